"""Short trials of a DataLoader: what a batch costs to prepare, and how fast batches come from a
number of workers.

The data set is read in other processes only: files and connections that it opens must not be there
when workers are forked.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_topt.data.apart import Failed, run_apart
from lightning_topt.data.stalls.loop import LoopTimes, Watched, makes_batches, samples_per_batch

PREFETCH_FACTOR = 2  # of the trials
_MOST_ITEMS = 1 << 17  # that are drawn for the trials; then they are read again
_BATCHES = 8  # at least as many in the time of a trial, of fewer samples if need be
_PATIENCE_SECONDS = 300.0  # for the first batch of a process


@dataclass(frozen=True)
class Preparation:
    """A `Preparation` says what a batch costs a process that does nothing else: means per batch of
    `trial_size` samples, in one thread.

    ``spread`` is the standard deviation of a whole batch's seconds over their mean, ``batch_bytes``
    the size of a whole batch.
    """

    trial_size: int
    seconds: float
    core_seconds: float
    spread: float
    batch_bytes: float


@dataclass(frozen=True)
class TrialLoader:
    """A `TrialLoader` is what the trials need of a loader. Its sampler, its generator and its owner
    stay where they are, untouched.

    `batch_size` is in samples, 1 where the data set makes the batches; `start_method` None: the
    system's.
    """

    dataset: Any
    collate_fn: Any
    worker_init_fn: Any
    batch_size: int
    makes_batches: bool
    start_method: str | None

    @staticmethod
    def of(loader: DataLoader[Any]) -> TrialLoader:
        """Return what the trials need of `loader`. A batch sampler without a ``batch_size`` is
        asked for its first batch; its generators are as before afterwards.
        """
        context = loader.multiprocessing_context
        return TrialLoader(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            batch_size=_batch_size(loader),
            makes_batches=makes_batches(loader),
            start_method=None if context is None else context.get_start_method(),
        )

    def over(self, chunks: Chunks, *, num_workers: int = 0) -> DataLoader[Any]:
        """Return a loader of these batches, in their order, without end."""
        source: dict[str, Any] = {"batch_sampler": chunks}
        if not self.makes_batches:
            source = {"batch_size": None, "sampler": chunks.items}
        workers: dict[str, Any] = {}
        if num_workers:
            workers = {
                "num_workers": num_workers,
                "prefetch_factor": PREFETCH_FACTOR,
                "multiprocessing_context": self.start_method,
                "worker_init_fn": self.worker_init_fn,
                "timeout": _PATIENCE_SECONDS,
            }
        return DataLoader(self.dataset, collate_fn=self.collate_fn, **source, **workers)


class Chunks:
    """Items in batches of `size`, which may be changed on the way."""

    def __init__(self, items: Iterator[int], size: int = 1) -> None:
        self.items, self.size = items, size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield list(islice(self.items, self.size))


class LoaderTrials:
    """Trials of one loader, on other items each, as long as there are any. `seconds` is the time of
    each.

    Workers of a trial are started anew, which comes on top. Raises ValueError for a data set
    without items.
    """

    def __init__(self, loader: DataLoader[Any], *, seconds: float) -> None:
        self.loader, self.seconds = TrialLoader.of(loader), seconds
        count = len(self.loader.dataset)
        if not count:
            raise ValueError(
                "the data set has no samples to measure: give num_workers and prefetch_factor as "
                "numbers"
            )
        items = random.Random(0).sample(range(count), min(count, _MOST_ITEMS))
        self._backwards, self._items = items[::-1], cycle(items)
        self._size = 1

    def prepare(self) -> Preparation:
        """Prepare batches in a process without workers. Raises what the data set raises;
        RuntimeError if its process ends.
        """
        result = run_apart(
            partial(prepare, self.loader, self._backwards, seconds=self.seconds),
            context=multiprocessing.get_context(self.loader.start_method),
            timeout_seconds=_PATIENCE_SECONDS + self.seconds,
            doing="preparing batches",
        )
        if isinstance(result, Failed):
            raise result.error from RuntimeError(result.trace)
        self._size = result.trial_size
        return result  # type: ignore[no-any-return]

    def run(self, num_workers: int) -> LoopTimes:
        """Run a loop that takes batches of `trial_size` as fast as they come from workers, in its
        steady part.
        """
        loader = self.loader.over(Chunks(self._items, self._size), num_workers=num_workers)
        # made while the loop waited for the workers to start
        ahead = num_workers * (PREFETCH_FACTOR + 1)
        watched = Watched(loader, self.seconds, skip=ahead, least=max(4, 2 * num_workers))
        for _ in watched:
            pass
        return watched.times()


def prepare(loader: TrialLoader, items: Sequence[int], *, seconds: float) -> Preparation:
    """Prepare batches of `items` here for `seconds`: of one sample first, then of more until they
    take an eighth of that.
    """
    chunks = Chunks(cycle(items))
    batches = iter(loader.over(chunks))
    next(batches)  # which opens what the data set opens
    timed: list[tuple[int, float, float]] = []
    end = time.perf_counter() + seconds
    while True:
        start, core = time.perf_counter(), time.process_time()
        batch = next(batches)
        timed.append((chunks.size, time.perf_counter() - start, time.process_time() - core))
        if time.perf_counter() > end:
            break
        if chunks.size < loader.batch_size and 2 * timed[-1][1] <= seconds / _BATCHES:
            chunks.size = min(2 * chunks.size, loader.batch_size)
    size = timed[-1][0]
    walls = [wall for other, wall, _ in timed if other == size]
    mean = statistics.fmean(walls)
    return Preparation(
        trial_size=size,
        seconds=mean,
        core_seconds=statistics.fmean(core for other, _, core in timed if other == size),
        spread=statistics.pstdev(walls) / mean * math.sqrt(size / loader.batch_size),
        batch_bytes=nbytes(batch) * loader.batch_size / size,
    )


def nbytes(batch: Any) -> float:
    """Return the bytes of the tensors and arrays in a batch, and of its other leaves when
    pickled.
    """
    if isinstance(batch, Mapping):
        return sum(map(nbytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(nbytes, batch))
    if hasattr(batch, "nbytes"):  # tensors and arrays
        return float(batch.nbytes)
    try:
        return float(len(pickle.dumps(batch)))
    except Exception:  # workers could not send it either, and their trial will say so
        return float(sys.getsizeof(batch))


def _batch_size(loader: DataLoader[Any]) -> int:
    sampler: Any = loader.batch_sampler
    known = getattr(sampler, "batch_size", None)
    if isinstance(known, int) and known > 0:
        return known
    inner = getattr(sampler, "sampler", None)
    found: Iterable[Any] = (
        loader.generator,
        *(getattr(part, "generator", None) for part in (sampler, inner)),
    )
    generators = [one for one in found if isinstance(one, torch.Generator)]
    states = [one.get_state() for one in generators]
    try:
        return max(1, samples_per_batch(loader))
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)
