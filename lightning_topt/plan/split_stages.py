"""Stages whose ranks hold slices: the chain of blocks under every split of a model that is worth a
look.

The splits are those of meshes with a tensor axis alone, of as many ranks, so a step on slices is
captured once for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.crossings import chain_of
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, pipeline_shapes
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape
from lightning_topt.plan.tensor_meshes import prices_on, split_of, step_of, tensor_sizes
from lightning_topt.techniques.tensor_parallel.model_splits import ModelSplit
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices


@dataclass(frozen=True, eq=False)
class SplitStages:
    """The chain `whole` under the split `chosen` of `split`, over `size` ranks; `prices` are those
    that it was found with.
    """

    whole: StageBlocks
    split: SplitModel
    chosen: ModelSplit
    size: int
    prices: SplitPrices

    @cached_property
    def bound(self) -> StageBlocks:
        """A chain that takes at most as much, without a capture."""
        return self._on(self.split.bound_graph(self.chosen, self.prices), same_operators=True)

    @cached_property
    def blocks(self) -> StageBlocks | None:
        """The chain, whose step is captured once; None where it cannot be, or runs other blocks."""
        local = self.local
        return None if local is None or chain_of(local) != self.whole.names else self._on(local)

    @property
    def local(self) -> OpGraph | None:
        """The step of one of these ranks; None where it cannot be captured."""
        return self.split.local_graph(self.chosen, self.size)

    def _on(self, local: OpGraph, *, same_operators: bool = False) -> StageBlocks:
        calls = self.split.calls(self.chosen)
        given: dict[str, Any] = {
            "size": self.size,
            "calls": calls,
            "same_operators": same_operators,
        }
        return blocks_on_slices(self.whole, local, self.chosen, **given)


def blocks_on_slices(
    whole: StageBlocks,
    local: OpGraph,
    chosen: ModelSplit,
    *,
    size: int,
    calls: Mapping[str, int],
    same_operators: bool = False,
) -> StageBlocks:
    """Return the chain of the step `local` of one of `size` ranks; `calls` as `SplitModel.calls`
    has them, `same_operators` as in `StageBlocks.of_slices`.
    """
    mesh = Mesh((Axis("data", 1), Axis("tensor", size)))
    step = step_of(whole.step, local, mesh=mesh, split=chosen)
    once = {whole.names[0]: calls[ROOT]} if ROOT in calls else {}
    return whole.of_slices(step, calls={**calls, **once}, same_operators=same_operators)


def stage_tensor_sizes(cluster: Cluster, count: int) -> list[int]:
    """Return the sizes that the tensor axis of a pipeline of `count` ranks may have: those that
    leave several stages.
    """
    return [size for size in tensor_sizes(cluster, count) if size < count]


def splits_of_stages(
    whole: StageBlocks,
    split: SplitModel,
    count: int,
    wanted: PipelineRequest,
    global_batch_size: int,
) -> Iterator[tuple[SplitStages, list[PipelineShape]]]:
    """Yield the chain under each split that is a candidate for meshes of `count` ranks, and wanted
    pipelines of its size.
    """
    for size in filter(wanted.takes, stage_tensor_sizes(whole.step.cluster, count)):
        shapes = [*pipeline_shapes(whole, count, global_batch_size, wanted, tensor=size)]
        if shapes:
            mesh = Mesh((Axis("data", count // size), Axis("tensor", size)))
            prices = prices_on(
                _of_data_rank(whole.step, count // size, global_batch_size), split, mesh=mesh
            )
            for chosen in split.candidates(prices):
                yield SplitStages(whole, split, chosen, size, prices), shapes


def _of_data_rank(step: TrainingStep, ranks: int, global_batch_size: int) -> TrainingStep:
    """The step on the samples of one of so many data ranks."""
    samples = max(global_batch_size // ranks, 1)
    return step.with_batch_size(samples if step.graph.batch_scaling else step.graph.batch_size)


def blocks_of_plan(whole: StageBlocks, split: SplitModel | None, plan: ParallelPlan) -> StageBlocks:
    """Return the chain of a rank under a plan with stages. Raises PlanError for other splits than
    those of the search.
    """
    if not plan.mesh.tensor_axes:
        return whole
    if split is None:
        raise PlanError(
            "a plan with a tensor axis is explained by the model that can be split: give it in the "
            "request"
        )
    chosen, size = split_of(plan), plan.mesh.ranks_along(plan.mesh.tensor_axes)
    local = split.local_graph(chosen, size)
    if local is None:
        raise PlanError(f"the plan's step on slices is not known: {split.why_whole(size)}")
    return blocks_on_slices(whole, local, chosen, size=size, calls=split.calls(chosen))
