"""The frontier of a pipeline: which blocks make which stage, under which configurations (see
`StageTable` for the costs).

The sum of leads and the largest load of a plan are searched with two limits. Below a size, lead
only grows as loads are held below less, so of all plans that could take less than T seconds the
loads are below T - (the least lead that is left): the cheapest plan below that load either takes
less, or raises the least lead, until nothing is left (`fastest_below`). Then the size is held below
that of the plan that was found, until nothing fits, or all that fits is beaten by plans that are
known.

Exact for the formula of the table, whatever schedule it is from; the brute force over all cuts is
its twin (`brute_force_stages`). With `epsilon`, for every plan there is one here, or a known one,
that takes at most 1 + epsilon times its seconds and bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.stage_table import StageTable
from lightning_topt.frontier.pareto import Array
from lightning_topt.frontier.stage_cuts import Cut, StageCuts

_HALVINGS = 8  # of the range of loads in which the first plan is sought


@dataclass(frozen=True)
class StagePoint:
    """A plan: seconds of a step, bytes at the peak; ``ends[s]`` is the block before which stage s
    ends, `variants` (stage,) and `configs` (block,) are indices.
    """

    step_seconds: float
    peak_bytes: float
    ends: tuple[int, ...]
    variants: tuple[int, ...]
    configs: tuple[int, ...]


@dataclass(frozen=True)
class StageFrontier:
    """Plans by memory ascending, and `error_bound` as in `Frontier`; plans that known ones beat are
    left out.
    """

    points: tuple[StagePoint, ...]
    error_bound: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether no plan is missing."""
        return self.error_bound == 0.0


def search_stages(
    table: StageTable,
    *,
    known: Array | None = None,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> StageFrontier:
    """Return every plan of `table` that no other one beats, nor one of those that are `known` (n,
    [seconds, bytes]).

    After `max_seconds` of CPU time the plans found so far are returned, with the largest bytes
    first; what is left takes less memory than all of them, so nothing bounds by how much it is
    better: then `error_bound` is infinite.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon is a share from 0 to below 1, got {epsilon}")
    deadline = time.thread_time() + max_seconds
    cuts, share = StageCuts(table, epsilon / 4), 1 + epsilon / 2  # (1 + e/4) (1 + e/2) < 1 + e
    beaten = _Known(table, known, share)
    found: list[Cut] = []
    size, hint, is_done = np.inf, 0.0, False
    while not is_done and time.thread_time() <= deadline:
        best = fastest_below(cuts, size=size, hint=hint, share=share)
        is_done = best is None
        if best is not None:
            hint, limit = best.load, beaten.size_below(best)
            if best.size < limit:
                found.append(best)
            size = min(best.size, limit) / share
    points = _frontier(table, cuts, found)
    error = cuts.error_bound if not epsilon else max(epsilon, (1 + cuts.error_bound) * share - 1)
    return StageFrontier(points, error if is_done else np.inf)


def fastest_below(
    cuts: StageCuts, *, size: float, hint: float = 0.0, share: float = 1.0
) -> Cut | None:
    """Return the plan of least seconds whose stages are below `size` bytes, or one that takes at
    most `share` times as long.

    `hint`: a load that it may have.
    """
    first = cuts.cheapest(size=size)
    if first is None:
        return None
    best, least = _first_plan(cuts, first, size=size, hint=hint)
    limit = best.seconds / share - first.lead
    while limit > least and (cut := cuts.cheapest(size=size, load=limit)) is not None:
        best = min(best, cut, key=lambda each: each.seconds)
        # Plans of more load, below the last limit, have at least the lead of this one.
        limit = min(best.seconds / share - cut.lead, cut.load)
    return best


def _first_plan(cuts: StageCuts, first: Cut, *, size: float, hint: float) -> tuple[Cut, float]:
    """A plan with stages of about equal load, and a load below or at which there is none."""
    best, low, high = first, cuts.least_load * (1 - 1e-12), first.load
    for _ in range(_HALVINGS):
        if high - low <= 1e-3 * high:
            break
        middle = hint * (1 + 1e-9) if low < hint < high else (low + high) / 2
        hint = 0.0
        cut = cuts.cheapest(size=size, load=middle)
        if cut is None:
            low = middle
        else:
            best, high = min(best, cut, key=lambda each: each.seconds), min(cut.load, middle)
    return best, low


class _Known:
    """Plans that are known, without what all plans of a table pay."""

    def __init__(self, table: StageTable, known: Array | None, share: float) -> None:
        costs = (
            np.zeros((0, 2)) if known is None else known - [table.fixed_seconds, table.fixed_bytes]
        )
        costs = costs[np.argsort(costs[:, 0], kind="stable")]
        self._seconds, self._least = costs[:, 0], np.minimum.accumulate(costs[:, 1])
        self._share = share

    def size_below(self, cut: Cut) -> float:
        """Return the bytes below which plans that take as long as `cut` are beaten by none that is
        known.
        """
        place = int(np.searchsorted(self._seconds, cut.seconds * self._share, side="right"))
        return float(self._least[place - 1]) if place else np.inf


def _frontier(table: StageTable, cuts: StageCuts, found: list[Cut]) -> tuple[StagePoint, ...]:
    points = []
    for cut in found:
        variants, configs = cuts.decisions(cut)
        points.append(
            StagePoint(*table.evaluate(cut.ends, variants, configs), cut.ends, variants, configs)
        )
    points.sort(key=lambda point: (point.peak_bytes, point.step_seconds))
    kept: list[StagePoint] = []
    for point in points:
        if not kept or point.step_seconds < kept[-1].step_seconds:
            kept.append(point)
    return tuple(kept)
