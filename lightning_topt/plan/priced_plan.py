"""A given plan is priced by the model that the search compares plans with; nothing is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_topt.costs.communication import check_world_size
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.op_graph import Block
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, Prediction
from lightning_topt.plan.plan_explanation import PlanExplanation, explain_plan
from lightning_topt.plan.search_request import SearchRequest, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_explanation import StageExplanation, explain_stages
from lightning_topt.plan.stage_peaks import peak_bytes_of, stage_bytes
from lightning_topt.plan.stage_times import formula_step_seconds, stage_seconds
from lightning_topt.plan.staged_plans import shape_of_plan, staged_points


@dataclass(frozen=True)
class PricedPlan:
    """A plan with what it is `predicted` to cost, and what that is made of: its blocks, or its
    stages.

    `seconds` are the work of a step by kind, on the rank that works longest, whether it is in the
    way of anything or not.
    """

    plan: ParallelPlan
    predicted: Prediction
    seconds: Mapping[str, float]
    blocks: PlanExplanation | None = None
    stages: tuple[StageExplanation, ...] = ()


def price_plan(request: SearchRequest, plan: ParallelPlan) -> PricedPlan:
    """Return what `plan` costs on the cluster of `request`, whose batch is that of the plan.

    Raises PlanError for a plan of another model or other blocks, ValueError for one that the
    cluster has too few devices for.
    """
    check_world_size(request.cluster, world_size=plan.mesh.size)
    request = _cut_as(request, plan)
    if plan.schedule is not None:
        return _price_stages(request, plan)
    explained = explain_plan(request, plan)
    total = explained.total
    predicted = Prediction(
        total.step_seconds,
        total.peak_bytes,
        total.compute_seconds,
        total.exposed_communication_seconds,
    )
    return PricedPlan(replace(plan, predicted=predicted), predicted, total.seconds, explained)


def _price_stages(request: SearchRequest, plan: ParallelPlan) -> PricedPlan:
    blocks, shape = stage_blocks(request, plan), shape_of_plan(plan)
    point = _point(blocks, plan)
    formula = float(formula_step_seconds(stage_seconds(blocks, shape, [point]), shape)[0])
    peak = float(peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, [point]))[0])
    point = replace(point, step_seconds=formula, peak_bytes=peak)
    (priced,) = staged_points(blocks, shape, [point], batch_size=plan.batch_size or 1)
    assert priced.plan.predicted is not None
    predicted = priced.plan.predicted
    plan = replace(plan, predicted=predicted)
    stages = explain_stages(request, plan)
    of_rank: dict[int, dict[str, float]] = {}
    for stage in stages:
        sums = of_rank.setdefault(stage.rank, dict.fromkeys(stage.seconds, 0.0))
        for kind, seconds in stage.seconds.items():
            sums[kind] += seconds
    longest = max(of_rank.values(), key=lambda sums: sum(sums.values()))
    work = sum(seconds for kind, seconds in longest.items() if kind != "receive")
    return PricedPlan(
        plan,
        predicted,
        {**longest, "waiting": max(predicted.step_seconds - work, 0.0)},
        stages=stages,
    )


def _point(blocks: StageBlocks, plan: ParallelPlan) -> StagePoint:
    names = [
        block.block
        for stage in plan.stages
        for block in stage.blocks
        if block.block in blocks.names
    ]
    if names != [*blocks.names]:
        raise PlanError(
            "the stages of the plan do not have the blocks of this step in order: search it again"
        )
    counts = [sum(block.block in blocks.names for block in stage.blocks) for stage in plan.stages]
    again = tuple(int(plan.configs[name].recompute) for name in blocks.names)
    return StagePoint(0.0, 0.0, tuple(np.cumsum(counts).tolist()), (0,) * len(counts), again)


def _cut_as(request: SearchRequest, plan: ParallelPlan) -> SearchRequest:
    """The request whose graph has the blocks of the plan."""
    graph = request.graph
    if plan.fingerprint is not None and plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'of another kind'}): class name, "
            "parameter names, shapes or "
            f"dtypes of this {graph.model} differ; give the model that it is for, or remove "
            "'fingerprint' from the plan"
        )
    known = {block.name: block for block in graph.blocks}
    if set(known) == set(plan.configs):
        return request
    if plan.mesh.tensor_axes:
        unknown = sorted(set(known) ^ set(plan.configs))[0]
        raise PlanError(
            f"{unknown!r} is a block of the plan or of this {graph.model}, not of both: search the "
            "plan again"
        )
    others = len(known)
    blocks = [
        known.get(name, Block(name, others + n, recomputable=True))
        for n, name in enumerate(plan.configs)
    ]
    try:
        return replace(request, graph=graph.with_blocks(blocks))
    except ValueError as error:
        raise PlanError(f"{error}; give the plan of this model") from error
