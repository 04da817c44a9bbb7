"""How many workers a DataLoader needs: try a few numbers, and keep the least that is nearly best.

Copy this file beside your program and measure once, on the machine that trains:

    from loader_workers import best_num_workers

    workers = best_num_workers(dataset, batch_size=64, seconds=5.0)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers)

Each number is tried for `seconds`, as fast as the loader goes; 0 means that handing a batch over
costs more than preparing it. Doubling ends where more workers bring nothing, or at the cores. With
several ranks on a node give `most` as their share of the cores, and measure on rank 0.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

NEARLY = 1.05  # times the best seconds per batch: not worth another worker


def best_num_workers(
    dataset: Dataset[Any], *, most: int | None = None, seconds: float = 5.0, **options: Any
) -> int:
    """Return the least number of workers within 5 % of the best that was tried.

    Args:
        dataset: map-style; samples are read in random order, as in training.
        most: workers at most; None: the cores that this process may use.
        seconds: of each trial, beside the start of its workers.
        options: of the DataLoader: batch_size, collate_fn, pin_memory, ...
    """
    most = len(os.sched_getaffinity(0)) if most is None else most
    seconds_by_workers: dict[int, float] = {}
    workers = 0
    while workers <= most:
        seconds_by_workers[workers] = batch_seconds(dataset, workers, seconds, options)
        others = [time for count, time in seconds_by_workers.items() if count < workers]
        if workers > 1 and seconds_by_workers[workers] > min(others) / NEARLY:
            break  # more bring nothing
        workers = max(1, 2 * workers)
    for count, each in seconds_by_workers.items():
        print(f"{count} workers: {1000 * each:.3g} ms per batch")
    goal = NEARLY * min(seconds_by_workers.values())
    return min(count for count, each in seconds_by_workers.items() if each <= goal)


def batch_seconds(
    dataset: Dataset[Any], workers: int, seconds: float, options: dict[str, Any]
) -> float:
    """Return the mean seconds per batch in steady state: without the start, and what was ahead."""
    generator = torch.Generator().manual_seed(0)
    endless = RandomSampler(dataset, replacement=True, num_samples=1 << 40, generator=generator)
    batches = iter(DataLoader(dataset, sampler=endless, num_workers=workers, **options))
    for _ in range(1 + 3 * workers):
        next(batches)
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds or count < 2:
        next(batches)
        count += 1
    return passed / count
