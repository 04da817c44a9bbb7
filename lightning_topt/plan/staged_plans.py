"""Cuts of a pipeline become plans, with the seconds that a simulation of their schedule gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.continuous_shape import ContinuousShape
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    PlanError,
    Prediction,
    StagePlan,
)
from lightning_topt.plan.pipeline_search import (
    PLAIN,
    FoundPipelines,
    PipelineRequest,
    hopeful_shapes,
    pipeline_shapes,
    search_pipelines,
    why_no_pipeline,
)
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.split_stages import splits_of_stages
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_moves import with_moves
from lightning_topt.plan.stage_peaks import peak_bytes_of, stage_bytes
from lightning_topt.plan.stage_tables import PipelineShape
from lightning_topt.plan.stage_times import stage_seconds, step_seconds_of
from lightning_topt.plan.tensor_meshes import placed_tensors
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel


def search_stages_for(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    known: Sequence[PlanPoint],
    *,
    global_batch_size: int,
    split: SplitModel | None = None,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> tuple[list[PlanPoint], list[PlanPoint], float]:
    """Return plans with stages for `count` ranks that none of those `known` for as many beats;
    plainer ones that only others with stages beat; and the search's error bound. With `split`,
    stages may run on slices of parameters.

    Raises PlanError where something is wanted that no pipeline of `count` ranks has.
    """
    costs = np.array([(p.step_seconds, p.peak_bytes) for p in known if p.devices == count]).reshape(
        -1, 2
    )
    deadline, best = time.thread_time() + max_seconds, KnownPlans.best([costs])
    search = _Search(wanted, global_batch_size, epsilon, deadline, best, error=epsilon)
    shapes = [*pipeline_shapes(blocks, count, global_batch_size, wanted)] if wanted.takes(1) else []
    if shapes:
        search.add(blocks, shapes)
    is_any = bool(shapes)
    for chain, of_size in (
        splits_of_stages(blocks, split, count, wanted, global_batch_size)
        if split is not None
        else ()
    ):
        if not blocks.step.kernel_seconds:  # of kernels that are measured no formula is a bound
            of_size = hopeful_shapes(chain.bound, of_size, search.known.scaled(1 / (1 + epsilon)))
        if of_size:
            is_any |= chain.blocks is not None
            search.add(chain.blocks, of_size)
    if not is_any and wanted.is_given:
        size = wanted.tensor or 1
        if (
            size > 1
            and split is not None
            and [*pipeline_shapes(blocks, count, global_batch_size, wanted, tensor=size)]
        ):
            raise PlanError(
                f"a pipeline has no stages on slices over {size} ranks: {split.why_whole(size)}"
            )
        raise PlanError(why_no_pipeline(blocks, count, wanted, global_batch_size=global_batch_size))
    return *search.priced(), search.error


@dataclass
class _Search:
    """Plans that were found, and costs of the best of all that are `known`."""

    wanted: PipelineRequest
    global_batch_size: int
    epsilon: float
    deadline: float
    known: KnownPlans
    error: float = 0.0
    found: list[tuple[StageBlocks, FoundPipelines]] = field(default_factory=list)
    # costs of what was known before, and of plans under 1F1B
    plain: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain.append(self.known.costs)

    def add(self, blocks: StageBlocks | None, shapes: Sequence[PipelineShape]) -> None:
        """Search the pipelines of these shapes; None: a step that cannot be captured."""
        if blocks is None:
            return
        left = max(self.deadline - time.thread_time(), 1e-3)
        found = search_pipelines(blocks, shapes, self.known, epsilon=self.epsilon, max_seconds=left)
        self.found.append((blocks, found))
        self.plain.append(
            _costs([each for each in (*found.plans, *found.plain) if each[0].schedule == PLAIN])
        )
        self.known = KnownPlans.best([self.known.costs, _costs(found.plans)])
        self.error = max(self.error, found.error_bound)

    def priced(self) -> tuple[list[PlanPoint], list[PlanPoint]]:
        """Return the plans that none that is known beats, and those under 1F1B that only others
        with stages beat.
        """
        best, plain = (
            {tuple(row) for row in each.costs.tolist()}
            for each in (self.known, KnownPlans.best(self.plain))
        )
        kept: tuple[list[PlanPoint], list[PlanPoint]] = [], []
        for blocks, found in self.found:
            every = [
                (each, (each[1].step_seconds, each[1].peak_bytes))
                for each in (*found.plans, *found.plain)
            ]
            chosen = [each for each, cost in every if cost in best]
            others = [
                each
                for each, cost in every
                if cost in plain and each[0].schedule == PLAIN and cost not in best
            ]
            for plans, into in zip((chosen, others), kept, strict=True):
                into += _points(
                    blocks, plans, self.global_batch_size, own_batches=self.wanted.own_batches
                )
        return kept


def _costs(plans: Sequence[tuple[PipelineShape, StagePoint]]) -> Array:
    return np.array([(point.step_seconds, point.peak_bytes) for _, point in plans]).reshape(-1, 2)


def _points(
    blocks: StageBlocks,
    plans: Sequence[tuple[PipelineShape, StagePoint]],
    global_batch_size: int,
    *,
    own_batches: bool,
) -> list[PlanPoint]:
    by_shape: dict[PipelineShape, list[StagePoint]] = {}
    for shape, point in plans:
        by_shape.setdefault(shape, []).append(point)
    found: list[PlanPoint] = []
    for shape, several in by_shape.items():
        given: dict[str, Any] = {
            "batch_size": global_batch_size // shape.data,
            "own_batches": own_batches,
        }
        found += staged_points(blocks, shape, with_moves(blocks, shape, several), **given)
    return found


def staged_points(
    blocks: StageBlocks,
    shape: PipelineShape,
    points: Sequence[StagePoint],
    *,
    batch_size: int,
    own_batches: bool = False,
) -> list[PlanPoint]:
    """Return plans of one shape with what they are predicted to cost; `batch_size` samples are
    those of a row of ranks, each of which brings its part with `own_batches`.
    """
    seconds = stage_seconds(blocks, shape, points)
    simulated = step_seconds_of(seconds, shape)
    steps = np.array([point.step_seconds for point in points]) if simulated is None else simulated
    peaks = [point.peak_bytes for point in points]
    if simulated is not None and (shape.stages_per_rank > 1 or shape.splits_backward):
        peaks = peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, points)).tolist()
    busy = np.zeros((shape.pipeline, len(points)))
    work = shape.num_microbatches * (seconds.forward + seconds.backward) + seconds.once
    np.add.at(busy, list(shape.ranks), work)
    compute = np.minimum(busy.max(axis=0), steps)
    plans = _Plans(blocks, shape, batch_size, own_batches)
    found = []
    for point, step, peak, own in zip(points, steps.tolist(), peaks, compute.tolist(), strict=True):
        predicted = Prediction(step, peak, own, step - own)
        found.append(PlanPoint(step, peak, plans.mesh.size, plans.plan(point, predicted)))
    return found


class _Plans:
    """Plans of one shape; blocks of equal configurations are one object."""

    def __init__(
        self, blocks: StageBlocks, shape: PipelineShape, batch_size: int, own_batches: bool
    ) -> None:
        graph, cluster = blocks.step.graph, blocks.step.cluster
        self.mesh, self._shape = shape.mesh(cluster), shape
        axes, over = len(self.mesh.axes), self.mesh.data_axes
        configs = [
            OpConfig.zero(shape.level, recompute=again, axes=axes, over=over)
            for again in (False, True)
        ]
        placed = placed_tensors(replace(blocks.step, mesh=self.mesh)) if blocks.tensor > 1 else {}

        def planned(name: str, again: bool) -> BlockPlan:
            return BlockPlan(
                name, replace(configs[again], **placed[name]) if name in placed else configs[again]
            )

        self._blocks = [[planned(name, again) for again in (False, True)] for name in blocks.names]
        # with all that is outside
        left = [block.name for block in graph.blocks if block.name not in blocks.names]
        self._others = tuple(planned(name, again=False) for name in left)
        self._common: dict[str, Any] = {
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "cluster": cluster.name,
        }
        self._batch_size = batch_size // shape.pipeline if own_batches else batch_size
        self._own_batches = own_batches

    def plan(self, point: StagePoint, predicted: Prediction) -> ParallelPlan:
        """Return the plan of a point."""
        chosen = [
            several[config] for several, config in zip(self._blocks, point.configs, strict=True)
        ]
        stages, first = [], 0
        for end in point.ends:
            stages.append(StagePlan((*chosen[first:end], *(() if first else self._others))))
            first = end
        return ParallelPlan(
            self.mesh,
            tuple(stages),
            **self._common,
            batch_size=self._batch_size,
            predicted=predicted,
            num_microbatches=self._shape.num_microbatches,
            schedule=self._shape.schedule,
            own_batches=self._own_batches,
        )


def shape_of_plan(plan: ParallelPlan) -> PipelineShape:
    """Return the shape of the pipeline of a plan with stages."""
    assert plan.schedule is not None and plan.batch_size is not None
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return ContinuousShape.of_plan(plan)
    level = max(block.config.storage.level for block in plan.blocks)
    samples = plan.batch_size if plan.own_batches else plan.batch_size / plan.num_microbatches
    mesh, tensor = plan.mesh, plan.mesh.ranks_along(plan.mesh.tensor_axes)
    schedule = plan.schedule, plan.stages_per_rank, plan.num_microbatches
    return PipelineShape(
        mesh.pipeline_size, mesh.data_parallel_size, *schedule, samples, level, tensor
    )
