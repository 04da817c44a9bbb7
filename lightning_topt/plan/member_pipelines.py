"""Pipelines whose ranks bring a batch each, as data ranks do: these batches are the microbatches.

Besides what every pipeline takes, batches of all ranks of a row go to each of these, and an
evaluation, which each rank runs by itself, needs the whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import MICROBATCH_NOTE_BYTES, TrainingStep
from lightning_topt.plan.chains import NO_BOUND
from lightning_topt.plan.parallel_plan import ParallelPlan, Prediction
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.search_request import SearchRequest, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape
from lightning_topt.plan.staged_plans import search_stages_for, shape_of_plan


def search_member_pipelines(request: SearchRequest, known: Sequence[PlanPoint]) -> PlanFrontier:
    """Return the plans with stages for ranks that have a batch like the captured one each, but for
    those that `known` ones for as many ranks beat; ``request.evaluates`` says whether the run has
    evaluations.
    """
    blocks, found, plainer, error = stage_blocks(request), list[PlanPoint](), list[PlanPoint](), 0.0
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
        found += [_of_members(blocks, point, evaluates=request.evaluates) for point in points]
        plainer += [_of_members(blocks, point, evaluates=request.evaluates) for point in plain]
        error = max(error, bound)
    return PlanFrontier.of(found, uniform=plainer, error_bound=min(error, NO_BOUND))


def least_member_seconds(request: SearchRequest) -> float:
    """Return seconds that no step is below whose ranks run their batches in stages: the computation
    is shared out evenly at best, and so is the update.
    """
    blocks = stage_blocks(request)
    found = [np.inf]
    for count in request.device_counts:
        for shape in _shapes(blocks, count):
            step = blocks.step
            compute = float(sum(times.sum() for times in step.compute.values()))
            share = 1 / shape.pipeline / (shape.data if step.optimizer.by_parameter else 1)
            update = sum(
                step.update_seconds(parameter, share=share) for parameter in step.graph.parameters
            )
            found.append(compute + update + sent_seconds(step, shape))
    return min(found)


def sent_seconds(step: TrainingStep, shape: PipelineShape) -> float:
    """Return the seconds in which each rank of a row gets the batches of the others, and results of
    its own; `step` is that of one batch.
    """
    ranks, along = shape.pipeline, replace(step, mesh=shape.mesh(step.cluster))
    axes = along.mesh.pipeline_axes
    batches = ranks * along.collective_seconds(
        "broadcast", step.graph.input_bytes.at(step.batch_size), axes=axes
    )
    return batches + 3 * along.collective_seconds(
        "all_gather", ranks * MICROBATCH_NOTE_BYTES, axes=axes
    )


def evaluation_bytes(blocks: StageBlocks, plan: ParallelPlan) -> float:
    """Return the bytes of the fullest rank that evaluates: all parameters, beside gradients and
    states of its own stages.
    """
    shape, names = shape_of_plan(plan), {name: place for place, name in enumerate(blocks.names)}
    once, graph = shape.once(blocks), blocks.step.graph
    sizes = np.array([sum(map(parameter_bytes, owned)) for owned in blocks.owned], float)
    held = np.zeros(shape.pipeline)
    for stage, rank in zip(plan.stages, shape.ranks, strict=True):
        places = [names[block.block] for block in stage.blocks if block.block in names]
        held[rank] += once.static[places].sum() - sizes[places].sum()
        if once.shared is not None:
            held[rank] += once.shared[1][min(places), max(places) + 1]
    inputs = graph.input_bytes.at(shape.samples * shape.num_microbatches)
    fixed = graph.buffer_bytes + inputs + blocks.step.cluster.device.process_bytes
    return float(held.max() + sizes.sum()) + fixed


def _of_members(blocks: StageBlocks, point: PlanPoint, *, evaluates: bool) -> PlanPoint:
    plan = point.plan
    assert plan.predicted is not None
    more = sent_seconds(blocks.step, shape_of_plan(plan))
    seconds, peak = point.step_seconds + more, point.peak_bytes
    if evaluates:
        peak = max(peak, evaluation_bytes(blocks, plan))
    compute = plan.predicted.compute_seconds
    plan = replace(plan, predicted=Prediction(seconds, peak, compute, seconds - compute))
    return PlanPoint(seconds, peak, point.devices, plan)


def _shapes(blocks: StageBlocks, count: int) -> Iterator[PipelineShape]:
    samples = blocks.step.batch_size
    for ranks in range(2, min(count, len(blocks.names)) + 1):
        if count % ranks == 0:
            yield PipelineShape(ranks, count // ranks, "1f1b", 1, ranks, samples)
