"""What a training loop waits for, measured in three runs of the user's own loop.

    step     a few batches that are in memory already        the step alone
    cold     items not read before, from the source          everything
    cached   the same items, in a cache of prepared samples  all but fetching and preparing

The differences are the parts of a batch's time, as in DS-Analyzer (arXiv 2007.06775, section 3.3),
which needs an edited script, and root to drop the page cache. Here `train` is the user's loop and
trains on whatever batches it gets. A cache holds prepared samples, so the cached run does not
prepare either; how busy the cores were in the cold run tells the two apart.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from math import inf
from typing import Any, NamedTuple

import numpy as np
import psutil
from torch.utils.data import DataLoader, IterableDataset

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.data.cache.cached_batches import collate, is_stacking, with_caches
from lightning_topt.data.cache.sample_cache import SampleCache

LEAST_BATCHES = 8
_READY = 4  # batches of the run of the step alone
_WORTH = 0.05  # of a batch's time: less is not worth an advice


class LoopTimes(NamedTuple):
    """Means per batch of a loop in steady state, in seconds.

    Args:
        batches: number of batches measured.
        batch_seconds: of the whole iteration, by the clock.
        wait_seconds: of these, waiting for the batch.
        core_seconds: core time of the training process.
        worker_core_seconds: core time of its child processes.
    """

    batches: int
    batch_seconds: float
    wait_seconds: float
    core_seconds: float
    worker_core_seconds: float


class Watched:
    """Batches of an iterable, timed while a loop takes them; `times` is valid after the loop.

    Args:
        batches: what the loop iterates over; one epoch of it.
        seconds: how long to measure, after the first `skip` batches.
        skip: batches before the steady state.
        least: batches measured at least, however long they take.
        most: batches measured at most.
    """

    def __init__(
        self,
        batches: Iterable[object],
        seconds: float,
        *,
        skip: int = 4,
        least: int = 4,
        most: int = 100_000,
    ) -> None:
        self.batches, self.seconds = batches, seconds
        self.skip, self.least, self.most = skip, least, most
        self.used = 0  # batches handed out
        self._waits: list[float] = []
        # at the beginning and the end of the steady state: clock, core seconds here and of children
        self._marks: list[tuple[float, float, float]] = []

    def __len__(self) -> int:
        """One more than there are batches: asking for that one ends the measurement."""
        return self.skip + self.most + 1

    def __iter__(self) -> Iterator[object]:
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
            if time.perf_counter() - started > self.seconds and self.used >= self.skip + self.least:
                break
        self._mark()

    def _mark(self) -> None:
        children = 0.0
        for child in psutil.Process().children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.Error:  # it has ended meanwhile
                continue
            children += times.user + times.system
        self._marks.append((time.perf_counter(), time.process_time(), children))

    def times(self) -> LoopTimes:
        """Return the times of the batches after the first `skip`.

        Raises:
            ValueError: the loop took too few batches.
        """
        if len(self._marks) < 2 or self.used <= self.skip:
            raise ValueError(
                f"the loop took {self.used} batches, and is measured after the first {self.skip}: "
                "let it train on all that it is given, on more samples or in smaller batches"
            )
        # marks hold running totals: their differences, per batch
        count = self.used - self.skip
        wall, own, children = (
            (end - start) / count for start, end in zip(*self._marks, strict=True)
        )
        return LoopTimes(count, wall, sum(self._waits[self.skip :]) / count, own, children)


@dataclass(frozen=True)
class StallMeasurement:
    """The three runs, of a loader with `num_workers` workers on `cores` cores.

    Args:
        entry_bytes: of one prepared sample in the cache.
        num_items: of the data set.
    """

    step: LoopTimes
    cold: LoopTimes
    cached: LoopTimes
    batch_size: int
    num_workers: int
    cores: int
    num_items: int
    entry_bytes: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds per batch; they add up to those of the cold run.

        A part that is absent may come out slightly below 0: these are differences of measured
        times.
        """
        source = self.cold.batch_seconds - self.cached.batch_seconds
        # cores that worked on samples, of those that could have
        if self.num_workers:
            worked = self.cold.worker_core_seconds - self.cached.worker_core_seconds
            worked /= min(self.num_workers, self.cores)
        else:
            worked = self.cold.core_seconds - self.cached.core_seconds
        preparing = source * min(1.0, max(0.0, worked / source)) if source > 0 else 0.0
        return {
            "step": self.step.batch_seconds,
            "fetching": source - preparing,
            "preparing": preparing,
            "loading": self.cached.batch_seconds - self.step.batch_seconds,
        }

    @property
    def fraction(self) -> float:
        """The fraction of the time that is not the step, 0 to 1."""
        return max(0.0, 1 - self.step.batch_seconds / self.cold.batch_seconds)

    @property
    def advice(self) -> list[str]:
        """What would help, in sentences; all figures in them were measured."""
        cold, cached, step = (run.batch_seconds for run in (self.cold, self.cached, self.step))
        room = format_bytes(self.entry_bytes * self.num_items)
        sentences = []
        if cold - cached > _WORTH * cold:
            sentences.append(
                f"With all samples in a cache this loop is {cold / cached:.2f} times as fast; they "
                f"take {room}."
            )
        else:
            sentences.append("A cache of its samples would not make this loop faster.")
        if cached - step > _WORTH * cached:
            sentences.append(
                f"The step alone takes {format_seconds(step)} of the {format_seconds(cached)} that "
                f"are left: try another num_workers than {self.num_workers}, on {self.cores} cores."
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        runs = {name: getattr(self, name)._asdict() for name in ("step", "cold", "cached")}
        own = {name: value for name, value in asdict(self).items() if name not in runs}
        return {**own, "runs": runs, "parts": self.parts, "fraction": self.fraction}


def measure_stalls(
    loader: DataLoader[Any],
    *,
    train: Callable[[Watched], object],
    seconds: float = 6.0,
    memory_bytes: int | str = 1 << 30,
    cores: int | None = None,
    seed: int = 0,
) -> StallMeasurement:
    """Measure `loader` under `train`, the user's loop, which trains on every batch that it gets.

    What the machine's page cache holds of a local source is measured as that. A data set that marks
    its deterministic part has a cache before it from then on.

    Args:
        loader: a DataLoader of a map-style data set.
        train: the loop.
        seconds: of each run.
        memory_bytes: of the cache, a number or text (``"1GiB"``).
        cores: for this loop; None: those that this process may use.
        seed: for the choice of the items that are read.

    Raises:
        ValueError: the loader is of another kind, or the data set has less than 8 batches.
    """
    room = check_size(memory_bytes, name="memory_bytes")
    if seconds <= 0 or (cores is not None and cores < 1):
        raise ValueError("seconds are positive, cores at least 1")
    size = samples_per_batch(loader)
    items = np.random.default_rng(seed).permutation(len(loader.dataset)).tolist()  # type: ignore[arg-type]
    if len(items) < LEAST_BATCHES * size:
        raise ValueError(
            f"stalls are measured on at least {LEAST_BATCHES} batches; this data set has "
            f"{len(items)} samples, a batch {size}: choose a smaller batch size"
        )

    def run(over: DataLoader[Any]) -> tuple[LoopTimes, int]:
        # steady state: neither the batches that fill the queues, nor those that empty them
        ahead = over.num_workers * (over.prefetch_factor or 2)
        count = len(over)
        skip = min(4 + ahead + over.num_workers, count // 2)
        watched = Watched(over, seconds, skip=skip, most=max(1, count - skip - ahead))
        train(watched)
        return watched.times(), watched.used

    # The step alone, on batches that a worker has read: this process opens no connections.
    ready = list(_loader_over(loader, items[: _READY * size], num_workers=1))
    watched = Watched(cycle(ready), seconds)
    train(watched)
    # Cold: items that were not read before, as far as there are enough.
    unread = items[_READY * size :]
    unread = unread if len(unread) >= LEAST_BATCHES * size else items
    cold, used = run(_loader_over(loader, unread, num_workers=loader.num_workers))
    with tempfile.TemporaryDirectory(prefix="topt-stalls-") as folder:
        # one cache for each data set inside of the loader's
        caches: dict[int, SampleCache] = {}

        def cache_of(dataset: Any) -> SampleCache:
            if id(dataset) not in caches:
                caches[id(dataset)] = SampleCache(
                    folder,
                    fingerprint=f"{len(caches)}",
                    num_items=len(dataset),
                    memory_bytes=room,
                    disk_bytes=0,
                )
            return caches[id(dataset)]

        def cached_over(some: Sequence[int]) -> DataLoader[Any]:
            return _loader_over(
                loader,
                some,
                num_workers=loader.num_workers,
                dataset=with_caches(loader.dataset, cache_of, ready_batches=is_stacking(loader)),
            )

        def stored() -> tuple[int, int]:
            known = [cache.statistics() for cache in caches.values()]
            return sum(one.memory_items for one in known), sum(one.memory_bytes for one in known)

        try:
            # Filled with what the cold run has read, as far as there is room.
            read = unread[: used * size]
            for _ in cached_over(read):
                pass
            count, nbytes = stored()
            if count < min(LEAST_BATCHES * size, len(read)):
                raise ValueError(
                    f"memory_bytes={memory_bytes} holds {count} samples, less than "
                    f"{LEAST_BATCHES} batches of {size}: raise it for the measurement"
                )
            cached, _ = run(cached_over(read[:count]))
        finally:
            for cache in caches.values():
                cache.close()
    return StallMeasurement(
        watched.times(),
        cold,
        cached,
        batch_size=size,
        num_workers=loader.num_workers,
        cores=cores or len(psutil.Process().cpu_affinity() or [0]),
        num_items=len(items),
        entry_bytes=nbytes / count,
    )


def samples_per_batch(loader: object) -> int:
    """Return the loader's batch size; where sizes differ that of the first batch.

    It is 1 where the data set itself makes the batches.
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
    if loader.batch_size is not None:
        return loader.batch_size
    return 1 if loader.batch_sampler is None else len(next(iter(loader.batch_sampler)))


def _loader_over(
    loader: DataLoader[Any], items: Sequence[int], *, num_workers: int, dataset: Any = None
) -> DataLoader[Any]:
    """Make a loader like `loader` over the given items, in full batches of its size.

    `dataset` may replace its data set, by the same one with caches.
    """
    size = samples_per_batch(loader)
    # a sampler of items where samples are batches, else full batches of them
    given: dict[str, Any] = {"batch_size": None, "sampler": list(items)}
    if loader.batch_sampler is not None:
        full = range(0, len(items) - size + 1, size)
        given = {"batch_sampler": [list(items[first : first + size]) for first in full]}
    if num_workers:  # DataLoader refuses these without workers
        given |= {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
        }
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        num_workers=num_workers,
        collate_fn=collate if dataset is not None and is_stacking(loader) else loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        **given,
    )
