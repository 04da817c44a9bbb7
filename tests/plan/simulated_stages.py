"""The slow twin of priced pipelines: a step of a plan, simulated pass by pass."""

from __future__ import annotations

from benchmarks.pipelines.simulated_memory import MemoryCosts
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import (
    cut_of_plan,
    pass_seconds,
    simulated_schedule,
    stage_bytes,
    stage_seconds,
)
from lightning_topt.plan.stage_tables import (
    ContinuousShape,
    PipelineShape,
    fixed_costs,
    shape_of_plan,
)
from lightning_topt.schedules.timing import Simulation, simulate


def step_of_plan(blocks: StageBlocks, plan: ParallelPlan) -> Simulation:
    """Return the passes of a step of `plan`, without what comes once: exchange and update."""
    shape = shape_of_plan(plan)
    continuous = isinstance(shape, ContinuousShape)
    schedule = shape.filling_schedule if continuous else simulated_schedule(shape)
    return simulate(schedule, costs_of_stages(blocks, shape, cut_of_plan(blocks, plan)))


def costs_of_stages(blocks: StageBlocks, shape: PipelineShape, cut: StagePoint) -> MemoryCosts:
    """Return the seconds and bytes of each stage of a pipeline that is cut so.

    What a rank has once (buffers, its batch) counts for the first of its stages. Of a split
    backward all activations count as held until gradients of parameters are there, with what has
    arrived for these.
    """
    seconds, sizes = stage_seconds(blocks, shape, [cut]), stage_bytes(blocks, shape, [cut])
    static = sizes.static[:, 0].copy()
    # the first stage of each rank has what the rank has once
    static[[shape.ranks.index(rank) for rank in range(shape.pipeline)]] += fixed_costs(
        blocks, shape
    )[1]
    received, first = blocks.crossing_bytes(shape.samples)[0], (0, *cut.ends[:-1])
    edges = [(stage - 1, stage) for stage in range(1, shape.num_stages)]
    there, back = (dict(zip(edges, row[1:, 0].tolist(), strict=True)) for row in seconds.transfers)
    forward, backward, inputs, weights = (
        part[:, 0].tolist() for part in pass_seconds(seconds, shape)
    )
    return MemoryCosts(
        forward,
        backward,
        inputs,
        weights,
        transfer_seconds=there,
        gradient_seconds=back,
        static_bytes=static.tolist(),
        activation_bytes=sizes.kept[:, 0].tolist(),
        weight_bytes=(sizes.kept + sizes.waiting)[:, 0].tolist() if shape.splits_backward else None,
        backward_bytes=sizes.hump[:, 0].tolist(),
        transfer_bytes={edge: float(received[first[edge[1]]]) for edge in edges},
        update=seconds.once[:, 0].tolist() if isinstance(shape, ContinuousShape) else None,
    )
