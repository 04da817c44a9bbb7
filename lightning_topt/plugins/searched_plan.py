"""Searches for the plan of a fit: what they need, on a given mesh, and of all plans.

They run in a copy of rank 0's process on CPUs, where user code leaves nothing behind
(`traced_planning`). What all ranks have to measure is asked of them (`NeedsCosts`, `NeedsKernels`).

    search_mesh   on a given mesh
    search_all    every rank has its own batch; the second and third only where they may beat what
                  was found before (`pays`):
      data axes     every ZeRO level and recomputation per block (`plan.plan_search`)
      tensor axes   the ranks of a tensor group run their batches one after the other
      stages        the ranks of a pipeline run their batches as microbatches (`group_steps`)

The last two need a step that is traced on fake tensors, and that other ranks may run as well
(`requirements`). All that was found becomes one frontier, from which the plan is chosen.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.pipeline.stage_layout import written_buffers
from lightning_topt.execution.pipeline.step_flows import StepFlows
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import WAY_OUT, CaptureError, StepError, may_need_values, one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.step_observer import observe_step
from lightning_topt.plan import step_factors
from lightning_topt.plan.choose import (
    TIME_TO_LOSS,
    NoPlanFitsError,
    choose,
    equal_in_words,
    errors_of,
    fitting_points,
)
from lightning_topt.plan.micro_batches import ModelFacts, of_steps
from lightning_topt.plan.own_batches import least_own_batch_seconds, search_own_batches
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_intervals import with_intervals
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plugins.group_steps import why_not_with_buffer
from lightning_topt.plugins.pipeline_steps import takes_index
from lightning_topt.plugins.plan_options import MeshPlan
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    step_table_of,
    steps_of_fit,
    ways_of_run,
)
from lightning_topt.plugins.planning import Planning, make_fake_optimizers
from lightning_topt.plugins.requirements import (
    OWN_BATCHES,
    SEARCHED_STAGES,
    SEQUENTIAL,
    SHARDED,
    SLICES,
    Fit,
    noted_reads,
    why_not,
)
from lightning_topt.plugins.step_records import loss_of
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import least_seconds, tensor_sizes

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
    profile = replace(profile, seconds_per_element=measured.update_seconds)
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
    wanted = replace(
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
        wanted = replace(wanted, kernel_seconds=kernels)
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
    # Name the matrices that are cut along fewer tensor axes than there are
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
    return replace(point, plan=replace(plan, reason=reason))


# ---- all plans -----------------------------------------------------------------------------------


def search_all(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> Questions[Planning]:
    """Search on data axes, then on tensor axes and in stages where that may pay.

    Returns the frontier of all that was found, with the plan chosen from it. Raises
    NoPlanFitsError, which says what was left out and why.
    """
    whole = request.keeps_parameters_whole
    step = TracedStep.of(trainer, batch, splits=not whole)
    costs = yield from read_costs(trainer, step.graph)
    search = search_request(request, trainer, step.graph, costs)
    # Data axes: the step as it is.
    found = [search_for(request, search)]
    why_axes = _why_data_axes_alone(request, step)
    # Tensor axes: whatever goes wrong is the reason why there are none.
    no_tensor_axes, split = why_axes, None
    if no_tensor_axes is None:
        try:
            no_tensor_axes, split = _tensor_request(request, step, search, found[0])
        except Exception as error:
            no_tensor_axes = one_line(error)
    if split is not None:
        if costs.measured.measures:
            kernels = yield NeedsKernels(local_graphs(split))
            split = replace(split, kernel_seconds={**split.kernel_seconds, **kernels})
        found.append(search_for(request, split))
    # Stages: these have to beat both.
    no_stages = why_axes
    if no_stages is None:
        try:
            no_stages = add_pipelines(request, step, search, found)
        except Exception as error:
            no_stages = one_line(error)
    whys = {
        "Parameters were not split over tensor axes": no_tensor_axes,
        "Stages of a pipeline were left out": no_stages,
        "Activation checkpointing was left out": why_not_recomputed(search.graph),
    }
    left_out = {what: why for what, why in whys.items() if why is not None}
    # One frontier, of steps that may have several batches.
    facts = ModelFacts.of(search.graph, search.optimizer, search.cluster)
    frontier = of_steps(together(found), accumulate=trainer.accumulate_grad_batches, facts=facts)
    frontier = with_intervals(frontier, search.cluster, search.graph, level=request.confidence)
    frontier = by_objective(request, frontier, trainer=trainer, optimizer=search.optimizer)
    try:
        chosen = choose_for(
            request, frontier, search.cluster, trainer=trainer, optimizer=search.optimizer
        )
        return Planning(frontier, chosen, search.graph, left_out)
    except NoPlanFitsError as error:
        raise NoPlanFitsError(
            ". ".join([str(error), *(f"{what}: {why}" for what, why in left_out.items())])
        ) from error


def _why_data_axes_alone(request: PlanRequest, step: TracedStep) -> str | None:
    # Why neither tensor axes nor stages are searched, as a clause, or None
    if request.keeps_parameters_whole:
        return 'only the exchange of gradients is searched (plan="search" searches all)'
    if step.trace is None:
        return "the step reads values of tensors, so that it cannot be split"
    return None


# ---- tensor axes ---------------------------------------------------------------------------------


def _tensor_request(
    request: PlanRequest, step: TracedStep, search: SearchRequest, best: PlanFrontier
) -> tuple[str | None, SearchRequest | None]:
    # Why no plan with a tensor axis can be chosen, as a clause; or what to search
    trainer = step.trainer
    (ranks,) = search.device_counts
    # A tensor group stays inside of a node.
    sizes = tensor_sizes(search.cluster, ranks)
    if not sizes or any((ranks // trainer.num_nodes) % size for size in sizes):
        return "no node has several ranks", None
    if not search.optimizer.elementwise:
        return "the optimizer does not update elements one by one", None
    # A lower bound of the time rules most models out.
    seconds = fastest(request, search, [best])
    if seconds is not None and request.objective == "time":
        mesh, samples = data_mesh(ranks), search.graph.batch_size
        whole = TrainingStep(
            search.graph, search.cluster, search.optimizer, mesh, samples, search.kernel_seconds
        )
        least = min(least_seconds(whole, size) for size in sizes)
        if not pays(least, seconds, request.difference_on(search.cluster)):
            return _why_computation(request, search), None
    if reason := why_not(step.fit(request), SHARDED, SEQUENTIAL):
        return reason, None
    split = replace(
        search,
        split=step.split(),
        own_batches=True,
        evaluates=trainer.enable_validation,
        layout="tensor",
    )
    # With kernels on slices by formula first: to measure them takes time of all ranks. Where
    # nothing fits at all, the error is to name the smallest plan, be it one of these.
    split_seconds = fastest(request, split, [search_for(request, split)])
    if seconds is not None and (
        split_seconds is None
        or (
            request.objective == "time"
            and not pays(split_seconds, seconds, request.difference_on(search.cluster))
        )
    ):
        return "no plan with a tensor axis is better", None
    return None, split


# ---- stages --------------------------------------------------------------------------------------


def add_pipelines(
    request: PlanRequest, step: TracedStep, search: SearchRequest, found: list[PlanFrontier]
) -> str | None:
    """Add plans with stages to `found`, or return why there are none, as a clause.

    Runs on rank 0, which captures steps for it.
    """
    trainer, batch = step.trainer, step.batch
    # Cheap reasons first: a lower bound of the time, then names, then the traced step.
    limit = seconds_that_pay(request, search, found)
    if (
        search.optimizer.by_parameter
        and limit is not None
        and least_own_batch_seconds(search) >= limit
    ):
        return _why_computation(request, search)
    if reason := why_left_out(step.fit(request), search):
        return reason
    frontier = _search_stages(request, replace(search, evaluates=trainer.enable_validation), found)
    if not frontier.points:
        return "no plan with stages is better"
    every = together([*found, frontier])
    try:
        plan = choose_for(
            request, every, search.cluster, trainer=trainer, optimizer=search.optimizer
        ).plan
    except NoPlanFitsError:  # the error will name the smallest
        plan = min(every.candidates, key=lambda point: point.peak_bytes).plan
    if not plan.own_batches:
        return "no plan with stages is better"
    if reason := why_not_cut(trainer, batch, plan):
        return reason
    found.append(frontier)
    return None


def why_left_out(fit: Fit, search: SearchRequest) -> str | None:
    """Return why ranks with a batch each cannot run in stages, as a clause.

    That is what can be seen before a search.
    """
    if not search.optimizer.by_parameter:
        return "the optimizer does not update each parameter by itself"
    return why_not(fit, SEARCHED_STAGES, SHARDED, OWN_BATCHES)


def _search_stages(
    request: PlanRequest, search: SearchRequest, found: list[PlanFrontier]
) -> PlanFrontier:
    """Search for plans with stages that may be chosen.

    They are faster by enough, or within a limit that no other plan keeps.
    """
    limit = seconds_that_pay(request, search, found)
    # A plan is kept where nothing known is better in time and memory.
    known = [point for frontier in found for point in frontier.candidates]
    if limit is not None:
        # Whatever memory the others take: a plan that is not faster by so much is not chosen.
        known = [replace(known[0], step_seconds=limit, peak_bytes=0.0)]
    frontier = search_own_batches(search, known)
    if limit is None or not frontier.points:
        return frontier
    best = fastest(request, search, [frontier])
    return frontier if best is not None and best < limit else replace(frontier, points=())


def why_not_cut(trainer: pl.Trainer, batch: Any, plan: ParallelPlan) -> str | None:
    """Return why the step cannot run in the stages of `plan`, as a clause."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    # One traced step, cut into the stages.
    indices = (0,) if takes_index(module) else ()

    def step(model: nn.Module, microbatch: Any) -> Tensor:
        with trainer.precision_plugin.train_step_context():
            loss = loss_of(model.training_step(microbatch[0], *indices))  # type: ignore[operator]
        return torch.zeros(()) if loss is None else loss

    stages = [[block.block for block in stage.blocks if block.block] for stage in plan.stages]
    try:
        (flow,) = StepFlows(module, stages, device=device).of(step, [(batch,)])
    except ValueError as error:
        return one_line(error)
    if flow.flow.reads_values:
        return "the step reads values of its batch, so that each would be traced"
    if flow.flow.draws_on_host:
        return (
            "the step draws numbers of Python or NumPy, on which the modules that it calls may "
            "depend"
        )
    if written := written_buffers(flow.flow, flow.stage_of_call):
        return why_not_with_buffer(min(written))
    return None


# ---- what may be chosen --------------------------------------------------------------------------


def fastest(
    request: PlanRequest, search: SearchRequest, found: Iterable[PlanFrontier]
) -> float | None:
    """Return the least seconds of plans that fit; None where none does."""
    # Without a limit, the memory of the device.
    limit = (
        search.cluster.device.memory_bytes if request.memory_limit is None else request.memory_limit
    )
    points = (point for frontier in found for point in frontier.candidates)
    margin = request.margin_on(search.cluster)
    fitting = fitting_points(points, memory_limit=limit, memory_margin=margin)
    return min((point.step_seconds for point in fitting), default=None)


def pays(seconds: float, best: float, difference: float | None) -> bool:
    """Return whether a step of `seconds` would be chosen before simpler ones of `best`.

    `difference` as in `choose`.
    """
    share, more = errors_of(difference)
    return seconds * (1 + share) + more < best


def _why_computation(request: PlanRequest, search: SearchRequest) -> str:
    words = equal_in_words(request.difference_on(search.cluster))
    return (
        "computation alone takes so long that the rest is not worth it: steps within "
        f"{words} count as equally fast"
    )


def seconds_that_pay(
    request: PlanRequest, search: SearchRequest, found: Iterable[PlanFrontier]
) -> float | None:
    """Return the seconds below which a step would be chosen before what was `found`.

    None where memory decides.
    """
    best = fastest(request, search, found)
    if best is None or request.objective != "time":
        return None
    share, more = errors_of(request.difference_on(search.cluster))
    return max((best - more) / (1 + share), 0.0)


def together(found: Sequence[PlanFrontier]) -> PlanFrontier:
    """Return one frontier of all that was searched."""
    first = found[0]
    if len(found) == 1:
        return first
    # `PlanFrontier.of` drops those that others beat.
    points: list[PlanPoint] = [point for frontier in found for point in frontier.points]
    return PlanFrontier.of(
        points,
        uniform=[point for frontier in found for point in frontier.uniform],
        capture_seconds=first.capture_seconds,
        search_seconds=sum(frontier.search_seconds for frontier in found),
        error_bound=max(frontier.error_bound for frontier in found),
    )


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
