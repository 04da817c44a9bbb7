"""The costs of a training loop that were measured in one set-up, and the set-ups that a throughput
is asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class StallCosts:
    """`StallCosts` are what one set-up showed; see `model` for the symbols. Seconds of a core are
    those of an idle machine.

    Args:
        batch_size: B, samples.
        num_items: of the data set.
        step_seconds: of a training step whose batch is there.
        step_core_seconds: that the training process computes in it, all threads together.
        latency_seconds: before the first byte of a sample; with `link_bytes_per_second` infinite,
            all the waiting.
        source_bytes: that one sample moves from its source.
        link_bytes_per_second: of the source or the network to it, shared by all who read.
        entry_bytes: of one sample in the cache.
        disk_bytes_per_second: of the disk that the cache's disk tier would be on.
        contention: seconds of a core for what takes 1 alone, when all cores are busy.
        other_seconds: that other processes of this machine, or its kernel, compute while a miss is
            waited for: a server of the source, the network.
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
        """The seconds of a core, for a sample from the source."""
        return self.prepare_seconds + self.collate_seconds / self.batch_size

    def share(self, cache_bytes: float) -> float:
        """Return the share of all items that `cache_bytes` hold, 0 to 1."""
        return min(1.0, cache_bytes / (self.entry_bytes * self.num_items))


@dataclass(frozen=True)
class SetUp:
    """A `SetUp` says what may be changed; None: as measured. Shares are those of the items in the
    memory and in the disk tier.

    `cores` are those of the machine for this loop; `step_speedup` 2: an accelerator that takes half
    the time.
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


def apply(costs: StallCosts, setup: SetUp) -> StallCosts:
    """Return the costs in a set-up: its link, disk and step in place of those measured."""
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
