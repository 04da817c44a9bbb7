"""Bytes that the stages of plans hold, and the peaks of their ranks: exact for the order of passes
of each schedule.

The search counts a rank of several stages as if all of these were like its largest one
(`costs.schedule_rates`), so what it keeps below a limit is. Plans that were found get the bytes of
the worst time of each rank (`held_counts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.cost_table import Array
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.continuous_shape import ContinuousShape
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape, fixed_costs
from lightning_topt.schedules.schedules import make_schedule
from lightning_topt.schedules.simulate import held_counts


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes of the stages of n plans (stage, n): `static` all the time; `kept` by a microbatch,
    with what it received; those that are `waiting` besides between the two parts of its backward;
    the `hump` while a pass runs, the `update`.
    """

    static: Array
    kept: Array
    waiting: Array
    hump: Array
    update: Array


def stage_bytes(
    blocks: StageBlocks, shape: PipelineShape, points: Sequence[StagePoint]
) -> StageBytes:
    """Return the bytes of the stages of plans of one shape, but for what each rank has once."""
    passes, once = blocks.passes(shape.samples), shape.once(blocks)
    again, ends = (
        np.array([point.configs for point in points], bool),
        np.array([point.ends for point in points]),
    )
    first = np.concatenate([np.zeros((len(points), 1), np.intp), ends[:, :-1]], axis=1)
    places = (first + again.shape[1] * np.arange(len(points))[:, None]).ravel()

    def by_stage(combined: np.ufunc, values: Array) -> Array:
        every = np.broadcast_to(values, again.shape).ravel()
        return np.asarray(combined.reduceat(every, places).reshape(first.shape).T)

    static, update = by_stage(np.add, once.static), by_stage(np.add, once.update)
    if once.shared is not None:
        static = static + once.shared[1][first, ends].T
    if isinstance(shape, ContinuousShape):
        static = static + _copied_bytes(blocks, shape, points)
    arrives, leaves = blocks.crossing_bytes(shape.samples)
    crosses = np.array(
        [s > 0 and shape.ranks[s - 1] != shape.ranks[s] for s in range(shape.num_stages)]
    )
    kept = (
        by_stage(np.add, np.where(again, passes.recomputed_kept, passes.kept))
        + (arrives[first] * crosses).T
    )
    hump = by_stage(np.maximum, np.where(again, passes.recomputed_hump, passes.hump))
    waiting = by_stage(np.add, passes.waiting) * shape.splits_backward
    if shape.splits_backward and shape.num_stages > 1:
        # nothing before it needs a gradient, so all of its backward waits
        waiting[0] = leaves[first[:, 1]]
    return StageBytes(static, kept, waiting, hump, update)


def _copied_bytes(
    blocks: StageBlocks, shape: ContinuousShape, points: Sequence[StagePoint]
) -> Array:
    """Bytes of the copies of weights of each stage (stage, n)."""
    found = []
    for point in points:
        cuts = zip((0, *point.ends[:-1]), point.ends, strict=True)
        found.append(
            [shape.copied_bytes(blocks, stage=s, first=a, end=b) for s, (a, b) in enumerate(cuts)]
        )
    return np.array(found).T


def peak_bytes_of(blocks: StageBlocks, shape: PipelineShape, sizes: StageBytes) -> Array:
    """Return the peaks (n,) of the fullest rank of each plan."""
    peaks = []
    for rank, counts in enumerate(_counts(shape)):
        own = [stage for stage, of in enumerate(shape.ranks) if of == rank]
        held = np.concatenate([sizes.kept[own], sizes.kept[own] + sizes.waiting[own]])
        running = (counts @ held).max(axis=0) + sizes.hump[own].max(axis=0)
        peaks.append(
            sizes.static[own].sum(axis=0) + np.maximum(running, sizes.update[own].sum(axis=0))
        )
    return np.asarray(np.max(peaks, axis=0) + fixed_costs(blocks, shape)[1])


def worst_activations(shape: PipelineShape, sizes: StageBytes) -> Array:
    """Return the bytes of activations (stage,) that each stage of the first plan has when its rank
    holds the most.
    """
    found = np.zeros(shape.num_stages)
    for rank, counts in enumerate(_counts(shape)):
        own = [stage for stage, of in enumerate(shape.ranks) if of == rank]
        held = np.concatenate([sizes.kept[own, 0], sizes.kept[own, 0] + sizes.waiting[own, 0]])
        worst = counts[(counts @ held).argmax()] * held
        found[own] = worst[: len(own)] + worst[len(own) :]
    return found


def _counts(shape: PipelineShape) -> tuple[NDArray[np.int64], ...]:
    if shape.stages_per_rank > 1:
        return _scheduled(
            shape.schedule, shape.pipeline, shape.num_microbatches, shape.stages_per_rank
        )
    pairs = zip(shape.rates.held, shape.rates.waits, strict=True)
    return tuple(
        np.array([(h - g, g) for h, g in ((held, 0), *waits)], np.int64) for held, waits in pairs
    )


@lru_cache(maxsize=64)
def _scheduled(
    name: str, ranks: int, microbatches: int, per_rank: int
) -> tuple[NDArray[np.int64], ...]:
    return held_counts(
        make_schedule(
            name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=per_rank
        )
    )
