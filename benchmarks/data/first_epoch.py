"""How much longer an epoch takes that stores what it reads.

    python -m benchmarks.data.first_epoch  # JPEG files on the local disk; about 20 minutes
    # the same files behind HTTP and a slow link
    sudo python -m benchmarks.data.first_epoch --link 200mbit --worker-counts 2

An uncached epoch and the first cached one alternate in one process, each with the same twentieth of
the files at a time. Who begins alternates too, because the speed of a shared machine changes within
seconds by more than the difference. Worker processes live all the time, and starting them counts.
What is written to disk in the background is written during both.

Before each part, three times the memory that it takes is used and given back. A virtual machine may
get a page from its host only at its first use. That takes microseconds and would hide the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.common import RESULTS, machine
from benchmarks.data.shared import (
    BATCH,
    KINDS,
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

PARTS = 20
TIERS = {"memory": 1, "memory and disk": 2}  # copies of an entry


class Part(Sampler[int]):
    """The indices of the part that comes next."""

    def __init__(self, number: int) -> None:
        self.indices = list(range(number))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Samples(pl.LightningDataModule):
    """A user's DataModule."""

    def __init__(self, data: Dataset[Any], sampler: Part, *, num_workers: int) -> None:
        super().__init__()
        self.data, self.sampler, self.num_workers = data, sampler, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        workers = self.num_workers
        return DataLoader(
            self.data,
            BATCH,
            sampler=self.sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
        )


def measure_one(options: argparse.Namespace) -> None:
    """In a process of its own: prints the seconds of both epochs as JSON."""
    torch.set_num_threads(1)
    data, fresh = source(options), options.folder / "fresh"
    number = len(json.loads((options.folder / "names.json").read_text()))
    size, copies = entry_bytes(data.kind) * number, TIERS[options.one]
    samplers = Part(number), Part(number)
    plain, own = (Samples(data, sampler, num_workers=options.workers) for sampler in samplers)
    shutil.rmtree(fresh, ignore_errors=True)
    cached = CachedDataModule(
        own, directory=fresh, memory_bytes=size, disk_bytes=size * (copies - 1), data_version="1"
    )
    cached.setup("fit")
    loaders = plain.train_dataloader(), cached.train_dataloader()
    order, seconds = (
        torch.randperm(number, generator=torch.Generator().manual_seed(0)).tolist(),
        [0.0, 0.0],
    )
    for part in range(PARTS):
        for sampler in samplers:
            sampler.indices = order[part * number // PARTS : (part + 1) * number // PARTS]
        for which in (0, 1) if part % 2 else (1, 0):
            touch_memory(3 * copies * size // PARTS)
            seconds[which] += epoch(loaders[which], data.kind)
    assert [counts.misses for counts in cached.statistics().values()] == [number]
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # without waiting for what is written behind


def rounds(
    folder: Path, options: argparse.Namespace, *, prefix: list[str], host: str
) -> dict[str, dict[int, Any]]:
    """By tier and number of workers: seconds of both epochs in every round."""
    found: dict[str, dict[int, Any]] = {
        tier: {workers: [] for workers in options.worker_counts} for tier in options.tiers
    }
    for index in range(options.rounds):
        for tier, by in found.items():
            for workers, pairs in by.items():
                pairs.append(
                    job(
                        "data.first_epoch", tier, workers, folder, options, prefix=prefix, host=host
                    )
                )
                print(index, tier, workers, pairs[-1], flush=True)
    return found


def report(found: dict[str, dict[int, Any]], options: argparse.Namespace) -> str:
    lines = ["| stored in | workers | uncached, s | times as long |", "|---|---|---|---|"]
    for tier, by in found.items():
        for workers, pairs in by.items():
            ratios = sorted(cached / uncached for uncached, cached in pairs)
            uncached = statistics.median(pair[0] for pair in pairs)
            spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            lines.append(f"| {tier} | {workers} | {uncached:.1f} | {spread} |")
    return "\n".join(
        [
            f"{options.number} samples of {KINDS[options.kind].nbytes:,} bytes, batches of "
            f"{BATCH}.",
            "",
            *lines,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--tiers", nargs="+", choices=tuple(TIERS), default=tuple(TIERS))
    options = parser.parse_args()
    if options.one:
        measure_one(options)
        return
    end_on_signals()
    text = report(on_link_or_here(rounds, prepared(options), options), options)
    out = RESULTS / f"data_first_epoch_{result_name(options)}.md"
    out.write_text(f"# The first epoch of cached data: {title(options)}\n\n{machine()}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
