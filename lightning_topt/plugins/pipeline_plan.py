"""A pipeline by its number of stages: cut where stages take equally long, with as many microbatches as suit the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from lightning_topt.costs.cluster import Device
from lightning_topt.costs.compute import KernelKey, estimate_pass_seconds
from lightning_topt.graph.blocks import choose_blocks
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Kernel, OpGraph
from lightning_topt.plan.choose import PlanFrontier, PlanPoint
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.presets import PRESETS
from lightning_topt.plugins.batch_parts import count_samples, split_batch
from lightning_topt.plugins.read_options import PipelinePlan

MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less


def microbatch_of(batch: Any, given: PipelinePlan, mesh: Mesh) -> tuple[Any, int]:
    """Return the first microbatch of `batch`, and how many a batch is to have. Raises ValueError as `split_batch`."""
    count = given.microbatches or choose_microbatches(count_samples(batch), mesh.pipeline_size)
    return split_batch(batch, count).batches[0], count


def choose_pipeline(
    given: PipelinePlan,
    mesh: Mesh,
    search: SearchRequest,
    *,
    count: int,
    samples: int,
    choose: Callable[[PlanFrontier], PlanPoint],
) -> ParallelPlan:
    """Return the plan that `choose` takes, for `count` microbatches like the captured one; where the graph is known for other
    sizes too, for any number that divides a batch of `samples`.

    `search` has the graph of one microbatch. Raises PlanError where there are fewer blocks than stages, NoPlanFitsError.
    """
    num_stages = mesh.pipeline_size * given.per_rank
    graph = _with_enough_blocks(search.graph, num_stages)
    seconds = block_seconds(graph, search.cluster.device, measured=search.kernel_seconds)
    if len(seconds) < num_stages:
        raise PlanError(
            f"{graph.model} has {len(seconds)} block(s) that can be stages of a pipeline ({', '.join(seconds) or 'none'}), and "
            f"{num_stages} stages are wanted: choose fewer stages, or let the model consist of more submodules that are called "
            "one after the other"
        )
    is_free = graph.batch_scaling and given.microbatches is None
    frontier = search_plans(
        replace(
            search,
            graph=graph,
            global_batch_size=(samples if is_free else graph.batch_size * count) * mesh.data_parallel_size,
            pipelines=given.wanted(mesh, microbatches=None if is_free else count),
            exchanges=(),
        )
    )
    points = [point for point in frontier.candidates if point.plan.mesh.pipeline_size == mesh.pipeline_size]
    if not points:  # with these stages on other numbers of ranks there are better ones
        return _cut_evenly(given, mesh, graph, seconds, count)
    plan = choose(replace(frontier, points=tuple(points), uniform=())).plan
    return _recomputed(plan, graph) if given.recompute else plan


def _recomputed(plan: ParallelPlan, graph: OpGraph) -> ParallelPlan:
    again = {block.name for block in graph.blocks if block.recomputable}

    def with_it(block: BlockPlan) -> BlockPlan:
        return replace(block, config=replace(block.config, recompute=True)) if block.block in again else block

    return replace(plan, stages=tuple(StagePlan(tuple(map(with_it, stage.blocks))) for stage in plan.stages))


def _cut_evenly(
    given: PipelinePlan, mesh: Mesh, graph: OpGraph, seconds: Mapping[str, float], count: int
) -> ParallelPlan:
    names, storage = list(seconds), PRESETS["ddp"].storage(mesh)
    stages, start = [], 0
    for stop in cut_evenly([*seconds.values()], mesh.pipeline_size * given.per_rank):
        outside = () if start else (BlockPlan("", OpConfig(storage)),)
        stages.append(StagePlan((*(BlockPlan(name, OpConfig(storage)) for name in names[start:stop]), *outside)))
        start = stop
    plan = ParallelPlan(
        mesh, tuple(stages), graph.model, graph.fingerprint, num_microbatches=count, schedule=given.schedule
    )
    return _recomputed(plan, graph) if given.recompute else plan


def _with_enough_blocks(graph: OpGraph, count: int) -> OpGraph:
    """Take smaller modules for blocks where there are too few of the size that is worth a decision."""
    if len(graph.blocks) > count:
        return graph
    finer = choose_blocks(graph, min_parameter_share=0.0, min_kept_share=0.0, max_share=0.5 / count)
    return graph.with_blocks(finer) if len(finer) > len(graph.blocks) else graph


def block_seconds(graph: OpGraph, device: Device, *, measured: Mapping[KernelKey, float]) -> dict[str, float]:
    """Return the seconds of forward and backward of each block in the order of their first calls, on `device`.

    What is between two blocks counts for the former, what is before the first for that one.
    """
    passes: dict[str, tuple[list[Kernel], list[Kernel]]] = {}
    before: tuple[list[Kernel], list[Kernel]] = ([], [])
    current = ""
    for op in graph.ops:
        current = op.block or current
        forward, backward = passes.setdefault(current, ([], [])) if current else before
        forward += op.forward
        backward += op.backward
    for first in list(passes.values())[:1]:
        first[0].extend(before[0])
        first[1].extend(before[1])

    def seconds(kernels: list[Kernel]) -> float:
        size = graph.batch_size
        return estimate_pass_seconds(
            kernels, batch_size=size, device=device, measured=measured, measured_batch_size=size
        )

    return {block: seconds(forward) + seconds(backward) for block, (forward, backward) in passes.items()}


def cut_evenly(seconds: Sequence[float], parts: int) -> list[int]:
    """Return where each of `parts` parts of the row `seconds` ends, so that the longest takes as little as it can.

    Exact, by dynamic programming; no part is empty. Among equals the sum of squares is the least.
    """
    count = len(seconds)
    assert 1 <= parts <= count
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0), *[(inf, inf, 0)] * count]]
    for _ in range(parts):
        row: list[tuple[float, float, int]] = [(inf, inf, 0)] * (count + 1)
        for stop in range(1, count + 1):
            total = 0.0
            for start in reversed(range(stop)):
                total += seconds[start]
                longest, squares, _start = best[-1][start]
                row[stop] = min(row[stop], (max(longest, total), squares + total**2, start))
        best.append(row)
    ends, stop = [], count
    for row in reversed(best[1:]):
        ends.append(stop)
        stop = row[stop][2]
    return ends[::-1]


def choose_microbatches(samples: int, ranks: int) -> int:
    """Return into how many parts a batch of `samples` is split for `ranks` stages at once.

    A multiple of the ranks, up to four times as many, that divides the batch if there is one.
    """
    multiples = [ranks * times for times in range(MICROBATCHES_PER_RANK, 0, -1) if ranks * times <= samples]
    even = [count for count in multiples if samples % count == 0]
    return (even or multiples or [samples])[0]
