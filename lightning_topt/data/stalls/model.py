"""Throughput of a data loading loop, predicted from measured costs, and the advice that follows.

    costs, setup = measurement.costs, measurement.setup
    samples_per_second(costs, replace(setup, num_workers=8))    # 8 workers instead
    least_cache(costs, setup)                                   # share of the items worth caching

Costs of a sample: a *miss* waits `latency_seconds`, moves `source_bytes` over the link, and takes
`prepare_seconds` of a core (system calls and decoding alike: a core does both), plus its share of
`collate_seconds` per batch. A *hit* takes `hit_seconds`, collating included. Costs of a batch of B
samples: with workers, `worker_seconds` more in the worker and `receive_seconds` in the training
process; then the step.

DS-Analyzer (arXiv 2007.06775, section 3.4) takes the slowest stage for the whole: `bounds`. Stages
share cores, though, and wait for each other. So `batch_seconds` simulates the loop: processes run
on cores, the link and the disk, and all users of a resource share it evenly.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# How sure an advice must be, and which changes are tried.
NEARLY = 0.05  # longer per batch: a larger cache is not worth it
_STEP = 0.005  # of the share: the precision of `least_cache`
_SAME = 0.01  # longer per batch: not worth another worker
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FASTER = (2.0, 4.0)


# The simulation.
CORE, LINK, DISK, DELAY, OTHERS = "core", "link", "disk", "delay", "others"
_CHUNKS = 16  # chunks of samples per batch
_BATCHES = 96  # simulated and counted, but at least 24 of each worker
_TINY = 1e-12
_LEAST_FREE = 0.1  # of the cores, kept for the loop: it never stops altogether


@dataclass(frozen=True)
class StallCosts:
    """Costs measured in one set-up; see the top of the module for the symbols.

    Seconds of a core are those of an idle machine.

    Args:
        batch_size: B, samples.
        num_items: of the data set.
        step_seconds: of a training step whose batch is there.
        step_core_seconds: core time of the training process in that step, all threads together.
        latency_seconds: before the first byte of a sample; with an infinite
            `link_bytes_per_second`, the whole wait.
        source_bytes: that one sample moves from its source.
        link_bytes_per_second: of the source or the network to it, shared by all readers.
        prepare_seconds: core time of a worker to read and decode one sample.
        hit_seconds: core time of one sample from the cache, collating included.
        collate_seconds: core time to collate one batch.
        worker_seconds: core time of a worker to send one batch.
        receive_seconds: core time of the training process to receive one batch.
        entry_bytes: of one sample in the cache.
        disk_bytes_per_second: of the disk that would hold the cache's disk tier.
        contention: core seconds for work that takes 1 second alone, when all cores are busy.
        other_seconds: core time of other processes or the kernel during the wait of a miss: a local
            server of the source, the network stack.
    """

    batch_size: int
    num_items: int
    step_seconds: float
    step_core_seconds: float
    latency_seconds: float
    source_bytes: float
    link_bytes_per_second: float
    prepare_seconds: float
    hit_seconds: float
    collate_seconds: float
    worker_seconds: float
    receive_seconds: float
    entry_bytes: float
    disk_bytes_per_second: float = inf
    contention: float = 1.0
    other_seconds: float = 0.0

    def __post_init__(self) -> None:
        if (
            self.batch_size < 1
            or self.num_items < 1
            or self.step_seconds <= 0
            or self.contention < 1
        ):
            raise ValueError(
                "costs need at least 1 sample per batch and item, a step that takes time and "
                "contention >= 1"
            )
        if min(self.link_bytes_per_second, self.disk_bytes_per_second) <= 0:
            raise ValueError("a link and a disk have positive rates (bytes per second)")

    @property
    def miss_seconds(self) -> float:
        """Core seconds of a sample from the source."""
        return self.prepare_seconds + self.collate_seconds / self.batch_size

    def share(self, cache_bytes: float) -> float:
        """Return the share of all items that `cache_bytes` hold, 0 to 1."""
        return min(1.0, cache_bytes / (self.entry_bytes * self.num_items))


@dataclass(frozen=True)
class SetUp:
    """A set-up to predict the throughput of; None means as measured.

    Args:
        num_workers: worker processes of the DataLoader.
        cores: of the machine, for this loop.
        prefetch_factor: batches ahead per worker.
        memory_share: share of the items in the memory tier, 0 to 1.
        disk_share: share of the items in the disk tier.
        step_speedup: 2 for an accelerator that takes half the time.
    """

    num_workers: int
    cores: int
    prefetch_factor: int = 2
    memory_share: float = 0.0
    disk_share: float = 0.0
    link_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    disk_bytes_per_second: float | None = None
    step_speedup: float = 1.0

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.cores < 1 or self.prefetch_factor < 1:
            raise ValueError(
                f"a set-up has at least 0 workers, 1 core and 1 batch of prefetching; got {self}"
            )
        if (
            min(self.memory_share, self.disk_share) < 0
            or self.memory_share + self.disk_share > 1 + 1e-9
        ):
            raise ValueError(
                f"the tiers hold a share of the items, from 0 to 1 together; got {self}"
            )
        rates = (self.link_bytes_per_second, self.disk_bytes_per_second, self.step_speedup)
        if any(rate is not None and rate <= 0 for rate in rates) or (self.latency_seconds or 0) < 0:
            raise ValueError(
                f"rates and the speed-up are positive, a latency is at least 0; got {self}"
            )


def samples_per_second(costs: StallCosts, setup: SetUp) -> float:
    """Predict the throughput in `setup`, from `batch_seconds`."""
    return costs.batch_size / batch_seconds(costs, setup)


def batch_seconds(costs: StallCosts, setup: SetUp, *, seed: int = 0) -> float:
    """Simulate a long epoch in `setup` and return its seconds per batch.

    `seed` decides the order in which hits and misses come.
    """
    # The steady state: without the batches during which the queues fill.
    loop = _SimulatedLoop(apply(costs, setup), setup, np.random.default_rng(seed))
    loop.run()
    first = loop.warmup
    return (loop.starts[-1] - loop.starts[first]) / (len(loop.starts) - 1 - first)


def bounds(costs: StallCosts, setup: SetUp) -> dict[str, float]:
    """Return the least seconds per batch that each resource alone allows.

    The keys are "step", "link", "disk", "cores" and "workers". Without workers, "workers" is all
    the work of the training process on its data, step included.
    """
    # Seconds per batch of waiting, of cores, and of other processes.
    c, missing = apply(costs, setup), 1 - setup.memory_share - setup.disk_share
    wait = c.batch_size * missing * (c.latency_seconds + c.source_bytes / c.link_bytes_per_second)
    wait += c.batch_size * setup.disk_share * c.entry_bytes / c.disk_bytes_per_second
    core = c.batch_size * (missing * c.miss_seconds + (1 - missing) * c.hit_seconds)
    others = c.batch_size * missing * c.other_seconds
    link = c.batch_size * missing * c.source_bytes / c.link_bytes_per_second
    disk = c.batch_size * setup.disk_share * c.entry_bytes / c.disk_bytes_per_second
    if setup.num_workers == 0:
        # The training process does it all, one after the other.
        step = c.step_seconds
        workers = wait + core + c.step_seconds
        in_all = core + c.step_core_seconds + others
    else:
        step = c.step_seconds + c.receive_seconds
        workers = (wait + core + c.worker_seconds) / setup.num_workers
        in_all = core + c.worker_seconds + c.receive_seconds + c.step_core_seconds + others
    return {
        "step": step,
        "link": link,
        "disk": disk,
        "cores": in_all / setup.cores,
        "workers": workers,
    }


def apply(costs: StallCosts, setup: SetUp) -> StallCosts:
    """Replace the measured link, disk and step by those of the set-up."""
    changed = {
        name: value
        for name in ("link_bytes_per_second", "latency_seconds", "disk_bytes_per_second")
        if (value := getattr(setup, name)) is not None
    }
    step = {
        name: getattr(costs, name) / setup.step_speedup
        for name in ("step_seconds", "step_core_seconds")
    }
    return dataclasses.replace(costs, **changed, **step)


@dataclass(frozen=True)
class Stalls:
    """Seconds per batch: the step, and the parts of the wait for its data.

    - ``fetch_seconds``: saved if the source answered at once;
    - ``prepare_seconds``: saved on top if every sample were in memory, prepared;
    - ``loading_seconds``: what remains: reading the cache, live augmentation, collating, sending.

    A part that is absent may come out slightly below zero: these are differences of measured times.
    """

    step_seconds: float
    fetch_seconds: float
    prepare_seconds: float
    loading_seconds: float

    @property
    def total_seconds(self) -> float:
        """The seconds of a batch."""
        return self.step_seconds + self.fetch_seconds + self.prepare_seconds + self.loading_seconds

    @property
    def fraction(self) -> float:
        """The fraction of the time that is not the step, 0 to 1."""
        return max(0.0, 1 - self.step_seconds / self.total_seconds)


def split_stalls(
    costs: StallCosts,
    setup: SetUp,
    *,
    cold_seconds: float,
    cached_seconds: float,
    step_seconds: float,
) -> Stalls:
    """Split the wait into its parts, from the seconds per batch of the three measured runs.

    This is the differential measurement of DS-Analyzer (arXiv 2007.06775, section 3.3). Our cache
    holds prepared samples, so its second run does not prepare either. The model says how much of
    the difference between cold and cached is due to fetching alone.
    """
    # the three runs by the model: as measured cold, with a source that answers at once, all cached
    cold = replace(setup, memory_share=0.0, disk_share=0.0)
    cached = replace(setup, memory_share=1.0, disk_share=0.0)
    at_once = replace(cold, latency_seconds=0.0, link_bytes_per_second=inf)
    all_seconds, prepared_seconds, hit_seconds = (
        batch_seconds(costs, s) for s in (cold, at_once, cached)
    )
    # which part of what a cache saves is waiting for the source
    removed = all_seconds - hit_seconds
    fetching = (
        min(1.0, max(0.0, (all_seconds - prepared_seconds) / removed)) if removed > 0 else 0.0
    )
    gone = cold_seconds - cached_seconds
    return Stalls(
        step_seconds, fetching * gone, (1 - fetching) * gone, cached_seconds - step_seconds
    )


def least_cache(costs: StallCosts, setup: SetUp, *, within: float = NEARLY) -> float:
    """Return the least share of the items in memory that is nearly as good as all of them.

    With that share a batch takes at most `within` (relative) longer than with all items in memory.
    """
    goal = batch_seconds(costs, replace(setup, memory_share=1.0, disk_share=0.0)) * (1 + within)

    def enough(share: float) -> bool:
        return batch_seconds(costs, replace(setup, memory_share=share, disk_share=0.0)) <= goal

    if enough(0.0):
        return 0.0
    # Bisection: more in memory is never slower.
    low, high = 0.0, 1.0
    while high - low > _STEP:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def best_num_workers(costs: StallCosts, setup: SetUp, *, most: int | None = None) -> int:
    """Return the least number of workers within 1 % of the best.

    Tried are 0 to `most` workers; None: twice the cores.
    """
    # the least of those that are nearly as good: more only take memory
    counts = range((2 * setup.cores if most is None else most) + 1)
    seconds = [batch_seconds(costs, replace(setup, num_workers=count)) for count in counts]
    return next(count for count in counts if seconds[count] <= min(seconds) * (1 + _SAME))


class WhatIf(NamedTuple):
    """One changed set-up, in words, with its group and its predicted throughput."""

    group: str
    change: str
    setup: SetUp
    samples_per_second: float


def what_if(
    costs: StallCosts, setup: SetUp, *, changes: Sequence[tuple[str, str, SetUp]] = ()
) -> list[WhatIf]:
    """Predict the throughput of `setup` as it is, and under the usual changes.

    `changes` adds more of them, as (group, words, set-up).
    """
    asked = [
        ("now", "as measured", setup),
        *_caches(costs, setup),
        *_machine(setup),
        *_rates(costs, setup),
        *changes,
    ]
    return [
        WhatIf(g, words, s, costs.batch_size / batch_seconds(costs, s)) for g, words, s in asked
    ]


def _caches(costs: StallCosts, setup: SetUp) -> list[tuple[str, str, SetUp]]:
    rows = [
        (
            "cache in memory",
            f"{100 * share:.0f} % of the items",
            replace(setup, memory_share=share, disk_share=0.0),
        )
        for share in SHARES
    ]
    if costs.disk_bytes_per_second < inf:
        on_disk = replace(setup, memory_share=0.0, disk_share=1.0)
        rows.append(("cache on disk", "100 % of the items", on_disk))
        faster = replace(on_disk, disk_bytes_per_second=4 * costs.disk_bytes_per_second)
        rows.append(("cache on disk", "100 %, disk 4 x as fast", faster))
    return rows


def _machine(setup: SetUp) -> list[tuple[str, str, SetUp]]:
    counts = sorted({0, 1, 2, setup.cores, 2 * setup.cores})
    rows = [("workers", f"{count}", replace(setup, num_workers=count)) for count in counts]
    for factor in FASTER:
        cores = round(factor * setup.cores)
        workers = max(setup.num_workers, cores)
        words = f"{cores} cores, {workers} workers"
        rows.append(("cores", words, replace(setup, cores=cores, num_workers=workers)))
    rows += [
        (
            "accelerator",
            f"{factor:g} x as fast",
            replace(setup, step_speedup=factor * setup.step_speedup),
        )
        for factor in FASTER
    ]
    return rows


def _rates(costs: StallCosts, setup: SetUp) -> list[tuple[str, str, SetUp]]:
    latency = costs.latency_seconds if setup.latency_seconds is None else setup.latency_seconds
    rows: list[tuple[str, str, SetUp]] = []
    rate = setup.link_bytes_per_second or costs.link_bytes_per_second
    if rate < inf and costs.source_bytes:
        rows += [
            ("source", f"rate x {factor:g}", replace(setup, link_bytes_per_second=factor * rate))
            for factor in (0.2, 0.5, 2.0, 4.0)
        ]
    if latency > 0:
        rows += [
            ("source", f"latency x {factor:g}", replace(setup, latency_seconds=factor * latency))
            for factor in (0.5, 2.0, 4.0)
        ]
    return rows


class _Phase(NamedTuple):
    """A piece of work of one process on one resource."""

    resource: str
    amount: float  # seconds, or bytes of the link and the disk
    demand: float = 1.0  # cores
    beside: float = 0.0  # cores that other processes use meanwhile


class _Sample(NamedTuple):
    """The costs of a chunk of samples, summed."""

    delay: float
    link: float
    disk: float
    core: float
    others: float  # cores that other processes use during its wait for the source

    def phases(self) -> Iterator[_Phase]:
        yield _Phase(DELAY, self.delay, beside=self.others)
        yield _Phase(LINK, self.link, beside=self.others)
        yield _Phase(DISK, self.disk)
        yield _Phase(CORE, self.core)


_Process = Iterator["_Phase | Callable[[], bool]"]  # phases of work, and conditions to wait for


class _SimulatedLoop:
    """Simulation of a DataLoader's workers and of the loop that takes their batches in order.

    Each process is a generator. It yields phases of work, and conditions to wait for.
    """

    def __init__(self, costs: StallCosts, setup: SetUp, rng: np.random.Generator) -> None:
        self.costs, self.setup, self.clock = costs, setup, 0.0
        self.starts: list[float] = []  # when each step began
        # the queues are full after these
        self.warmup = setup.num_workers * (setup.prefetch_factor + 2)
        total = self.warmup + max(_BATCHES, _BATCHES // 4 * setup.num_workers) + 1
        self.samples = _draw(costs, setup, total, rng)
        self.ready: set[int] = set()
        ahead = setup.num_workers * setup.prefetch_factor
        # workers take the first batches in turns
        self.queues: list[deque[int]] = [
            deque(range(worker, min(ahead, total), setup.num_workers))
            for worker in range(setup.num_workers)
        ]
        self.next_batch = ahead

    def train(self) -> _Process:
        """The training process: receive a batch, or prepare it here, then do the step."""
        c = self.costs
        for batch, chunks in enumerate(self.samples):
            if self.setup.num_workers:
                # The next batch in order; the worker that made it gets another index list.
                yield partial(self.ready.__contains__, batch)
                if self.next_batch < len(self.samples):
                    self.queues[self.next_batch % self.setup.num_workers].append(self.next_batch)
                    self.next_batch += 1
                yield _Phase(CORE, c.receive_seconds)
            else:
                for chunk in chunks:
                    yield from chunk.phases()
            # The step: its core time first, then the accelerator alone.
            self.starts.append(self.clock)
            if c.step_core_seconds >= c.step_seconds:
                yield _Phase(CORE, c.step_seconds, c.step_core_seconds / c.step_seconds)
            else:
                yield _Phase(CORE, c.step_core_seconds)
                yield _Phase(DELAY, c.step_seconds - c.step_core_seconds)

    def work(self, worker: int) -> _Process:
        """A worker: prepare the batches of its queue, one after the other."""
        queue = self.queues[worker]
        while True:
            yield lambda: bool(queue)
            batch = queue.popleft()
            for chunk in self.samples[batch]:
                yield from chunk.phases()
            yield _Phase(CORE, self.costs.worker_seconds)
            self.ready.add(batch)

    def run(self) -> None:
        """Advance all processes from event to event until the training process ends."""
        processes = [self.train(), *(self.work(worker) for worker in range(self.setup.num_workers))]
        # of each process: the condition that it waits for, its phase, and what is left of that
        waiting: list[Callable[[], bool] | None] = [None] * len(processes)
        phases: list[_Phase | None] = [None] * len(processes)
        left = [0.0] * len(processes)
        while True:
            # Start what can start. Workers first: the training process sees what they finish now.
            for i in (*range(1, len(processes)), 0):
                while phases[i] is None and (waiting[i] is None or waiting[i]()):
                    step = next(processes[i], None)
                    if step is None:
                        return
                    if isinstance(step, _Phase):
                        waiting[i] = None
                        if step.amount > _TINY:
                            phases[i], left[i] = step, step.amount
                    else:
                        waiting[i] = step
            # Run until the first phase ends.
            speeds = self._speeds(phases)
            active = [i for i, phase in enumerate(phases) if phase is not None]
            assert active, "the loop waits for a batch that nobody prepares"
            rates = [
                0.0
                if phase is None
                else speeds[phase.resource] * (speeds[OTHERS] if phase.beside else 1.0)
                for phase in phases
            ]
            elapsed = min(left[i] / rates[i] for i in active)
            self.clock += elapsed
            for i in active:
                phase = phases[i]
                assert phase is not None
                left[i] -= elapsed * rates[i]
                if left[i] <= _TINY * max(1.0, phase.amount):
                    phases[i] = None

    def _speeds(self, phases: list[_Phase | None]) -> dict[str, float]:
        """Return what one user of each resource gets of it per second."""
        # Users of each resource, and cores that others use during the waits.
        users, waits = {CORE: 0.0, LINK: 0.0, DISK: 0.0, DELAY: 0.0}, {LINK: 0.0, DELAY: 0.0}
        for phase in phases:
            if phase is not None:
                users[phase.resource] += phase.demand
                if phase.beside:
                    waits[phase.resource] += phase.beside
        # Users that share the link take longer for the same bytes.
        beside = waits[DELAY] + waits[LINK] / max(users[LINK], 1.0)
        cores = self.setup.cores
        busy = min(users[CORE] + beside, float(cores))
        # the more cores are at work, the more each of them is slowed down
        slower = (
            1.0
            if cores == 1
            else 1 + (self.costs.contention - 1) * max(0.0, busy - 1) / (cores - 1)
        )
        # The work of others for a miss comes first, up to a limit. Its wait ends when that is done.
        others = min(1.0, (1 - _LEAST_FREE) * cores / max(beside, _TINY))
        free = cores - beside * others
        return {
            OTHERS: others,
            CORE: min(1.0, free / max(users[CORE], _TINY)) / slower,
            LINK: self.costs.link_bytes_per_second / max(users[LINK], 1.0),
            DISK: self.costs.disk_bytes_per_second / max(users[DISK], 1.0),
            DELAY: 1.0,
        }


def _draw(
    c: StallCosts, setup: SetUp, batches: int, rng: np.random.Generator
) -> list[list[_Sample]]:
    """Draw the samples of each batch, in chunks.

    Hits have exactly their share, and come in random order.
    """
    total = batches * c.batch_size
    tiers = np.zeros(total, np.int8)  # 0: a miss, 1: on disk, 2: in memory
    in_memory = round(setup.memory_share * total)
    on_disk = round((setup.memory_share + setup.disk_share) * total)
    tiers[:in_memory], tiers[in_memory:on_disk] = 2, 1
    rng.shuffle(tiers)
    size = ceil(c.batch_size / _CHUNKS)
    # an infinite rate takes no time
    link = 0.0 if c.link_bytes_per_second == inf else c.source_bytes
    disk = 0.0 if c.disk_bytes_per_second == inf else c.entry_bytes
    wait = c.latency_seconds + c.source_bytes / c.link_bytes_per_second
    others = min(1.0, c.other_seconds / wait) if wait > 0 else 0.0

    def chunk(some: npt.NDArray[np.int8]) -> _Sample:
        misses, disk_hits = int((some == 0).sum()), int((some == 1).sum())
        core = misses * c.miss_seconds + (len(some) - misses) * c.hit_seconds
        return _Sample(misses * c.latency_seconds, misses * link, disk_hits * disk, core, others)

    of_batch = tiers.reshape(batches, c.batch_size)
    return [[chunk(row[i : i + size]) for i in range(0, c.batch_size, size)] for row in of_batch]
