"""The fastest way to cut a model into the stages of one given pipeline: stages, schedule and microbatches are fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape, stage_table
from lightning_topt.plan.staged_plans import stage_seconds, step_seconds_of


@dataclass(frozen=True)
class BestCut:
    """A `BestCut` has the blocks of each stage, in order, and what a step is predicted to take: seconds, bytes at the peak."""

    stages: tuple[tuple[str, ...], ...]
    step_seconds: float
    peak_bytes: float


def best_cut(
    step: TrainingStep,
    *,
    mesh: Mesh,
    schedule: str,
    num_microbatches: int,
    stages_per_rank: int = 1,
    memory_limit: float | None = None,
    recompute: bool = False,
) -> BestCut:
    """Return the cut with the fastest step on `mesh`, which has a pipeline axis, whose ranks stay below `memory_limit` bytes.

    Args:
        step: the step of a rank, captured; its mesh is not asked. A graph that is known for one batch size alone is cut by the
            times of that, whatever size the microbatches have.
        memory_limit: where no cut fits, the one of least memory is returned.
        recompute: whether blocks recompute, those that can.

    Of plans that the formulas of the schedule find, the one with the fastest simulated step counts. Raises PlanError for fewer
    blocks than stages, ValueError for sizes that the schedule does not take.
    """
    step = replace(step, mesh=data_mesh(1), batch_size=step.graph.batch_size, exchange=None)
    blocks = StageBlocks(step)
    ranks, data = mesh.pipeline_size, mesh.data_parallel_size
    if len(blocks.names) < ranks * stages_per_rank:
        raise PlanError(
            f"{step.graph.model} has {len(blocks.names)} block(s) that can be stages of a pipeline "
            f"({', '.join(blocks.names) or 'none'}), and {ranks * stages_per_rank} stages are wanted: choose fewer stages"
        )
    samples = float(step.graph.batch_size)
    shape = PipelineShape(ranks, data, schedule, stages_per_rank, num_microbatches, samples)
    table = stage_table(blocks, shape, recomputes=(recompute,))
    points = search_stages(table).points
    seconds = step_seconds_of(stage_seconds(blocks, shape, points), shape)
    if seconds is None:
        seconds = np.array([point.step_seconds for point in points])
    sizes = np.array([point.peak_bytes for point in points])
    fits = sizes < (np.inf if memory_limit is None else memory_limit)
    best = int(np.argmin(np.where(fits, seconds, np.inf))) if fits.any() else int(np.argmin(sizes))
    return BestCut(named_stages(blocks, points[best]), float(seconds[best]), points[best].peak_bytes)


def named_stages(blocks: StageBlocks, point: StagePoint) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of each stage."""
    first = (0, *point.ends[:-1])
    return tuple(blocks.names[start:end] for start, end in zip(first, point.ends, strict=True))
