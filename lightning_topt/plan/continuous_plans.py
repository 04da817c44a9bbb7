"""Pipelines that never flush, in the search of plans: a step is one minibatch, which every stage
updates its weights with.

Its seconds are those of the slowest stage, forward, backward, exchange between replicas and update,
unless transfers take too long for the minibatches in flight (`seconds_per_minibatch`). A stage
holds activations of its minibatches in flight, and copies of its weights as the rule of prediction
has it. Cuts are found by the formula of `continuous_table` and priced as above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_topt.costs.stage_table import StageKind, StageTable, StageVariant
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan.continuous_shape import ContinuousShape, trained_bytes
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import stage_table
from lightning_topt.plan.staged_plans import search_stages_for, staged_points
from lightning_topt.prediction import Prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES


@dataclass(frozen=True)
class StaleWeights:
    """Pipelines that never flush may be chosen, with `prediction`, a rule of weights."""

    prediction: Prediction


def continuous_shapes(
    blocks: StageBlocks,
    count: int,
    global_batch_size: int,
    wanted: PipelineRequest,
    stale: StaleWeights,
) -> Iterator[ContinuousShape]:
    """Yield the pipelines of `count` ranks; each row of ranks takes its part of the batch as one
    minibatch.
    """
    graph = blocks.step.graph
    if wanted.schedule not in (None, *CONTINUOUS_SCHEDULES) or wanted.microbatches not in (None, 1):
        return
    if wanted.own_batches or not wanted.takes(1):
        return
    for ranks in range(2, min(count, len(blocks.names)) + 1):
        data = count // ranks
        samples = global_batch_size / data
        if count % ranks or global_batch_size % data or wanted.ranks not in (None, ranks):
            continue
        if wanted.stages in (None, ranks) and (graph.batch_scaling or samples == graph.batch_size):
            for name in CONTINUOUS_SCHEDULES if wanted.schedule is None else (wanted.schedule,):
                yield ContinuousShape.of(
                    ranks, data, samples=samples, schedule=name, prediction=stale.prediction
                )


def continuous_table(blocks: StageBlocks, shape: ContinuousShape) -> StageTable:
    """Return the costs of all ways to cut `blocks` into the stages of `shape`: as of any pipeline,
    with copies of weights, and minibatches in flight while a stage updates.
    """
    table, variants, stages = stage_table(blocks, shape), list[StageVariant](), list[StageKind]()
    copied = np.array(
        [trained_bytes(blocks, blocks.kinds.index(kind)) for kind in range(max(blocks.kinds) + 1)]
    )
    for stage, copies in zip(table.stages, shape.copies, strict=True):
        own = tuple(range(len(variants), len(variants) + len(stage.variants)))
        for variant in (table.variants[index] for index in stage.variants):
            variants.append(replace(variant, static=variant.static + copies * copied))
        stages.append(replace(stage, variants=own, in_update=stage.in_flight - 1))
    return replace(table, variants=tuple(variants), stages=tuple(stages))


def search_pipelines_for(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    known: Sequence[PlanPoint],
    *,
    stale: StaleWeights | None,
    **limits: Any,
) -> tuple[list[PlanPoint], list[PlanPoint], float]:
    """Return what `search_stages_for` does, with `stale` of pipelines that never flush as well;
    `limits` as there.
    """
    points, plain, error = list[PlanPoint](), list[PlanPoint](), 0.0
    if stale is None or wanted.schedule not in CONTINUOUS_SCHEDULES:
        points, plain, error = search_stages_for(blocks, count, wanted, known, **limits)
    if stale is not None:
        own = {
            name: limits[name]
            for name in ("global_batch_size", "epsilon", "max_seconds")
            if name in limits
        }
        more, bound = search_continuous(blocks, count, wanted, stale, [*known, *points], **own)
        fewest = min(
            CONTINUOUS_SCHEDULES.values()
        )  # missed updates: preferred where others gain little
        plain = plain + [
            point for point in more if CONTINUOUS_SCHEDULES[point.plan.schedule or ""] == fewest
        ]
        points, error = points + more, max(error, bound)
    return points, plain, error


def search_continuous(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    stale: StaleWeights,
    known: Sequence[PlanPoint],
    *,
    global_batch_size: int,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> tuple[list[PlanPoint], float]:
    """Return plans that never flush for `count` ranks, but for those that one of `known` beats; and
    the search's error bound.

    Raises PlanError where such a plan is asked for by name, and none of `count` ranks is as wanted.
    """
    shapes = [*continuous_shapes(blocks, count, global_batch_size, wanted, stale)]
    if not shapes and wanted.schedule in CONTINUOUS_SCHEDULES:
        raise PlanError(_why_none(blocks, count, wanted, global_batch_size=global_batch_size))
    costs = np.array([(p.step_seconds, p.peak_bytes) for p in known if p.devices == count]).reshape(
        -1, 2
    )
    found, error = list[PlanPoint](), 0.0
    for shape in shapes:
        result = search_stages(
            continuous_table(blocks, shape),
            known=costs,
            epsilon=epsilon,
            max_seconds=max_seconds / len(shapes),
        )
        points = continuous_points(
            blocks, shape, result.points, stale=stale, batch_size=global_batch_size // shape.data
        )
        own = np.array([(p.step_seconds, p.peak_bytes) for p in points]).reshape(-1, 2)
        found, error = found + points, max(error, result.error_bound)
        costs = KnownPlans.best([costs, own]).costs
    return found, error


def continuous_points(
    blocks: StageBlocks,
    shape: ContinuousShape,
    points: Sequence[StagePoint],
    *,
    stale: StaleWeights,
    batch_size: int,
) -> list[PlanPoint]:
    """Return plans of one shape with what they are predicted to cost."""
    found = staged_points(blocks, shape, points, batch_size=batch_size) if points else []
    return [
        replace(point, plan=replace(point.plan, prediction=stale.prediction)) for point in found
    ]


def _why_none(
    blocks: StageBlocks, count: int, wanted: PipelineRequest, *, global_batch_size: int
) -> str:
    if wanted.microbatches not in (None, 1):
        return (
            f"the schedule {wanted.schedule!r} takes whole minibatches one after the other: "
            "leave out microbatches"
        )
    row = "" if wanted.ranks is None else f", {wanted.ranks} in a row,"
    named = "stages" if wanted.stages is None else f"{wanted.stages} stages"
    return (
        f"no pipeline of {count} ranks{row} has {named} and schedule {wanted.schedule!r}: it runs "
        "one stage on each rank, the "
        f"model has {len(blocks.names)} blocks that can be stages, the ranks in a row divide "
        f"{count}, and the "
        f"{global_batch_size} sample(s) of a step are shared equally by the rows"
    )
