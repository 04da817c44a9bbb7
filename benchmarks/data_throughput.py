"""Samples per second of a cached data set against the uncached one, a list in memory, litdata and MosaicML streaming.

    python -m benchmarks.data_throughput                     # decode-bound: JPEG files on the local disk; about 15 minutes
    sudo python -m benchmarks.data_throughput --link 200mbit # network-bound: the same files behind HTTP and a slow link

litdata and streaming hold what they are best at: prepared samples in their own chunk files on the local disk, written before.
All run in one process with 0, 1 or 2 workers, rounds interleaved, batches of 64 with torch's default collate; the best number
of workers of each counts; for all but the uncached one, the mean of epochs 2 to 6. Missing packages are left out of the table.

The first epoch, which stores what it reads, is compared with an uncached one on the first `FEW` files, after memory was
touched: a virtual machine may get a page from its host, some microseconds, only when it is first used, which would be all that
is seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import RESULTS, machine
from benchmarks.data_sources import CROP, HttpFiles, JpegFiles, make_files
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt.plugins.cached_data import CachedDataModule

BATCH, FEW = 64, 2000
PARTS = (slice(0, 1), slice(1, None))
EPOCHS = 5  # after the first, for all that is in memory or prepared then
TOUCHED_BYTES = 4 << 30
FIRST = {
    "uncached": "DataLoader, uncached, few",
    "memory and disk": "ours, first epoch, few",
    "memory": "ours, first epoch, few, memory only",
}
PORT = 8000
Loader = Iterable[Any]


class Pictures(pl.LightningDataModule):
    """A user's DataModule."""

    def __init__(self, data: Dataset[Any], *, num_workers: int) -> None:
        super().__init__()
        self.data, self.num_workers = data, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return plain(self.data, self.num_workers)


def plain(data: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, BATCH, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0, **options)


class InMemory(Dataset[Any]):
    """What nothing can beat but by assembling batches better: a list of prepared samples."""

    def __init__(self, data: Dataset[Any], prepared: Path) -> None:
        if not prepared.exists():
            torch.save(list(DataLoader(data, None, num_workers=2)), prepared)
        self.samples = torch.load(prepared)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def ours(data: Dataset[Any], num_workers: int, folder: Path, memory_bytes: int, *, disk: bool = True) -> Loader:
    module = CachedDataModule(
        Pictures(data, num_workers=num_workers),
        directory=folder,
        memory_bytes=memory_bytes,
        disk_bytes=memory_bytes if disk else 0,
        data_version="1",
    )
    module.setup("fit")
    loader: Loader = module.train_dataloader()
    return loader


def litdata_loader(data: Dataset[Any], num_workers: int, folder: Path) -> Loader:
    import litdata  # noqa: PLC0415 - not installed everywhere

    if not folder.exists():
        litdata.optimize(
            fn=data.__getitem__,
            inputs=list(range(len(data))),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
        )
    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    loader: Loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)
    return loader


def streaming_loader(data: Dataset[Any], num_workers: int, folder: Path) -> Loader:
    import streaming  # noqa: PLC0415

    if not folder.exists():
        columns = {"x": "ndarray:uint8:3,224,224", "y": "int"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
            for image, label in DataLoader(data, None, num_workers=2):
                writer.write({"x": image.numpy(), "y": label})
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return plain_iterable(dataset, num_workers)


def plain_iterable(data: Any, num_workers: int) -> Loader:
    return DataLoader(data, BATCH, num_workers=num_workers, persistent_workers=num_workers > 0)


def epoch(loader: Loader) -> float:
    """Seconds of one pass; every batch is copied once to memory that is there, as to a device's staging buffer."""
    device = torch.empty(BATCH, 3, CROP, CROP, dtype=torch.uint8).fill_(0)
    start, number = time.perf_counter(), 0
    for batch in loader:
        images = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch[0])
        device[: len(images)].copy_(images)
        number += len(images)
    assert number and device.any()
    return time.perf_counter() - start


def touch_memory(nbytes: int) -> None:
    """Use so much memory and give it back."""
    descriptor = os.memfd_create("touched")
    for _ in range(nbytes >> 20):
        os.write(descriptor, bytes(1 << 20))
    os.close(descriptor)


def own_megabytes() -> float:
    """Memory that this process and its workers have for themselves."""
    me = psutil.Process()
    return sum(process.memory_full_info().uss for process in [me, *me.children(recursive=True)]) / 1e6


def measure_one(options: argparse.Namespace) -> None:
    """In a process of its own: epochs of one contender; prints the figures as JSON."""
    torch.set_num_threads(1)
    names = json.loads((options.folder / "names.json").read_text())
    names = names[:FEW] if options.one in FIRST.values() else names
    data = HttpFiles((options.host, PORT), names) if options.host else JpegFiles(options.folder / "files", names)
    base, size = own_megabytes(), 160_000 * len(names)
    make: dict[str, Callable[[], Loader]] = {
        "DataLoader, uncached": lambda: plain(data, options.workers),
        "list in memory": lambda: plain(InMemory(data, options.folder / "prepared.pt"), options.workers),
        "ours": lambda: ours(data, options.workers, options.folder / "cache", size),
        FIRST["uncached"]: lambda: plain(data, options.workers),
        FIRST["memory and disk"]: lambda: ours(data, options.workers, options.folder / "fresh", size),
        FIRST["memory"]: lambda: ours(data, options.workers, options.folder / "fresh", size, disk=False),
        "litdata": lambda: litdata_loader(data, options.workers, options.folder / "litdata"),
        "streaming": lambda: streaming_loader(data, options.workers, options.folder / "streaming"),
    }
    loader = make[options.one]()
    if options.one in ("ours", "litdata", "streaming", "list in memory"):
        epoch(loader)  # fills what is not filled yet, and starts workers
    if options.one in FIRST.values():
        touch_memory(TOUCHED_BYTES)
    seconds = [epoch(loader) for _ in range(options.epochs)]
    print(json.dumps({"seconds": seconds, "megabytes": own_megabytes() - base}), flush=True)
    os._exit(0)  # worker processes of others may not end by themselves


def job(contender: str, workers: int, folder: Path, *, epochs: int, prefix: list[str], host: str) -> dict[str, Any]:
    command = [
        *prefix,
        sys.executable,
        "-m",
        "benchmarks.data_throughput",
        "--one",
        contender,
        "--workers",
        str(workers),
    ]
    command += ["--folder", str(folder), "--epochs", str(epochs), *(["--host", host] if host else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{contender}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def rounds(folder: Path, options: argparse.Namespace, *, prefix: list[str], host: str) -> dict[str, Any]:
    """By contender and number of workers: seconds per epoch of every round, megabytes."""
    found: dict[str, Any] = {}
    for index in range(options.rounds):
        for contender in contenders(options):
            for workers in options.worker_counts:
                if contender in FIRST.values():
                    shutil.rmtree(folder / "fresh", ignore_errors=True)
                epochs = 1 if "uncached" in contender or contender in FIRST.values() else EPOCHS
                result = job(contender, workers, folder, epochs=epochs, prefix=prefix, host=host)
                entry = found.setdefault(contender, {}).setdefault(
                    workers, {"seconds": [], "epochs": [], "megabytes": 0}
                )
                entry["seconds"].append(statistics.mean(result["seconds"]))
                entry["epochs"].append(result["seconds"])
                entry["megabytes"] = max(entry["megabytes"], result["megabytes"])
                print(index, contender, workers, result, flush=True)
    return found


def contenders(options: argparse.Namespace) -> list[str]:
    if options.first:
        return list(FIRST.values())
    known = ["DataLoader, uncached", "list in memory", "ours", *FIRST.values()]
    return known + [name for name in ("litdata", "streaming") if importlib.util.find_spec(name) and not options.link]


def best(by: dict[int, Any]) -> tuple[int, list[float], float]:
    """Of one contender: its best number of workers, seconds of the rounds with it, megabytes."""
    workers, entry = min(by.items(), key=lambda item: statistics.median(item[1]["seconds"]))
    return workers, entry["seconds"], entry["megabytes"]


def ratios(others: list[float], own: list[float]) -> str:
    """How many times as fast as another contender in the same round: median and range."""
    found = sorted(other / mine for other, mine in zip(others, own, strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def report(found: dict[str, Any], number: int, title: str) -> str:
    lines = [
        f"## {title}",
        "",
        f"{number} samples of 150,528 bytes, batches of {BATCH}; the best number of workers of each.",
        "",
    ]
    lines += [
        "| | workers | samples/s | times uncached | of the list | in epoch 2 | in epochs 3 to 6 | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base, top = (best(found[name])[1] for name in ("DataLoader, uncached", "list in memory"))
    for name, by in found.items():
        if name in FIRST.values():
            continue
        workers, seconds, megabytes = best(by)
        second, later = (of_list(found["list in memory"], by[workers]["epochs"], part) for part in PARTS)
        rates = sorted(number / value for value in seconds)
        cells = [name, str(workers), f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"]
        lines.append(
            "| "
            + " | ".join([*cells, ratios(base, seconds), ratios(top, seconds), second, later, f"{megabytes:.0f}"])
            + " |"
        )
    return "\n".join([*lines, "", first_epoch(found)])


def of_list(by: dict[int, Any], epochs: list[list[float]], part: slice) -> str:
    """The ratio of some of the epochs; nothing for a contender of which only one was measured."""
    if len(epochs[0]) < EPOCHS:
        return "-"
    top = by[best(by)[0]]["epochs"]
    return ratios(*([statistics.mean(round_[part]) for round_ in rounds_] for rounds_ in (top, epochs)))


def first_epoch(found: dict[str, Any]) -> str:
    lines = [
        f"First epoch, {FEW} files: times as long as an uncached one.",
        "",
        "| stored in | workers | times as long |",
    ]
    lines.append("|---|---|---|")
    for where, name in FIRST.items():
        for workers, entry in found[name].items() if where != "uncached" else ():
            uncached = found[FIRST["uncached"]][workers]["seconds"]
            lines.append(f"| {where} | {workers} | {ratios(entry['seconds'], uncached)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", help="rate of the link to the files, in tc's units; none: local files")
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker-counts", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-pictures")
    parser.add_argument("--first", action="store_true", help="the first epoch only")
    for hidden in ("--one", "--host"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_one(options)
        return
    end_on_signals()
    folder: Path = options.folder / str(options.number)
    names = make_files(folder / "files", number=options.number)
    (folder / "names.json").write_text(json.dumps(names))
    for stale in ("cache", "fresh"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    title = f"Behind HTTP and a link of {options.link}" if options.link else "JPEG files on the local disk"
    found = over_link(folder, options) if options.link else rounds(folder, options, prefix=[], host="")
    text = first_epoch(found) if options.first else report(found, options.number, title)
    out = RESULTS / f"data_{'first_epoch' if options.first else 'throughput'}_{options.link or 'local'}.md"
    out.write_text(f"# Throughput of cached data\n\n{machine()}\n\n{text}\n")
    print(text)


def over_link(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    try:
        with Lab(2, rate=options.link) as lab:
            into = ["ip", "netns", "exec"]
            serve = [sys.executable, "-m", "benchmarks.data_sources", str(folder / "files"), "--host", lab.address(0)]
            server = subprocess.Popen([*into, lab.nodes[0], *serve, "--port", str(PORT)])
            try:
                time.sleep(3)
                return rounds(folder, options, prefix=[*into, lab.nodes[1]], host=lab.address(0))
            finally:
                server.kill()
    except LabError as error:
        sys.exit(f"data_throughput: {error}")


if __name__ == "__main__":
    main()
