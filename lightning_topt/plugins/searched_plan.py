"""What a search for a plan needs, and the search on a given mesh.

All ranks take part: rank 0 captures the step and searches, all of them measure.

    graph = capture_on_ranks(trainer, batch)
    costs = read_costs(request, trainer, graph)               # optimizer, cluster, kernels
    search = search_request(request, trainer, graph, costs)   # on data axes
    frontier = search_for(request, search)
    point = choose_for(request, frontier, costs.cluster, trainer=trainer, optimizer=costs.optimizer)
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_topt.basics.forked_call import ForkedCall
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import CaptureError, may_need_values
from lightning_topt.graph.op_config import Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.step_observer import observe_step
from lightning_topt.plan import step_factors
from lightning_topt.plan.choose import choose
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_intervals import with_intervals
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plugins.plan_options import MeshPlan
from lightning_topt.plugins.plan_request import PlanRequest, exchanges_of_run, steps_of_fit
from lightning_topt.plugins.planning import (
    PlanDecision,
    Planning,
    on_every_rank,
    on_rank_0,
    optimizers_of,
)
from lightning_topt.plugins.requirements import SHARDED, SLICES, Fit, why_not
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel

_SEARCH_SECONDS = 3.0  # a fit waits for it
_STEP_SECONDS = 60.0  # for one step, without a word


class Trace(Protocol):
    """Sees the forward pass of a copy of a module."""

    def of(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which it runs."""


def capture_on_ranks(
    trainer: pl.Trainer,
    batch: Any,
    *,
    trace: Trace | None = None,
    scales: bool = False,
    may_run: bool = False,
) -> OpGraph:
    """Return the graph of rank 0's step on fake tensors; see `capture_step`.

    With `may_run` a step that depends on values runs once on real tensors, in an isolated copy of
    rank 0's process. A collective call. Raises what rank 0 raised; `may_need_values` tells on every
    rank.
    """

    def captured() -> OpGraph:
        try:
            return capture_step(trainer, batch, trace=trace, scales=scales)
        except Exception as error:
            if (
                not may_run
                or trace is not None
                or not may_need_values(error)
                or not hasattr(os, "fork")
            ):
                raise
            try:
                return ForkedCall(run, isolated=True).result(timeout_seconds=_STEP_SECONDS)
            except Exception as failure:
                why = f"{error}\nNor did it run on real tensors: {failure}"
                raise CaptureError(why, needs_values=True) from failure

    def run() -> OpGraph:
        torch.set_num_threads(1)  # threads of the pool are not copied with the process
        return observe_step(
            trainer.lightning_module,
            batch,
            forward_context=trainer.precision_plugin.forward_context,
        )

    return on_rank_0(captured)


def capture_step(
    trainer: pl.Trainer, batch: Any, *, trace: Trace | None = None, scales: bool = False
) -> OpGraph:
    """Return the graph of this rank's step on fake tensors.

    `trace` gets the calls of torch functions. With `scales` the graph says how the step grows with
    the batch, where that can be found. Raises what the last attempt did.
    """

    def on(*, scales: bool) -> OpGraph:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # all of it comes again in the step itself
            return capture(
                trainer.lightning_module,
                batch,
                batch_scaling=scales,
                forward_context=trainer.precision_plugin.forward_context,
                device=trainer.strategy.root_device.type,
                adapt=None if trace is None else trace.of,
            )

    if scales:
        with contextlib.suppress(Exception):
            return on(scales=True)
    return on(scales=False)


@dataclass(frozen=True)
class RunCosts:
    """What a search needs besides the graph.

    `measurements` are None where the cluster was given.
    """

    optimizer: OptimizerProfile
    cluster: Cluster
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    measurements: Measurements | None = None

    def measured(self, graphs: Iterable[OpGraph]) -> dict[KernelKey, float]:
        """Return the seconds of the kernels of `graphs`. A collective call."""
        return {} if self.measurements is None else measured_kernels(self.measurements, graphs)


def measured_kernels(
    measurements: Measurements, graphs: Iterable[OpGraph]
) -> dict[KernelKey, float]:
    """Return the seconds of the kernels of `graphs`; those of rank 0 count. A collective call."""
    kernels: dict[KernelKey, float] = {}
    for each in graphs:
        kernels |= on_every_rank(partial(measurements.kernel_seconds, each))
    return kernels


def read_costs(request: PlanRequest, trainer: pl.Trainer, graph: OpGraph) -> RunCosts:
    """Return the costs of this run, measured unless the cluster is given. A collective call."""
    device = trainer.strategy.root_device
    # The optimizer: which state it keeps, how it updates.
    optimizers, named = optimizers_of(trainer)
    profile = on_every_rank(
        lambda: read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    )
    if request.cluster is not None:
        return RunCosts(profile, request.cluster)
    # Stored from earlier runs on this machine, or measured now, by all ranks.
    measurements = open_measurements(trainer)
    seconds = on_every_rank(lambda: measurements.update_seconds(optimizers, named_parameters=named))
    cluster = on_every_rank(measurements.cluster)
    profile = dataclasses.replace(profile, seconds_per_element=seconds)
    costs = RunCosts(profile, cluster, measurements=measurements)
    return dataclasses.replace(costs, kernel_seconds=costs.measured([graph]))


def open_measurements(trainer: pl.Trainer) -> Measurements:
    """Return what measures the cluster and kernels of this run; it says what it does."""
    return Measurements.open(
        device=trainer.strategy.root_device,
        num_nodes=trainer.num_nodes,
        progress=lambda line: rank_zero_info(f"topt: {line}"),
    )


def search_request(
    request: PlanRequest, trainer: pl.Trainer, graph: OpGraph, costs: RunCosts
) -> SearchRequest:
    """Return what to search on data axes, where every rank has a batch like the captured one."""
    ranks = dist.get_world_size()
    fit = Fit(trainer, graph=graph, only_replicated=request.only_replicated)
    return SearchRequest(
        graph,
        costs.cluster,
        costs.optimizer,
        device_counts=(ranks,),
        global_batch_size=graph.batch_size * ranks,
        shards=why_not(fit, SHARDED) is None,
        exchanges=exchanges_of_run(request.allowed, trainer, costs.optimizer),
        kernel_seconds=costs.kernel_seconds,
        returns_memory=request.saves_memory,
        gradient_views=request.gradient_views,
        max_seconds=_SEARCH_SECONDS,
    )


def say(plan: ParallelPlan) -> None:
    """Tell the user about a plan that was found."""
    rank_zero_info(f"topt: {plan.summary()}. {plan.reason}".strip())


def split_model(
    trainer: pl.Trainer, batch: Any, graph: OpGraph, trace: FunctionTrace
) -> SplitModel:
    """Return what splits the step of `trainer` that was captured as `graph` under `trace`."""
    return SplitModel(
        trainer.lightning_module,
        batch,
        graph,
        trace,
        forward_context=trainer.precision_plugin.forward_context,
        device=trainer.strategy.root_device.type,
    )


def say_what_stays(graph: OpGraph) -> None:
    """Warn where some blocks of a plan that was asked to recompute cannot."""
    if reason := why_not_recomputed(graph):
        rank_zero_warn(f"topt: '+recompute' leaves blocks as they are: {reason}")


def search_mesh(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: MeshPlan
) -> PlanDecision:
    """Return the best plan on a given mesh. A collective call."""
    # The step, and how it can be split.
    mesh, trace = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes), FunctionTrace()
    graph = capture_on_ranks(trainer, batch, trace=trace)
    fit = Fit(trainer, graph=graph, only_replicated=request.only_replicated)
    kinds = (SHARDED, SLICES) if mesh.tensor_axes else (SHARDED,)
    reason = on_every_rank(lambda: why_not(fit, *kinds))
    if reason is not None and mesh.tensor_axes:
        raise PlanError(
            f"a mesh with tensor axes splits parameters, but {reason}; choose one without"
        )
    # What to search: on this mesh only, without compression.
    split = split_model(trainer, batch, graph, trace)
    costs = read_costs(request, trainer, graph)
    wanted = dataclasses.replace(
        search_request(request, trainer, graph, costs),
        global_batch_size=graph.batch_size * mesh.data_parallel_size,
        shards=not given.preset and reason is None,
        exchanges=(),
        returns_memory=request.saves_memory or given.recompute,
        split=split,
        mesh=mesh,
        layout=given.preset,
    )
    # Kernels on slices, measured by all ranks.
    kernels = {**costs.kernel_seconds, **costs.measured(on_rank_0(lambda: local_graphs(wanted)))}
    planning: Planning | None = None

    def search() -> dict[str, Any]:
        nonlocal planning
        frontier = with_intervals(
            search_for(request, dataclasses.replace(wanted, kernel_seconds=kernels)),
            costs.cluster,
            graph,
            level=request.confidence,
        )
        if given.preset:
            chosen = _with_what_is_left(_preset_of(given, frontier), graph)
        else:
            chosen = choose_for(
                request, frontier, costs.cluster, trainer=trainer, optimizer=costs.optimizer
            )
        planning = Planning(frontier, chosen, graph)
        return planning.chosen.plan.to_dict()

    plan = ParallelPlan.from_dict(on_rank_0(search))
    say(plan)
    if given.recompute:
        say_what_stays(graph)
    return PlanDecision(plan, planning, "given", costs.measurements)


def _preset_of(given: MeshPlan, frontier: PlanFrontier) -> PlanPoint:
    """Return the uniform plan that splits most.

    It recomputes all that it can, or nothing.
    """
    again = [
        (sum(block.config.recompute for block in point.plan.blocks), point)
        for point in frontier.uniform
    ]
    wanted = max(count for count, _ in again) if given.recompute else 0
    return min(
        (point for count, point in again if count == wanted), key=lambda point: point.peak_bytes
    )


def _with_what_is_left(point: PlanPoint, graph: OpGraph) -> PlanPoint:
    """Name the matrices that are cut along fewer tensor axes than there are."""
    plan, axes = point.plan, point.plan.mesh.tensor_axes
    if len(axes) < 2:
        return point
    # Along which axes each parameter is cut.
    placed = {
        f"{b.block}.{name}".lstrip("."): along
        for b in plan.blocks
        for name, along in b.config.parameters
    }
    matrices = [parameter.name for parameter in graph.parameters if len(parameter.shape) > 1]
    left = [
        name
        for name in matrices
        if name not in placed or not all(isinstance(placed[name][axis], Shard) for axis in axes)
    ]
    if not left:
        return point
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    reason = (
        "Whole along an axis, since its size does not divide or nothing says how to cut it: "
        f"{', '.join(left[:3])}{more}."
    )
    return dataclasses.replace(point, plan=dataclasses.replace(plan, reason=reason))


def choose_for(
    request: PlanRequest,
    frontier: PlanFrontier,
    cluster: Cluster,
    *,
    trainer: pl.Trainer,
    optimizer: OptimizerProfile,
) -> PlanPoint:
    """Return the point of `frontier` that meets `request`.

    `trainer` and `optimizer` say what trains, for the objective ``"time_to_loss"``. No limit means
    the memory of a device. Raises NoPlanFitsError.
    """
    limit = cluster.device.memory_bytes if request.memory_limit is None else request.memory_limit
    options: dict[str, Any] = {
        "memory_limit": limit,
        "memory_margin": request.margin_on(cluster),
        "difference": request.difference_on(cluster),
    }
    if request.objective == step_factors.OBJECTIVE:
        training = step_factors.Training(optimizer.name, steps_of_fit(trainer))
        module = trainer.lightning_module
        parameters = sum(parameter.numel() for parameter in module.parameters())
        model = step_factors.model_words(type(module).__name__, parameters)
        table = step_factors.StepTable.of_model(model)
        return step_factors.choose_by_loss(frontier.candidates, training, table=table, **options)
    return choose(frontier.candidates, objective=request.objective, **options)


def search_for(
    request: PlanRequest,
    search: SearchRequest,
    *,
    progress: Callable[[str], None] | None = None,
) -> PlanFrontier:
    """Return what `search_plans` finds; where a loss is the objective, for each way of training."""
    if request.objective == step_factors.OBJECTIVE:
        return step_factors.search_each_way(search, progress=progress)
    return search_plans(search, progress=progress)
