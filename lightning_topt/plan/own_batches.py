"""Pipelines whose ranks bring a batch each, as data ranks do: these batches are the microbatches.

The loaders of a run without a plan give every rank a batch. A pipeline of R ranks then runs R
microbatches per step, one from each rank. This costs more than every pipeline does. Each rank of a
row gets the batches of all others (`sent_seconds`). An evaluation, which each rank runs by itself,
needs the full parameters (`evaluation_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import MICROBATCH_NOTE_BYTES, TrainingStep
from lightning_topt.plan.chains import NO_BOUND
from lightning_topt.plan.parallel_plan import ParallelPlan, StepEstimate
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape, bytes_of_rank, shape_of_plan
from lightning_topt.plan.staged_plans import search_stages_for


def search_own_batches(request: SearchRequest, known: Sequence[PlanPoint]) -> PlanFrontier:
    """Return the plans with stages for ranks that have a batch like the captured one each.

    Those that `known` plans for as many ranks beat are left out. ``request.evaluates`` says whether
    the run has evaluations.
    """
    blocks, found, plainer, error = stage_blocks(request), list[PlanPoint](), list[PlanPoint](), 0.0
    # plainer: those under 1F1B that only others with stages beat
    for count in request.device_counts:
        points, plain, bound = search_stages_for(
            blocks,
            count,
            PipelineRequest(own_batches=True),
            known,
            global_batch_size=request.graph.batch_size * count,
            epsilon=request.epsilon,
            max_seconds=request.max_seconds,
        )
        found += [
            _with_batches_sent(blocks, point, evaluates=request.evaluates) for point in points
        ]
        plainer += [
            _with_batches_sent(blocks, point, evaluates=request.evaluates) for point in plain
        ]
        error = max(error, bound)
    return PlanFrontier.of(found, uniform=plainer, error_bound=min(error, NO_BOUND))


def _with_batches_sent(blocks: StageBlocks, point: PlanPoint, *, evaluates: bool) -> PlanPoint:
    # Add the costs of sent batches, and of evaluations, to a plan
    plan = point.plan
    assert plan.predicted is not None
    more = sent_seconds(blocks.step, shape_of_plan(plan))
    seconds, peak = point.step_seconds + more, point.peak_bytes
    if evaluates:
        peak = max(peak, evaluation_bytes(blocks, plan))
    compute = plan.predicted.compute_seconds
    plan = replace(plan, predicted=StepEstimate(seconds, peak, compute, seconds - compute))
    return PlanPoint(seconds, peak, point.devices, plan)


def sent_seconds(step: TrainingStep, shape: PipelineShape) -> float:
    """Return the seconds to send each rank of a row the batches of the others, and results back.

    `step` is that of one batch.
    """
    ranks, along = shape.pipeline, replace(step, mesh=shape.mesh(step.cluster))
    axes = along.mesh.pipeline_axes
    # every rank broadcasts its batch; notes before, and results after, are gathered
    batches = ranks * along.collective_seconds(
        "broadcast", step.graph.input_bytes.at(step.batch_size), axes=axes
    )
    return batches + 3 * along.collective_seconds(
        "all_gather", ranks * MICROBATCH_NOTE_BYTES, axes=axes
    )


def evaluation_bytes(blocks: StageBlocks, plan: ParallelPlan) -> float:
    """Return the bytes of the fullest rank that evaluates.

    It has all parameters, beside gradients and optimizer states of its own stages.
    """
    shape, names = shape_of_plan(plan), {name: place for place, name in enumerate(blocks.names)}
    once = shape.once(blocks)
    sizes = np.array([sum(map(parameter_bytes, owned)) for owned in blocks.owned], float)
    # gradients and states of the stages of each rank
    held = np.zeros(shape.pipeline)
    for stage, rank in zip(plan.stages, shape.ranks, strict=True):
        places = [names[block.block] for block in stage.blocks if block.block in names]
        held[rank] += once.static[places].sum() - sizes[places].sum()
        if once.shared is not None:
            held[rank] += once.shared[1][min(places), max(places) + 1]
    return float(held.max() + sizes.sum()) + bytes_of_rank(blocks, shape)


def least_own_batch_seconds(request: SearchRequest) -> float:
    """Return a lower bound of all steps whose ranks run their batches in stages.

    At best the stages share the computation evenly, and so they do the update.
    """
    blocks, found = stage_blocks(request), [np.inf]
    step = blocks.step
    compute = float(sum(times.sum() for times in step.compute.values()))
    for count in request.device_counts:
        for shape in _pipelines_of(blocks, count):
            # ZeRO-1 shares the update among the replicas too
            share = 1 / shape.pipeline / (shape.data if step.optimizer.by_parameter else 1)
            update = sum(
                step.update_seconds(parameter, share=share) for parameter in step.graph.parameters
            )
            found.append(compute + update + sent_seconds(step, shape))
    return min(found)


def _pipelines_of(blocks: StageBlocks, count: int) -> Iterator[PipelineShape]:
    # Yield 1F1B pipelines of `count` ranks with one microbatch per rank of a row
    samples = blocks.step.batch_size
    for ranks in range(2, min(count, len(blocks.names)) + 1):
        if count % ranks == 0:
            yield PipelineShape(ranks, count // ranks, "1f1b", 1, ranks, samples)
