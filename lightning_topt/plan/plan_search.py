"""The search of plans: every mesh, placement of blocks on it and exchange of gradients.

`search_plans` returns one frontier of plans:

    graph = capture(module, batch)
    optimizers = [torch.optim.AdamW(module.parameters())]
    optimizer = read_optimizer(optimizers, named_parameters=module.named_parameters())
    request = SearchRequest(graph, cluster, optimizer, device_counts=(1, 2), global_batch_size=16)
    frontier = search_plans(request)
    choose(frontier.candidates, memory_limit=2**30).plan

For each number of devices there are three searches, each of which knows what those before it found:

    1. meshes without a tensor axis     chains of blocks on each mesh (`plan.chains`)
    2. meshes with a tensor axis        the same on slices (`split_steps`)
    3. pipelines                        cuts of the chain into stages (`plan.staged_plans`)

A fit (`plugins.planning`, `plugins.searched_plan`) and commands
that plan call it, once graph and costs are there. From its frontier `choose` picks the plan that an
`Engine` runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import legal_exchanges
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.sizes import ROOT, parameter_bytes
from lightning_topt.costs.training_step import MICROBATCH_NOTE_BYTES, CompiledCost, TrainingStep
from lightning_topt.graph.capture import no_collection
from lightning_topt.graph.mesh_axes import Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.chains import (
    NO_BOUND,
    Chain,
    Choices,
    FoundPlans,
    KnownPlans,
    search_chains,
)
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StepEstimate
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PipelineShape, bytes_of_rank, shape_of_plan
from lightning_topt.plan.staged_plans import (
    blocks_of_plan,
    search_pipelines_for,
    search_stages_for,
    splits_of_stages,
)
from lightning_topt.techniques.data_parallel import has_buckets
from lightning_topt.techniques.plan_costs import PlanBatch, PlanCosts, Rows
from lightning_topt.techniques.technique import has_unsharded_gradients
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import (
    placed_tensors,
    saving_no_computation,
    tensor_meshes,
    tensor_sizes,
    tensor_steps,
)


@dataclass(frozen=True)
class SearchRequest:
    """What to search for one model on one cluster.

    Args:
        graph, cluster, optimizer: see `TrainingStep`.
        device_counts: numbers of ranks to plan for. The global batch is the same for all, so each
            must divide it.
        global_batch_size: samples per step over all ranks.
        shards: whether gradients and parameters may be sharded; else every rank has them unsharded.
        exchanges: ways to exchange unsharded gradients that may be chosen besides DDP's all-reduce.
            Those that a number of ranks cannot have are left out there.
        local_steps: ways of data ranks to train alone and meet once in
            many steps, which may be chosen as well: other trainings, to be compared by how many
            steps they need (`step_factors`).
        kernel_seconds: measured kernels (`measure_kernels`); only of use at the captured batch
            size.
        returns_memory: every plan is to keep a memory limit (see `TrainingStep`); plans that shard
            gradients always do.
        capture_seconds: what making `graph` took, for the record.
        max_seconds: CPU seconds of the search for one number of devices, without captures of steps
            on slices. Afterwards the best plans so far are returned with `error_bound`.
        split: the same step as one whose parameters can be split over tensor axes; None: no mesh
            has one.
        mesh: the only mesh to search, of as many ranks as each of `device_counts`; None: all.
        own_batches: search meshes with a tensor axis only, whose ranks bring a batch each, as data
            ranks do. The ranks of a tensor group run these as microbatches.
        evaluates: whether such a run has evaluations, for which every rank needs the full
            parameters.
        layout: of the tensor axes of `mesh` (`split_layouts.LAYOUTS`); none: any of one axis.
        pipelines: search plans with stages too, as asked for; None: none. With a number of stages,
            a schedule or microbatches, plans with stages alone.
        stale: with `pipelines`, search asynchronous ones as well, whose weights are stale;
            None: none.
        gradient_views: whether unsharded gradients are views of DDP's buckets (see `ParallelPlan`):
            what plans may have. Those that have different ones are not compared with one another.
        epsilon: plans that others beat by less than this share, in both costs, may be left out.
        offloads: shards may be offloaded, on meshes without a tensor axis.
        compiled: blocks that may be compiled, on such meshes (see `TrainingStep`).
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    device_counts: Sequence[int]
    global_batch_size: int
    shards: bool = True
    exchanges: Sequence[GradientMethod] = ()
    local_steps: Sequence[LocalMethod] = ()
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    returns_memory: bool = False
    capture_seconds: float = 0.0
    max_seconds: float = 10.0
    split: SplitModel | None = None
    mesh: Mesh | None = None
    own_batches: bool = False
    evaluates: bool = True
    layout: str = ""
    pipelines: PipelineRequest | None = None
    stale: StaleWeights | None = None
    gradient_views: Sequence[bool] = (False,)
    epsilon: float = 0.0
    offloads: bool = False
    compiled: Mapping[str, CompiledCost] = field(default_factory=dict)


@no_collection()  # it takes long, with all that a capture leaves
def search_plans(
    request: SearchRequest, *, progress: Callable[[str], None] | None = None
) -> PlanFrontier:
    """Return the frontier over all meshes and exchanges at every number of devices.

    Uniform plans are kept beside it.

    Args:
        request: what to search.
        progress: is called with what is searched now.

    Raises:
        ValueError: a device count does not divide the batch.
        PlanError: only plans that split the model are asked for, and nothing of it can be split.
    """
    start, error_bound = time.perf_counter(), 0.0
    points: list[PlanPoint] = []
    uniform: list[PlanPoint] = []
    show = progress or (lambda _: None)
    for count in request.device_counts:
        found_spaces = 0
        # chains of blocks, on meshes without and with a tensor axis
        for spaces, found in _searched(request, count, show):
            points += [
                p for batch, rows in _best_rows(found.batches) for p in points_of(batch, rows)
            ]
            uniform += [
                point
                for space in spaces
                if space.own
                for point in points_of(space.uniform, np.arange(len(space.uniform.plans)))
            ]
            error_bound = max(error_bound, found.error_bound)
            found_spaces += len(spaces)
        # stages of pipelines
        if request.pipelines is not None and request.mesh is None and not request.own_batches:
            show(f"searching plans with stages for {count} devices")
            staged, plain, error = search_pipelines_for(
                stage_blocks(request),
                count,
                request.pipelines,
                points,
                stale=request.stale,
                split=request.split,
                exchanges=request.exchanges,
                global_batch_size=request.global_batch_size,
                epsilon=request.epsilon,
                max_seconds=request.max_seconds,
            )
            points, uniform = points + staged, uniform + plain
            found_spaces += len(staged)
            error_bound = max(error_bound, min(error, NO_BOUND))
        # not one space of plans: what was asked for cannot be, on so many ranks
        if not found_spaces:
            raise PlanError(_why_none(replace(request, device_counts=(count,))))
    return PlanFrontier.of(
        points,
        uniform=uniform,
        capture_seconds=request.capture_seconds,
        search_seconds=time.perf_counter() - start,
        error_bound=error_bound,
    )


def _searched(
    request: SearchRequest, count: int, show: Callable[[str], None]
) -> Iterator[tuple[Sequence[PlanSpace], FoundPlans]]:
    """Yield spaces of plans for `count` ranks with the best plans of them.

    First those without a tensor axis, then those with one.
    """
    # stages alone are asked for
    if request.pipelines is not None and request.pipelines.is_given:
        return
    # one budget of CPU seconds for all searches of this number of ranks
    left = request.max_seconds
    show(f"searching plans for {count} devices")
    for spaces in _by_views(_spaces(request, count)):
        start = time.thread_time()
        found = search_chains(
            [c for space in spaces for c in space.chains()],
            max_seconds=left,
            epsilon=request.epsilon,
        )
        # and of each space a plan of little memory, which a search of chains may miss
        found = replace(
            found, batches=(*found.batches, *(space.smallest() for space in spaces if space.own))
        )
        left = max(left - (time.thread_time() - start), 1e-3)
        yield spaces, found
    if request.mesh is not None or request.own_batches:
        return
    if request.split is not None:
        show(f"searching plans with tensor axes for {count} devices")
    for spaces in _by_views(_tensor_spaces(request, count)):
        start = time.thread_time()
        chains = [c for space in spaces for c in space.chains()]
        yield spaces, search_chains(chains, max_seconds=left, epsilon=request.epsilon)
        left = max(left - (time.thread_time() - start), 1e-3)


def _by_views(spaces: Iterable[PlanSpace]) -> Iterator[list[PlanSpace]]:
    # Yield the spaces with gradients of their own, then those with views of DDP's buckets
    found = [*spaces]
    for are_views in (False, True):
        if some := [space for space in found if space.costs.step.gradient_views == are_views]:
            yield some


def local_graphs(request: SearchRequest) -> list[OpGraph]:
    """Return the steps on slices that `search_plans` may price, each once.

    Their kernels may be measured before the search.
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


# ---- the step of a rank


def step_on(request: SearchRequest, mesh: Mesh) -> TrainingStep:
    """Return the step of a data rank of `mesh`, with nothing split."""
    # of a tensor group with a batch for each rank, these run one after the other
    batches = mesh.ranks_along(mesh.tensor_axes) if request.own_batches else 1
    samples = max(request.global_batch_size // (mesh.data_parallel_size * batches), 1)
    return TrainingStep(
        request.graph,
        request.cluster,
        request.optimizer,
        mesh,
        samples,
        request.kernel_seconds,
        returns_memory=request.returns_memory,
        num_microbatches=batches,
        offloads=request.offloads,
        compiled=request.compiled if samples == request.graph.batch_size else {},
    )


def stage_blocks(request: SearchRequest, plan: ParallelPlan | None = None) -> StageBlocks:
    """Return the chain of blocks that stages of a pipeline share, on slices where `plan` has them.

    Raises:
        PlanError: the plan has other splits than those of the search.
    """
    blocks = StageBlocks(
        TrainingStep(
            request.graph,
            request.cluster,
            request.optimizer,
            data_mesh(1),
            request.graph.batch_size,
            request.kernel_seconds,
            returns_memory=request.returns_memory,
        )
    )
    return blocks if plan is None else blocks_of_plan(blocks, request.split, plan)


# ---- meshes


def meshes(cluster: Cluster, count: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks: one data axis, then copies times shards."""
    per_node = cluster.devices_per_node
    whole = "intra" if count <= per_node else "inter"
    # one data axis; then copies of the model times shards of it
    yield data_mesh(count, scope=whole)
    for shard in range(2, count // 2 + 1):
        if count % shard == 0:
            # shards stay inside a node where nodes consist of whole groups
            inside = shard <= per_node and per_node % shard == 0
            yield hybrid_mesh(count // shard, shard, scopes=(whole, "intra" if inside else "inter"))


def _spaces(request: SearchRequest, count: int) -> Iterator[PlanSpace]:
    # Yield the plans for `count` ranks without a tensor axis, or those on the given mesh
    cluster, samples = request.cluster, request.global_batch_size
    if request.mesh is not None:
        yield from _spaces_on(request, request.mesh)
    elif request.own_batches:
        # a batch for each rank: meshes with a tensor axis alone
        for step, _ in _tensor_steps(request, count):
            step = saving_no_computation(step, step_on(request, step.mesh))
            step = step if request.evaluates else replace(step, joined_bytes=0.0)
            yield from spaces_of(step, (), shards=False, views=request.gradient_views)
    elif samples % count == 0:
        # data axes: the first mesh has all plans, the others those that shard gradients
        first, *rest = meshes(cluster, count)
        # exchanges that so many ranks can have, each once
        legal = (
            legal_exchanges(options, cluster=cluster, world_size=count)
            for options in request.exchanges
        )
        exchanges = [*dict.fromkeys(itertools.chain.from_iterable(legal))]
        step, views = step_on(request, first), request.gradient_views
        yield from spaces_of(step, rest, shards=request.shards, exchanges=exchanges, views=views)
        # data ranks that train alone: each with the whole model
        alone = (
            legal_exchanges(method, cluster=cluster, world_size=count)
            for method in request.local_steps
        )
        for method in dict.fromkeys(itertools.chain.from_iterable(alone)):
            yield _whole_gradients(PlanCosts(replace(step, local_steps=method)))
    # neither all ranks nor a part of them can share the batch
    elif not _tensor_sizes(request, count) and request.pipelines is None:
        raise ValueError(_why_indivisible(samples, count))


def _spaces_on(request: SearchRequest, mesh: Mesh) -> Iterator[PlanSpace]:
    # Yield the plans on one given mesh
    parts = mesh.data_parallel_size
    if request.global_batch_size % parts:
        raise ValueError(
            f"a global batch of {request.global_batch_size} samples cannot be divided evenly over "
            f"{parts} data ranks; choose a batch size that is a multiple of {parts}"
        )
    if not mesh.tensor_axes:
        yield from spaces_of(
            step_on(request, mesh), (), shards=request.shards, views=request.gradient_views
        )
        return
    assert request.split is not None, "a mesh with a tensor axis needs a model that can be split"
    for split, _ in _tensor_steps(request, mesh.size):
        yield from spaces_of(split, (), shards=request.shards, views=request.gradient_views)


def _tensor_spaces(request: SearchRequest, count: int) -> Iterator[PlanSpace]:
    # Yield the plans for `count` ranks with a tensor axis
    for step, others in _tensor_steps(request, count):
        yield from spaces_of(step, others, shards=request.shards, views=request.gradient_views)


def _tensor_steps(
    request: SearchRequest, count: int
) -> Iterator[tuple[TrainingStep, Sequence[Mesh]]]:
    # Yield steps on slices on one mesh, each with other meshes of the same tensor axis
    if request.split is None or (request.mesh is not None and not request.mesh.tensor_axes):
        return
    if request.mesh is not None:
        of_tensor = [[request.mesh]]
    else:
        of_tensor = [
            [*tensor_meshes(request.cluster, count, size)] for size in _tensor_sizes(request, count)
        ]
    for first, *others in of_tensor:
        # the search of splits looks at the first mesh; the others reuse its steps
        whole = step_on(request, first)
        for step in tensor_steps(whole, request.split, mesh=first, layout=request.layout):
            yield step, others


def _tensor_sizes(request: SearchRequest, count: int) -> list[int]:
    # Sizes of tensor axes that leave every data rank as many samples
    sizes = tensor_sizes(request.cluster, count) if request.split is not None else []
    return [
        size
        for size in sizes
        if request.own_batches or request.global_batch_size % (count // size) == 0
    ]


# ---- plans on one mesh


@dataclass(frozen=True)
class PlanSpace:
    """The plans on one mesh, with one exchange of gradients.

    `groups` are storages that blocks may have beside one another, `own` those of uniform plans.
    """

    costs: PlanCosts
    groups: Sequence[Collection[Storage]]
    own: Collection[Storage]

    def chains(self) -> Iterator[Chain]:
        """Yield one chain for each group and configuration of the block ``""``."""
        for group in self.groups:
            configs = self._configs(group)
            # only where every block has a configuration of this group
            if all(configs.values()):
                choices = Choices(self.costs, configs)
                halves = choices.split_by_first()
                for root in configs[ROOT]:
                    sharded = root.storage.sharded_axes("gradients")
                    yield from (Chain(each, root) for each in (halves if sharded else [choices]))

    @cached_property
    def uniform(self) -> PlanBatch:
        """The plans with one storage for all blocks, without and with recomputation.

        A block that cannot have that takes what is nearest.
        """
        configs = self._configs(self.own)
        kinds = dict.fromkeys(config for several in configs.values() for config in several)
        # lists of configurations are shared by equal blocks, so each is looked at once
        nearest = {
            id(several): [_nearest(several, kind) for kind in kinds]
            for several in {id(several): several for several in configs.values()}.values()
        }
        rows = dict.fromkeys(
            zip(*(nearest[id(several)] for several in configs.values()), strict=True)
        )
        return PlanBatch(self.costs, configs, np.array([*rows], np.intp))

    def smallest(self) -> PlanBatch:
        """Return one plan of little memory.

        It is the smallest of the `uniform` ones, improved as long as one change saves any: another
        configuration of all blocks that are alike, or of the first or the last of them. The bytes
        of a chain are upper bounds where blocks differ in storage, so a search of chains may miss
        the smallest mix.
        """
        configs = self._configs(self.groups[-1])
        # a row: the index of each block's configuration
        start = self.uniform.configs_of(int(self.uniform.peak_bytes.argmin()))
        row = np.array([several.index(start[name]) for name, several in configs.items()], np.intp)
        # single changes: of all alike blocks, of the first and of the last of them
        alike: dict[tuple[int, int], list[int]] = {}
        for index, (name, several) in enumerate(configs.items()):
            alike.setdefault((self.costs.step.alike[name], id(several)), []).append(index)
        changed = dict.fromkeys(
            tuple(some) for each in alike.values() for some in (each, each[:1], each[-1:])
        )
        lists = [*configs.values()]
        # all single changes at once, of which the best is kept
        while True:
            rows = [row]
            for blocks in changed:
                for config in range(len(lists[blocks[0]])):
                    rows.append(row.copy())
                    rows[-1][[*blocks]] = config
            # row 0 is the plan without a change
            least = int(PlanBatch(self.costs, configs, np.array(rows)).peak_bytes.argmin())
            if least == 0:
                return PlanBatch(self.costs, configs, row[None])
            row = rows[least]

    def _configs(self, group: Collection[Storage]) -> dict[str, list[OpConfig]]:
        # Each block's configurations with storage in `group`; equal blocks share a list
        found: dict[int, list[OpConfig]] = {}
        legal = {block.name: self.costs.configs(block) for block in self.costs.step.graph.blocks}
        for several in legal.values():
            if id(several) not in found:
                found[id(several)] = [config for config in several if config.storage in group]
        return {name: found[id(several)] for name, several in legal.items()}


def _nearest(configs: Sequence[OpConfig], kind: OpConfig) -> int:
    # The index of the configuration that is most like `kind`

    def distance(index: int) -> tuple[int, int, bool, bool]:
        # as many sharded axes first, then the level, then recomputation, then compilation
        config = configs[index]
        axes = [len(c.storage.sharded_axes("optimizer_state")) for c in (config, kind)]
        levels = abs(config.storage.level - kind.storage.level)
        return (
            abs(axes[0] - axes[1]),
            levels,
            config.recompute != kind.recompute,
            config.compile != kind.compile,
        )

    return min(range(len(configs)), key=distance)


def spaces_of(
    step: TrainingStep,
    others: Sequence[Mesh],
    *,
    shards: bool,
    exchanges: Sequence[GradientMethod] = (),
    views: Sequence[bool] = (False,),
) -> Iterator[PlanSpace]:
    """Yield the plans of `step`, on its mesh and on `others` of as many ranks.

    `views` says whether gradients are views of DDP's buckets; both are searched where that saves
    anything.
    """
    # views save a copy of the gradients that are in buckets
    saves = has_buckets(step) and step.num_microbatches == 1
    # where views save nothing, both are one
    for are_views in dict.fromkeys(each and saves for each in views):
        viewed = replace(step, gradient_views=True) if are_views else step
        for exchange in (None, *exchanges):
            yield _whole_gradients(
                PlanCosts(viewed if exchange is None else replace(viewed, exchange=exchange))
            )
        if shards:
            # plans that shard gradients always run so (see `TrainingStep`)
            returning = viewed if viewed.returns_memory else replace(viewed, returns_memory=True)
            for mesh in (step.mesh, *others):
                yield _sharded_gradients(PlanCosts(returning.on(mesh)))


def _whole_gradients(costs: PlanCosts) -> PlanSpace:
    # The plans with unsharded gradients: plain data parallelism by itself, then all
    whole = [storage for storage in _storages(costs) if not storage.sharded_axes("gradients")]
    plain = [storage for storage in whole if storage.level == 0]
    return PlanSpace(costs, [plain, whole] if whole != plain else [plain], own=whole)


def _sharded_gradients(costs: PlanCosts) -> PlanSpace:
    """Return the plans that only the mesh of `costs` has.

    They shard gradients along its last axis: these by themselves, and with all others.
    """
    storages, axes = _storages(costs), costs.step.mesh.data_axes
    own = [storage for storage in storages if storage.sharded_axes("gradients") == axes[-1:]]
    if own and costs.step.graph.is_manual:  # what is in no block stays whole
        return PlanSpace(costs, [storages], own=storages)
    if costs.step.gradient_views:  # of which plans without unsharded gradients have none
        return PlanSpace(costs, [storages] if own else [], own=())
    return PlanSpace(costs, [own, storages] if own else [], own=own)


def _storages(costs: PlanCosts) -> list[Storage]:
    legal = {id(several): several for several in map(costs.configs, costs.step.graph.blocks)}
    return [*dict.fromkeys(config.storage for several in legal.values() for config in several)]


def _best_rows(batches: Sequence[PlanBatch]) -> Iterator[tuple[PlanBatch, Rows]]:
    """Yield the batches with their plans (rows) that may be on a frontier; others are not made.

    No plan of any of these batches beats them. Plans whose gradients are views are compared with
    one another only, so all of these batches stay.
    """
    best = {tuple(costs) for costs in KnownPlans.of(batches).costs.tolist()}
    for batch in batches:
        every = zip(batch.seconds.tolist(), batch.peak_bytes.tolist(), strict=True)
        rows = [
            n for n, costs in enumerate(every) if batch.costs.step.gradient_views or costs in best
        ]
        yield batch, np.array(rows, np.intp)


def points_of(batch: PlanBatch, rows: Rows) -> list[PlanPoint]:
    """Return the plans of `rows` of `batch` with their expected costs."""
    step = batch.costs.step
    placed, known = placed_tensors(step), dict[tuple[int, int], OpConfig]()
    # a number for each block, equal for blocks that are split alike
    numbers: dict[object, int] = {}
    alike = {
        name: numbers.setdefault(tuple(entries.items()), len(numbers))
        for name, entries in placed.items()
    }

    def on_slices(config: OpConfig, name: str) -> OpConfig:
        # one object for all of these, so that it is checked once
        key = id(config), alike[name]
        if key not in known:
            known[key] = replace(config, **placed[name])
        return known[key]

    # one entry for each block and configuration, which all plans share
    blocks = [
        [BlockPlan(name, on_slices(c, name) if name in placed else c) for c in legal]
        for name, legal in batch.configs.items()
    ]
    found = []
    # rows are indices into the configurations of each block
    for row, costs in zip(
        batch.plans[rows].tolist(),
        zip(
            *(
                each[rows].tolist()
                for each in (batch.seconds, batch.peak_bytes, batch.compute_seconds)
            ),
            strict=True,
        ),
        strict=True,
    ):
        seconds, peak, compute = costs
        placed_blocks = [legal[index] for legal, index in zip(blocks, row, strict=True)]
        plan = ParallelPlan.of_blocks(
            placed_blocks,
            mesh=step.mesh,
            model=step.graph.model,
            fingerprint=step.graph.fingerprint,
            batch_size=int(step.batch_size),
            cluster=step.cluster.name,
            predicted=StepEstimate(seconds, peak, compute, max(seconds - compute, 0.0)),
            gradient_exchange=step.exchange,
            local_steps=step.local_steps,
            num_microbatches=step.num_microbatches,
            gradient_views=step.gradient_views
            and any(has_unsharded_gradients(block.config) for block in placed_blocks),
        )
        found.append(PlanPoint(seconds, peak, step.mesh.size, plan))
    return found


# ---- pipelines whose ranks bring a batch each: these batches are the microbatches
#
# The loaders of a run without a plan give every rank a batch. A pipeline of R ranks then runs R
# microbatches per step, one from each rank. This costs more than every pipeline does. Each rank of
# a row gets the batches of all others (`sent_seconds`). An evaluation, which each rank runs by
# itself, needs the full parameters (`evaluation_bytes`).


def search_own_batches(request: SearchRequest, known: Sequence[PlanPoint]) -> PlanFrontier:
    """Return the plans with stages for ranks that have a batch like the captured one each.

    Those that `known` plans for as many ranks beat are left out. ``request.evaluates`` says whether
    the run has evaluations.
    """
    blocks, error = stage_blocks(request), 0.0
    points, uniform = list[PlanPoint](), list[PlanPoint]()
    # uniform: those under 1F1B that only others with stages beat
    for count in request.device_counts:
        staged, plain, bound = search_stages_for(
            blocks,
            count,
            PipelineRequest(own_batches=True),
            known,
            global_batch_size=request.graph.batch_size * count,
            epsilon=request.epsilon,
            max_seconds=request.max_seconds,
        )
        for found, kept in ((staged, points), (plain, uniform)):
            kept += [_with_batches_sent(blocks, p, evaluates=request.evaluates) for p in found]
        error = max(error, bound)
    return PlanFrontier.of(points, uniform=uniform, error_bound=min(error, NO_BOUND))


def _with_batches_sent(blocks: StageBlocks, point: PlanPoint, *, evaluates: bool) -> PlanPoint:
    # Add the costs of sent batches, and of evaluations, to a plan
    plan = point.plan
    assert plan.predicted is not None
    more = sent_seconds(blocks.step, shape_of_plan(plan))
    seconds, peak = point.step_seconds + more, point.peak_bytes
    if evaluates:
        peak = max(peak, evaluation_bytes(blocks, plan))
    compute = plan.predicted.compute_seconds
    plan = replace(plan, predicted=StepEstimate(seconds, peak, compute, seconds - compute))
    return PlanPoint(seconds, peak, point.devices, plan)


def sent_seconds(step: TrainingStep, shape: PipelineShape) -> float:
    """Return the seconds to send each rank of a row the batches of the others, and results back.

    `step` is that of one batch.
    """
    ranks, along = shape.pipeline, replace(step, mesh=shape.mesh(step.cluster))
    axes = along.mesh.pipeline_axes
    # every rank broadcasts its batch; notes before, and results after, are gathered
    batches = ranks * along.collective_seconds(
        "broadcast", step.graph.input_bytes.at(step.batch_size), axes=axes
    )
    return batches + 3 * along.collective_seconds(
        "all_gather", ranks * MICROBATCH_NOTE_BYTES, axes=axes
    )


def evaluation_bytes(blocks: StageBlocks, plan: ParallelPlan) -> float:
    """Return the bytes of the fullest rank that evaluates.

    It has all parameters, beside gradients and optimizer states of its own stages.
    """
    shape, names = shape_of_plan(plan), {name: place for place, name in enumerate(blocks.names)}
    once = shape.once(blocks)
    sizes = np.array([sum(map(parameter_bytes, owned)) for owned in blocks.owned], float)
    # gradients and states of the stages of each rank
    held = np.zeros(shape.pipeline)
    for stage, rank in zip(plan.stages, shape.ranks, strict=True):
        places = [names[block.block] for block in stage.blocks if block.block in names]
        held[rank] += once.static[places].sum() - sizes[places].sum()
        if once.shared is not None:
            held[rank] += once.shared[1][min(places), max(places) + 1]
    return float(held.max() + sizes.sum()) + bytes_of_rank(blocks, shape)


def least_own_batch_seconds(request: SearchRequest) -> float:
    """Return a lower bound of all steps whose ranks run their batches in stages.

    At best the stages share the computation evenly, and so they do the update.
    """
    blocks, found = stage_blocks(request), [np.inf]
    step = blocks.step
    compute = float(sum(times.sum() for times in step.compute.values()))
    for count in request.device_counts:
        for shape in _pipelines_of(blocks, count):
            # ZeRO-1 shares the update among the replicas too
            share = 1 / shape.pipeline / (shape.data if step.optimizer.by_parameter else 1)
            update = sum(
                step.update_seconds(parameter, share=share) for parameter in step.graph.parameters
            )
            found.append(compute + update + sent_seconds(step, shape))
    return min(found)


def _pipelines_of(blocks: StageBlocks, count: int) -> Iterator[PipelineShape]:
    # Yield 1F1B pipelines of `count` ranks with one microbatch per rank of a row
    samples = blocks.step.batch_size
    for ranks in range(2, min(count, len(blocks.names)) + 1):
        if count % ranks == 0:
            yield PipelineShape(ranks, count // ranks, "1f1b", 1, ranks, samples)


# ---- why a search found nothing


def _why_none(request: SearchRequest) -> str:
    # Explain a search of meshes with a tensor axis where no step on slices is known
    if request.mesh is None and not _tensor_sizes(request, *request.device_counts):
        (count,) = request.device_counts
        if request.global_batch_size % count:
            return _why_indivisible(request.global_batch_size, count)
        return (
            f"no plan with stages was found for {count} devices in {request.max_seconds} s of "
            "search; fewer stages or microbatches take less time"
            + (
                "; with local steps every stage trains parameters, and shares none with another, "
                "unless the schedule never flushes"
                if request.local_steps
                else ""
            )
        )
    found = why_unsplit(request)
    sizes, whys = " or ".join(map(str, found)), "; ".join(dict.fromkeys(found.values()))
    return (
        f"nothing of this model can be split over {sizes} ranks: {whys}. Choose another number of "
        "ranks or another plan"
    )


def why_unsplit(request: SearchRequest) -> dict[int, str]:
    """Return why splits were left out of the search, by the size of the tensor axis."""
    if request.split is None:
        return {}
    whys = {size: request.split.why_whole(size) for size in request.split.sizes}
    return {size: why for size, why in whys.items() if why}


def _why_indivisible(samples: int, count: int) -> str:
    return (
        f"a global batch of {samples} samples cannot be divided evenly over {count} devices; "
        f"choose a batch size that is a multiple of {count}, or other device counts"
    )
