"""Samples per second of a cached data set against its alternatives.

    # decode-bound: JPEG files on the local disk; about 20 minutes
    python -m benchmarks.data.throughput
    # the same without numbers of workers that are best for nobody
    python -m benchmarks.data.throughput --known-best
    # network-bound: the same files behind HTTP and a slow link
    sudo python -m benchmarks.data.throughput --link 200mbit
    # pieces of Python's source, padded to 2,048 tokens
    sudo python -m benchmarks.data.throughput --link 200mbit --kind texts

Alternatives are the uncached data set, a list in memory, litdata and MosaicML streaming. The last
two hold what they are best at: prepared samples in their own chunk files on the local disk, written
before, also where the files are behind a link. All run in one process with 0, 1 or 2 workers,
rounds interleaved, in batches of 64 with torch's default collate. For all but the uncached one the
figure is the mean of epochs 2 to 6. Missing packages are left out of the table.

Before each epoch memory is used and given back. A virtual machine may get a page from its host only
at its first use, which takes some microseconds. With workers every batch is new memory, and one
early epoch of any contender took twice as long.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import RESULTS, machine
from benchmarks.data.shared import (
    BATCH,
    KINDS,
    Loader,
    LocalFiles,
    add_common_options,
    entry_bytes,
    epoch,
    job,
    on_link_or_here,
    prepared,
    result_name,
    source,
    title,
    touch_memory,
)
from benchmarks.lab import end_on_signals
from lightning_topt.plugins.cached_data import CachedDataModule

UNCACHED, LIST = "DataLoader, uncached", "list in memory"
# On 2 cores, by runs of all numbers of workers; two connections fill a link of 200 Mb/s with
# pictures.
KNOWN_BEST = {UNCACHED: [2], LIST: [0, 2], "ours": [0, 2], "litdata": [0], "streaming": [2]}
PEERS = {"litdata": "litdata", "streaming": "mosaicml-streaming"}  # and their packages
TOUCHED = 2 << 30  # bytes
EPOCHS = 5  # after the first, for all that is in memory or prepared then


class Samples(pl.LightningDataModule):
    """A user's DataModule."""

    def __init__(self, data: Dataset[Any], *, num_workers: int) -> None:
        super().__init__()
        self.data, self.num_workers = data, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return plain(self.data, self.num_workers)


def plain(data: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        **options,
    )


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
        Samples(data, num_workers=num_workers),
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


def streaming_loader(data: LocalFiles, num_workers: int, folder: Path) -> Loader:
    import streaming  # noqa: PLC0415

    if not folder.exists():
        shape = ",".join(str(size) for size in data.kind.shape)
        columns = {
            "x": f"ndarray:{str(data.kind.dtype).removeprefix('torch.')}:{shape}",
            "y": "int",
        }
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
            for sample, label in DataLoader(data, None, num_workers=2):
                writer.write({"x": sample.numpy(), "y": label})
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return plain_iterable(dataset, num_workers)


def plain_iterable(data: Any, num_workers: int) -> Loader:
    return DataLoader(data, BATCH, num_workers=num_workers, persistent_workers=num_workers > 0)


def own_megabytes() -> float:
    """Return the memory of this process and its workers.

    Memory that several of them share, or the cache with them, counts once.
    """
    me = psutil.Process()
    return (
        sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]) / 1e6
    )


def measure_one(options: argparse.Namespace) -> None:
    """In a process of its own: epochs of one contender; prints the figures as JSON."""
    torch.set_num_threads(1)
    data, base = source(options), own_megabytes()
    size = entry_bytes(data.kind) * len(data)
    make: dict[str, Callable[[], Loader]] = {
        UNCACHED: lambda: plain(data, options.workers),
        LIST: lambda: plain(InMemory(data, options.folder / "prepared.pt"), options.workers),
        "ours": lambda: ours(data, options.workers, options.folder / "cache", size),
        "litdata": lambda: litdata_loader(data, options.workers, options.folder / "litdata"),
        "streaming": lambda: streaming_loader(data, options.workers, options.folder / "streaming"),
    }
    loader = make[options.one]()
    if options.one != UNCACHED:
        epoch(loader, data.kind)  # fills what is not filled yet, and starts workers
    seconds = []
    for _ in range(options.epochs):
        touch_memory(TOUCHED)
        seconds.append(epoch(loader, data.kind))
    print(json.dumps({"seconds": seconds, "megabytes": own_megabytes() - base}), flush=True)
    os._exit(0)  # worker processes of others may not end by themselves


def rounds(
    folder: Path, options: argparse.Namespace, *, prefix: list[str], host: str
) -> dict[str, Any]:
    """By contender and number of workers: seconds per epoch of every round, megabytes."""
    found: dict[str, Any] = {}
    for index in range(options.rounds):
        for contender in contenders():
            for workers in KNOWN_BEST[contender] if options.known_best else options.worker_counts:
                epochs = 1 if contender == UNCACHED else EPOCHS
                result = job(
                    "data.throughput",
                    contender,
                    workers,
                    folder,
                    options,
                    epochs=epochs,
                    prefix=prefix,
                    host=host,
                )
                entry = found.setdefault(contender, {}).setdefault(
                    workers, {"seconds": [], "epochs": [], "megabytes": 0}
                )
                entry["seconds"].append(statistics.mean(result["seconds"]))
                entry["epochs"].append(result["seconds"])
                entry["megabytes"] = max(entry["megabytes"], result["megabytes"])
                print(index, contender, workers, result, flush=True)
    return found


def contenders() -> list[str]:
    known = [UNCACHED, LIST, "ours"]
    return known + [name for name in PEERS if importlib.util.find_spec(name)]


def best(by: dict[int, Any]) -> list[float]:
    """Of one contender: seconds of the rounds with its best number of workers."""
    found: list[float] = min((entry["seconds"] for entry in by.values()), key=statistics.median)
    return found


def ratios(others: list[float], own: list[float]) -> str:
    """How many times as fast as another contender in the same round: median and range."""
    found = sorted(other / mine for other, mine in zip(others, own, strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    number = options.number
    lines = [
        f"{number} samples of {KINDS[options.kind].nbytes:,} bytes, batches of {BATCH}. Compared "
        "with the uncached loader and",
        "the list at their best numbers of workers, and with the list at the same number.",
        "",
        "| | workers | samples/s | times uncached | of the list | with as many workers | the same "
        "in epoch 2 | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base, top = best(found[UNCACHED]), best(found[LIST])
    for name, by in found.items():
        for workers, entry in by.items():
            seconds, equal = entry["seconds"], found[LIST].get(workers)
            rates = sorted(number / value for value in seconds)
            cells = [
                name,
                str(workers),
                f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})",
            ]
            cells += [ratios(base, seconds), ratios(top, seconds)]
            cells += (
                [ratios(equal["seconds"], seconds), second_epochs(equal, entry)]
                if equal
                else ["-", "-"]
            )
            lines.append("| " + " | ".join([*cells, f"{entry['megabytes']:.0f}"]) + " |")
    versions = [
        f"{package} {metadata.version(package)}" for name, package in PEERS.items() if name in found
    ]
    if versions:
        lines += ["", f"{', '.join(versions)}, with samples prepared before on the local disk."]
    return "\n".join(lines)


def second_epochs(other: Any, own: Any) -> str:
    """Their ratio; nothing for a contender of which they were not measured."""
    if len(own["epochs"][0]) < EPOCHS:
        return "-"
    return ratios(*([round_[0] for round_ in entry["epochs"]] for entry in (other, own)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument(
        "--known-best",
        action="store_true",
        help="of pictures: only the number of workers best for each",
    )
    options = parser.parse_args()
    if options.one:
        measure_one(options)
        return
    end_on_signals()
    folder = prepared(options)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    text = report(on_link_or_here(rounds, folder, options), options)
    out = RESULTS / f"data_throughput_{result_name(options)}.md"
    out.write_text(f"# Throughput of cached data: {title(options)}\n\n{machine()}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
