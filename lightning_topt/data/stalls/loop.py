"""Timing a training loop from its loader, and loaders like the user's to be timed.

    watched = Watched(loader, seconds=6.0)
    train(watched)              # any loop that iterates over `watched`
    watched.times()             # LoopTimes: seconds per batch, of the wait for it, of cores

Nothing of the loop itself is changed: the loader's iterator sees when batches are requested.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

MOST_BATCHES = 100_000
PAGE_BYTES = 4096


class LoopTimes(NamedTuple):
    """Means per batch of a loop in steady state, in seconds.

    Args:
        batches: number of batches measured.
        batch_seconds: of the whole iteration, by the clock.
        wait_seconds: of these, waiting for the batch.
        core_seconds: core time of the training process.
        worker_core_seconds: core time of its child processes.
        other_core_seconds: core time of everything else on the machine, including the kernel's work
            for the network.
    """

    batches: int
    batch_seconds: float
    wait_seconds: float
    core_seconds: float
    worker_core_seconds: float
    other_core_seconds: float = 0.0


class Watched:
    """Batches of an iterable, timed while a loop takes them.

    Args:
        batches: what the loop iterates over; one epoch of it.
        seconds: how long to measure, after the first `skip` batches.
        skip: batches before the steady state.
        least: batches measured at least, however long they take.
        most: batches measured at most.

    `used` counts the batches handed out; `times` is valid after the loop.
    """

    def __init__(
        self,
        batches: Iterable[object],
        seconds: float,
        *,
        skip: int = 4,
        least: int = 4,
        most: int = MOST_BATCHES,
    ) -> None:
        self.batches, self.seconds = batches, seconds
        self.skip, self.least, self.most = skip, least, most
        self.used = 0
        self._waits: list[float] = []
        # Clock, and core seconds of this process, its children and all others.
        self._marks: list[tuple[float, float, float, float]] = []

    def __len__(self) -> int:
        """One more than there are batches.

        A loop that counts must then request one more, and that request ends the measurement.
        """
        return self.skip + self.most + 1

    def __iter__(self) -> Iterator[object]:
        # The steady state is between two marks: after `skip` batches, and at the end.
        iterator = iter(self.batches)
        self._waits, self._marks, self.used = [], [], 0
        started = inf
        while self.used < self.skip + self.most:
            if self.used == self.skip:
                self._mark()
                started = time.perf_counter()
            # the wait is inside `next` alone; between two requests the loop trains
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self._waits.append(time.perf_counter() - asked)
            self.used += 1
            yield batch
            # asked for the next one: this batch has been trained on
            if time.perf_counter() - started > self.seconds and self.used >= self.skip + self.least:
                break
        self._mark()

    def _mark(self) -> None:
        own, children = time.process_time(), _children_core_seconds()
        self._marks.append(
            (time.perf_counter(), own, children, _machine_core_seconds() - own - children)
        )

    def times(self) -> LoopTimes:
        """Return the times of the batches after the first `skip`.

        Raises:
            ValueError: the loop took too few batches.
        """
        if len(self._marks) < 2 or self.used <= self.skip:
            raise ValueError(
                f"the loop took {self.used} batches; stalls are measured after the first "
                f"{self.skip}: let it train on all that it is given, on more samples or in smaller "
                "batches"
            )
        # marks hold running totals: their differences, per batch
        count = self.used - self.skip
        wall, own, children, others = (
            (end - start) / count for start, end in zip(*self._marks, strict=True)
        )
        # others: the machine's cores less this process and its children, never below 0
        return LoopTimes(
            count, wall, sum(self._waits[self.skip :]) / count, own, children, max(0.0, others)
        )


def _children_core_seconds() -> float:
    # Workers of workers included; a child may end while it is being asked.
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _machine_core_seconds() -> float:
    # Of all cores, since the machine started.
    times = psutil.cpu_times()
    return float(
        sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    )


def touch(batch: object) -> None:
    """Read a byte of every memory page of a batch's tensors, as the start of a step does."""
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu" and batch.layout == torch.strided and batch.numel():
            # every page once: a batch in shared memory is mapped but not yet read
            batch.reshape(-1)[:: max(1, PAGE_BYTES // batch.element_size())].clone()
    elif isinstance(batch, Mapping):
        for value in batch.values():
            touch(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            touch(value)


def check_loader(loader: object) -> None:
    """Check that the loader is a DataLoader over a map-style data set, which can be cached.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"stalls are measured on one DataLoader; got {type(loader).__name__} (of several, pass "
            "one after the other)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "an iterable data set has no items to cache: StallMonitor measures the wait for it in "
            "training"
        )


def samples_per_batch(loader: DataLoader[object]) -> int:
    """Return the loader's batch size; 1 where the data set itself makes the batches.

    Where the sizes differ, it is that of the first batch.
    """
    if loader.batch_size is not None:
        return loader.batch_size
    if loader.batch_sampler is None:
        return 1
    return len(next(iter(loader.batch_sampler)))


def loader_over(
    loader: DataLoader[object], items: Sequence[int], *, num_workers: int
) -> DataLoader[object]:
    """Make a loader like `loader` over the given items, in their order.

    Batches have its size; a last incomplete one is left out.
    """
    # Either a sampler and a batch size, or a batch sampler, or neither: samples are batches then.
    size = samples_per_batch(loader)
    # samples one by one; then batches of equal size, without an incomplete one
    batches: dict[str, Any] = {"batch_size": loader.batch_size, "sampler": list(items)}
    if loader.batch_size is not None:
        batches["drop_last"] = True
    elif loader.batch_sampler is not None:
        full = range(0, len(items) - size + 1, size)
        batches = {"batch_sampler": [list(items[first : first + size]) for first in full]}
    workers: dict[str, Any] = {}
    # DataLoader refuses these without workers
    if num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout if num_workers else 0,
        worker_init_fn=loader.worker_init_fn,
        **batches,
        **workers,
    )


def makes_batches(loader: DataLoader[object]) -> bool:
    """Return whether the loader collates samples; else each sample is a batch."""
    return loader.batch_sampler is not None
