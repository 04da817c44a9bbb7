"""The step of one plan with stages: what each stage takes and holds, and when its passes run."""

from __future__ import annotations

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.continuous_shape import ContinuousShape
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_peaks import stage_bytes
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape, fixed_costs
from lightning_topt.plan.stage_times import simulated_schedule, stage_seconds
from lightning_topt.plan.staged_plans import shape_of_plan
from lightning_topt.schedules.simulate import Simulation, simulate
from lightning_topt.schedules.timing import StageCosts


def step_of_plan(blocks: StageBlocks, plan: ParallelPlan) -> Simulation | None:
    """Return the passes of a step of `plan`, which a search of `blocks` found; None for more of
    them than are simulated.

    After its passes a rank exchanges gradients and updates parameters, which is not part of it.
    """
    shape = shape_of_plan(plan)
    schedule = simulated_schedule(shape)
    if schedule is None:
        return None
    return simulate(schedule, costs_of_stages(blocks, shape, cut_of_plan(blocks, plan)))


def cut_of_plan(blocks: StageBlocks, plan: ParallelPlan) -> StagePoint:
    """Return where the stages of `plan` end in the chain `blocks`, and which blocks recompute."""
    counts = [sum(block.block in blocks.names for block in stage.blocks) for stage in plan.stages]
    again = tuple(int(plan.configs[name].recompute) for name in blocks.names)
    assert plan.predicted is not None, "plans that are found have predictions"
    ends = tuple(np.cumsum(counts).tolist())
    return StagePoint(
        plan.predicted.step_seconds, plan.predicted.peak_bytes, ends, (0,) * len(counts), again
    )


def costs_of_stages(blocks: StageBlocks, shape: PipelineShape, cut: StagePoint) -> StageCosts:
    """Return the seconds and bytes of each stage of a pipeline that is cut so.

    What a rank has once (buffers, its batch) counts for the first of its stages. Of a split
    backward all activations count as held until gradients of parameters are there, with what has
    arrived for these.
    """
    seconds, sizes = stage_seconds(blocks, shape, [cut]), stage_bytes(blocks, shape, [cut])
    static = sizes.static[:, 0].copy()
    static[[shape.ranks.index(rank) for rank in range(shape.pipeline)]] += fixed_costs(
        blocks, shape
    )[1]
    received, first = blocks.crossing_bytes(shape.samples)[0], (0, *cut.ends[:-1])
    edges = [(stage - 1, stage) for stage in range(1, shape.num_stages)]
    there, back = (dict(zip(edges, row[1:, 0].tolist(), strict=True)) for row in seconds.transfers)
    return StageCosts(
        _passes(seconds.forward),
        _passes(seconds.backward),
        _passes(np.maximum(seconds.backward - seconds.weights, 0.0)),
        _passes(seconds.weights),
        transfer_seconds=there,
        gradient_seconds=back,
        static_bytes=static.tolist(),
        activation_bytes=sizes.kept[:, 0].tolist(),
        weight_bytes=(sizes.kept + sizes.waiting)[:, 0].tolist() if shape.splits_backward else None,
        backward_bytes=sizes.hump[:, 0].tolist(),
        transfer_bytes={edge: float(received[first[edge[1]]]) for edge in edges},
        update=seconds.once[:, 0].tolist() if isinstance(shape, ContinuousShape) else None,
    )


def _passes(seconds: Array) -> list[float]:
    found: list[float] = (seconds[:, 0] + PASS_SECONDS).tolist()
    return found
