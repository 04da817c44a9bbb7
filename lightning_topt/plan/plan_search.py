"""`search_plans` tries every mesh, every placement of every block on it, every exchange of gradients; it returns one frontier
of plans.

graph = capture(module, batch)
optimizer = read_optimizer([torch.optim.AdamW(module.parameters())], named_parameters=module.named_parameters())
frontier = search_plans(SearchRequest(graph, cluster, optimizer, device_counts=(1, 2), global_batch_size=16))
choose(frontier.candidates, memory_limit=2**30).plan
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.exchange_model import legal_exchanges
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.chains import Chain, Choices, search_chains
from lightning_topt.plan.choose import PlanFrontier, PlanPoint
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, Prediction
from lightning_topt.plan.tensor_meshes import placed_tensors, tensor_meshes, tensor_sizes, tensor_steps
from lightning_topt.techniques.plan_batch import PlanBatch
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel


@dataclass(frozen=True)
class SearchRequest:
    """A `SearchRequest` says what to search for one model on one cluster.

    Args:
        graph, cluster, optimizer: see `TrainingStep`.
        device_counts: numbers of ranks to plan for. The global batch is the same for all, so each must divide it.
        global_batch_size: samples per step over all ranks.
        shards: whether gradients and parameters may be sharded; else they stay whole on every rank.
        exchanges: ways to exchange whole gradients that may be chosen besides DDP's all-reduce; those that a number of ranks
            cannot have are left out there.
        kernel_seconds: measured kernels (`measure_kernels`); only of use at the captured batch size.
        returns_memory: every plan is to keep a memory limit (see `TrainingStep`); plans that shard gradients always do so.
        capture_seconds: what making `graph` took, for the record.
        max_seconds: CPU seconds of the search for one number of devices, after which the best plans so far are returned with
            `error_bound`.
        split: the same step as one whose parameters can be split over tensor axes; None: no mesh has one.
        mesh: the only mesh to look at, of as many ranks as each of `device_counts`; None: all.
        layout: of the tensor axes of `mesh` (`split_layouts.LAYOUTS`); none: any of one axis.
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    device_counts: Sequence[int]
    global_batch_size: int
    shards: bool = True
    exchanges: Sequence[ExchangeOptions] = ()
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    returns_memory: bool = False
    capture_seconds: float = 0.0
    max_seconds: float = 10.0
    split: SplitModel | None = None
    mesh: Mesh | None = None
    layout: str = ""


def search_plans(request: SearchRequest) -> PlanFrontier:
    """Return the frontier over all meshes and exchanges at every number of devices; uniform plans are kept beside it.

    Raises ValueError when a device count does not divide the batch.
    """
    start, error_bound = time.perf_counter(), 0.0
    points: list[PlanPoint] = []
    uniform: list[PlanPoint] = []
    for count in request.device_counts:
        spaces = [*_spaces(request, count)]
        found = search_chains([c for space in spaces for c in space.chains()], max_seconds=request.max_seconds)
        points += [point for batch in found.batches for point in points_of(batch)]
        uniform += [point for space in spaces if space.own for point in points_of(space.uniform())]
        error_bound = max(error_bound, found.error_bound)
    return PlanFrontier.of(
        points,
        uniform=uniform,
        capture_seconds=request.capture_seconds,
        search_seconds=time.perf_counter() - start,
        error_bound=error_bound,
    )


def meshes(cluster: Cluster, count: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks: one data axis, then copies times shards for every way to divide."""
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
    placed = placed_tensors(step)
    blocks = [
        [BlockPlan(name, replace(c, **placed[name]) if name in placed else c) for c in legal]
        for name, legal in batch.configs.items()
    ]
    found = []
    for row, costs in zip(
        batch.plans.tolist(), zip(batch.seconds, batch.peak_bytes, batch.compute_seconds, strict=True), strict=True
    ):
        seconds, peak, compute = map(float, costs)
        plan = ParallelPlan.of_blocks(
            [legal[index] for legal, index in zip(blocks, row, strict=True)],
            mesh=step.mesh,
            model=step.graph.model,
            fingerprint=step.graph.fingerprint,
            batch_size=int(step.batch_size),
            cluster=step.cluster.name,
            predicted=Prediction(seconds, peak, compute, max(seconds - compute, 0.0)),
            gradient_exchange=step.exchange,
        )
        found.append(PlanPoint(seconds, peak, step.mesh.size, plan))
    return found


@dataclass(frozen=True)
class _Space:
    """Plans on one mesh: `groups` are storages that blocks may have beside one another, `own` those of uniform plans."""

    costs: PlanCosts
    groups: Sequence[Collection[Storage]]
    own: Collection[Storage]

    def chains(self) -> Iterator[Chain]:
        """Yield one chain for each group and configuration of the block ``""``."""
        for group in self.groups:
            configs = self._configs(group)
            if all(configs.values()):
                choices = Choices(self.costs, configs)
                yield from (Chain(choices, root) for root in configs[ROOT])

    def uniform(self) -> PlanBatch:
        """Return the plans with one storage for all blocks, without and with recomputation; a block that cannot have that takes
        what is nearest.
        """
        configs = self._configs(self.own)
        kinds = dict.fromkeys(config for several in configs.values() for config in several)
        rows = dict.fromkeys(tuple(_nearest(several, kind) for several in configs.values()) for kind in kinds)
        return PlanBatch(self.costs, configs, np.array([*rows], np.intp))

    def _configs(self, group: Collection[Storage]) -> dict[str, list[OpConfig]]:
        blocks = self.costs.step.graph.blocks
        return {block.name: [c for c in self.costs.configs(block) if c.storage in group] for block in blocks}


def _nearest(configs: Sequence[OpConfig], kind: OpConfig) -> int:
    """The index of the configuration that is most like `kind`."""

    def distance(index: int) -> tuple[int, int, bool]:
        config = configs[index]
        axes = [len(c.storage.sharded_axes("optimizer_state")) for c in (config, kind)]
        levels = abs(config.storage.level - kind.storage.level)
        return abs(axes[0] - axes[1]), levels, config.recompute != kind.recompute

    return min(range(len(configs)), key=distance)


def _spaces(request: SearchRequest, count: int) -> Iterator[_Space]:
    """The plans for `count` ranks: on every mesh, with every exchange."""
    cluster, samples = request.cluster, request.global_batch_size
    if request.mesh is not None:
        yield from _spaces_on(request, request.mesh)
        return
    sizes = tensor_sizes(cluster, count) if request.split is not None else []
    sizes = [size for size in sizes if samples % (count // size) == 0]
    if samples % count and not sizes:
        raise ValueError(
            f"a global batch of {samples} samples cannot be divided evenly over {count} devices; choose a "
            f"batch size that is a multiple of {count}, or other device counts"
        )
    first, *rest = meshes(cluster, count)
    common = request.graph, cluster, request.optimizer, first, max(samples // count, 1)
    whole = TrainingStep(*common, request.kernel_seconds, returns_memory=request.returns_memory)
    if samples % count == 0:
        legal = (legal_exchanges(options, cluster=cluster, world_size=count) for options in request.exchanges)
        exchanges = dict.fromkeys(itertools.chain.from_iterable(legal))
        yield from _spaces_of(whole, rest, shards=request.shards, exchanges=[*exchanges])
    for size in sizes:
        assert request.split is not None
        first, *others = tensor_meshes(cluster, count, size)
        of_rank = replace(whole, batch_size=samples // (count // size))
        for step in tensor_steps(of_rank, request.split, mesh=first):
            yield from _spaces_of(step, others, shards=request.shards)


def _spaces_on(request: SearchRequest, mesh: Mesh) -> Iterator[_Space]:
    """The plans on one mesh."""
    parts = mesh.data_parallel_size
    if request.global_batch_size % parts:
        raise ValueError(
            f"a global batch of {request.global_batch_size} samples cannot be divided evenly over {parts} data ranks; choose a "
            f"batch size that is a multiple of {parts}"
        )
    common = request.graph, request.cluster, request.optimizer, mesh, request.global_batch_size // parts
    step = TrainingStep(*common, request.kernel_seconds, returns_memory=request.returns_memory)
    if not mesh.tensor_axes:
        yield from _spaces_of(step, (), shards=request.shards)
        return
    assert request.split is not None, "a mesh with a tensor axis needs a model that can be split"
    for split in tensor_steps(step, request.split, mesh=mesh, layout=request.layout):
        yield from _spaces_of(split, (), shards=request.shards)


def _spaces_of(
    step: TrainingStep, others: Sequence[Mesh], *, shards: bool, exchanges: Sequence[ExchangeOptions] = ()
) -> Iterator[_Space]:
    """The plans of `step`, on its mesh and on `others` of as many ranks."""
    for exchange in (None, *exchanges):
        yield _whole_gradients(PlanCosts(step if exchange is None else replace(step, exchange=exchange)))
    if shards:
        returning = step if step.returns_memory else replace(step, returns_memory=True)
        for mesh in (step.mesh, *others):
            yield _sharded_gradients(PlanCosts(returning.on(mesh)))


def _storages(costs: PlanCosts) -> list[Storage]:
    found = (config.storage for block in costs.step.graph.blocks for config in costs.configs(block))
    return [*dict.fromkeys(found)]


def _whole_gradients(costs: PlanCosts) -> _Space:
    """Plans of plain data parallelism by themselves, then all whose gradients are whole."""
    whole = [storage for storage in _storages(costs) if not storage.sharded_axes("gradients")]
    plain = [storage for storage in whole if storage.level == 0]
    return _Space(costs, [plain, whole] if whole != plain else [plain], own=whole)


def _sharded_gradients(costs: PlanCosts) -> _Space:
    """Plans that only the mesh of `costs` has: gradients sharded along its last axis, by themselves and with all others."""
    storages, axes = _storages(costs), costs.step.mesh.data_axes
    own = [storage for storage in storages if storage.sharded_axes("gradients") == axes[-1:]]
    return _Space(costs, [own, storages] if own else [], own=own)
