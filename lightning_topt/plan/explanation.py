"""What a given plan costs, by kind of work and by stage. Nothing is searched.

    chosen = choose(search_plans(request).candidates)
    explain_plan(request, chosen.plan).peak_parts
    explain_stages(request, chosen.plan)[0].seconds["forward"]    # a plan with stages
    price_plan(request, ParallelPlan.load("mine.yaml")).predicted # any plan of this model

Costs are those that the search compares plans with. Plans with a tensor axis are explained by the
step of one rank on its slices, which the search has captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_topt.costs.communication import check_world_size
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.op_graph import Block
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, StepEstimate
from lightning_topt.plan.plan_frontier import ModelFacts, PlanPoint, step_of_microbatches
from lightning_topt.plan.plan_search import SearchRequest, stage_blocks, step_on
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import (
    cut_of_plan,
    formula_step_seconds,
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
    worst_activations,
)
from lightning_topt.plan.stage_tables import ContinuousShape, shape_of_plan
from lightning_topt.plan.staged_plans import staged_points
from lightning_topt.techniques.plan_costs import Explanation, PlanCosts, explain
from lightning_topt.techniques.tensor_parallel.split_steps import placed_layout, step_in

# ---- any plan of a model


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its expected costs, and what these are made of.

    Args:
        plan: with `predicted`.
        predicted: its costs, of a step with all its micro-batches.
        seconds: the work of a step by kind, on the rank that works longest, whether or not anything
            waits for it.
        stages: of a plan with stages.
    """

    plan: ParallelPlan
    predicted: StepEstimate
    seconds: Mapping[str, float]
    stages: tuple[StageExplanation, ...] = ()


def price_plan(request: SearchRequest, plan: ParallelPlan) -> PricedPlan:
    """Return what a step of `plan` costs on the cluster of `request`.

    The batch of `request` is that of the plan: one of its micro-batches, where it has several.

    Raises:
        PlanError: the plan is of another model or other blocks.
        ValueError: the cluster has too few devices.
    """
    # the blocks of the plan on this graph; then stages, or blocks on one rank
    check_world_size(request.cluster, world_size=plan.mesh.size)
    offloads = any(config.storage.offload for config in plan.configs.values())
    request = replace(_cut_as(request, plan), offloads=offloads)
    if plan.schedule is not None:
        return _price_stages(request, plan)
    # without stages every rank has the same costs
    total = explain_plan(request, plan)
    predicted = StepEstimate(
        total.step_seconds,
        total.peak_bytes,
        total.compute_seconds,
        total.exposed_communication_seconds,
    )
    plan = _with_micro_batches(request, replace(plan, predicted=predicted))
    assert plan.predicted is not None
    # what comes once in a step, whatever its micro-batches
    once = {"update", *(("gather", "reduce", "broadcast") if plan.keeps_gradients_whole else ())}
    seconds = {
        kind: value * (1 if kind in once else plan.accumulate)
        for kind, value in total.seconds.items()
    }
    return PricedPlan(plan, plan.predicted, seconds)


def _with_micro_batches(request: SearchRequest, plan: ParallelPlan) -> ParallelPlan:
    # `plan`, priced for one micro-batch, with the prediction of a step of all of them
    if plan.accumulate == 1:
        return plan
    assert plan.predicted is not None
    facts = ModelFacts.of(request.graph, request.optimizer, request.cluster)
    predicted = plan.predicted
    point = PlanPoint(predicted.step_seconds, predicted.peak_bytes, plan.mesh.size, plan)
    return step_of_microbatches(point, accumulate=plan.accumulate, facts=facts).plan


def _price_stages(request: SearchRequest, plan: ParallelPlan) -> PricedPlan:
    # the cut as the search would hold it
    blocks, shape = stage_blocks(request, plan), shape_of_plan(plan)
    # by formulas first, which stay where the schedule is too long to be simulated
    point = _cut_in_order(blocks, plan)
    formula = float(formula_step_seconds(stage_seconds(blocks, shape, [point]), shape)[0])
    peak = float(peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, [point]))[0])
    point = replace(point, step_seconds=formula, peak_bytes=peak)
    (priced,) = staged_points(blocks, shape, [point], batch_size=plan.batch_size or 1)
    plan = _with_micro_batches(request, replace(plan, predicted=priced.plan.predicted))
    predicted = plan.predicted
    assert predicted is not None
    stages = explain_stages(request, plan)
    # the work of the rank that works longest
    of_rank: dict[int, dict[str, float]] = {}
    for stage in stages:
        sums = of_rank.setdefault(stage.rank, dict.fromkeys(stage.seconds, 0.0))
        for kind, seconds in stage.seconds.items():
            sums[kind] += seconds
    longest = max(of_rank.values(), key=lambda sums: sum(sums.values()))
    # receiving is no work: it counts as waiting, with all else that the step takes longer
    work = sum(seconds for kind, seconds in longest.items() if kind != "receive")
    return PricedPlan(
        plan,
        predicted,
        {**longest, "waiting": max(predicted.step_seconds - work, 0.0)},
        stages=stages,
    )


def _cut_as(request: SearchRequest, plan: ParallelPlan) -> SearchRequest:
    # The request with a graph that has the blocks of the plan
    graph = request.graph
    # another model: its blocks would be found by name and priced all the same
    plan.check_model(graph.model, graph.fingerprint)
    # the same blocks: nothing to do
    known = {block.name: block for block in graph.blocks}
    if set(known) == set(plan.configs):
        return request
    # splits belong to blocks as the search captured them
    if plan.mesh.tensor_axes:
        unknown = min(set(known) ^ set(plan.configs))
        raise PlanError(
            f"{unknown!r} is a block of the plan or of this {graph.model}, not of both: search the "
            "plan again"
        )
    # blocks of the plan's own, each a group by itself
    others = len(known)
    blocks = [
        known.get(name, Block(name, others + n, recomputable=True))
        for n, name in enumerate(plan.configs)
    ]
    try:
        return replace(request, graph=graph.with_blocks(blocks))
    except ValueError as error:
        raise PlanError(f"{error}; give the plan of this model") from error


# ---- by kind of work


def explain_plan(request: SearchRequest, plan: ParallelPlan) -> Explanation:
    """Return what `plan`, one that `search_plans(request)` found, costs on each rank.

    Raises:
        PlanError: the plan has other splits than those of the search, or stages.
    """
    if plan.schedule is not None:
        raise PlanError("a plan with stages is explained stage by stage: use explain_stages")
    # the placements of computation are in the step already
    plain: dict[str, Any] = dict.fromkeys(
        ("parameters", "inputs", "outputs", "sums", "gathers"), ()
    )
    # so only storage and recomputation are left to be priced
    configs = {name: replace(config, **plain) for name, config in plan.configs.items()}
    return explain(PlanCosts(step_of(request, plan)), configs)


def step_of(request: SearchRequest, plan: ParallelPlan) -> TrainingStep:
    """Return the step of one rank under `plan`, as the search priced it.

    Raises:
        PlanError: as `explain_plan`.
    """
    # plans that shard gradients run with freed memory given back at once, as under a limit
    shards = any(block.config.storage.sharded_axes("gradients") for block in plan.blocks)
    whole = replace(
        step_on(request, plan.mesh),
        exchange=plan.gradient_exchange,
        local_steps=plan.local_steps,
        returns_memory=request.returns_memory or shards,
        gradient_views=plan.gradient_views,
        float32_gathers=plan.float32_gathers is True,
    )
    if not plan.mesh.tensor_axes:
        return whole
    if request.split is None:
        raise PlanError(
            "a plan with a tensor axis is explained by the model that can be split: give it in the "
            "request"
        )
    layout = placed_layout(plan.configs, plan.mesh)
    step = step_in(layout, whole, request.split, mesh=plan.mesh)
    if step is None:
        ranks = plan.mesh.ranks_along(plan.mesh.tensor_axes)
        raise PlanError(f"the plan's step on slices is not known: {request.split.why_whole(ranks)}")
    return step


# ---- stage by stage


@dataclass(frozen=True)
class StageExplanation:
    """One stage of a plan, on `rank` of the pipeline.

    Sums of its blocks, one after the other; a rank of several stages waits for what none of them
    runs.

    Args:
        rank: of the pipeline.
        blocks: its blocks in the order of forward.
        seconds: of a step, all micro-batches: "forward", "backward" (with recomputation), "receive"
            (activations from the stage before, and their gradients back), "once" (exchange of
            gradients and update).
        bubble: the share of the step in which its rank runs no pass and no exchange or update of
            any of its stages.
        peak_parts: bytes: "static" (parameters, gradients, states, copies of weights);
            "activations" (of all microbatches in flight when its rank holds the most, received
            tensors and gradients that wait for a later part of backward too); "running" (the most
            beside these while a block runs); "update" (while the optimizer steps). What is on every
            rank (buffers, batch) is in none of them.
        missing_updates: of the stage, before a minibatch's own one, that its forward pass is too
            early for.
    """

    rank: int
    blocks: tuple[str, ...]
    seconds: Mapping[str, float]
    bubble: float
    peak_parts: Mapping[str, float]
    missing_updates: int = 0


def explain_stages(request: SearchRequest, plan: ParallelPlan) -> tuple[StageExplanation, ...]:
    """Return what each stage of `plan` costs, one that `search_plans(request)` found.

    Raises:
        PlanError: the plan has no stages, or other blocks than those of the step.
    """
    if plan.schedule is None:
        raise PlanError("a plan without stages is explained by kind of work: use explain_plan")
    blocks, shape = stage_blocks(request, plan), shape_of_plan(plan)
    point = _cut_in_order(blocks, plan)
    # rows of stages, one column: this cut alone
    seconds, sizes = stage_seconds(blocks, shape, [point]), stage_bytes(blocks, shape, [point])
    simulated = step_seconds_of(seconds, shape)
    step = point.step_seconds if simulated is None else float(simulated[0])
    count, activations = shape.num_microbatches, worst_activations(shape, sizes)
    # seconds that each rank of the pipeline is at work; several stages may be on one
    busy = np.zeros(shape.pipeline)
    # a fixed time per pass, forward and backward, beside the blocks' own
    passes_seconds = count * (seconds.forward + seconds.backward + 2 * shape.pass_seconds)
    passes_seconds += seconds.once
    np.add.at(busy, list(shape.ranks), passes_seconds[:, 0])
    missing = (
        shape.missing_updates if isinstance(shape, ContinuousShape) else (0,) * shape.num_stages
    )
    found, passes = [], count * plan.accumulate
    for s, rank in enumerate(shape.ranks):
        times = {
            "forward": passes * float(seconds.forward[s, 0]),
            "backward": passes * float(seconds.backward[s, 0]),
            "receive": passes * float(seconds.transfers[:, s, 0].sum()) if s else 0.0,
            "once": float(seconds.once[s, 0]),
        }
        held = {
            "static": float(sizes.static[s, 0]),
            "activations": float(activations[s]),
            "running": float(sizes.hump[s, 0]),
            "update": float(sizes.update[s, 0]),
        }
        # of the rank, so equal for all of its stages
        bubble = max(1 - float(busy[rank]) / step, 0.0)
        # without the block "", which is no link of the chain
        names = tuple(b.block for b in plan.stages[s].blocks if b.block in blocks.names)
        found.append(StageExplanation(rank, names, times, bubble, held, missing[s]))
    return tuple(found)


def _cut_in_order(blocks: StageBlocks, plan: ParallelPlan) -> StagePoint:
    # Where the stages of `plan` end. Raises PlanError for other blocks or another order.
    names = [b.block for stage in plan.stages for b in stage.blocks if b.block in blocks.names]
    if names != [*blocks.names]:
        raise PlanError(
            "the stages of the plan do not have the blocks of this step in order: search it again"
        )
    return cut_of_plan(blocks, plan)
