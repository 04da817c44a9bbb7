"""Samples per second of a cached data set against the uncached one, a list in memory, litdata and MosaicML streaming.

    python -m benchmarks.data_throughput                     # decode-bound: JPEG files on the local disk; about 15 minutes
    python -m benchmarks.data_throughput --known-best        # the same with the number of workers best for each; 8 minutes
    sudo python -m benchmarks.data_throughput --link 200mbit # network-bound: the same files behind HTTP and a slow link

litdata and streaming hold what they are best at: prepared samples in their own chunk files on the local disk, written before.
All run in one process with 0, 1 or 2 workers, rounds interleaved, batches of 64 with torch's default collate; the best number
of workers of each counts; for all but the uncached one, the mean of epochs 2 to 6. Missing packages are left out of the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import RESULTS, machine
from benchmarks.data_jobs import (
    BATCH,
    ENTRY_BYTES,
    Loader,
    add_common_options,
    epoch,
    job,
    on_link_or_here,
    prepared,
    source,
)
from benchmarks.lab import end_on_signals
from lightning_topt.plugins.cached_data import CachedDataModule

PARTS = (slice(0, 1), slice(1, None))
# On 2 cores, with local files: by runs of all numbers of workers.
KNOWN_BEST = {"DataLoader, uncached": 2, "list in memory": 0, "ours": 0, "litdata": 0, "streaming": 2}
EPOCHS = 5  # after the first, for all that is in memory or prepared then


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


def ours(data: Dataset[Any], num_workers: int, folder: Path, memory_bytes: int) -> Loader:
    module = CachedDataModule(
        Pictures(data, num_workers=num_workers),
        directory=folder,
        memory_bytes=memory_bytes,
        disk_bytes=memory_bytes,
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


def own_megabytes() -> float:
    """Memory of this process and its workers; what several of them share, and what the cache shares with them, counts once."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]) / 1e6


def measure_one(options: argparse.Namespace) -> None:
    """In a process of its own: epochs of one contender; prints the figures as JSON."""
    torch.set_num_threads(1)
    data, base = source(options), own_megabytes()
    size = ENTRY_BYTES * len(data)  # type: ignore[arg-type]
    make: dict[str, Callable[[], Loader]] = {
        "DataLoader, uncached": lambda: plain(data, options.workers),
        "list in memory": lambda: plain(InMemory(data, options.folder / "prepared.pt"), options.workers),
        "ours": lambda: ours(data, options.workers, options.folder / "cache", size),
        "litdata": lambda: litdata_loader(data, options.workers, options.folder / "litdata"),
        "streaming": lambda: streaming_loader(data, options.workers, options.folder / "streaming"),
    }
    loader = make[options.one]()
    if options.one != "DataLoader, uncached":
        epoch(loader)  # fills what is not filled yet, and starts workers
    seconds = [epoch(loader) for _ in range(options.epochs)]
    print(json.dumps({"seconds": seconds, "megabytes": own_megabytes() - base}), flush=True)
    os._exit(0)  # worker processes of others may not end by themselves


def rounds(folder: Path, options: argparse.Namespace, *, prefix: list[str], host: str) -> dict[str, Any]:
    """By contender and number of workers: seconds per epoch of every round, megabytes."""
    found: dict[str, Any] = {}
    for index in range(options.rounds):
        for contender in contenders(options):
            for workers in [KNOWN_BEST[contender]] if options.known_best else options.worker_counts:
                epochs = 1 if "uncached" in contender else EPOCHS
                result = job("data_throughput", contender, workers, folder, epochs=epochs, prefix=prefix, host=host)
                entry = found.setdefault(contender, {}).setdefault(
                    workers, {"seconds": [], "epochs": [], "megabytes": 0}
                )
                entry["seconds"].append(statistics.mean(result["seconds"]))
                entry["epochs"].append(result["seconds"])
                entry["megabytes"] = max(entry["megabytes"], result["megabytes"])
                print(index, contender, workers, result, flush=True)
    return found


def contenders(options: argparse.Namespace) -> list[str]:
    known = ["DataLoader, uncached", "list in memory", "ours"]
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
        workers, seconds, megabytes = best(by)
        second, later = (of_list(found["list in memory"], by[workers]["epochs"], part) for part in PARTS)
        rates = sorted(number / value for value in seconds)
        cells = [name, str(workers), f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"]
        lines.append(
            "| "
            + " | ".join([*cells, ratios(base, seconds), ratios(top, seconds), second, later, f"{megabytes:.0f}"])
            + " |"
        )
    return "\n".join(lines)


def of_list(by: dict[int, Any], epochs: list[list[float]], part: slice) -> str:
    """The ratio of some of the epochs; nothing for a contender of which only one was measured."""
    if len(epochs[0]) < EPOCHS:
        return "-"
    top = by[best(by)[0]]["epochs"]
    return ratios(*([statistics.mean(round_[part]) for round_ in rounds_] for rounds_ in (top, epochs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument(
        "--known-best", action="store_true", help="of local files: only the number of workers best for each"
    )
    options = parser.parse_args()
    if options.known_best and options.link:
        parser.error("--known-best is of local files: give --worker-counts beside --link")
    if options.one:
        measure_one(options)
        return
    end_on_signals()
    folder = prepared(options)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    title = f"Behind HTTP and a link of {options.link}" if options.link else "JPEG files on the local disk"
    text = report(on_link_or_here(rounds, folder, options), options.number, title)
    out = RESULTS / f"data_throughput_{options.link or 'local'}.md"
    out.write_text(f"# Throughput of cached data\n\n{machine()}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
