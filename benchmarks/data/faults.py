"""What a cache survives: killed writers, flipped bits, a full disk, a failing source.

    python -m benchmarks.data.faults  # two minutes; the full disk, a small file system, needs root

Cut files and a lack of memory are tried too. After every fault all items are read through a fresh
cache; a sample that is not the source's ends the benchmark.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import RESULTS, machine
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import decode, encode, size_of

ITEMS, ELEMENTS = 200, 8000
FORK = multiprocessing.get_context("fork")
Sample = tuple[Tensor, int]


def source(item: int) -> Sample:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(item)), item


SIZE = size_of(encode(source(0)))


def make(folder: Path, *, memory: int = ITEMS, disk: int = ITEMS) -> SampleCache:
    return SampleCache(
        folder,
        fingerprint="faults",
        num_items=ITEMS,
        memory_bytes=memory * SIZE,
        disk_bytes=disk * SIZE,
    )


def epoch(cache: SampleCache, order: list[int]) -> int:
    """Every item once; how many came from the source. Raises AssertionError for a wrong sample."""
    read = 0
    for item in order:
        entry = cache.get(item)
        sample = source(item) if entry is None else decode(entry)
        if entry is None:
            read += 1
            cache.put(item, encode(sample))
        wanted = source(item)
        assert torch.equal(sample[0], wanted[0]) and sample[1] == wanted[1], f"item {item} is wrong"
    return read


def fill_for_ever(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    cache, rng = make(folder), random.Random(seed)
    while True:
        epoch(cache, rng.sample(range(ITEMS), ITEMS))
        for tier in cache.tiers:
            for item in rng.sample(range(ITEMS), ITEMS // 2):
                tier.discard(item)  # its place is written again


def killed_writers(folder: Path, *, kills: int = 200) -> str:
    """Kill one of two writers that fill one cache at random moments; the other goes on.

    Both drop half of the cache again and again.
    """
    rng, found = random.Random(0), 0
    writers = [FORK.Process(target=fill_for_ever, args=(folder, seed)) for seed in range(2)]
    for writer in writers:
        writer.start()
    for kill in range(kills):
        time.sleep(rng.uniform(0.0, 0.15))
        victim = kill % 2
        os.kill(writers[victim].pid or 0, signal.SIGKILL)
        writers[victim].join()
        if kill % 20 == 19:
            found += ITEMS - epoch(make(folder), rng.sample(range(ITEMS), ITEMS))
        writers[victim] = FORK.Process(target=fill_for_ever, args=(folder, kill + 2))
        writers[victim].start()
    for writer in writers:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    cache = make(folder)
    epoch(cache, list(range(ITEMS)))
    assert epoch(cache, list(range(ITEMS))) == 0, "places were lost"
    assert found
    return (
        f"{kills} killed: no wrong sample among {found} found in the cache in between; all {ITEMS} "
        "stored afterwards"
    )


def flipped_bits(folder: Path, *, memory: int = 0, disk: int = ITEMS, flips: int = 1000) -> str:
    """Flip single bits anywhere in the entries of one tier.

    Each time a process that has not read them yet has to find them.
    """
    rng, found = random.Random(1), 0
    keeper = make(folder, memory=memory, disk=disk)
    epoch(keeper, list(range(ITEMS)))
    for _ in range(flips):
        cache = make(folder, memory=memory, disk=disk)
        (tier,) = cache.tiers
        item = rng.randrange(ITEMS)
        where = tier.locate(item)
        assert where is not None
        position = where.offset + rng.randrange(where.nbytes)
        byte = os.pread(where.descriptor, 1, position)[0]
        os.pwrite(where.descriptor, bytes([byte ^ 1 << rng.randrange(8)]), position)
        found += epoch(cache, [item])
        assert epoch(cache, [item]) == 0
        cache.close()
    keeper.close()
    assert found == flips
    return f"{flips} flipped: {found} found and read again from the source"


def failing_source(folder: Path) -> str:
    """Let a source fail every third time: its errors reach the caller of the cached data set."""
    cache, calls, raised, rng = make(folder), 0, 0, random.Random(5)

    class Data:
        def __len__(self) -> int:
            return ITEMS

        def __getitem__(self, item: int) -> Sample:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise OSError("no such bucket")
            return source(item)

    data = CachedDataset(Data(), cache)
    missing = set(range(ITEMS))
    while missing:
        wanted = rng.sample(sorted(missing), min(10, len(missing)))
        try:
            for item, sample in zip(wanted, data.__getitems__(wanted), strict=True):
                assert torch.equal(sample[0], source(item)[0]) and sample[1] == item
            missing -= set(wanted)
        except OSError as error:
            assert str(error) == "no such bucket"
            raised += 1
    assert epoch(cache, list(range(ITEMS))) == 0
    cache.close()
    return (
        f"{raised} errors raised to the caller; every sample right, and kept as soon as it had "
        "been read"
    )


def cut_files(folder: Path, *, cuts: int = 50) -> str:
    """The disk tier's file cut at random lengths, under an open cache and before opening one."""
    rng, read = random.Random(2), 0
    for _ in range(cuts):
        cache = make(folder, memory=0)
        epoch(cache, list(range(ITEMS)))
        path = folder / "faults" / "samples"
        os.truncate(path, rng.randrange(path.stat().st_size))
        read += epoch(cache, list(range(ITEMS)))
        cache.close()
        cache = make(folder, memory=0)
        epoch(cache, list(range(ITEMS)))
        assert epoch(cache, list(range(ITEMS))) == 0
        cache.close()
    return (
        f"{cuts} cut: no wrong sample, no SIGBUS; {read / cuts:.0f} of {ITEMS} read again on "
        "average"
    )


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(folder: Path) -> str:
    """A file system of 3 MB for samples of 6 MB."""
    if os.geteuid() != 0:
        return "left out: making a small file system needs root"
    with small_disk(folder / "small", 3) as small, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = make(small, memory=0)
        first = epoch(cache, list(range(ITEMS)))
        second = epoch(cache, list(range(ITEMS)))
        held = cache.statistics().disk_items
        cache.close()
    assert first == ITEMS and second == ITEMS - held > 0 and len(caught) == 1, (
        first,
        second,
        held,
        len(caught),
    )
    return f"{held} of {ITEMS} held, the rest read from the source, one warning"


def full_memory(folder: Path) -> str:
    """Write from a process with files of at most 2 MB, as with a full shared memory."""

    def limited(out: multiprocessing.queues.Queue[tuple[int, int, list[str]]]) -> None:  # type: ignore[name-defined]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache = make(folder, disk=0)
            epoch(cache, list(range(ITEMS)))
            read = epoch(cache, list(range(ITEMS)))
        # A file of that limit cannot be mapped either, which is said too.
        words = [str(one.message).partition(", which makes")[0].partition(":")[0] for one in caught]
        out.put((read, cache.statistics().memory_items, words))

    out = FORK.Queue()
    process = FORK.Process(target=limited, args=(out,))
    process.start()
    read, held, warned = out.get(timeout=60)
    process.join()
    expected = [
        "the memory cache cannot be mapped",
        "no more samples are stored in the memory cache",
    ]
    assert read == ITEMS - held and 0 < held < ITEMS and warned == expected, (read, held, warned)
    return f"{held} of {ITEMS} held, the rest read from the source, two warnings"


def nothing_left(folder: Path) -> str:
    """Jobs that fill the memory tier and are killed."""
    before = set(os.listdir("/dev/shm"))
    for seed in range(20):
        process = FORK.Process(target=fill_for_ever, args=(folder, seed))
        process.start()
        time.sleep(0.2)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    left = set(os.listdir("/dev/shm")) - before
    assert not left, left
    return "20 jobs killed: no file in /dev/shm, the memory freed by the kernel"


FAULTS: dict[str, Callable[[Path], str]] = {
    "writers killed at random moments": killed_writers,
    "single bits flipped in entries on disk": flipped_bits,
    "single bits flipped in entries in memory": lambda folder: flipped_bits(
        folder, memory=ITEMS, disk=0
    ),
    "source that fails": failing_source,
    "file cut off at random lengths": cut_files,
    "disk full": full_disk,
    "shared memory full": full_memory,
    "left in shared memory": nothing_left,
}


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# What the sample cache survives",
        "",
        machine(),
        "",
        "| fault | outcome |",
        "|---|---|",
    ]
    for name, fault in FAULTS.items():
        folder = Path(tempfile.mkdtemp(prefix="topt-faults-"))
        try:
            lines.append(f"| {name} | {fault(folder)} |")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(lines[-1], flush=True)
    (RESULTS / "data_faults.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
