"""Searches for the plan of a fit, whose step was traced (`planning.trace_step`).

They run in a copy of rank 0's process on CPUs, where user code leaves nothing behind (`planning`).
What all ranks have to measure is asked of them (`NeedsCosts`, `NeedsKernels`).

    search_mesh   on a given mesh
    search_stages so many stages, or those of a given mesh
    search_all    every rank has its own batch; the second and third only where they may beat what
                  was found before:
      data axes     every ZeRO level and recomputation per block (`plan.plan_search`)
      tensor axes   the ranks of a tensor group run their batches one after the other
      stages        the ranks of a pipeline run their batches as microbatches (`group_steps`)

The last two need a step that is traced on fake tensors, and that other ranks may run as well
(`requirements`). All that was found becomes one frontier, from which the plan is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import CompiledCost, TrainingStep
from lightning_topt.execution.pipeline.stage_layout import StepFlows, written_buffers
from lightning_topt.graph.blocks import choose_blocks, why_not_recomputed
from lightning_topt.graph.capture import call_training_step, loss_of
from lightning_topt.graph.errors import one_line
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan import step_factors
from lightning_topt.plan.choose import (
    TIME_TO_LOSS,
    NoPlanFitsError,
    choose,
    equal_in_words,
    errors_of,
    fitting_points,
)
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_frontier import (
    ModelFacts,
    PlanFrontier,
    PlanPoint,
    of_steps,
    with_intervals,
)
from lightning_topt.plan.plan_search import (
    SearchRequest,
    least_own_batch_seconds,
    local_graphs,
    search_own_batches,
    search_plans,
)
from lightning_topt.plugins.compiled_steps import known_trials
from lightning_topt.plugins.plan_options import MeshPlan, PipelinePlan
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    rule_for,
    step_table_of,
    steps_of_fit,
    ways_of_run,
)
from lightning_topt.plugins.requirements import (
    CONTINUOUS,
    OWN_BATCHES,
    SEARCHED_STAGES,
    SEQUENTIAL,
    SHARDED,
    SLICES,
    Fit,
    why_not,
)
from lightning_topt.techniques.known_trials import compiled_costs
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import least_seconds, tensor_sizes

_SEARCH_SECONDS = 3.0  # a fit waits for it
T = TypeVar("T")


@dataclass(frozen=True)
class Planning:
    """A frontier of the step `graph`, and the point chosen from it; its plan says why."""

    frontier: PlanFrontier
    chosen: PlanPoint
    graph: OpGraph


# ---- what ranks are asked ------------------------------------------------------------------------


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

    Seconds of kernels, and of updates per element of each parameter by name.
    """

    cluster: Cluster
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    update_seconds: Mapping[str, float] = field(default_factory=dict)


Questions = Generator[NeedsCosts | NeedsKernels, Any, T]


# ---- what is searched ----------------------------------------------------------------------------


def make_fake_optimizers(
    module: pl.LightningModule, *, device: torch.device
) -> tuple[list[Optimizer], list[tuple[str, nn.Parameter]]]:
    """Return what the module's own `configure_optimizers` makes, run on a fake copy.

    With the parameters by name that these may have.
    """
    # Parameters on the fake device take no memory, whatever state is built.
    copied, mode = fake_copy(module, device=device.type)
    with mode:
        optimizers, _, _ = _configure_optimizers(
            copied.configure_optimizers()  # type: ignore[arg-type]
        )
    # Modules may ask their trainer for the parameters (`self.trainer.model.parameters()`), which
    # are the original ones.
    return optimizers, [*copied.named_parameters(), *module.named_parameters()]


def search_request(request: PlanRequest, step: Fit) -> Questions[SearchRequest]:
    """Return what to search on data axes, where every rank has a batch like the traced one.

    Ranks are asked for what they measure.
    """
    trainer, graph, ranks = step.trainer, step.traced, dist.get_world_size()
    device = trainer.strategy.root_device
    # The optimizer, and what ranks have measured or were given.
    optimizers, named = make_fake_optimizers(trainer.lightning_module, device=device)
    optimizer = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    costs: RankCosts = yield NeedsCosts(graph)
    optimizer = replace(optimizer, seconds_per_element=costs.update_seconds)
    # What plans may do.
    exchanges, local_steps = ways_of_run(request, trainer, optimizer, ranks=ranks)
    compiled: Mapping[str, CompiledCost] = {}
    if request.allowed.compile and step.batch is not None:
        trials = known_trials(trainer, step.batch).trials
        compiled = compiled_costs(step.module, trials, steps=steps_of_fit(trainer))
    return SearchRequest(
        graph,
        costs.cluster,
        optimizer,
        device_counts=(ranks,),
        global_batch_size=graph.batch_size * ranks,
        shards=not request.keeps_parameters_whole and why_not(step, SHARDED) is None,
        exchanges=exchanges,
        local_steps=local_steps,
        kernel_seconds=costs.kernel_seconds,
        compiled=compiled,
        returns_memory=request.saves_memory,
        gradient_views=request.gradient_views,
        max_seconds=_SEARCH_SECONDS,
    )


def with_slices(request: PlanRequest, search: SearchRequest) -> Questions[SearchRequest]:
    """Return `search` with the seconds of kernels on slices, which the full step does not have."""
    if request.cluster is not None:  # nothing is measured
        return search
    kernels = yield NeedsKernels(local_graphs(search))
    return replace(search, kernel_seconds={**search.kernel_seconds, **kernels})


def split_of(step: Fit) -> SplitModel:
    """Return what splits a traced step over tensor axes. Raises PlanError where it cannot be."""
    if step.trace is None:
        raise PlanError(step.why_not_split)
    return SplitModel(
        step.module,
        step.batch,
        step.traced,
        step.trace,
        forward_context=step.trainer.precision_plugin.forward_context,
        device=step.trainer.strategy.root_device.type,
    )


def say_what_stays(graph: OpGraph) -> None:
    """Warn where some blocks of a plan that was asked to recompute cannot."""
    if reason := why_not_recomputed(graph):
        rank_zero_warn(f"topt: '+recompute' leaves blocks as they are: {reason}")


# ---- on a given mesh -----------------------------------------------------------------------------


def search_mesh(request: PlanRequest, step: Fit, given: MeshPlan) -> Questions[Planning]:
    """Return what was found on a given mesh."""
    trainer, graph = step.trainer, step.traced
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    reason = why_not(step, *((SHARDED, SLICES) if mesh.tensor_axes else (SHARDED,)))
    if reason is not None and mesh.tensor_axes:
        raise PlanError(
            f"a mesh with tensor axes splits parameters, but {reason}; choose one without"
        )
    # What to search: on this mesh only, without compression.
    search = replace(
        (yield from search_request(request, step)),
        global_batch_size=graph.batch_size * mesh.data_parallel_size,
        shards=not given.preset and reason is None,
        exchanges=(),
        local_steps=(),
        returns_memory=request.saves_memory or given.recompute,
        split=split_of(step),
        mesh=mesh,
        layout=given.preset,
    )
    search = yield from with_slices(request, search)
    # The choice: of a layout by name, the plan that splits most.
    frontier = frontier_of_steps(request, search_for(request, search), search, trainer)
    if given.preset:
        chosen = _preset_of(given, frontier)
    else:
        chosen = choose_for(request, frontier, search, trainer)
    if given.recompute:
        say_what_stays(graph)
    return Planning(frontier, chosen, graph)


def _preset_of(given: MeshPlan, frontier: PlanFrontier) -> PlanPoint:
    # The uniform plan that splits most. It recomputes all that it can, or nothing
    again = [
        (sum(block.config.recompute for block in point.plan.blocks), point)
        for point in frontier.uniform
    ]
    wanted = max(count for count, _ in again) if given.recompute else 0
    return min(
        (point for count, point in again if count == wanted), key=lambda point: point.peak_bytes
    )


# ---- stages --------------------------------------------------------------------------------------


def search_stages(
    request: PlanRequest, step: Fit, given: PipelinePlan, *, samples: int, count: int
) -> Questions[ParallelPlan]:
    """Return a plan with stages for the traced microbatch, one of `count` of `samples`.

    Raises PlanError where there are fewer blocks than stages, NoPlanFitsError.
    """
    mesh = given.mesh(dist.get_world_size(), num_nodes=step.trainer.num_nodes)
    graph = with_blocks_for(step.traced, given, mesh)
    step = replace(step, graph=graph)
    _check_blocks(graph, mesh.pipeline_size * given.per_rank)
    # What to search: for any number of microbatches that divides the batch, where that is free.
    search = yield from search_request(request, step)
    is_free = graph.batch_scaling and given.microbatches is None
    exchange = given.gradient_exchange
    search = replace(
        search,
        global_batch_size=(samples if is_free else graph.batch_size * count)
        * mesh.data_parallel_size,
        pipelines=PipelineRequest(
            given.stages if given.sizes is not None else mesh.pipeline_size * given.per_rank,
            given.schedule,
            None if is_free else count,
            ranks=mesh.pipeline_size,
            tensor=mesh.ranks_along(mesh.tensor_axes),
            by_exchange=exchange is not None,
        ),
        exchanges=() if exchange is None else (exchange,),
        stale=_stale_weights(request, step.trainer, given),
    )
    if mesh.tensor_axes:
        search = replace(search, split=split_of(step))
        search = yield from with_slices(request, search)
    # The choice; limits are for plans that recompute, where that was asked for.
    frontier = search_plans(search)
    if given.recompute:
        again = [_recomputed(point, search) for point in frontier.candidates]
        frontier = replace(frontier, points=tuple(again), uniform=())
        say_what_stays(graph)
    return choose_for(request, frontier, search, step.trainer).plan.gathering(graph)


def _check_blocks(graph: OpGraph, stages: int) -> None:
    # In the order of their first operator.
    names = [*dict.fromkeys(op.block for op in graph.ops if op.block)]
    if len(names) < stages:
        raise PlanError(
            f"{graph.model} has {len(names)} block(s) that can be stages of a pipeline "
            f"({', '.join(names) or 'none'}), and {stages} stages are wanted: choose fewer "
            "stages, or let the model consist of more submodules that are called one after the "
            "other"
        )


def _stale_weights(
    request: PlanRequest, trainer: pl.Trainer, given: PipelinePlan
) -> StaleWeights | None:
    # What a search for `given` may choose of continuous pipelines
    if not request.allowed.staleness:
        return None
    if given.schedule is None and why_not(Fit(trainer), CONTINUOUS):
        return None
    module, device = trainer.lightning_module, trainer.strategy.root_device
    (optimizer,), _ = make_fake_optimizers(module, device=device)
    rule = partial(
        rule_for,
        optimizer,
        given.prediction or request.allowed.rule,
        accumulate=trainer.accumulate_grad_batches,
    )
    rule()  # one that does not know the optimizer is refused before the search
    return StaleWeights(lambda flight: rule(flight=flight), trainer.accumulate_grad_batches)


def _recomputed(point: PlanPoint, search: SearchRequest) -> PlanPoint:
    # The plan of `point` with all blocks recomputed that can be, and what it takes
    again = {block.name for block in search.graph.blocks if block.recomputable}

    def with_it(block: BlockPlan) -> BlockPlan:
        config = replace(block.config, recompute=block.config.recompute or block.block in again)
        return replace(block, config=config)

    stages = tuple(StagePlan(tuple(map(with_it, stage.blocks))) for stage in point.plan.stages)
    priced = price_plan(search, replace(point.plan, stages=stages))
    predicted = priced.predicted
    return PlanPoint(predicted.step_seconds, predicted.peak_bytes, point.devices, priced.plan)


def with_blocks_for(graph: OpGraph, given: PipelinePlan, mesh: Mesh) -> OpGraph:
    """Return `graph` with blocks enough for the stages.

    They are smaller modules where too few are of the size worth a decision.
    """
    count = mesh.pipeline_size * given.per_rank
    if len(graph.blocks) > count:
        return graph
    # Two blocks per stage at least, so that cuts can balance.
    finer = choose_blocks(graph, min_parameter_share=0.0, min_kept_share=0.0, max_share=0.5 / count)
    return graph.with_blocks(finer) if len(finer) > len(graph.blocks) else graph


# ---- all plans -----------------------------------------------------------------------------------


def search_all(request: PlanRequest, step: Fit) -> Questions[Planning]:
    """Search on data axes, then on tensor axes and in stages where that may pay.

    Returns the frontier of all that was found, with the plan chosen from it. Raises
    NoPlanFitsError, which says what was left out and why.
    """
    trainer = step.trainer
    search = yield from search_request(request, step)
    # Data axes: the step as it is.
    frontiers = [search_for(request, search)]
    no_tensor_axes = no_stages = None
    if request.keeps_parameters_whole:
        no_tensor_axes = no_stages = (
            'only the exchange of gradients is searched (plan="search" searches all)'
        )
    elif search.graph.is_manual:
        no_tensor_axes = no_stages = "training_step optimizes manually"
    elif step.trace is None:
        no_tensor_axes = no_stages = "the step reads values of tensors, so that it cannot be split"
    # Tensor axes: whatever goes wrong is the reason why there are none.
    if no_tensor_axes is None:
        split = None
        try:
            no_tensor_axes, split = _tensor_request(request, step, search, frontiers)
        except Exception as error:
            no_tensor_axes = one_line(error)
        if split is not None:
            frontiers.append(search_for(request, (yield from with_slices(request, split))))
    # Stages: these have to beat both.
    if no_stages is None:
        try:
            no_stages = _add_stages(request, step, search, frontiers)
        except Exception as error:
            no_stages = one_line(error)
    # One frontier.
    frontier = frontier_of_steps(request, together(frontiers), search, trainer)
    try:
        chosen = choose_for(request, frontier, search, trainer)
    except NoPlanFitsError as error:
        whys = {
            "Parameters were not split over tensor axes": no_tensor_axes,
            "Stages of a pipeline were left out": no_stages,
            "Activation checkpointing was left out": why_not_recomputed(search.graph),
        }
        left_out = (f"{what}: {why}" for what, why in whys.items() if why is not None)
        raise NoPlanFitsError(". ".join([str(error), *left_out])) from error
    return Planning(frontier, chosen, search.graph)


def _tensor_request(
    request: PlanRequest, step: Fit, search: SearchRequest, frontiers: Sequence[PlanFrontier]
) -> tuple[str | None, SearchRequest | None]:
    # Why no plan with a tensor axis can be chosen, as a clause; or what to search
    trainer, (ranks,) = step.trainer, search.device_counts
    # A tensor group stays inside of a node.
    sizes = tensor_sizes(search.cluster, ranks)
    if not sizes or any((ranks // trainer.num_nodes) % size for size in sizes):
        return "no node has several ranks", None
    if not search.optimizer.elementwise:
        return "the optimizer does not update elements one by one", None
    # A lower bound of the time rules most models out.
    limit = _seconds_that_pay(request, search, frontiers)
    if limit is not None:
        mesh, samples = data_mesh(ranks), search.graph.batch_size
        full = TrainingStep(
            search.graph, search.cluster, search.optimizer, mesh, samples, search.kernel_seconds
        )
        if min(least_seconds(full, size) for size in sizes) >= limit:
            return _why_computation(request, search), None
    if reason := why_not(step, SHARDED, SEQUENTIAL):
        return reason, None
    split = replace(
        search,
        split=split_of(step),
        own_batches=True,
        evaluates=trainer.enable_validation,
        layout="tensor",
    )
    # With kernels on slices by formula first: to measure them takes time of all ranks. Where
    # nothing fits at all, the error is to name the smallest plan, be it one of these.
    seconds = _fastest(request, split, [search_for(request, split)])
    fits = _fastest(request, search, frontiers) is not None
    if fits and (seconds is None or (limit is not None and seconds >= limit)):
        return "no plan with a tensor axis is better", None
    return None, split


def _add_stages(
    request: PlanRequest, step: Fit, search: SearchRequest, frontiers: list[PlanFrontier]
) -> str | None:
    # Add plans with stages to `frontiers`, or return why there are none, as a clause
    trainer = step.trainer
    # Cheap reasons first: a lower bound of the time, then names, then the traced step.
    limit = _seconds_that_pay(request, search, frontiers)
    by_parameter = search.optimizer.by_parameter
    if by_parameter and limit is not None and least_own_batch_seconds(search) >= limit:
        return _why_computation(request, search)
    if not by_parameter:
        return "the optimizer does not update each parameter by itself"
    if reason := why_not(step, SEARCHED_STAGES, SHARDED, OWN_BATCHES):
        return reason
    # A plan is kept where no other is better in time and memory; or, whatever memory the others
    # take, where it is faster by so much that it is chosen.
    others = [point for frontier in frontiers for point in frontier.candidates]
    if limit is not None:
        others = [replace(others[0], step_seconds=limit, peak_bytes=0.0)]
    frontier = search_own_batches(replace(search, evaluates=trainer.enable_validation), others)
    if limit is not None:
        best = _fastest(request, search, [frontier])
        if best is None or best >= limit:
            return "no plan with stages is better"
    every = together([*frontiers, frontier])
    try:
        plan = choose_for(request, every, search, trainer).plan
    except NoPlanFitsError:  # the error will name the smallest
        plan = min(every.candidates, key=lambda point: point.peak_bytes).plan
    if not plan.own_batches:
        return "no plan with stages is better"
    if reason := why_not_cut(trainer, step.batch, plan):
        return reason
    frontiers.append(frontier)
    return None


def why_not_cut(trainer: pl.Trainer, batch: Any, plan: ParallelPlan) -> str | None:
    """Return why the step cannot run in the stages of `plan`, as a clause."""
    module, device = trainer.lightning_module, trainer.strategy.root_device

    # One traced step, cut into the stages.
    def step(model: nn.Module, microbatch: Any) -> Tensor:
        with trainer.precision_plugin.train_step_context():
            return loss_of(call_training_step(model, microbatch[0]))

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
        return (
            f"training steps change the buffer {min(written)!r}, of which ddp keeps what rank 0's "
            "batches make"
        )
    return None


# ---- what may be chosen --------------------------------------------------------------------------


def _fastest(
    request: PlanRequest, search: SearchRequest, frontiers: Iterable[PlanFrontier]
) -> float | None:
    # The least seconds of plans that fit; None where none does
    points = (point for frontier in frontiers for point in frontier.candidates)
    margin = request.margin_on(search.cluster)
    fitting = fitting_points(points, memory_limit=_limit(request, search), memory_margin=margin)
    return min((point.step_seconds for point in fitting), default=None)


def _limit(request: PlanRequest, search: SearchRequest) -> float:
    # Without one, the memory of the device
    given = request.memory_limit
    return search.cluster.device.memory_bytes if given is None else given


def _why_computation(request: PlanRequest, search: SearchRequest) -> str:
    words = equal_in_words(request.difference_on(search.cluster))
    return (
        "computation alone takes so long that the rest is not worth it: steps within "
        f"{words} count as equally fast"
    )


def _seconds_that_pay(
    request: PlanRequest, search: SearchRequest, frontiers: Iterable[PlanFrontier]
) -> float | None:
    # The seconds below which a step would be chosen before those of `frontiers`; None where memory
    # decides
    best = _fastest(request, search, frontiers)
    if best is None or request.objective != "time":
        return None
    share, more = errors_of(request.difference_on(search.cluster))
    return max((best - more) / (1 + share), 0.0)


def together(frontiers: Sequence[PlanFrontier]) -> PlanFrontier:
    """Return one frontier of all that was searched."""
    first = frontiers[0]
    if len(frontiers) == 1:
        return first
    # `PlanFrontier.of` drops those that others beat.
    points: list[PlanPoint] = [point for frontier in frontiers for point in frontier.points]
    return PlanFrontier.of(
        points,
        uniform=[point for frontier in frontiers for point in frontier.uniform],
        capture_seconds=first.capture_seconds,
        search_seconds=sum(frontier.search_seconds for frontier in frontiers),
        error_bound=max(frontier.error_bound for frontier in frontiers),
    )


def frontier_of_steps(
    request: PlanRequest,
    found: PlanFrontier,
    search: SearchRequest,
    trainer: pl.Trainer,
    *,
    progress: Callable[[str], None] | None = None,
) -> PlanFrontier:
    """Return what was `found` as a frontier of steps, which may have several batches.

    Where no plan fits, plans that offload are searched as well.
    """
    facts = ModelFacts.of(search.graph, search.optimizer, search.cluster)
    known: dict[str, Any] = {"accumulate": trainer.accumulate_grad_batches, "facts": facts}
    frontier = of_steps(found, **known)
    can_offload = (
        search.shards
        and request.objective != TIME_TO_LOSS
        and not (search.mesh is not None and search.mesh.tensor_axes)
        and not (search.pipelines is not None and search.pipelines.is_given)
    )
    if can_offload and _fastest(request, search, [frontier]) is None:
        more = replace(search, offloads=True, split=None, pipelines=None, exchanges=())
        offloaded = search_for(request, more, progress=progress)
        frontier = of_steps(together([found, offloaded]), **known)
    return in_view(request, frontier, search, trainer)


def in_view(
    request: PlanRequest, frontier: PlanFrontier, search: SearchRequest, trainer: pl.Trainer
) -> PlanFrontier:
    """Return `frontier` with intervals, over what `request` asks for."""
    frontier = with_intervals(frontier, search.cluster, search.graph, level=request.confidence)
    if request.objective != TIME_TO_LOSS:
        return frontier
    training = step_factors.Training(search.optimizer.name, steps_of_fit(trainer))
    return step_factors.by_loss(frontier, training, table=step_table_of(trainer))


def choose_for(
    request: PlanRequest, frontier: PlanFrontier, search: SearchRequest, trainer: pl.Trainer
) -> PlanPoint:
    """Return the point of `frontier`, which `search` has found, that meets `request`.

    No limit means the memory of a device. Raises NoPlanFitsError.
    """
    options: dict[str, Any] = {
        "memory_limit": _limit(request, search),
        "memory_margin": request.margin_on(search.cluster),
        "difference": request.difference_on(search.cluster),
    }
    if request.objective == TIME_TO_LOSS:
        training = step_factors.Training(search.optimizer.name, steps_of_fit(trainer))
        table = step_table_of(trainer)
        return step_factors.choose_by_loss(frontier, training, table=table, **options)
    return choose(frontier.candidates, objective=request.objective, **options)


def search_for(
    request: PlanRequest, search: SearchRequest, *, progress: Callable[[str], None] | None = None
) -> PlanFrontier:
    """Return what `search_plans` finds; where a loss is the objective, for each way of training."""
    if request.objective == TIME_TO_LOSS:
        return step_factors.search_each_way(search, progress=progress)
    return search_plans(search, progress=progress)
