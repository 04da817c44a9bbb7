"""A pipeline by its number of stages: cut where stages take equally long, with as many microbatches
as suit the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_topt.graph.blocks import choose_blocks
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plugins.batch_parts import count_samples, split_batch
from lightning_topt.plugins.given_plans import PipelinePlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less


def microbatch_of(batch: Any, given: PipelinePlan, mesh: Mesh) -> tuple[Any, int]:
    """Return the first microbatch of `batch`, and how many a batch is to have. Raises ValueError as
    `split_batch`.
    """
    if given.schedule in CONTINUOUS_SCHEDULES:
        return batch, 1
    count = given.microbatches or choose_microbatches(count_samples(batch), mesh.pipeline_size)
    return split_batch(batch, count).batches[0], count


def pipeline_request(
    given: PipelinePlan, mesh: Mesh, search: SearchRequest, *, count: int, samples: int
) -> SearchRequest:
    """Return what to search for `count` microbatches like the captured one; where the graph is
    known for other sizes too, for any number that divides a batch of `samples`. `search` has the
    graph of one microbatch, with blocks for the stages.
    """
    is_free = search.graph.batch_scaling and given.microbatches is None
    return replace(
        search,
        global_batch_size=(samples if is_free else search.graph.batch_size * count)
        * mesh.data_parallel_size,
        pipelines=given.wanted(mesh, microbatches=None if is_free else count),
        exchanges=(),
    )


def choose_pipeline(
    given: PipelinePlan,
    mesh: Mesh,
    search: SearchRequest,
    *,
    choose: Callable[[PlanFrontier], PlanPoint],
) -> ParallelPlan:
    """Return the plan that `choose` takes of those of a `pipeline_request`.

    Raises PlanError where there are fewer blocks than stages, NoPlanFitsError.
    """
    num_stages, graph = mesh.pipeline_size * given.per_rank, search.graph
    names = [*dict.fromkeys(op.block for op in graph.ops if op.block)]
    if len(names) < num_stages:
        raise PlanError(
            f"{graph.model} has {len(names)} block(s) that can be stages of a pipeline "
            f"({', '.join(names) or 'none'}), and {num_stages} stages are wanted: choose fewer "
            "stages, or let the model consist of more submodules that are called one after the "
            "other"
        )
    plan = choose(search_plans(search)).plan
    return _recomputed(plan, graph) if given.recompute else plan


def _recomputed(plan: ParallelPlan, graph: OpGraph) -> ParallelPlan:
    again = {block.name for block in graph.blocks if block.recomputable}

    def with_it(block: BlockPlan) -> BlockPlan:
        return (
            replace(block, config=replace(block.config, recompute=True))
            if block.block in again
            else block
        )

    return replace(
        plan, stages=tuple(StagePlan(tuple(map(with_it, stage.blocks))) for stage in plan.stages)
    )


def with_blocks_for(graph: OpGraph, given: PipelinePlan, mesh: Mesh) -> OpGraph:
    """Return `graph` with blocks enough for the stages: smaller modules where too few are of the
    size worth a decision.
    """
    count = mesh.pipeline_size * given.per_rank
    if len(graph.blocks) > count:
        return graph
    finer = choose_blocks(graph, min_parameter_share=0.0, min_kept_share=0.0, max_share=0.5 / count)
    return graph.with_blocks(finer) if len(finer) > len(graph.blocks) else graph


def choose_microbatches(samples: int, ranks: int) -> int:
    """Return into how many parts a batch of `samples` is split for `ranks` stages at once.

    A multiple of the ranks, up to four times as many, that divides the batch if there is one.
    """
    multiples = [
        ranks * times for times in range(MICROBATCHES_PER_RANK, 0, -1) if ranks * times <= samples
    ]
    even = [count for count in multiples if samples % count == 0]
    return (even or multiples or [samples])[0]
