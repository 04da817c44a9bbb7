"""Plans with stages for a number of ranks: pipelines are searched, their cuts become plans.

    search_pipelines_for        all of these
        search_stages_for       pipelines that flush, unsplit and on slices of parameters
        search_continuous       asynchronous pipelines, where stale weights are allowed

A pipeline that flushes is searched by formulas (`plan.pipeline_search`); what is kept gets the
seconds of a simulation and better cuts by moves (`plan.stage_simulation`).

A step of a pipeline that never flushes is one minibatch, which every stage updates its weights
with. Its seconds are those of the slowest stage: forward, backward, exchange between replicas and
update. Transfers decide where they take too long for the minibatches in flight
(`seconds_per_minibatch`). A stage holds activations of its minibatches in flight, and copies of its
weights as the rule of prediction has it.

Stages on slices have the splits of meshes with a tensor axis of as many ranks. So a step on slices
is captured once for both. In the layout ``tensor_sequence`` tensors between products are in slices
as well; what crosses between stages is gathered first, and cut again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.segments import chain_of
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.chains import KnownPlans
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    PlanError,
    StagePlan,
    StepEstimate,
)
from lightning_topt.plan.pipeline_search import (
    FoundPipelines,
    PipelineRequest,
    StaleWeights,
    continuous_shapes,
    hopeful_shapes,
    is_plain,
    least_seconds_of,
    pipeline_shapes,
    search_pipelines,
    why_no_pipeline,
)
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.stage_blocks import EqualShares, StageBlocks
from lightning_topt.plan.stage_simulation import (
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
    with_moves,
)
from lightning_topt.plan.stage_tables import ContinuousShape, PipelineShape, continuous_table
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import (
    placed_layout,
    placed_tensors,
    prices_on,
    step_in,
    tensor_sizes,
)


def search_pipelines_for(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    known: Sequence[PlanPoint],
    *,
    stale: StaleWeights | None,
    global_batch_size: int,
    split: SplitModel | None = None,
    exchanges: Sequence[GradientMethod] = (),
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> tuple[list[PlanPoint], list[PlanPoint], float]:
    """Return what `search_stages_for` does; with `stale`, asynchronous pipelines as well."""
    points, plain, error = list[PlanPoint](), list[PlanPoint](), 0.0
    limits: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "exchanges": exchanges,
        "epsilon": epsilon,
        "max_seconds": max_seconds,
    }
    # pipelines that flush, unless one without flush is asked for by name
    if stale is None or wanted.schedule not in CONTINUOUS_SCHEDULES:
        points, plain, error = search_stages_for(
            blocks, count, wanted, known, split=split, **limits
        )
    if stale is not None:
        # these must beat the ones that flush as well
        more, bound = search_continuous(blocks, count, wanted, stale, [*known, *points], **limits)
        fewest = min(
            CONTINUOUS_SCHEDULES.values()
        )  # missed updates: preferred where others gain little
        plain = plain + [
            point for point in more if CONTINUOUS_SCHEDULES[point.plan.schedule or ""] == fewest
        ]
        points, error = points + more, max(error, bound)
    return points, plain, error


# ---- pipelines that flush


def search_stages_for(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    known: Sequence[PlanPoint],
    *,
    global_batch_size: int,
    split: SplitModel | None = None,
    exchanges: Sequence[GradientMethod] = (),
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> tuple[list[PlanPoint], list[PlanPoint], float]:
    """Return plans with stages for `count` ranks.

    With `split`, stages may run on slices of parameters. Where they do not, rows of ranks may send
    gradients by one of `exchanges`, or train alone.

    Returns:
        Plans that none of those `known` for as many ranks beats; plainer ones that only others with
        stages beat; and the search's error bound.

    Raises:
        PlanError: something is wanted that no pipeline of `count` ranks has.
    """
    # one budget of time, without captures, and one set of known costs for all searches below
    best = KnownPlans.best([_costs_for(known, count)])
    search = _Search(wanted, global_batch_size, epsilon, max_seconds, best, error=epsilon)
    shapes = list[PipelineShape]()
    if wanted.takes(1):
        shapes += pipeline_shapes(blocks, count, global_batch_size, wanted, exchanges=exchanges)
    chains: list[tuple[SplitStages, list[PipelineShape]]] = []
    if split is not None:
        chains += splits_of_stages(blocks, split, count, wanted, global_batch_size)
    if not blocks.step.kernel_seconds:  # the most promising first
        chains.sort(key=lambda each: least_seconds_of(each[0].bound, each[1]))
    # Stages of unsplit blocks, then on slices under each split. Each has an equal part of the time
    # that is left.
    if shapes:
        search.add(blocks, shapes, share=1 / (1 + len(chains)))
    is_any = bool(shapes)
    for n, (chain, of_size) in enumerate(chains):
        if not blocks.step.kernel_seconds:  # formulas bound no measured kernels
            of_size = hopeful_shapes(chain.bound, of_size, search.known.scaled(1 / (1 + epsilon)))
        if of_size:
            is_any |= chain.blocks is not None
            search.add(chain.blocks, of_size, share=1 / (len(chains) - n))
    # nothing to search, though stages are insisted on: say whether slices or stages are why
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
    left: float  # CPU seconds
    known: KnownPlans
    error: float = 0.0
    found: list[tuple[StageBlocks, FoundPipelines]] = field(default_factory=list)
    # costs of what was known before, and of plans under 1F1B
    plain: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain.append(self.known.costs)

    def add(
        self, blocks: StageBlocks | None, shapes: Sequence[PipelineShape], *, share: float
    ) -> None:
        """Search the pipelines of these shapes; None: a step that cannot be captured."""
        if blocks is None:
            return
        # a share of the time that is left, and a moment in any case
        start, left = time.thread_time(), max(self.left * share, 1e-3)
        found = search_pipelines(blocks, shapes, self.known, epsilon=self.epsilon, max_seconds=left)
        self.left -= time.thread_time() - start
        self.found.append((blocks, found))
        self.plain.append(
            _costs([each for each in (*found.plans, *found.plain) if is_plain(each[0])])
        )
        # later searches must beat these
        self.known = KnownPlans.best([self.known.costs, _costs(found.plans)])
        self.error = max(self.error, found.error_bound)

    def priced(self) -> tuple[list[PlanPoint], list[PlanPoint]]:
        """Return the plans that no known one beats, and those under 1F1B that only stages beat."""
        # plans are told by their costs: (seconds, bytes) that no other plan beats, as tuples
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
            # on the frontier; beside it 1F1B plans, which are simpler to run
            chosen = [each for each, cost in every if cost in best]
            others = [
                each
                for each, cost in every
                if cost in plain and is_plain(each[0]) and cost not in best
            ]
            for plans, into in zip((chosen, others), kept, strict=True):
                into += _points(
                    blocks, plans, self.global_batch_size, own_batches=self.wanted.own_batches
                )
        return kept


def _costs(plans: Sequence[tuple[PipelineShape, StagePoint]]) -> Array:
    return np.array([(point.step_seconds, point.peak_bytes) for _, point in plans]).reshape(-1, 2)


def _costs_for(points: Sequence[PlanPoint], count: int) -> Array:
    # The costs (n, [seconds, bytes]) of the points for `count` ranks
    rows = [(p.step_seconds, p.peak_bytes) for p in points if p.devices == count]
    return np.array(rows).reshape(-1, 2)


def _points(
    blocks: StageBlocks,
    plans: Sequence[tuple[PipelineShape, StagePoint]],
    global_batch_size: int,
    *,
    own_batches: bool,
) -> list[PlanPoint]:
    # the points of one shape are priced at once
    by_shape: dict[PipelineShape, list[StagePoint]] = {}
    for shape, point in plans:
        by_shape.setdefault(shape, []).append(point)
    found: list[PlanPoint] = []
    for shape, several in by_shape.items():
        moved, samples = with_moves(blocks, shape, several), global_batch_size // shape.data
        found += staged_points(blocks, shape, moved, batch_size=samples, own_batches=own_batches)
    return found


# ---- pipelines that never flush


def search_continuous(
    blocks: StageBlocks,
    count: int,
    wanted: PipelineRequest,
    stale: StaleWeights,
    known: Sequence[PlanPoint],
    *,
    global_batch_size: int,
    exchanges: Sequence[GradientMethod] = (),
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> tuple[list[PlanPoint], float]:
    """Return asynchronous plans for `count` ranks, and the search's error bound.

    Those that one of `known` beats are left out.

    Raises:
        PlanError: such a plan is asked for by name, and none of `count` ranks is as wanted.
    """
    shapes = [
        *continuous_shapes(blocks, count, global_batch_size, wanted, stale, exchanges=exchanges)
    ]
    if not shapes and wanted.schedule in CONTINUOUS_SCHEDULES:
        raise PlanError(why_no_pipeline(blocks, count, wanted, global_batch_size=global_batch_size))
    # shape after shape, each with an equal share of the time, and against what is known by then
    costs, found, error = _costs_for(known, count), list[PlanPoint](), 0.0
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
        found, error = found + points, max(error, result.error_bound)
        costs = KnownPlans.best([costs, _costs_for(points, count)]).costs
    return found, error


def continuous_points(
    blocks: StageBlocks,
    shape: ContinuousShape,
    points: Sequence[StagePoint],
    *,
    stale: StaleWeights,
    batch_size: int,
) -> list[PlanPoint]:
    """Return plans of one shape with their expected costs."""
    found = staged_points(blocks, shape, points, batch_size=batch_size) if points else []
    rule = stale.rule(shape.pipeline, shape.schedule)
    return [replace(point, plan=replace(point.plan, prediction=rule)) for point in found]


# ---- cuts as plans


def staged_points(
    blocks: StageBlocks,
    shape: PipelineShape,
    points: Sequence[StagePoint],
    *,
    batch_size: int,
    own_batches: bool = False,
) -> list[PlanPoint]:
    """Return plans of one shape with their expected costs.

    `batch_size` are the samples of a row of ranks. With `own_batches` each rank of it brings its
    part.
    """
    # the step as the search's formula says, unless it was simulated
    seconds = stage_seconds(blocks, shape, points)
    simulated = step_seconds_of(seconds, shape)
    steps = np.array([point.step_seconds for point in points]) if simulated is None else simulated
    peaks = [point.peak_bytes for point in points]
    if simulated is not None and (shape.stages_per_rank > 1 or shape.splits_backward):
        peaks = peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, points)).tolist()
    # computation of the rank that works longest
    busy = np.zeros((shape.pipeline, len(points)))
    work = shape.num_microbatches * (seconds.forward + seconds.backward) + seconds.once
    np.add.at(busy, list(shape.ranks), work)
    compute = np.minimum(busy.max(axis=0), steps)
    plans = _Plans(blocks, shape, batch_size, own_batches)
    found = []
    for point, step, peak, own in zip(points, steps.tolist(), peaks, compute.tolist(), strict=True):
        predicted = StepEstimate(step, peak, own, step - own)
        found.append(PlanPoint(step, peak, plans.mesh.size, plans.plan(point, predicted)))
    return found


class _Plans:
    """Plans of one shape; blocks of equal configurations are one object."""

    def __init__(
        self, blocks: StageBlocks, shape: PipelineShape, batch_size: int, own_batches: bool
    ) -> None:
        graph, cluster = blocks.step.graph, blocks.step.cluster
        self.mesh, self._shape = shape.mesh(cluster), shape
        # without and with recomputation, the only choice that blocks of a shape have
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

        # of each block, without and with recomputation
        self._blocks = [[planned(name, again) for again in (False, True)] for name in blocks.names]
        # with all that is outside
        left = [block.name for block in graph.blocks if block.name not in blocks.names]
        self._others = tuple(planned(name, again=False) for name in left)
        self._common: dict[str, Any] = {
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "cluster": cluster.name,
        }
        # the batch of a rank: that of its row, or its own part of it
        self._batch_size = batch_size // shape.pipeline if own_batches else batch_size
        self._own_batches = own_batches
        self._common["gradient_exchange"] = shape.exchange

    def plan(self, point: StagePoint, predicted: StepEstimate) -> ParallelPlan:
        """Return the plan of a point."""
        chosen = [
            several[config] for several, config in zip(self._blocks, point.configs, strict=True)
        ]
        # blocks outside of the chain run in the first stage
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


# ---- stages on slices


def splits_of_stages(
    whole: StageBlocks,
    split: SplitModel,
    count: int,
    wanted: PipelineRequest,
    global_batch_size: int,
) -> Iterator[tuple[SplitStages, list[PipelineShape]]]:
    """Yield the chain under each split that is a candidate, with the wanted pipelines of its size.

    Candidates are those for meshes of `count` ranks, and last of each size the layout
    ``tensor_sequence``, if the model can run in it.
    """
    for size in filter(wanted.takes, stage_tensor_sizes(whole.step.cluster, count)):
        shapes = [*pipeline_shapes(whole, count, global_batch_size, wanted, tensor=size)]
        if shapes:
            mesh = Mesh((Axis("data", count // size), Axis("tensor", size)))
            # the step on the samples of one data rank
            step = whole.step.with_batch_size(
                max(global_batch_size // (count // size), 1)
                if whole.step.graph.batch_scaling
                else whole.step.graph.batch_size
            )
            prices = prices_on(step, split, mesh=mesh)
            for chosen in split.candidates(prices):
                yield SplitStages(whole, split, chosen.layout, size), shapes
            # tensors between products split as well, if the model can run so
            with suppress(ValueError):
                layout = split.layout("tensor_sequence", prices, (Axis("tensor", size),))
                yield SplitStages(whole, split, layout, size), shapes


def stage_tensor_sizes(cluster: Cluster, count: int) -> list[int]:
    """Return the sizes that the tensor axis of a pipeline of `count` ranks may have.

    They leave several stages.
    """
    return [size for size in tensor_sizes(cluster, count) if size < count]


@dataclass(frozen=True, eq=False)
class SplitStages:
    """The chain `whole` on slices over `size` ranks, as `chosen` of `split` says."""

    whole: StageBlocks
    split: SplitModel
    chosen: SplitLayout
    size: int

    @cached_property
    def bound(self) -> StageBlocks:
        """A chain that takes at most as much, without a capture."""
        return EqualShares.of(self.whole, self.size)

    @cached_property
    def blocks(self) -> StageBlocks | None:
        """The chain, whose step is captured once; None where it cannot be, or runs other blocks."""
        step = step_on_slices(self.whole, self.split, self.chosen, size=self.size)
        if step is None or chain_of(step.graph) != self.whole.names:
            return None
        return blocks_on_slices(self.whole, step, calls=self.split.calls(self.chosen))

    @property
    def local(self) -> OpGraph | None:
        """The step of one of these ranks; None where it cannot be captured."""
        step = step_on_slices(self.whole, self.split, self.chosen, size=self.size)
        return None if step is None else step.graph


def blocks_of_plan(whole: StageBlocks, split: SplitModel | None, plan: ParallelPlan) -> StageBlocks:
    """Return the chain of a rank under a plan with stages.

    Raises:
        PlanError: the plan has other splits than those of the search.
    """
    if not plan.mesh.tensor_axes:
        return whole
    if split is None:
        raise PlanError(
            "a plan with a tensor axis is explained by the model that can be split: give it in the "
            "request"
        )
    chosen = placed_layout(plan.configs, plan.mesh)
    size = plan.mesh.ranks_along(plan.mesh.tensor_axes)
    step = step_on_slices(whole, split, chosen, size=size)
    if step is None:
        raise PlanError(f"the plan's step on slices is not known: {split.why_whole(size)}")
    return blocks_on_slices(whole, step, calls=split.calls(chosen))


def slices_mesh(size: int) -> Mesh:
    """Return a mesh of `size` ranks with slices; data ranks come with the pipeline's shape."""
    return Mesh((Axis("data", 1), Axis("tensor", size)))


def step_on_slices(
    whole: StageBlocks, split: SplitModel, chosen: SplitLayout, *, size: int
) -> TrainingStep | None:
    """Return the step of one of `size` ranks; None where it cannot be captured."""
    return step_in(chosen, whole.step, split, mesh=slices_mesh(size))


def blocks_on_slices(
    whole: StageBlocks, step: TrainingStep, *, calls: Mapping[str, int]
) -> StageBlocks:
    """Return the chain of the `step` of a rank with slices; `calls` as in `SplitModel.calls`."""
    # calls outside of all blocks count with the first one
    once = {whole.names[0]: calls[ROOT]} if ROOT in calls else {}
    return whole.of_slices(step, calls={**calls, **once})
