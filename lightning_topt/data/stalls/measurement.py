"""The differential measurement of a loop's data: the same loop on batches that are there, on the
source, and on a cache.

DS-Analyzer (arXiv 2007.06775, section 3.3) needs an edited script, and root to drop the page cache.
Here `train` is the user's own loop (`topt stalls`: a Trainer) and takes whatever batches it is
given; what a sample costs is seen from outside, by the clock, the time of the cores and the
counters of bytes that arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import DataLoader

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.data.stalls.advice import Stalls, split_stalls
from lightning_topt.data.stalls.loop import (
    LoopTimes,
    Watched,
    check_loader,
    loader_over,
    samples_per_batch,
    touch,
)
from lightning_topt.data.stalls.model import batch_seconds
from lightning_topt.data.stalls.probes import (
    WARMUP_SAMPLES,
    SourceProbe,
    fit_link,
    probe_source,
    read_rate,
)
from lightning_topt.data.stalls.stall_costs import SetUp, StallCosts

LEAST_BATCHES = 8
_MOST_PROBES = 400
_REPLAYED = 4  # batches
_LEAST_BUSY = 1.2  # cores, below which nothing is learnt about contention
Train = Callable[[Watched], None]  # the user's loop: trains on every batch that it is given


class CacheUnderTest(Protocol):
    """A cache of prepared samples for the cached run, empty at first."""

    def loader_over(
        self, loader: DataLoader[Any], items: Sequence[int], *, num_workers: int
    ) -> DataLoader[Any]:
        """Return what the function of that name makes, its samples from the cache where they are
        there and stored where not.
        """

    def entry_bytes(self) -> float:
        """Return the mean size of what is stored."""


@dataclass(frozen=True)
class MeasurementOptions:
    """`MeasurementOptions` say how much to measure.

    - ``seconds``: of each run; the whole takes about eight times as long;
    - ``memory_bytes``: room of the cached run's cache, a number or text (``"1GiB"``);
    - ``link_bytes_per_second``: where known; None: told from samples of different sizes, if they
      differ;
    - ``cores``: of this loop; None: those that this process may use;
    - ``seed``: of the items that are read.
    """

    seconds: float = 6.0
    memory_bytes: int | str = 1 << 30
    link_bytes_per_second: float | None = None
    cores: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_bytes", check_size(self.memory_bytes, name="memory_bytes"))
        if self.seconds <= 0 or (self.cores is not None and self.cores < 1):
            raise ValueError("seconds are positive, cores at least 1")
        if self.link_bytes_per_second is not None and self.link_bytes_per_second <= 0:
            raise ValueError("link_bytes_per_second is positive")


@dataclass(frozen=True)
class StallMeasurement:
    """A `StallMeasurement` holds what was measured on `setup`: the three runs, in times per batch,
    and the costs that the model takes from there.
    """

    costs: StallCosts
    setup: SetUp
    synthetic: LoopTimes
    cold: LoopTimes
    cached: LoopTimes

    @property
    def stalls(self) -> Stalls:
        """The parts of the wait."""
        return split_stalls(
            self.costs,
            self.setup,
            cold_seconds=self.cold.batch_seconds,
            cached_seconds=self.cached.batch_seconds,
            step_seconds=self.synthetic.batch_seconds,
        )

    @property
    def model_errors(self) -> dict[str, float]:
        """The model's throughput against that of the runs it was made from (0.05: 5 % too high): a
        check of both.
        """
        cached = replace(self.setup, memory_share=1.0)
        return {
            "cold": self.cold.batch_seconds / batch_seconds(self.costs, self.setup) - 1,
            "cached": self.cached.batch_seconds / batch_seconds(self.costs, cached) - 1,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite rate is None."""
        costs = {
            name: None if value == inf else value for name, value in asdict(self.costs).items()
        }
        runs = {name: getattr(self, name)._asdict() for name in ("synthetic", "cold", "cached")}
        stalls = {**asdict(self.stalls), "fraction": self.stalls.fraction}
        return {
            "costs": costs,
            "set_up": asdict(self.setup),
            "runs": runs,
            "stalls": stalls,
            "model_errors": self.model_errors,
        }


def measure_stalls(
    loader: DataLoader[Any],
    *,
    train: Train,
    cache: CacheUnderTest,
    directory: str,
    options: MeasurementOptions,
) -> StallMeasurement:
    """Measure `loader` under `train`: a new item for every sample of the cold runs, as long as
    there are any.

    `directory` is where a cache on disk would be. A local source that the machine's page cache
    holds is measured as that. Raises ValueError for what cannot be cached (no DataLoader, no
    map-style data set), and for less than 8 batches.
    """
    check_loader(loader)
    return _Measurement(loader, train, cache, options).run(directory)


class _Items:
    """The data set's items in random order, each once until all were used."""

    def __init__(self, count: int, seed: int) -> None:
        self.order: list[int] = np.random.default_rng(seed).permutation(count).tolist()
        self.used = 0

    def rest(self, *, at_least: int) -> list[int]:
        """Return those not used yet; all of them again where fewer than `at_least` are left."""
        if len(self.order) - self.used < at_least:
            self.used = 0
        return self.order[self.used :]


class _Measurement:
    def __init__(
        self,
        loader: DataLoader[Any],
        train: Train,
        cache: CacheUnderTest,
        options: MeasurementOptions,
    ) -> None:
        self.loader, self.train, self.cache, self.options = loader, train, cache, options
        self.cores = options.cores or len(os.sched_getaffinity(0))
        self.batch_size = samples_per_batch(loader)
        self.items = _Items(len(loader.dataset), options.seed)  # type: ignore[arg-type]
        if len(self.items.order) < LEAST_BATCHES * self.batch_size:
            raise ValueError(
                f"stalls are measured on at least {LEAST_BATCHES} batches; this data set has "
                f"{len(self.items.order)} "
                f"samples, a batch {self.batch_size}: choose a smaller batch size"
            )

    def run(self, directory: str) -> StallMeasurement:
        """Do all runs, in an order in which none finds the source's items read before (as far as
        there are enough).
        """
        workers, seconds = self.loader.num_workers, self.options.seconds
        probes, batches = self._probe()
        synthetic = self._loop(Watched(cycle(batches), seconds))
        alone_cold, _ = self._cold(1, self._drain)
        crowded, used = self._cold(max(1, self.cores), self._loop)
        cold, used = (crowded, used) if workers == self.cores else self._cold(workers, self._loop)
        kept = self._fill(used)
        cached = self._loop(self._over(kept, workers))
        alone, beside = (self._drain(self._over(kept, count)) for count in (0, 1))
        hit_seconds = alone.core_seconds / self.batch_size
        _, link = fit_link(probes.samples, rate=self.options.link_bytes_per_second)
        source_bytes = float(np.mean([probe.source_bytes for probe in probes.samples]))
        worker_seconds = max(0.0, beside.worker_core_seconds - self.batch_size * hit_seconds)
        sample = sample_costs(
            alone_cold, synthetic, self.batch_size, worker_seconds + probes.collate_seconds
        )
        entry_bytes = self.cache.entry_bytes()
        costs = StallCosts(
            batch_size=self.batch_size,
            num_items=len(self.items.order),
            step_seconds=synthetic.batch_seconds,
            step_core_seconds=synthetic.core_seconds,
            latency_seconds=max(0.0, sample.wait_seconds - source_bytes / link),
            source_bytes=source_bytes,
            link_bytes_per_second=link,
            prepare_seconds=sample.core_seconds,
            hit_seconds=hit_seconds,
            collate_seconds=probes.collate_seconds,
            worker_seconds=worker_seconds,
            receive_seconds=beside.core_seconds,
            entry_bytes=entry_bytes,
            disk_bytes_per_second=read_rate(directory, entry_bytes=entry_bytes),
            other_seconds=sample.other_seconds,
        )
        costs = replace(costs, contention=contention(costs, crowded, cores=self.cores))
        setup = SetUp(workers, self.cores, prefetch_factor=self.loader.prefetch_factor or 2)
        return StallMeasurement(costs, setup, synthetic, cold, cached)

    def _probe(self) -> tuple[SourceProbe, list[Any]]:
        """Costs of reading and collating alone, and a few batches. Not in this process, whose
        children start anew.
        """
        count = max(_MOST_PROBES, 2 * self.batch_size)
        items = self.items.rest(at_least=count)[:count]
        probes = probe_source(self.loader, items, seconds=self.options.seconds)
        self.items.used += len(probes.samples) + WARMUP_SAMPLES
        batches = loader_over(self.loader, items[: _REPLAYED * self.batch_size], num_workers=1)
        return probes, list(batches)

    def _over(self, items: Sequence[int], workers: int, *, cached: bool = True) -> Watched:
        """The loader over items, watched in its steady part: not while its queues fill or run
        empty.
        """
        ahead = workers * (self.loader.prefetch_factor or 2)
        make = self.cache.loader_over if cached else loader_over
        loader = make(self.loader, items, num_workers=workers)
        count = len(loader)
        skip = min(4 + ahead + workers, count // 2)
        most = max(1, count - skip - ahead)
        return Watched(loader, self.options.seconds, skip=skip, most=most)

    def _loop(self, watched: Watched) -> LoopTimes:
        self.train(watched)
        return watched.times()

    def _cold(
        self, workers: int, run: Callable[[Watched], LoopTimes]
    ) -> tuple[LoopTimes, list[int]]:
        """The loop, or the loader alone, on items that were not read before, and these."""
        items = self.items.rest(at_least=(16 + 8 * workers) * self.batch_size)
        watched = self._over(items, workers, cached=False)
        times = run(watched)
        taken = min(len(items), watched.used * self.batch_size)
        # read and not trained on
        ahead = workers * ((self.loader.prefetch_factor or 2) + 1) * self.batch_size
        self.items.used += min(len(items), taken + ahead)
        return times, items[:taken]

    def _fill(self, items: Sequence[int]) -> list[int]:
        """Put items into the cache, as many as it has room for; those."""
        # forked ones would share this process's connections
        workers = self.cores if self.loader.num_workers else 0
        first = list(items[: max(self.batch_size, 16)])
        for _ in self.cache.loader_over(self.loader, first, num_workers=workers):
            pass
        room = int(0.9 * int(self.options.memory_bytes) / self.cache.entry_bytes())
        if room < LEAST_BATCHES * self.batch_size:
            raise ValueError(
                f"memory_bytes={self.options.memory_bytes} holds {room} samples, less than "
                f"{LEAST_BATCHES} batches of "
                f"{self.batch_size}: raise it for the measurement"
            )
        kept = list(items[:room])
        for _ in self.cache.loader_over(self.loader, kept, num_workers=workers):
            pass
        return kept

    def _drain(self, watched: Watched) -> LoopTimes:
        """The loader alone, as fast as it goes, and each batch looked at: memory that a worker sent
        is mapped by then.
        """
        watched.seconds = min(watched.seconds, 3.0)
        for batch in watched:
            touch(batch)
        return watched.times()


class SampleCosts(NamedTuple):
    """`SampleCosts` are those of a sample from the source, in seconds: waited for, of a core, and
    of cores that others used meanwhile.
    """

    wait_seconds: float
    core_seconds: float
    other_seconds: float


def sample_costs(
    cold: LoopTimes, idle: LoopTimes, batch_size: int, worker_seconds: float
) -> SampleCosts:
    """Return the costs of a sample, measured on one worker that does nothing but read the source;
    `worker_seconds` is what a batch takes it besides its samples.

    What others did in the same time of the `idle` loop, which reads nothing, has nothing to do with
    the samples.
    """
    wait = max(0.0, cold.batch_seconds - cold.worker_core_seconds)
    others = (
        cold.other_core_seconds - idle.other_core_seconds / idle.batch_seconds * cold.batch_seconds
    )
    work = max(0.0, cold.worker_core_seconds - worker_seconds)
    return SampleCosts(
        wait / batch_size, work / batch_size, min(wait, max(0.0, others)) / batch_size
    )


def contention(costs: StallCosts, crowded: LoopTimes, *, cores: int) -> float:
    """Return how much longer the work of a cold loop with a worker per core takes its cores than
    the same work does alone.
    """
    alone = costs.batch_size * costs.miss_seconds
    alone += costs.worker_seconds + costs.receive_seconds + costs.step_core_seconds
    taken = crowded.core_seconds + crowded.worker_core_seconds
    busy = min(float(cores), taken / crowded.batch_seconds)
    if cores == 1 or busy < _LEAST_BUSY:
        return 1.0
    return 1 + max(0.0, taken / alone - 1) * (cores - 1) / (busy - 1)
