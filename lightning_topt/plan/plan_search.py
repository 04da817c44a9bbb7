"""`search_plans` tries every mesh, every placement of every block on it, every exchange of
gradients; it returns one frontier of plans.

graph = capture(module, batch) optimizer = read_optimizer([torch.optim.AdamW(module.parameters())],
named_parameters=module.named_parameters()) frontier = search_plans(SearchRequest(graph, cluster,
optimizer, device_counts=(1, 2), global_batch_size=16)) choose(frontier.candidates,
memory_limit=2**30).plan
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.exchange_model import legal_exchanges
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.no_trace import no_collection
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.chains import NO_BOUND, FoundPlans, search_chains
from lightning_topt.plan.continuous_plans import search_pipelines_for
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, Prediction
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_space import PlanSpace, spaces_of
from lightning_topt.plan.search_request import SearchRequest, stage_blocks, step_on
from lightning_topt.plan.split_stages import splits_of_stages
from lightning_topt.plan.tensor_meshes import (
    placed_tensors,
    saving_no_computation,
    tensor_meshes,
    tensor_sizes,
    tensor_steps,
)
from lightning_topt.techniques.plan_batch import PlanBatch
from lightning_topt.techniques.technique import has_whole_gradients


@no_collection()  # it takes long, with all that a capture leaves
def search_plans(request: SearchRequest) -> PlanFrontier:
    """Return the frontier over all meshes and exchanges at every number of devices; uniform plans
    are kept beside it.

    Raises ValueError when a device count does not divide the batch, PlanError where only plans that
    split the model are asked for and nothing of it can be split.
    """
    start, error_bound = time.perf_counter(), 0.0
    points: list[PlanPoint] = []
    uniform: list[PlanPoint] = []
    for count in request.device_counts:
        found_spaces = 0
        for spaces, found in _searched(request, count):
            points += [point for batch in found.batches for point in points_of(batch)]
            uniform += [
                point for space in spaces if space.own for point in points_of(space.uniform)
            ]
            error_bound, found_spaces = (
                max(error_bound, found.error_bound),
                found_spaces + len(spaces),
            )
        if request.pipelines is not None and request.mesh is None and not request.own_batches:
            staged, plain, error = search_pipelines_for(
                stage_blocks(request),
                count,
                request.pipelines,
                points,
                stale=request.stale,
                split=request.split,
                **_limits(request),
            )
            points, uniform, found_spaces = (
                points + staged,
                uniform + plain,
                found_spaces + len(staged),
            )
            error_bound = max(error_bound, min(error, NO_BOUND))
        if not found_spaces:
            raise PlanError(_why_none(replace(request, device_counts=(count,))))
    return PlanFrontier.of(
        points,
        uniform=uniform,
        capture_seconds=request.capture_seconds,
        search_seconds=time.perf_counter() - start,
        error_bound=error_bound,
    )


def meshes(cluster: Cluster, count: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks: one data axis, then copies times shards for every way to
    divide.
    """
    per_node = cluster.devices_per_node
    whole = "intra" if count <= per_node else "inter"
    yield data_mesh(count, scope=whole)
    for shard in range(2, count // 2 + 1):
        if count % shard == 0:
            inside = shard <= per_node and per_node % shard == 0
            yield hybrid_mesh(count // shard, shard, scopes=(whole, "intra" if inside else "inter"))


def points_of(batch: PlanBatch) -> list[PlanPoint]:
    """Return the plans of `batch` with what they are predicted to cost."""
    step = batch.costs.step
    placed, known = placed_tensors(step), dict[tuple[int, int], OpConfig]()
    numbers: dict[Any, int] = {}
    alike = {
        name: numbers.setdefault(tuple(entries.items()), len(numbers))
        for name, entries in placed.items()
    }

    def on_slices(config: OpConfig, name: str) -> OpConfig:
        """Return one object for blocks that are split alike: what is said of it need not be checked
        for each of them.
        """
        key = id(config), alike[name]
        if key not in known:
            known[key] = replace(config, **placed[name])
        return known[key]

    blocks = [
        [BlockPlan(name, on_slices(c, name) if name in placed else c) for c in legal]
        for name, legal in batch.configs.items()
    ]
    found = []
    for row, costs in zip(
        batch.plans.tolist(),
        zip(batch.seconds, batch.peak_bytes, batch.compute_seconds, strict=True),
        strict=True,
    ):
        seconds, peak, compute = map(float, costs)
        placed_blocks = [legal[index] for legal, index in zip(blocks, row, strict=True)]
        plan = ParallelPlan.of_blocks(
            placed_blocks,
            mesh=step.mesh,
            model=step.graph.model,
            fingerprint=step.graph.fingerprint,
            batch_size=int(step.batch_size),
            cluster=step.cluster.name,
            predicted=Prediction(seconds, peak, compute, max(seconds - compute, 0.0)),
            gradient_exchange=step.exchange,
            num_microbatches=step.num_microbatches,
            joint=step.joint,
            gradient_views=step.gradient_views
            and any(has_whole_gradients(block.config) for block in placed_blocks),
        )
        found.append(PlanPoint(seconds, peak, step.mesh.size, plan))
    return found


def local_graphs(request: SearchRequest) -> list[OpGraph]:
    """Return the steps on slices that `search_plans` may look at, each once: their kernels may be
    measured before it.
    """
    found: list[OpGraph | None] = []
    for count in request.device_counts:
        if request.pipelines is None or not request.pipelines.is_given:
            found += [step.graph for step, _ in _tensor_steps(request, count)]
        if request.pipelines is not None and request.split is not None and request.mesh is None:
            given = request.pipelines, request.global_batch_size
            chains = splits_of_stages(stage_blocks(request), request.split, count, *given)
            found += [chain.local for chain, _ in chains]
    return [*{id(graph): graph for graph in found if graph is not None}.values()]


def _searched(
    request: SearchRequest, count: int
) -> Iterator[tuple[Sequence[PlanSpace], FoundPlans]]:
    """Plans for `count` ranks and the best of them: without a tensor axis, then on the meshes with
    one that may be better.
    """
    if request.pipelines is not None and request.pipelines.is_given:
        return
    left, batches = request.max_seconds, list[PlanBatch]()
    for spaces in _by_views(_spaces(request, count)):
        start = time.thread_time()
        found = search_chains(
            [c for space in spaces for c in space.chains()],
            max_seconds=left,
            epsilon=request.epsilon,
        )
        found = replace(
            found, batches=(*found.batches, *(space.smallest() for space in spaces if space.own))
        )
        left = max(left - (time.thread_time() - start), 1e-3)
        batches += found.batches
        yield spaces, found
    if request.mesh is not None or request.own_batches:
        return
    known = KnownPlans.of(batches).scaled(1 / (1 + request.epsilon))
    for spaces in _by_views(_tensor_spaces(request, count, known)):
        start = time.thread_time()
        chains = [c for space in spaces for c in space.chains() if known.may_gain(c.table)]
        yield spaces, search_chains(chains, max_seconds=left, epsilon=request.epsilon)
        left = max(left - (time.thread_time() - start), 1e-3)


def _by_views(spaces: Iterable[PlanSpace]) -> Iterator[list[PlanSpace]]:
    """Yield the spaces whose gradients are tensors of their own, then those where they are views,
    each by themselves.
    """
    found = [*spaces]
    for are_views in (False, True):
        if some := [space for space in found if space.costs.step.gradient_views == are_views]:
            yield some


def _limits(request: SearchRequest) -> dict[str, Any]:
    names = "global_batch_size", "epsilon", "max_seconds"
    return {name: getattr(request, name) for name in names}


def _spaces(request: SearchRequest, count: int) -> Iterator[PlanSpace]:
    """The plans for `count` ranks: on every mesh without a tensor axis, with every exchange; or on
    the given mesh.
    """
    cluster, samples = request.cluster, request.global_batch_size
    if request.mesh is not None:
        yield from _spaces_on(request, request.mesh)
    elif request.own_batches:
        for step, _ in _tensor_steps(request, count):
            step = saving_no_computation(step, step_on(request, step.mesh))
            step = step if request.evaluates else replace(step, joined_bytes=0.0)
            yield from spaces_of(step, (), shards=False, views=request.gradient_views)
    elif samples % count == 0:
        first, *rest = meshes(cluster, count)
        legal = (
            legal_exchanges(options, cluster=cluster, world_size=count)
            for options in request.exchanges
        )
        exchanges = [*dict.fromkeys(itertools.chain.from_iterable(legal))]
        step, views = step_on(request, first), request.gradient_views
        yield from spaces_of(step, rest, shards=request.shards, exchanges=exchanges, views=views)
    elif not _tensor_sizes(request, count) and request.pipelines is None:
        raise ValueError(_why_indivisible(samples, count))


def _why_indivisible(samples: int, count: int) -> str:
    return (
        f"a global batch of {samples} samples cannot be divided evenly over {count} devices; "
        "choose a "
        f"batch size that is a multiple of {count}, or other device counts"
    )


def _tensor_sizes(request: SearchRequest, count: int) -> list[int]:
    """Sizes of the tensor axes to look at, those that leave every data rank as many samples."""
    sizes = tensor_sizes(request.cluster, count) if request.split is not None else []
    return [
        size
        for size in sizes
        if request.own_batches or request.global_batch_size % (count // size) == 0
    ]


def _tensor_steps(
    request: SearchRequest,
    count: int,
    is_needed: Callable[[Sequence[Mesh], TrainingStep], bool] | None = None,
) -> Iterator[tuple[TrainingStep, Sequence[Mesh]]]:
    """The steps on slices, each on one mesh, and the other meshes of the same tensor axis;
    `is_needed` as `tensor_steps` asks it.
    """
    if request.split is None or (request.mesh is not None and not request.mesh.tensor_axes):
        return
    if request.mesh is not None:
        of_tensor = [[request.mesh]]
    else:
        of_tensor = [
            [*tensor_meshes(request.cluster, count, size)] for size in _tensor_sizes(request, count)
        ]
    for first, *others in of_tensor:
        bound = None if is_needed is None else partial(is_needed, others)
        whole = step_on(request, first)
        for step in tensor_steps(
            whole, request.split, mesh=first, layout=request.layout, is_needed=bound
        ):
            yield step, others


def _tensor_spaces(request: SearchRequest, count: int, known: KnownPlans) -> Iterator[PlanSpace]:
    """The plans for `count` ranks on meshes with a tensor axis, those of splits with which some may
    be better than all of `known`.
    """

    def is_needed(others: Sequence[Mesh], step: TrainingStep) -> bool:
        spaces = spaces_of(step, others, shards=request.shards, views=request.gradient_views)
        return any(known.may_gain(chain.table) for space in spaces for chain in space.chains())

    # Of kernels that are measured no formula is a bound.
    for step, others in _tensor_steps(request, count, None if request.kernels else is_needed):
        yield from spaces_of(step, others, shards=request.shards, views=request.gradient_views)


def _spaces_on(request: SearchRequest, mesh: Mesh) -> Iterator[PlanSpace]:
    """The plans on one mesh."""
    parts = mesh.data_parallel_size
    if request.global_batch_size % parts:
        raise ValueError(
            f"a global batch of {request.global_batch_size} samples cannot be divided evenly over "
            f"{parts} data ranks; choose a "
            f"batch size that is a multiple of {parts}"
        )
    if not mesh.tensor_axes:
        yield from spaces_of(
            step_on(request, mesh), (), shards=request.shards, views=request.gradient_views
        )
        return
    assert request.split is not None, "a mesh with a tensor axis needs a model that can be split"
    for split, _ in _tensor_steps(request, mesh.size):
        yield from spaces_of(split, (), shards=request.shards, views=request.gradient_views)


def why_unsplit(request: SearchRequest) -> dict[int, str]:
    """Return why splits were left out that the search had looked at, by the size of the tensor
    axis.
    """
    if request.split is None:
        return {}
    whys = {size: request.split.why_whole(size) for size in request.split.sizes}
    return {size: why for size, why in whys.items() if why}


def _why_none(request: SearchRequest) -> str:
    """All meshes of the request have a tensor axis, and no step on slices is known."""
    if request.mesh is None and not _tensor_sizes(request, *request.device_counts):
        return _why_indivisible(request.global_batch_size, *request.device_counts)
    found = why_unsplit(request)
    sizes, whys = " or ".join(map(str, found)), "; ".join(dict.fromkeys(found.values()))
    return (
        f"nothing of this model can be split over {sizes} ranks: {whys}. Choose another number "
        "of ranks or another plan"
    )
