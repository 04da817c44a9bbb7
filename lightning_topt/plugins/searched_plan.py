"""What a search for a plan needs: a traced step and its costs; and the search on a given mesh.

On CPUs it runs in a copy of rank 0's process, where user code leaves nothing behind
(`traced_planning`). What all ranks have to measure is asked of them (`NeedsCosts`, `NeedsKernels`).
The search without a mesh is `default_search`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import WAY_OUT, CaptureError, StepError, may_need_values
from lightning_topt.graph.op_config import Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.step_observer import observe_step
from lightning_topt.plan import step_factors
from lightning_topt.plan.choose import TIME_TO_LOSS, choose
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_intervals import with_intervals
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plugins.plan_options import MeshPlan
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    step_table_of,
    steps_of_fit,
    ways_of_run,
)
from lightning_topt.plugins.planning import Planning, make_fake_optimizers
from lightning_topt.plugins.requirements import SHARDED, SLICES, Fit, noted_reads, why_not
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel

_SEARCH_SECONDS = 3.0  # a fit waits for it
T = TypeVar("T")


@dataclass(frozen=True)
class NeedsCosts:
    """Asks all ranks for the costs of a step: `RankCosts`."""

    graph: OpGraph


@dataclass(frozen=True)
class NeedsKernels:
    """Asks all ranks for the seconds of the kernels of `graphs`, by `kernel_key`."""

    graphs: list[OpGraph]


@dataclass(frozen=True)
class RankCosts:
    """What ranks have measured, or the `cluster` that was given.

    Seconds of kernels, and of updates per element of each parameter by name. `measures`: more
    kernels can be measured.
    """

    cluster: Cluster
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    measures: bool = False


Questions = Generator[NeedsCosts | NeedsKernels, Any, T]


# ---- the traced step -----------------------------------------------------------------------------


class Trace(Protocol):
    """Sees the forward pass of a copy of a module."""

    def of(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which it runs."""


@dataclass(frozen=True)
class TracedStep:
    """The step of `trainer` on `batch`: its graph, and the calls that tell how it can be split.

    `trace` is None where a step that reads values ran on real tensors; `why_not_split` says where
    it reads them. `reads`: see `noted_reads`.
    """

    trainer: pl.Trainer
    batch: Any
    graph: OpGraph
    trace: FunctionTrace | None = None
    reads: frozenset[str] = frozenset()
    why_not_split: str = ""

    @classmethod
    def of(
        cls, trainer: pl.Trainer, batch: Any, *, splits: bool = True, scales: bool = False
    ) -> TracedStep:
        """Trace the step on fake tensors, or run it once on real ones where it reads values.

        With `splits` the calls are traced too; with `scales` the graph says how the step grows with
        the batch, where that can be found. Raises what the last attempt did.
        """
        trace = FunctionTrace() if splits else None
        try:
            with noted_reads() as reads:
                graph = capture_step(trainer, batch, trace, scales=scales)
            return cls(trainer, batch, graph, trace, frozenset(reads))
        except Exception as error:
            # In this process, which is a copy, a real step leaves nothing behind.
            if not may_need_values(error) or trainer.strategy.root_device.type != "cpu":
                raise
            try:
                with noted_reads() as reads:
                    graph = observe_step(
                        trainer.lightning_module,
                        batch,
                        forward_context=trainer.precision_plugin.forward_context,
                    )
            except StepError:  # which says more than what fake tensors made of it
                raise
            except Exception as failure:
                why = f"{str(error).removesuffix(WAY_OUT)}Nor did it run on real tensors: {failure}"
                raise CaptureError(why, needs_values=True) from failure
            return cls(trainer, batch, graph, None, frozenset(reads), why_not_split=str(error))

    def fit(self, request: PlanRequest, **more: Any) -> Fit:
        """Return the fit of this step, as requirements look at it."""
        alone = request.only_replicated
        return Fit(self.trainer, self.batch, self.graph, alone, self.reads, **more)

    def split(self) -> SplitModel:
        """Return what splits the step over tensor axes. Raises PlanError where it cannot be."""
        if self.trace is None:
            raise PlanError(self.why_not_split)
        return SplitModel(
            self.trainer.lightning_module,
            self.batch,
            self.graph,
            self.trace,
            forward_context=self.trainer.precision_plugin.forward_context,
            device=self.trainer.strategy.root_device.type,
        )


def capture_step(
    trainer: pl.Trainer, batch: Any, trace: Trace | None = None, *, scales: bool = False
) -> OpGraph:
    """Return the graph of this rank's step on fake tensors, whose calls `trace` gets."""

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


# ---- what a search needs besides the graph -------------------------------------------------------


@dataclass(frozen=True)
class RunCosts:
    """The optimizer, and what was measured or given."""

    optimizer: OptimizerProfile
    measured: RankCosts

    @property
    def cluster(self) -> Cluster:
        """The machines of the run."""
        return self.measured.cluster


def read_costs(trainer: pl.Trainer, graph: OpGraph) -> Questions[RunCosts]:
    """Return the costs of this run; ranks are asked for what they measure."""
    device = trainer.strategy.root_device
    optimizers, named = make_fake_optimizers(trainer.lightning_module, device=device)
    profile = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    measured: RankCosts = yield NeedsCosts(graph)
    profile = dataclasses.replace(profile, seconds_per_element=measured.update_seconds)
    return RunCosts(profile, measured)


def search_request(
    request: PlanRequest, trainer: pl.Trainer, graph: OpGraph, costs: RunCosts
) -> SearchRequest:
    """Return what to search on data axes, where every rank has a batch like the traced one."""
    ranks = dist.get_world_size()
    fit = Fit(trainer, graph=graph, only_replicated=request.only_replicated)
    exchanges, local_steps = ways_of_run(request, trainer, costs.optimizer, ranks=ranks)
    return SearchRequest(
        graph,
        costs.cluster,
        costs.optimizer,
        device_counts=(ranks,),
        global_batch_size=graph.batch_size * ranks,
        shards=not request.keeps_parameters_whole and why_not(fit, SHARDED) is None,
        exchanges=exchanges,
        local_steps=local_steps,
        kernel_seconds=costs.measured.kernel_seconds,
        returns_memory=request.saves_memory,
        gradient_views=request.gradient_views,
        max_seconds=_SEARCH_SECONDS,
    )


def say(plan: ParallelPlan) -> None:
    """Tell the user about a plan that was found."""
    rank_zero_info(f"topt: {plan.summary()}. {plan.reason}".strip())


def say_what_stays(graph: OpGraph) -> None:
    """Warn where some blocks of a plan that was asked to recompute cannot."""
    if reason := why_not_recomputed(graph):
        rank_zero_warn(f"topt: '+recompute' leaves blocks as they are: {reason}")


# ---- on a given mesh -----------------------------------------------------------------------------


def search_mesh(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: MeshPlan
) -> Questions[Planning]:
    """Return what was found on a given mesh."""
    # The step, and how it can be split.
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    step = TracedStep.of(trainer, batch)
    graph = step.graph
    fit = step.fit(request)
    kinds = (SHARDED, SLICES) if mesh.tensor_axes else (SHARDED,)
    reason = why_not(fit, *kinds)
    if reason is not None and mesh.tensor_axes:
        raise PlanError(
            f"a mesh with tensor axes splits parameters, but {reason}; choose one without"
        )
    # What to search: on this mesh only, without compression.
    costs = yield from read_costs(trainer, graph)
    wanted = dataclasses.replace(
        search_request(request, trainer, graph, costs),
        global_batch_size=graph.batch_size * mesh.data_parallel_size,
        shards=not given.preset and reason is None,
        exchanges=(),
        local_steps=(),
        returns_memory=request.saves_memory or given.recompute,
        split=step.split(),
        mesh=mesh,
        layout=given.preset,
    )
    # Kernels on slices, measured by all ranks.
    if costs.measured.measures:
        kernels = yield NeedsKernels(local_graphs(wanted))
        kernels = {**wanted.kernel_seconds, **kernels}
        wanted = dataclasses.replace(wanted, kernel_seconds=kernels)
    frontier = with_intervals(
        search_for(request, wanted), costs.cluster, graph, level=request.confidence
    )
    frontier = by_objective(request, frontier, trainer=trainer, optimizer=costs.optimizer)
    if given.preset:
        chosen = _with_what_is_left(_preset_of(given, frontier), graph)
    else:
        chosen = choose_for(
            request, frontier, costs.cluster, trainer=trainer, optimizer=costs.optimizer
        )
    if given.recompute:
        say_what_stays(graph)
    return Planning(frontier, chosen, graph)


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
    if request.objective == TIME_TO_LOSS:
        training = step_factors.Training(optimizer.name, steps_of_fit(trainer))
        table = step_table_of(trainer)
        return step_factors.choose_by_loss(frontier, training, table=table, **options)
    return choose(frontier.candidates, objective=request.objective, **options)


def by_objective(
    request: PlanRequest,
    frontier: PlanFrontier,
    *,
    trainer: pl.Trainer,
    optimizer: OptimizerProfile,
) -> PlanFrontier:
    """Return the frontier over what `request` asks for: of time to a loss, or as it is."""
    if request.objective != TIME_TO_LOSS:
        return frontier
    training = step_factors.Training(optimizer.name, steps_of_fit(trainer))
    return step_factors.by_loss(frontier, training, table=step_table_of(trainer))


def search_for(
    request: PlanRequest,
    search: SearchRequest,
    *,
    progress: Callable[[str], None] | None = None,
) -> PlanFrontier:
    """Return what `search_plans` finds; where a loss is the objective, for each way of training."""
    if request.objective == TIME_TO_LOSS:
        return step_factors.search_each_way(search, progress=progress)
    return search_plans(search, progress=progress)
