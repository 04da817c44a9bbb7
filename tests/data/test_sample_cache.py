"""The tiers together: what they hold, shared by processes, nothing left in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from lightning_topt.data.cache.memory_file import REGISTRY, open_shared
from lightning_topt.data.cache.sample_cache import RefusedCacheError, SampleCache
from lightning_topt.data.cache.sample_codec import decode, encode, size_of
from tests.shared_memory import shared_files

ITEMS = 50
FORK = multiprocessing.get_context("fork")


def sample(item):
    return torch.full((100,), float(item)), item


SIZE = size_of(encode(sample(0)))


def make(directory, *, memory=ITEMS, disk=ITEMS, **options):
    return SampleCache(
        directory,
        fingerprint="f",
        num_items=ITEMS,
        memory_bytes=memory * SIZE,
        disk_bytes=disk * SIZE,
        **options,
    )


def epoch(cache, *, items=range(ITEMS)):
    """Every item once, through the cache; what came from the source."""
    read = []
    for item in items:
        entry = cache.get(item)
        if entry is None:
            read.append(item)
            cache.put(item, encode(sample(item)))
        else:
            tensor, label = decode(entry)
            assert torch.equal(tensor, sample(item)[0]) and label == item
    return read


@pytest.mark.parametrize("memory", [0, 20, ITEMS])
@pytest.mark.parametrize("disk", [0, 10, ITEMS])
def test_misses_are_what_found_no_room(tmp_path, memory, disk):
    if memory + disk == 0:
        return
    cache = make(tmp_path, memory=memory, disk=disk)
    assert epoch(cache) == list(range(ITEMS))
    cache.statistics(reset=True)
    for seed in range(3):
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(seed)).tolist()
        assert len(epoch(cache, items=order)) == ITEMS - max(memory, disk)
        statistics = cache.statistics(reset=True)
        assert statistics.misses == ITEMS - max(memory, disk)
        assert statistics.memory_hits == memory and statistics.disk_hits == max(0, disk - memory)
        assert (statistics.memory_items, statistics.disk_items) == (memory, disk)
        assert (statistics.memory_bytes, statistics.disk_bytes) == (memory * SIZE, disk * SIZE)


def test_the_disk_outlives_the_run_and_fills_the_memory_of_the_next(tmp_path):
    epoch(make(tmp_path))
    cache = make(tmp_path)
    assert cache.statistics().memory_items == 0  # the first one's memory went with it
    assert epoch(cache) == [] and cache.statistics().disk_hits == ITEMS
    cache.statistics(reset=True)
    assert epoch(cache) == [] and cache.statistics().memory_hits == ITEMS


def _worker(cache, out):
    out.put((epoch(cache), cache.statistics().memory_hits))


def test_processes_share_one_memory(tmp_path):
    cache, out = make(tmp_path, disk=0), FORK.Queue()
    for expected in (list(range(ITEMS)), []):
        process = FORK.Process(target=_worker, args=(cache, out))
        process.start()
        assert out.get(timeout=120)[0] == expected
        process.join()
    assert epoch(cache) == []


def _another(tmp_path, out):
    out.put(epoch(make(tmp_path, disk=0)))


def test_another_job_finds_the_memory(tmp_path):
    cache, out = make(tmp_path, disk=0), FORK.Queue()
    epoch(cache)
    job = FORK.Process(target=_another, args=(tmp_path, out))
    job.start()
    assert out.get(timeout=120) == []
    job.join()


def _fill_and_hang(tmp_path, filled):
    cache = make(tmp_path, disk=0)
    epoch(cache)
    filled.set()
    time.sleep(600)
    cache.close()


def test_nothing_is_left_in_shared_memory_by_a_killed_job(tmp_path):
    before = shared_files()
    filled = FORK.Event()
    job = FORK.Process(target=_fill_and_hang, args=(tmp_path, filled))
    job.start()
    assert filled.wait(120)
    link = (tmp_path / "f" / REGISTRY).read_text().split()
    assert os.path.exists(f"/proc/{link[0]}/fd/{link[1]}")
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    assert shared_files() <= before
    cache = make(tmp_path, disk=0)  # the registry names a dead process
    assert epoch(cache) == list(range(ITEMS))


def test_the_memory_goes_with_the_last_cache(tmp_path):
    def held():
        names = [
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)
        ]
        return sum("memfd:lightning-topt" in name for name in names)

    def _exists(fd):
        return os.path.islink(f"/proc/self/fd/{fd}")

    before = held()
    first, second = make(tmp_path), make(tmp_path)
    assert held() >= before + 2  # a map holds one of its own
    first.close()
    first.close()
    del second
    assert held() == before


def test_a_refused_cache_forgets_everything_and_stays_closed(tmp_path):
    cache, other = make(tmp_path), make(tmp_path)
    epoch(cache)
    cache.refuse("two draws differ")
    assert other.get(0) is None
    with pytest.raises(RefusedCacheError, match="two draws differ"):
        make(tmp_path)


def test_damage_is_counted_and_repaired(tmp_path):
    cache = make(tmp_path, memory=0)
    epoch(cache)
    where = cache.disk.locate(7)
    os.pwrite(where.descriptor, b"\0" * 8, where.offset + 64)
    assert epoch(cache) == [7] and cache.statistics().damaged == 1
    assert epoch(cache) == []


class OtherNode:
    """Holds odd items."""

    def __init__(self):
        self.entries, self.asked, self.closed = {}, [], False

    def is_own(self, item):
        return item % 2 == 0

    def fetch(self, items):
        self.asked.append(list(items))
        return [self.entries.get(item) for item in items]

    def push(self, entries):
        for item, parts in entries.items():
            self.entries[item] = bytearray(b"".join(bytes(part) for part in parts))

    def close(self):
        self.closed = True


def test_items_of_other_nodes_are_fetched_together_and_given_to_their_owner(tmp_path):
    peers = OtherNode()
    cache = make(tmp_path, peers=peers)
    assert cache.get_many(range(6)) == [None] * 6 and peers.asked == [[1, 3, 5]]
    for item in range(6):
        cache.put(item, encode(sample(item)))
    assert sorted(peers.entries) == [1, 3, 5] and len(cache.memory) == len(cache.disk) == 3
    cache.statistics(reset=True)
    assert [decode(entry)[1] for entry in cache.get_many(range(6))] == list(range(6))
    statistics = cache.statistics()
    assert (statistics.memory_hits, statistics.peer_hits, statistics.misses) == (3, 3, 0)
    cache.close()
    assert peers.closed


def test_a_foreign_registry_is_not_trusted(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x")
    with path.open() as file:
        (tmp_path / "memory").write_text(f"{os.getpid()} {file.fileno()} secret\nnonsense\n1 2\n")
        descriptor = open_shared(tmp_path / "memory")
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def _count_often(cache, barrier):
    barrier.wait(30)
    for _ in range(20_000):
        cache.count_memory_hits(1)


def test_no_count_is_lost_between_processes(tmp_path):
    cache = SampleCache(tmp_path, fingerprint="f", num_items=1, memory_bytes=1 << 12, disk_bytes=0)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    processes = [fork.Process(target=_count_often, args=(cache, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert cache.statistics().memory_hits == 40_000
    cache.close()
