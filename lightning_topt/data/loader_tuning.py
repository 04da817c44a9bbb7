"""Chooses the number of workers and the prefetch factor of a DataLoader, by short trials.

    choice = tune_loader(loader, num_workers="auto", prefetch_factor="auto", cores=8,
                         memory_bytes=memory_for_waiting(1), seconds=20.0)
    choice.num_workers, choice.reason

A trial is trusted; a model only fills in for what there was no time to try. Other work on the
machine makes a trial slower, never faster: one that shows no gain is repeated, and the faster one
counts. The time of a training step is not known before training, so the loader is tried alone, as
fast as it goes.

The data set is read in other processes only: files and connections that it opens must not be in
this one when workers fork.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader

from lightning_topt.basics.core_wait import usable_cores
from lightning_topt.data.apart import Failed, run_apart
from lightning_topt.data.cache.determinism import other_randomness
from lightning_topt.data.stalls.loop import LoopTimes, Watched, makes_batches, samples_per_batch

Auto = Literal["auto"]
AUTO: Auto = "auto"
NEARLY = 0.05  # longer per batch than the best: not worth another worker
_GAIN = 0.1  # shorter per batch; less may be noise, and no more workers are tried
_BOTH_ENDS = 2.0  # handing a batch over costs the worker about as much as the training process
_SLOW_SECONDS = 0.1  # to prepare a batch; handing it over is surely faster
_MORE = " (seconds= allows more)"
_SURE = 3.0  # standard deviations of a batch's time that prefetching covers
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 8  # batches per worker
_MEMORY_SHARE, _SHARED_MEMORY_SHARE = 0.1, 0.5  # of what is free, for batches that wait
_SHARED_MEMORY = Path("/dev/shm")


# Trials.
PREFETCH_FACTOR = 2  # of the trials
_MOST_ITEMS = 1 << 17  # drawn for the trials; then they are read again
_BATCHES = 8  # at least, in a trial's time; of fewer samples if need be
_PATIENCE_SECONDS = 300.0  # for the first batch of a process


@dataclass(frozen=True)
class LoaderChoice:
    """What was chosen for a loader, and why.

    Args:
        num_workers: chosen number.
        prefetch_factor: None without workers.
        reason: in words.
        pin_memory: None: unchanged.
        trial_size: samples per batch of the trials.
        batch_seconds: what was tried: seconds per batch by number of workers, 0 for the training
            process itself; empty where nothing was measured.
    """

    num_workers: int
    prefetch_factor: int | None
    reason: str
    pin_memory: bool | None = None
    trial_size: int = 0
    batch_seconds: dict[int, float] = field(default_factory=dict)


class WorkerChoice(NamedTuple):
    """A number of workers, why, and seconds per batch of what was tried."""

    num_workers: int
    reason: str
    batch_seconds: dict[int, float]


def tune_loader(
    loader: DataLoader[object],
    *,
    num_workers: int | Auto,
    prefetch_factor: int | Auto | None,
    cores: int,
    memory_bytes: float,
    seconds: float,
) -> LoaderChoice:
    """Choose what is "auto"; neither the loader nor the random states change.

    Nothing is measured without "auto".

    Args:
        loader: over a map-style data set.
        num_workers: a number, or "auto".
        prefetch_factor: a number, or "auto"; None: torch's default.
        cores: the most workers.
        memory_bytes: of prepared batches that wait.
        seconds: how long it takes, about.

    Raises:
        ValueError: the data set has no samples, or `prefetch_factor` is a number without workers.
        RuntimeError: a process ended. Exceptions of the data set are raised as they are.
    """
    # what needs no measurement
    if num_workers == 0 and isinstance(prefetch_factor, int):
        raise ValueError(
            "prefetch_factor is of workers, and the loader has none: give num_workers, or leave it "
            "out"
        )
    if num_workers == 0:
        return LoaderChoice(0, None, "0 workers, as given")
    if num_workers == AUTO and multiprocessing.current_process().daemon:
        return LoaderChoice(
            0,
            None,
            "0 workers: this process is a daemon of multiprocessing, which must not start others",
        )
    if num_workers != AUTO and prefetch_factor != AUTO:
        reason = f"{num_workers} workers, prefetch_factor={prefetch_factor}, as given"
        return LoaderChoice(num_workers, prefetch_factor, reason)
    # Measure in the time given, and leave the random states as they are.
    with other_randomness(0):
        prepared, found = _measure(
            loader, num_workers, cores=cores, memory_bytes=memory_bytes, seconds=seconds
        )
    if prefetch_factor == AUTO:
        prefetch_factor = choose_prefetch_factor(
            prepared, found.num_workers, memory_bytes=memory_bytes
        )
    ahead = prefetch_factor if found.num_workers else None
    reason = f"{found.reason} (batches of {prepared.trial_size}); prefetch_factor={ahead}"
    return LoaderChoice(
        found.num_workers, ahead, reason, None, prepared.trial_size, found.batch_seconds
    )


def _measure(
    loader: DataLoader[object],
    num_workers: int | Auto,
    *,
    cores: int,
    memory_bytes: float,
    seconds: float,
) -> tuple[PreparationCost, WorkerChoice]:
    """Return the cost of a batch, and the number of workers, tried where it is not given."""
    if num_workers != AUTO:
        prepared = LoaderTrials(loader, seconds=seconds).prepare()
        return prepared, WorkerChoice(
            num_workers, f"{num_workers} workers, as given", {0: prepared.seconds}
        )
    end = time.perf_counter() + seconds
    # an equal share of the time for each trial
    rungs = len(list(_ladder(cores))) + 2  # the preparation, and one that is repeated
    trials = LoaderTrials(loader, seconds=seconds / rungs)
    prepared = trials.prepare()
    # each worker has at least one batch waiting
    most = min(cores, math.floor(memory_bytes / max(1.0, prepared.batch_bytes)))
    found = find_num_workers(
        prepared.seconds,
        most=most,
        trial=trials.run,
        is_time_left=lambda: time.perf_counter() < end,
    )
    return prepared, found


def find_num_workers(
    prepare_seconds: float,
    *,
    most: int,
    trial: Callable[[int], LoopTimes],
    is_time_left: Callable[[], bool],
) -> WorkerChoice:
    """Return the least number of workers within 5 % of the best that was tried, up to `most`.

    It is 0 where handing batches over costs as much as `prepare_seconds`, of preparing one in the
    training process. Numbers are tried by doubling until more bring nothing, then between the last
    two. Where there was no time to try, more workers are assumed to be faster in proportion, until
    the training process only receives.
    """
    # Without workers, or without time to try any.
    tried = {0: prepare_seconds}
    if most < 1:
        return WorkerChoice(
            0, "0 workers: the memory for batches that wait has no room for one", tried
        )
    if prepare_seconds > _SLOW_SECONDS and not is_time_left():
        count = _estimated({1: prepare_seconds}, most, receive_seconds=0.0)
        return WorkerChoice(
            count,
            f"{_workers(count)} of at most {most}: estimated, there was no time to try any{_MORE}",
            tried,
        )
    # Is a worker worth it at all?
    one = trial(1)
    tried[1] = one.batch_seconds
    transfer_seconds = _BOTH_ENDS * one.core_seconds
    compared = (
        f"{_milliseconds(transfer_seconds)} to hand a batch over, {_milliseconds(prepare_seconds)} "
        "to prepare it"
    )
    if transfer_seconds >= prepare_seconds:
        return WorkerChoice(0, f"0 workers: {compared}", tried)
    # How many: double, then bisect; estimate where the time is over.
    by_workers = {1: one.batch_seconds}
    if _climb(by_workers, most, trial, is_time_left):
        count = _least(by_workers, trial, is_time_left)
        why = (
            f"{_milliseconds(by_workers[count])} per batch, the best tried "
            f"{_milliseconds(min(by_workers.values()))}"
        )
    else:
        count = _estimated(by_workers, most, receive_seconds=one.core_seconds)
        why = f"estimated, there was time to try up to {max(by_workers)}{_MORE}"
    return WorkerChoice(
        count, f"{_workers(count)} of at most {most}: {why}; {compared}", tried | by_workers
    )


def _climb(
    tried: dict[int, float],
    most: int,
    trial: Callable[[int], LoopTimes],
    is_time_left: Callable[[], bool],
) -> bool:
    """Try 2, 4, ... `most` workers until more bring nothing, into `tried`.

    Returns whether there was time for it.
    """
    for count in _ladder(most):
        if count in tried:
            continue
        if not is_time_left():
            return False
        # a number that seems to bring nothing is tried twice: trials are short, and others use the
        # cores
        goal = (1 - _GAIN) * min(tried.values())
        tried[count] = trial(count).batch_seconds
        if tried[count] > goal and is_time_left():
            tried[count] = min(tried[count], trial(count).batch_seconds)
        if tried[count] > goal:
            return True
    return True


def _least(
    tried: dict[int, float], trial: Callable[[int], LoopTimes], is_time_left: Callable[[], bool]
) -> int:
    """Find the least number that is nearly as fast as the best, by bisection.

    It ends early where there is no time left.
    """
    # `high` is fast enough, `low` is not.
    goal = (1 + NEARLY) * min(tried.values())
    high = min(count for count, seconds in tried.items() if seconds <= goal)
    low = max((count for count in tried if count < high), default=0)
    while high - low > 1 and is_time_left():
        middle = (low + high) // 2
        tried[middle] = trial(middle).batch_seconds
        if tried[middle] <= goal:
            high = middle
        else:
            low = middle
    return high


def _estimated(tried: dict[int, float], most: int, *, receive_seconds: float) -> int:
    """Estimate the least number that is nearly as fast as the best.

    More workers than those `tried` are assumed to continue in proportion.
    """
    largest = max(tried)
    seconds = dict(tried)
    for count in range(largest + 1, most + 1):
        seconds[count] = max(tried[largest] * largest / count, receive_seconds)
    goal = (1 + NEARLY) * min(seconds.values())
    return min(count for count, value in seconds.items() if value <= goal)


def _ladder(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... and `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def choose_prefetch_factor(
    prepared: PreparationCost, num_workers: int, *, memory_bytes: float
) -> int:
    """Return the batches ahead per worker, 2 to 8, that bridge a slow batch.

    The other workers continue while one takes 3 standard deviations longer than the mean. It is
    less (at least 1) where the waiting batches would exceed `memory_bytes`.
    """
    wanted = math.ceil(1 + _SURE * prepared.spread)
    room = math.floor(memory_bytes / max(1.0, num_workers * prepared.batch_bytes))
    return max(1, min(max(wanted, _LEAST_PREFETCH), _MOST_PREFETCH, room))


def cores_per_rank(ranks_on_node: int) -> int:
    """Return this process's share of the cores that it may run on, at least 1."""
    # the cores that this process may use, in a container or under taskset too
    return max(1, usable_cores() // ranks_on_node)


def memory_for_waiting(sharers: int) -> float:
    """Return the bytes for prepared batches of each of `sharers` loaders of a node.

    Together these take a tenth of the free memory, and half of the shared memory: batches wait
    there, and containers have little of it.
    """
    room = _MEMORY_SHARE * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        room = min(room, _SHARED_MEMORY_SHARE * shutil.disk_usage(_SHARED_MEMORY).free)
    return float(room) / sharers


@dataclass(frozen=True)
class PreparationCost:
    """Cost of a batch for a process that does nothing else, in one thread.

    Args:
        trial_size: samples per batch that was measured.
        seconds: mean per such batch.
        core_seconds: the same, of core time.
        spread: standard deviation of a whole batch's seconds over their mean.
        batch_bytes: size of a whole batch.
    """

    trial_size: int
    seconds: float
    core_seconds: float
    spread: float
    batch_bytes: float


class LoaderTrials:
    """Trials of one loader, `seconds` each, on new items as long as there are any.

    Workers of a trial are started anew, which takes extra time.

    Raises:
        ValueError: the data set has no items.
    """

    def __init__(self, loader: DataLoader[object], *, seconds: float) -> None:
        self.loader, self.seconds = TrialLoader.of(loader), seconds
        count = len(self.loader.dataset)
        if not count:
            raise ValueError(
                "the data set has no samples to measure: give num_workers and prefetch_factor as "
                "numbers"
            )
        # backwards for the preparation, so that trials begin with items that are not read yet
        items = random.Random(0).sample(range(count), min(count, _MOST_ITEMS))
        self._backwards, self._items = items[::-1], cycle(items)
        self._size = 1

    def prepare(self) -> PreparationCost:
        """Prepare batches in a process without workers.

        Raises:
            RuntimeError: the process ended. Exceptions of the data set are raised as they are.
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
        """Time a loop that takes batches as fast as workers send them, in steady state."""
        loader = self.loader.over(
            ResizableBatches(self._items, self._size), num_workers=num_workers
        )
        # Batches made while the workers started.
        ahead = num_workers * (PREFETCH_FACTOR + 1)
        watched = Watched(loader, self.seconds, skip=ahead, least=max(4, 2 * num_workers))
        for _ in watched:
            pass
        return watched.times()


@dataclass(frozen=True)
class TrialLoader:
    """What the trials need of a loader, whose sampler and generator stay untouched.

    Args:
        batch_size: in samples, 1 where the data set makes the batches.
        start_method: of workers; None: the system's.
    """

    dataset: Any
    collate_fn: Any
    worker_init_fn: Any
    batch_size: int
    makes_batches: bool
    start_method: str | None

    @staticmethod
    def of(loader: DataLoader[object]) -> TrialLoader:
        """Return what the trials need of `loader`.

        A batch sampler without a ``batch_size`` has to yield its first batch; its generators are
        restored afterwards.
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

    def over(self, chunks: ResizableBatches, *, num_workers: int = 0) -> DataLoader[object]:
        """Make a loader of these batches, in their order, without end."""
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


def _batch_size(loader: DataLoader[object]) -> int:
    sampler: Any = loader.batch_sampler
    # some samplers say it without drawing
    known = getattr(sampler, "batch_size", None)
    if isinstance(known, int) and known > 0:
        return known
    inner = getattr(sampler, "sampler", None)
    # others have to draw, after which the user's generators are put back
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


class ResizableBatches:
    """Items in batches of `size`, which may change on the way."""

    def __init__(self, items: Iterator[int], size: int = 1) -> None:
        self.items, self.size = items, size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield list(islice(self.items, self.size))


def prepare(loader: TrialLoader, items: Sequence[int], *, seconds: float) -> PreparationCost:
    """Prepare batches of `items` in this process for `seconds`.

    They start with one sample and grow until a batch takes an eighth of that time.
    """
    chunks = ResizableBatches(cycle(items))
    batches = iter(loader.over(chunks))
    next(batches)  # the data set opens its files now
    timed: list[tuple[int, float, float]] = []
    end = time.perf_counter() + seconds
    while True:
        start, core = time.perf_counter(), time.process_time()
        batch = next(batches)
        timed.append((chunks.size, time.perf_counter() - start, time.process_time() - core))
        if time.perf_counter() > end:
            break
        # larger batches, as long as one takes little of the time
        if chunks.size < loader.batch_size and 2 * timed[-1][1] <= seconds / _BATCHES:
            chunks.size = min(2 * chunks.size, loader.batch_size)
    # Only batches of the final size count.
    size = timed[-1][0]
    walls = [wall for other, wall, _ in timed if other == size]
    mean = statistics.fmean(walls)
    return PreparationCost(
        trial_size=size,
        seconds=mean,
        core_seconds=statistics.fmean(core for other, _, core in timed if other == size),
        # of a whole batch: sums of more samples scatter less
        spread=statistics.pstdev(walls) / mean * math.sqrt(size / loader.batch_size),
        batch_bytes=nbytes(batch) * loader.batch_size / size,
    )


def nbytes(batch: object) -> float:
    """Return the bytes of tensors and arrays in a batch, and of other leaves when pickled."""
    if isinstance(batch, Mapping):
        return sum(map(nbytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(nbytes, batch))
    if hasattr(batch, "nbytes"):  # tensors and arrays
        return float(batch.nbytes)
    try:
        return float(len(pickle.dumps(batch)))
    except Exception:  # workers cannot send it either, and their trial will say so
        return float(sys.getsizeof(batch))
