"""Which plan a run gets: given or searched, on rank 0, and the same on every rank or an error on every rank."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info

from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.memory import FAMILIES
from lightning_topt.execution.memory import release_free_memory
from lightning_topt.execution.mesh import check_world_size
from lightning_topt.graph.batches import batch_sizes
from lightning_topt.graph.capture import capture
from lightning_topt.graph.op_graph import OpGraph, model_fingerprint
from lightning_topt.plan.choose import PlanFrontier, PlanPoint, choose
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, uniform_plan
from lightning_topt.plugins.allowed_exchanges import AllowedExchanges, check_exchange_of_run, exchanges_of_run
from lightning_topt.plugins.example_batch import example_batches
from lightning_topt.plugins.planning import Planning, profile_optimizers, search_plans
from lightning_topt.plugins.read_options import UniformPlan

T = TypeVar("T")


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked of the planner; see `AutoParallelStrategy`. `own_hook`: the user exchanges gradients.

    Raises PlanError for a plan whose gradient exchange is not allowed, ValueError where it would replace the user's.
    """

    memory_limit: float | None = None
    objective: str = "time"
    plan: ParallelPlan | UniformPlan | None = None
    cluster: Cluster | None = None
    memory_margin: float = 0.05
    only_replicated: bool = False
    allowed: AllowedExchanges = field(default_factory=AllowedExchanges)
    own_hook: bool = False

    def __post_init__(self) -> None:
        exchange = self.plan.gradient_exchange if isinstance(self.plan, ParallelPlan) else None
        if isinstance(self.plan, ParallelPlan):
            self.allowed.check(self.plan)
        if self.own_hook and (exchange is not None or self.allowed.candidates):
            raise ValueError(
                "a plan's gradient exchange would replace your communication hook: leave out ddp_comm_hook and "
                "mixed_precision, or allow_compression and the plan's gradient_exchange"
            )


def decide_plan(request: PlanRequest, trainer: pl.Trainer) -> tuple[ParallelPlan, Planning | None]:
    """The plan for this fit, equal on every rank. A collective call; `Planning` on rank 0 when there was a search."""
    module = trainer.lightning_module
    check_agreement(request, module)
    world_size = dist.get_world_size()
    if not module.automatic_optimization:
        return _manual_plan(request, world_size), None
    given = request.plan
    if isinstance(given, UniformPlan) and given.stage < 2 and not given.recompute:
        given = uniform_plan(given.stage, data_parallel_size=world_size)
    if isinstance(given, ParallelPlan):
        check_world_size(given, world_size)
        _check_model(given, module)
        _check_features(given, request, trainer)
        return given, None
    # setup_data() waits for all ranks, so all of them call it, and a failure must not leave the others waiting later.
    batches = on_every_rank(lambda: example_batches(trainer))
    graph = on_rank_0(
        lambda: capture(
            module,
            batches[0],
            second_batch=batches[1],
            forward_context=trainer.precision_plugin.forward_context,
            device=trainer.strategy.root_device.type,
        )
    )
    if isinstance(given, UniformPlan):
        plan = given.of(graph, data_parallel_size=world_size)
        _check_features(plan, request, trainer)
        return plan, None
    return _search(request, trainer, graph, samples=batch_sizes(*batches)[0])


def _search(
    request: PlanRequest, trainer: pl.Trainer, graph: OpGraph, *, samples: int
) -> tuple[ParallelPlan, Planning | None]:
    module, device = trainer.lightning_module, trainer.strategy.root_device
    measure = request.cluster is None
    profile = on_every_rank(lambda: profile_optimizers(module, device=device, measure=measure))
    cluster, kernel_seconds = request.cluster, None
    if cluster is None:
        cluster = on_every_rank(lambda: calibrate(device=device, num_nodes=trainer.num_nodes))
        kernel_seconds = on_every_rank(lambda: measure_kernels(graph, device=device))
    planning: Planning | None = None

    def search() -> dict[str, Any]:
        nonlocal planning
        frontier = search_plans(
            graph,
            cluster=cluster,
            optimizer=profile,
            device_counts=(dist.get_world_size(),),
            global_batch_size=samples * dist.get_world_size(),
            families=_families(request, trainer),
            exchanges=exchanges_of_run(request.allowed, trainer),
            kernel_seconds=kernel_seconds,
        )
        planning = Planning(frontier, choose_for(request, frontier, cluster), graph)
        return planning.chosen.plan.to_dict()

    plan = ParallelPlan.from_dict(on_rank_0(search))
    release_free_memory()
    rank_zero_info(f"topt: {plan.summary()}. {plan.reason}")
    return plan, planning


def choose_for(request: PlanRequest, frontier: PlanFrontier, cluster: Cluster) -> PlanPoint:
    """The point of `frontier` that meets `request`; no limit means the memory of a device. Raises NoPlanFitsError."""
    limit = cluster.device.memory_bytes if request.memory_limit is None else request.memory_limit
    margin = request.memory_margin
    return choose(frontier.candidates, objective=request.objective, memory_limit=limit, memory_margin=margin)


def _families(request: PlanRequest, trainer: pl.Trainer) -> tuple[str, ...]:
    reason = _needs_whole_parameters(request, trainer)
    return ("replicated",) if reason else FAMILIES


def _needs_whole_parameters(request: PlanRequest, trainer: pl.Trainer) -> str | None:
    """Why plans with sharded parameters cannot run here, or None."""
    if request.only_replicated:
        return "options of DistributedDataParallel were given, and sharded plans do not run it"
    averaging = (StochasticWeightAveraging, WeightAveraging)
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return "weight-averaging callbacks copy whole parameters"
    if trainer.precision == "16-true":
        return "16-true keeps no float32 weights to shard"
    return None


def _check_features(plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer) -> None:
    reason = _needs_whole_parameters(request, trainer) if plan.is_sharded else None
    if reason:
        raise PlanError(f"this plan shards parameters, but {reason}; choose ZeRO stage 0 or 1")
    check_exchange_of_run(plan, trainer)


def _check_model(plan: ParallelPlan, module: torch.nn.Module) -> None:
    name = type(module).__name__
    parameters = [(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in module.named_parameters()]
    if plan.fingerprint is not None and plan.fingerprint != model_fingerprint(name, parameters):
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'of another kind'}): class name, parameter names, shapes or "
            f"dtypes of this {name} differ. Make a new plan, or remove 'fingerprint' from the plan to run it all the same"
        )


def _manual_plan(request: PlanRequest, world_size: int) -> ParallelPlan:
    given = request.plan
    plan = uniform_plan(0, data_parallel_size=world_size)
    if given not in (None, plan, UniformPlan(0, recompute=False)):
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
    return plan


# ---- agreement of the ranks -------------------------------------------------------------------------------------------


def check_agreement(request: PlanRequest, module: torch.nn.Module) -> None:
    """Raise RuntimeError on every rank when ranks differ in versions, options or model. A collective call."""
    mine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "options of the strategy": repr(request),
        "parameters of the model": [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()],
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                first, second = _first_difference(value, other[name])
                raise RuntimeError(f"rank 0 and rank {rank} differ in {name}: {first} against {second}")


def _first_difference(one: Any, two: Any) -> tuple[Any, Any]:
    if not isinstance(one, list):
        return one, two
    for a, b in zip(one, two, strict=False):
        if a != b:
            return a, b
    return f"{len(one)} entries", f"{len(two)} entries"


class RemotePlanningError(RuntimeError):
    """Planning failed on another rank; the message is that rank's."""


def on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and give every rank its result, or an error on every rank. A collective call."""
    return _share(function, only_rank_0=True)


def on_every_rank(function: Callable[[], T]) -> T:
    """Run `function` on every rank; when one fails, all raise. A collective call (and `function` may hold some)."""
    return _share(function, only_rank_0=False)


def _share(function: Callable[[], T], *, only_rank_0: bool) -> T:
    result: Any = None
    error: BaseException | None = None
    if dist.get_rank() == 0 or not only_rank_0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RemotePlanningError(f"planning failed on rank {rank}: {message}")
    if only_rank_0:
        box = [result]
        dist.broadcast_object_list(box, 0)
        result = box[0]
    return cast(T, result)
