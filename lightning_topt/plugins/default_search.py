"""The whole search, where every rank has its own batch.

Three searches, each only where it may beat what was found before (`pays`):

    data axes    every ZeRO level and recomputation per block (`plan.plan_search`)
    tensor axes  the ranks of a tensor group run their batches one after the other (`group_steps`)
    stages       the ranks of a pipeline run their batches as microbatches (`pipeline_steps`)

The last two need a step that is traced on fake tensors, and that other ranks may run as well
(`requirements`). All that was found becomes one frontier, from which the plan is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.pipeline.stage_layout import written_buffers
from lightning_topt.execution.pipeline.step_flows import StepFlows
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.errors import one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.choose import (
    NoPlanFitsError,
    equal_in_words,
    errors_of,
    fitting_points,
)
from lightning_topt.plan.micro_batches import ModelFacts, of_steps
from lightning_topt.plan.own_batches import least_own_batch_seconds, search_own_batches
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_intervals import with_intervals
from lightning_topt.plan.plan_search import SearchRequest, local_graphs
from lightning_topt.plan.tensor_meshes import least_seconds, tensor_sizes
from lightning_topt.plugins.group_steps import why_not_with_buffer
from lightning_topt.plugins.pipeline_steps import takes_index
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.requirements import (
    OWN_BATCHES,
    SEARCHED_STAGES,
    SEQUENTIAL,
    SHARDED,
    Fit,
    why_not,
)
from lightning_topt.plugins.searched_plan import (
    NeedsKernels,
    Questions,
    TracedStep,
    by_objective,
    choose_for,
    read_costs,
    search_for,
    search_request,
)
from lightning_topt.plugins.step_records import loss_of


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
    tensor_search = TensorSearch(request, step, search, found[0])
    no_tensor_axes, graphs = why_axes, list[OpGraph]()
    if no_tensor_axes is None:
        try:
            no_tensor_axes, graphs = tensor_search.by_formula()
        except Exception as error:
            no_tensor_axes = one_line(error)
    if no_tensor_axes is None:
        kernels: Mapping[KernelKey, float] = {}
        if costs.measured.measures and graphs:
            kernels = yield NeedsKernels(graphs)
        found.append(tensor_search.frontier(kernels))
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
    """Return why neither tensor axes nor stages are searched, as a clause, or None."""
    if request.keeps_parameters_whole:
        return 'only the exchange of gradients is searched (plan="search" searches all)'
    if step.trace is None:
        return "the step reads values of tensors, so that it cannot be split"
    return None


# ---- tensor axes ---------------------------------------------------------------------------------


class TensorSearch:
    """A search on tensor axes, where it may beat the `best` found on data axes."""

    def __init__(
        self, request: PlanRequest, step: TracedStep, search: SearchRequest, best: PlanFrontier
    ) -> None:
        self._request, self._step, self._best = request, step, best
        self._search = search  # of the whole step; from `by_formula` on of a step that can be split

    def by_formula(self) -> tuple[str | None, list[OpGraph]]:
        """Search with kernels on slices by formula.

        Returns why no plan may be chosen, as a clause, or the graphs of the kernels to measure.
        """
        if reason := self._why_not():
            return reason, []
        trainer = self._step.trainer
        if reason := why_not(self._step.fit(self._request), SEQUENTIAL):
            return reason, []
        self._search = dataclasses.replace(
            self._search,
            split=self._step.split(),
            own_batches=True,
            evaluates=trainer.enable_validation,
            layout="tensor",
        )
        request = self._request
        frontier = search_for(request, self._search)
        split_best, best = (
            fastest(request, self._search, [each]) for each in (frontier, self._best)
        )
        # Where nothing fits at all, the error is to name the smallest plan, be it one of these.
        if best is not None and (
            split_best is None
            or (
                request.objective == "time"
                and not pays(split_best, best, request.difference_on(self._search.cluster))
            )
        ):
            return "no plan with a tensor axis is better", []
        return None, local_graphs(self._search)

    def frontier(self, kernels: Mapping[KernelKey, float]) -> PlanFrontier:
        """Search with the seconds of `kernels` on slices."""
        kernels = {**self._search.kernel_seconds, **kernels}
        search = dataclasses.replace(self._search, kernel_seconds=kernels)
        return search_for(self._request, search)

    def _why_not(self) -> str | None:
        """Return why no plan with a tensor axis can be chosen, as a clause, or None."""
        request, trainer, search = self._request, self._step.trainer, self._search
        (ranks,) = search.device_counts
        # A tensor group stays inside of a node.
        sizes = tensor_sizes(search.cluster, ranks)
        if not sizes or any((ranks // trainer.num_nodes) % size for size in sizes):
            return "no node has several ranks"
        if not search.optimizer.elementwise:
            return "the optimizer does not update elements one by one"
        # A lower bound of the time rules most models out.
        best = fastest(request, search, [self._best])
        if best is not None and request.objective == "time":
            mesh, samples = data_mesh(ranks), search.graph.batch_size
            step = TrainingStep(
                search.graph, search.cluster, search.optimizer, mesh, samples, search.kernel_seconds
            )
            least = min(least_seconds(step, size) for size in sizes)
            if not pays(least, best, request.difference_on(search.cluster)):
                return _why_computation(request, search)
        return why_not(self._step.fit(request), SHARDED, SEQUENTIAL)


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
    frontier = _search_stages(
        request, dataclasses.replace(search, evaluates=trainer.enable_validation), found
    )
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
        known = [dataclasses.replace(known[0], step_seconds=limit, peak_bytes=0.0)]
    frontier = search_own_batches(search, known)
    if limit is None or not frontier.points:
        return frontier
    best = fastest(request, search, [frontier])
    return (
        frontier if best is not None and best < limit else dataclasses.replace(frontier, points=())
    )


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
