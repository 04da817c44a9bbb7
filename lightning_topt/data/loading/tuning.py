"""Trials, not a rule of thumb, choose how many workers a DataLoader needs, and how far ahead they
should read.

A trial is taken for the truth and a model only for what there was no time to try. Disturbances by
other work make a trial slower, never faster: one that shows no gain is repeated, and the faster one
counts. The time of a training step is not known before training, so the loader alone is tried, as
fast as it goes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from torch.utils.data import DataLoader

from lightning_topt.data.cache.determinism import other_randomness
from lightning_topt.data.loading.trials import LoaderTrials, Preparation
from lightning_topt.data.stalls.loop import LoopTimes

Auto = Literal["auto"]
AUTO: Auto = "auto"
NEARLY = 0.05  # longer per batch than the best: not worth another worker
_GAIN = 0.1  # shorter per batch: less is not told from a disturbance, and no more workers are tried
_BOTH_ENDS = 2.0  # handing a batch over costs the worker about what it costs the training process
_SLOW_SECONDS = 0.1  # to prepare a batch: handing it over is surely less
_MORE = " (seconds= allows more)"
_SURE = 3.0  # standard deviations of a batch's time that prefetching covers
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 8  # batches per worker
_MEMORY_SHARE, _SHARED_MEMORY_SHARE = 0.1, 0.5  # of what is free, for batches that wait
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LoaderChoice:
    """A `LoaderChoice` says what was chosen for a loader, and why.

    `prefetch_factor` is None without workers; `pin_memory` None: as it was. `batch_seconds` has
    what was tried: seconds per batch of `trial_size` samples by number of workers, 0 for the
    training process itself; empty where nothing was measured.
    """

    num_workers: int
    prefetch_factor: int | None
    reason: str
    pin_memory: bool | None = None
    trial_size: int = 0
    batch_seconds: dict[int, float] = field(default_factory=dict)


class Found(NamedTuple):
    """A number of workers, why, and seconds per batch of what was tried."""

    num_workers: int
    reason: str
    batch_seconds: dict[int, float]


def tune_loader(
    loader: DataLoader[Any],
    *,
    num_workers: int | Auto,
    prefetch_factor: int | Auto | None,
    cores: int,
    memory_bytes: float,
    seconds: float,
) -> LoaderChoice:
    """Choose what is "auto"; the loader stays as it is, the random states too. Without "auto"
    nothing is measured.

    `cores`: the most workers; `memory_bytes`: of prepared batches that wait; `prefetch_factor`
    None: torch's default. Takes about `seconds`. Raises what the data set raises, RuntimeError
    where a process ends, and ValueError for a data set without samples and for a number in
    `prefetch_factor` without workers.
    """
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
    loader: DataLoader[Any],
    num_workers: int | Auto,
    *,
    cores: int,
    memory_bytes: float,
    seconds: float,
) -> tuple[Preparation, Found]:
    """Return what a batch costs, and the number of workers, tried where it is not given."""
    if num_workers != AUTO:
        prepared = LoaderTrials(loader, seconds=seconds).prepare()
        return prepared, Found(
            num_workers, f"{num_workers} workers, as given", {0: prepared.seconds}
        )
    end = time.perf_counter() + seconds
    rungs = len(list(_ladder(cores))) + 2  # the preparation, and one that is repeated
    trials = LoaderTrials(loader, seconds=seconds / rungs)
    prepared = trials.prepare()
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
) -> Found:
    """Return the least number of workers within 5 % of the best that was tried, up to `most`.

    0 where handing batches over costs as much as `prepare_seconds`, of preparing one in the
    training process. Numbers are tried by doubling until more bring nothing, then between the last
    two. For what there was no time to try it is supposed that more workers are faster in
    proportion, until the training process has no time but to receive.
    """
    tried = {0: prepare_seconds}
    if most < 1:
        return Found(0, "0 workers: the memory for batches that wait has no room for one", tried)
    if prepare_seconds > _SLOW_SECONDS and not is_time_left():
        count = _estimated({1: prepare_seconds}, most, receive_seconds=0.0)
        return Found(
            count,
            f"{_workers(count)} of at most {most}: estimated, there was no time to try any{_MORE}",
            tried,
        )
    one = trial(1)
    tried[1] = one.batch_seconds
    transfer_seconds = _BOTH_ENDS * one.core_seconds
    compared = (
        f"{_milliseconds(transfer_seconds)} to hand a batch over, "
        f"{_milliseconds(prepare_seconds)} to prepare it"
    )
    if transfer_seconds >= prepare_seconds:
        return Found(0, f"0 workers: {compared}", tried)
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
    return Found(
        count, f"{_workers(count)} of at most {most}: {why}; {compared}", tried | by_workers
    )


def choose_prefetch_factor(prepared: Preparation, num_workers: int, *, memory_bytes: float) -> int:
    """Return the batches ahead per worker, 2 to 8: the others go on while one takes 3 standard
    deviations longer than the mean.

    Less (at least 1) where all that may wait would be more than `memory_bytes`.
    """
    wanted = math.ceil(1 + _SURE * prepared.spread)
    room = math.floor(memory_bytes / max(1.0, num_workers * prepared.batch_bytes))
    return max(1, min(max(wanted, _LEAST_PREFETCH), _MOST_PREFETCH, room))


def cores_per_rank(ranks_on_node: int) -> int:
    """Return this process's share of the cores that it may run on, at least 1."""
    known = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, known // ranks_on_node)


def memory_for_waiting(sharers: int) -> float:
    """Return the bytes for prepared batches of each of `sharers` loaders of a node: a tenth of the
    free memory, half of the shared one.

    (Batches wait in shared memory, of which containers have little.)
    """
    room = _MEMORY_SHARE * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        room = min(room, _SHARED_MEMORY_SHARE * shutil.disk_usage(_SHARED_MEMORY).free)
    return float(room) / sharers


def _climb(
    tried: dict[int, float],
    most: int,
    trial: Callable[[int], LoopTimes],
    is_time_left: Callable[[], bool],
) -> bool:
    """Try 2, 4, ... `most` workers until it brings nothing, into `tried`; whether there was time
    for it.
    """
    for count in _ladder(most):
        if count in tried:
            continue
        if not is_time_left():
            return False
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
    """The least number that is nearly as fast as the best, looked for between those `tried` as long
    as there is time.
    """
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
    """The least number nearly as fast as the best, where more than those `tried` go on as they
    did.
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
