"""A run gets one plan: given or searched, on rank 0, and the same on every rank or an error on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.execution.memory_meter import release_free_memory
from lightning_topt.execution.mesh import check_world_size
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.capture import capture, may_need_values
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_graph import OpGraph, model_fingerprint
from lightning_topt.plan.choose import PlanFrontier, PlanPoint, choose
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan, uniform_plan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.presets import PRESETS
from lightning_topt.plugins.allowed_exchanges import check_exchange_of_run, exchanges_of_run
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning, optimizers_of
from lightning_topt.plugins.planning_ranks import on_every_rank, on_rank_0
from lightning_topt.plugins.read_options import MeshPlan, UniformPlan
from lightning_topt.plugins.whole_parameters import why_whole
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel

_SEARCH_SECONDS = 3.0  # a fit waits for it

Decision = tuple[ParallelPlan, Planning | None, str]


def decide_plan(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> Decision:
    """Return the plan for this fit, equal on every rank, what was searched (on rank 0), and where the plan comes from.

    A collective call. `batch` is the one that will be trained on; it is only looked at. Optimizers that the strategy has
    set up are read; without any, the module's own are made on a fake copy. What cannot be planned runs as ``ddp`` does,
    with a warning, unless the request insists.
    """
    module = trainer.lightning_module
    world_size = dist.get_world_size()
    plain = uniform_plan(0, data_parallel_size=world_size)
    if not module.automatic_optimization:
        _check_manual(request, plain)
        return plain, None, "ddp: manual optimization"
    given = request.plan
    mesh = data_mesh(world_size)
    if isinstance(given, MeshPlan):
        return *search_mesh(request, trainer, batch, given), "given"
    if isinstance(given, UniformPlan):
        mesh = given.mesh(world_size, num_nodes=trainer.num_nodes)
        given = given if request.needs_batch(module) else preset_plan(given.preset, mesh=mesh)
    if isinstance(given, ParallelPlan):
        check_world_size(given, world_size)
        _check_model(given, module)
        on_every_rank(lambda: _check_features(given, request, trainer))
        return given, None, "given"
    try:
        graph = capture_on_ranks(trainer, batch)
        if isinstance(given, UniformPlan):
            plan = given.of(graph, mesh)
            on_every_rank(lambda: _check_features(plan, request, trainer, graph))
            return plan, None, "given"
        return *_search(request, trainer, graph), "search"
    except Exception as error:
        if request.insists or is_of_collective(error):
            raise
        reason = " ".join(str(error).split())
        rank_zero_warn(
            f"topt: this training step cannot be planned, so it runs as strategy='ddp' does: nothing is lost but what a plan "
            f"could have saved. The reason: {reason}"
        )
        return plain, None, f"ddp: {reason}"


def capture_on_ranks(trainer: pl.Trainer, batch: Any, *, trace: FunctionTrace | None = None) -> OpGraph:
    """Return the graph of rank 0's step: on fake tensors, or on real ones by all ranks where it depends on values.

    A collective call. On rank 0 `trace` gets the calls of torch functions; the step must not depend on values then. Raises
    what the last attempt raised.
    """

    def on(*, real: bool) -> OpGraph:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # all of it comes again in the step itself
            return capture(
                trainer.lightning_module,
                batch,
                batch_scaling=False,
                real=real,
                forward_context=trainer.precision_plugin.forward_context,
                device=trainer.strategy.root_device.type,
                adapt=None if trace is None else trace.of,
            )

    def on_fake_tensors() -> OpGraph | str:
        try:
            return on(real=False)
        except Exception as error:
            if trace is not None or not may_need_values(error):
                raise
            return str(error)

    graph = on_rank_0(on_fake_tensors)
    if isinstance(graph, str):
        own = on_every_rank(lambda: on(real=True))
        release_free_memory()
        graph = on_rank_0(lambda: own)
    assert isinstance(graph, OpGraph)
    return graph


def _search(
    request: PlanRequest,
    trainer: pl.Trainer,
    graph: OpGraph,
    *,
    given: MeshPlan | None = None,
    mesh: Mesh | None = None,
    split: SplitModel | None = None,
) -> tuple[ParallelPlan, Planning | None]:
    """Return the best plan, on `given`'s `mesh` only if there is one, and on rank 0 what was searched. A collective call."""
    profile, cluster, kernel_seconds = _costs(request, trainer, graph)
    preset, ranks = given is not None and given.preset, dist.get_world_size()
    planning: Planning | None = None

    def search() -> dict[str, Any]:
        nonlocal planning
        frontier = search_plans(
            SearchRequest(
                graph,
                cluster,
                profile,
                device_counts=(ranks,),
                global_batch_size=graph.batch_size * (ranks if mesh is None else mesh.data_parallel_size),
                shards=not preset and _needs_whole_parameters(request, trainer, graph) is None,
                exchanges=exchanges_of_run(request.allowed, trainer) if mesh is None else (),
                kernel_seconds=kernel_seconds or {},
                returns_memory=request.saves_memory or (given is not None and given.recompute),
                max_seconds=_SEARCH_SECONDS,
                split=split,
                mesh=mesh,
            )
        )
        if not frontier.candidates:
            raise PlanError(
                "nothing of this model can be split over these ranks: its layers do not divide, or its code cannot run on "
                "slices; choose another number of ranks or another plan"
            )
        chosen = _preset_of(given, frontier) if given and given.preset else choose_for(request, frontier, cluster)
        planning = Planning(frontier, chosen, graph)
        return planning.chosen.plan.to_dict()

    plan = ParallelPlan.from_dict(on_rank_0(search))
    rank_zero_info(f"topt: {plan.summary()}. {plan.reason}".strip())
    return plan, planning


def search_mesh(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: MeshPlan
) -> tuple[ParallelPlan, Planning | None]:
    """Return the best plan on a given mesh, and on rank 0 what was searched. A collective call."""
    mesh, trace = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes), FunctionTrace()
    graph = capture_on_ranks(trainer, batch, trace=trace)
    reason = on_every_rank(lambda: _needs_whole_parameters(request, trainer, graph))
    if reason is not None and mesh.tensor_axes:
        raise PlanError(f"a mesh with tensor axes splits parameters, but {reason}; choose one without")
    split = SplitModel(
        trainer.lightning_module,
        batch,
        graph,
        trace,
        forward_context=trainer.precision_plugin.forward_context,
        device=trainer.strategy.root_device.type,
    )
    return _search(request, trainer, graph, given=given, mesh=mesh, split=split)


def _preset_of(given: MeshPlan, frontier: PlanFrontier) -> PlanPoint:
    """The uniform plan that splits most, and recomputes all that it can or nothing."""
    again = [(sum(block.config.recompute for block in point.plan.blocks), point) for point in frontier.uniform]
    wanted = max(count for count, _ in again) if given.recompute else 0
    return min((point for count, point in again if count == wanted), key=lambda point: point.peak_bytes)


def _costs(
    request: PlanRequest, trainer: pl.Trainer, graph: OpGraph
) -> tuple[OptimizerProfile, Cluster, Mapping[KernelKey, float] | None]:
    """Return what the search needs besides the graph, measured unless the cluster is given."""
    device = trainer.strategy.root_device
    optimizers, named = optimizers_of(trainer)
    profile = on_every_rank(lambda: read_optimizer(optimizers, named_parameters=named, device_type=device.type))
    if request.cluster is not None:
        return profile, request.cluster, None
    measurements = Measurements.open(device=device, num_nodes=trainer.num_nodes, progress=_progress)
    seconds = on_every_rank(lambda: measurements.update_seconds(optimizers, named_parameters=named))
    cluster = on_every_rank(measurements.cluster)
    kernels = on_every_rank(lambda: measurements.kernel_seconds(graph))
    return dataclasses.replace(profile, seconds_per_element=seconds), cluster, kernels


def _progress(line: str) -> None:
    rank_zero_info(f"topt: {line}")


def choose_for(request: PlanRequest, frontier: PlanFrontier, cluster: Cluster) -> PlanPoint:
    """Return the point of `frontier` that meets `request`; no limit means the memory of a device. Raises NoPlanFitsError."""
    limit = cluster.device.memory_bytes if request.memory_limit is None else request.memory_limit
    margin = request.memory_margin
    return choose(frontier.candidates, objective=request.objective, memory_limit=limit, memory_margin=margin)


def _needs_whole_parameters(
    request: PlanRequest,
    trainer: pl.Trainer,
    graph: OpGraph | None = None,
    *,
    would_shard: Callable[[str], bool] = lambda _: True,
) -> str | None:
    """Why plans that shard the parameters whose name `would_shard` cannot run here, or None."""
    if request.only_replicated:
        return "options of DistributedDataParallel were given, and sharded plans do not run it"
    averaging = (StochasticWeightAveraging, WeightAveraging)
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return "weight-averaging callbacks copy whole parameters"
    if trainer.precision == "16-true":
        return "16-true keeps no float32 weights to shard"
    unused = [] if graph is None else [name for name in graph.unused if would_shard(name)]
    if unused:
        return f"the step gives {unused[0]} no gradient, which only DistributedDataParallel sees and answers"
    return why_whole(trainer, would_shard=would_shard)


def _check_features(
    plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer, graph: OpGraph | None = None
) -> None:
    levels = {block.block: block.config.storage.sharded_axes("gradients") for block in plan.blocks}
    split = {f"{b.block}.{name}".lstrip(".") for b in plan.blocks for name, _ in b.config.parameters}

    def would_shard(parameter: str) -> bool:
        return bool(levels[block_of(parameter, levels)]) or parameter in split

    shards = not plan.keeps_gradients_whole
    if shards and (reason := _needs_whole_parameters(request, trainer, graph, would_shard=would_shard)):
        way_out = "choose a plan without tensor axes" if split else "choose ZeRO level 0 or 1"
        raise PlanError(f"this plan shards parameters, but {reason}; {way_out}")
    check_exchange_of_run(plan, trainer)


def _check_model(plan: ParallelPlan, module: pl.LightningModule) -> None:
    name = type(module).__name__
    parameters = [(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in module.named_parameters()]
    if plan.fingerprint is not None and plan.fingerprint != model_fingerprint(name, parameters):
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'of another kind'}): class name, parameter names, shapes or "
            f"dtypes of this {name} differ. Make a new plan, or remove 'fingerprint' from the plan to run it all the same"
        )


def _check_manual(request: PlanRequest, plain: ParallelPlan) -> None:
    if request.plan not in (None, plain, UniformPlan(PRESETS["ddp"])):
        raise PlanError("manual optimization runs under the plan 'ddp' only: its steps cannot be seen in advance")
    if request.memory_limit is not None or request.objective != "time":
        raise ValueError(
            "manual optimization cannot be planned (its steps cannot be seen in advance), so memory_limit and "
            "objective='memory' cannot be honoured; remove them, or use automatic optimization"
        )
    if request.allowed.candidates:
        raise ValueError(
            "manual optimization is not planned, so allow_compression chooses nothing; remove it, or use "
            'strategy="topt_compressed"'
        )
