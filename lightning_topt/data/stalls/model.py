"""The model says, from a few measured costs, what a training loop waits for: the throughput of any
other set-up.

Symbols, per sample unless said: a *miss* waits `latency_seconds`, moves `source_bytes` over the
link and takes `prepare_seconds` of a core (system calls and decoding alike: a core does both), and
its part of `collate_seconds` per batch; a *hit* takes `hit_seconds`, collated. Per batch of B
samples: with workers `worker_seconds` more in the worker and `receive_seconds` in the training
process; then the step.

DS-Analyzer (arXiv 2007.06775, section 3.4) takes the slowest stage for the whole: `bounds`. Stages
share cores, though, and wait for each other, so `batch_seconds` plays the loop through: processes,
cores, the link and the disk as fluids that those who use them share evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_topt.data.stalls.stall_costs import SetUp, StallCosts, apply

CORE, LINK, DISK, DELAY, OTHERS = "core", "link", "disk", "delay", "others"
_CHUNKS = 16  # in which the samples of a batch are played
_BATCHES = 96  # played and counted, but at least 24 of each worker
_TINY = 1e-12
_LEAST_FREE = 0.1  # of the cores, for the loop: nothing stands still


class _Phase(NamedTuple):
    resource: str
    amount: float  # seconds, or bytes of the link and the disk
    demand: float = 1.0  # cores
    beside: float = 0.0  # cores that others use meanwhile


class _Sample(NamedTuple):
    """Amounts of some samples together."""

    delay: float
    link: float
    disk: float
    core: float
    others: float  # cores that others use while it waits for its source

    def phases(self) -> Iterator[_Phase]:
        yield _Phase(DELAY, self.delay, beside=self.others)
        yield _Phase(LINK, self.link, beside=self.others)
        yield _Phase(DISK, self.disk)
        yield _Phase(CORE, self.core)


_Process = Iterator["_Phase | Callable[[], bool]"]  # does phases, or waits until something is so


def bounds(costs: StallCosts, setup: SetUp) -> dict[str, float]:
    """Return the least seconds per batch that each resource alone allows: "step", "link", "disk",
    "cores" and "workers".

    Without workers, "workers" is all the work of the training process on its data, and has the step
    in it.
    """
    c, missing = apply(costs, setup), 1 - setup.memory_share - setup.disk_share
    wait = c.batch_size * missing * (c.latency_seconds + c.source_bytes / c.link_bytes_per_second)
    wait += c.batch_size * setup.disk_share * c.entry_bytes / c.disk_bytes_per_second
    core = c.batch_size * (missing * c.miss_seconds + (1 - missing) * c.hit_seconds)
    others = c.batch_size * missing * c.other_seconds
    link = c.batch_size * missing * c.source_bytes / c.link_bytes_per_second
    disk = c.batch_size * setup.disk_share * c.entry_bytes / c.disk_bytes_per_second
    if setup.num_workers == 0:
        workers = wait + core + c.step_seconds
        in_all = core + c.step_core_seconds + others
        return {
            "step": c.step_seconds,
            "link": link,
            "disk": disk,
            "cores": in_all / setup.cores,
            "workers": workers,
        }
    workers = (wait + core + c.worker_seconds) / setup.num_workers
    in_all = core + c.worker_seconds + c.receive_seconds + c.step_core_seconds + others
    step = c.step_seconds + c.receive_seconds
    return {
        "step": step,
        "link": link,
        "disk": disk,
        "cores": in_all / setup.cores,
        "workers": workers,
    }


def batch_seconds(costs: StallCosts, setup: SetUp, *, seed: int = 0) -> float:
    """Return the seconds per batch of a long epoch in `setup`; `seed`: of the order in which hits
    and misses come.
    """
    loop = _Loop(apply(costs, setup), setup, np.random.default_rng(seed))
    loop.play()
    first = loop.warmup
    return (loop.starts[-1] - loop.starts[first]) / (len(loop.starts) - 1 - first)


def samples_per_second(costs: StallCosts, setup: SetUp) -> float:
    """Return the throughput of `batch_seconds`."""
    return costs.batch_size / batch_seconds(costs, setup)


class _Loop:
    """A DataLoader's worker processes and the loop that takes their batches, in the order of the
    batches.
    """

    def __init__(self, costs: StallCosts, setup: SetUp, rng: np.random.Generator) -> None:
        self.costs, self.setup, self.clock = costs, setup, 0.0
        self.starts: list[float] = []  # when each step began
        self.warmup = setup.num_workers * (setup.prefetch_factor + 2)
        total = self.warmup + max(_BATCHES, _BATCHES // 4 * setup.num_workers) + 1
        self.samples = _draw(costs, setup, total, rng)
        self.ready: set[int] = set()
        ahead = setup.num_workers * setup.prefetch_factor
        self.queues: list[deque[int]] = [
            deque(range(worker, min(ahead, total), setup.num_workers))
            for worker in range(setup.num_workers)
        ]
        self.next_batch = ahead

    def train(self) -> _Process:
        """Run the training process."""
        c = self.costs
        for batch, chunks in enumerate(self.samples):
            if self.setup.num_workers:
                yield partial(self.ready.__contains__, batch)
                if self.next_batch < len(self.samples):
                    self.queues[self.next_batch % self.setup.num_workers].append(self.next_batch)
                    self.next_batch += 1
                yield _Phase(CORE, c.receive_seconds)
            else:
                for chunk in chunks:
                    yield from chunk.phases()
            self.starts.append(self.clock)
            if c.step_core_seconds >= c.step_seconds:
                yield _Phase(CORE, c.step_seconds, c.step_core_seconds / c.step_seconds)
            else:
                yield _Phase(CORE, c.step_core_seconds)
                yield _Phase(DELAY, c.step_seconds - c.step_core_seconds)

    def work(self, worker: int) -> _Process:
        """Run a worker process."""
        queue = self.queues[worker]
        while True:
            yield lambda: bool(queue)
            batch = queue.popleft()
            for chunk in self.samples[batch]:
                yield from chunk.phases()
            yield _Phase(CORE, self.costs.worker_seconds)
            self.ready.add(batch)

    def play(self) -> None:
        """Run until the training process ends."""
        processes = [self.train(), *(self.work(worker) for worker in range(self.setup.num_workers))]
        waiting: list[Callable[[], bool] | None] = [None] * len(processes)
        phases: list[_Phase | None] = [None] * len(processes)
        left = [0.0] * len(processes)
        while True:
            # what workers finish now, the training process sees now
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
            speeds = self._speeds(phases)
            active = [i for i, phase in enumerate(phases) if phase is not None]
            assert active, "the loop waits for a batch that nobody prepares"
            rates = [0.0 if phase is None else self._rate(phase, speeds) for phase in phases]
            elapsed = min(left[i] / rates[i] for i in active)
            self.clock += elapsed
            for i in active:
                phase = phases[i]
                assert phase is not None
                left[i] -= elapsed * rates[i]
                if left[i] <= _TINY * max(1.0, phase.amount):
                    phases[i] = None

    def _rate(self, phase: _Phase, speeds: dict[str, float]) -> float:
        return speeds[phase.resource] * (speeds[OTHERS] if phase.beside else 1.0)

    def _speeds(self, phases: list[_Phase | None]) -> dict[str, float]:
        """Return what one user of each resource gets of it per second."""
        users, waits = {CORE: 0.0, LINK: 0.0, DISK: 0.0, DELAY: 0.0}, {LINK: 0.0, DELAY: 0.0}
        for phase in phases:
            if phase is not None:
                users[phase.resource] += phase.demand
                if phase.beside:
                    waits[phase.resource] += phase.beside
        # those who share the link take longer for the same
        beside = waits[DELAY] + waits[LINK] / max(users[LINK], 1.0)
        cores = self.setup.cores
        busy = min(users[CORE] + beside, float(cores))
        slower = (
            1.0
            if cores == 1
            else 1 + (self.costs.contention - 1) * max(0.0, busy - 1) / (cores - 1)
        )
        # What others do for a miss comes first, up to a limit, and its wait is over when they have
        # done it.
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
    """The samples of each batch in chunks. Hits have exactly their share, and come in random
    order.
    """
    total = batches * c.batch_size
    tiers = np.zeros(total, np.int8)
    in_memory = round(setup.memory_share * total)
    on_disk = round((setup.memory_share + setup.disk_share) * total)
    tiers[:in_memory], tiers[in_memory:on_disk] = 2, 1
    rng.shuffle(tiers)
    size = ceil(c.batch_size / _CHUNKS)
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
