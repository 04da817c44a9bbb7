"""Advice says what the wait for data is made of, what would remove it, and how much cache is worth
having.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from lightning_topt.data.stalls.model import batch_seconds
from lightning_topt.data.stalls.stall_costs import SetUp, StallCosts

NEARLY = 0.05  # longer per batch: what more of a cache would save is not worth having
_STEP = 0.005  # of the share
_SAME = 0.01  # longer per batch: not worth another worker
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FASTER = (2.0, 4.0)


@dataclass(frozen=True)
class Stalls:
    """Seconds per batch: the step, and the parts of the wait for its data.

    - ``fetch_seconds``: what would go if the source answered at once;
    - ``prepare_seconds``: what would go on top if every sample were in memory, prepared;
    - ``loading_seconds``: what stays even then: reading the cache, live augmentation, collating,
      handing over.

    A part may come out slightly below zero where it is none: these are differences of measured
    times.
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
        """The fraction of the time that is no step, 0 to 1."""
        return max(0.0, 1 - self.step_seconds / self.total_seconds)


def split_stalls(
    costs: StallCosts,
    setup: SetUp,
    *,
    cold_seconds: float,
    cached_seconds: float,
    step_seconds: float,
) -> Stalls:
    """Return the differential measurement of DS-Analyzer (arXiv 2007.06775, section 3.3), seconds
    per batch of its three runs.

    Our cache holds prepared samples, so its second run has no preparation either: the model says
    how much of the difference between cold and cached would go with fetching alone.
    """
    cold, cached = (
        replace(setup, memory_share=0.0, disk_share=0.0),
        replace(setup, memory_share=1.0, disk_share=0.0),
    )
    at_once = replace(cold, latency_seconds=0.0, link_bytes_per_second=inf)
    all_seconds, prepared_seconds, hit_seconds = (
        batch_seconds(costs, s) for s in (cold, at_once, cached)
    )
    removed = all_seconds - hit_seconds
    fetching = (
        min(1.0, max(0.0, (all_seconds - prepared_seconds) / removed)) if removed > 0 else 0.0
    )
    gone = cold_seconds - cached_seconds
    return Stalls(
        step_seconds, fetching * gone, (1 - fetching) * gone, cached_seconds - step_seconds
    )


def least_cache(costs: StallCosts, setup: SetUp, *, within: float = NEARLY) -> float:
    """Return the least share of the items in memory at which a batch takes at most `within` longer
    than with all of them there.
    """
    goal = batch_seconds(costs, replace(setup, memory_share=1.0, disk_share=0.0)) * (1 + within)

    def enough(share: float) -> bool:
        return batch_seconds(costs, replace(setup, memory_share=share, disk_share=0.0)) <= goal

    if enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high - low > _STEP:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def best_num_workers(costs: StallCosts, setup: SetUp, *, most: int | None = None) -> int:
    """Return the least number of workers within 1 % of the best, up to `most` (None: twice the
    cores).
    """
    counts = range((2 * setup.cores if most is None else most) + 1)
    seconds = [batch_seconds(costs, replace(setup, num_workers=count)) for count in counts]
    return next(count for count in counts if seconds[count] <= min(seconds) * (1 + _SAME))


class WhatIf(NamedTuple):
    """One changed set-up: what was changed, in words, of which group, and the throughput that
    follows.
    """

    group: str
    change: str
    setup: SetUp
    samples_per_second: float


def what_if(
    costs: StallCosts, setup: SetUp, *, changes: Sequence[tuple[str, str, SetUp]] = ()
) -> list[WhatIf]:
    """Return the usual questions asked of `setup`, first as it is; then `changes`, as (group,
    words, set-up).
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
