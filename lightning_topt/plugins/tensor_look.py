"""A search without a plan looks at tensor axes as well, where these may be better than all that
data axes offer, and then at pipelines.

Every rank has its own batch by then, so the ranks of a tensor group run them in joint modules
(`joint_batches`) or in turns (`turns`), whichever is faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plan.tensor_meshes import least_seconds, tensor_sizes
from lightning_topt.plugins.found_plans import fastest, pays, together
from lightning_topt.plugins.joint_batches import are_alike
from lightning_topt.plugins.own_batches import TracedStep, why_no_turns
from lightning_topt.plugins.pipeline_look import add_pipelines
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.planning_ranks import on_rank_0
from lightning_topt.plugins.searched_plan import (
    choose_for,
    needs_whole_parameters,
    read_costs,
    say,
    search_request,
    split_model,
)
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace


def search_default(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, graph: OpGraph
) -> tuple[ParallelPlan, Planning | None]:
    """Return the best plan for ranks that have a batch each, and on rank 0 what was searched. A
    collective call.
    """
    costs = read_costs(request, trainer, graph)
    search = search_request(request, trainer, graph, costs)
    are_joint = are_alike(batch, None, device=trainer.strategy.root_device)
    planning: Planning | None = None

    def searched(kernels: Mapping[KernelKey, float] | None) -> list[OpGraph] | dict[str, Any]:
        nonlocal planning
        found = search_with_axes(
            request, trainer, batch, search, are_joint=are_joint, kernels=kernels
        )
        if isinstance(found, list):
            return found
        planning = found
        return planning.chosen.plan.to_dict()

    found = on_rank_0(lambda: searched(None if costs.measurements is not None else {}))
    if isinstance(found, list):
        kernels = costs.measured(found)
        found = on_rank_0(lambda: searched(kernels))
    assert isinstance(found, dict)
    plan = ParallelPlan.from_dict(found)
    say(plan)
    return plan, planning


def search_with_axes(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    search: SearchRequest,
    *,
    are_joint: bool,
    kernels: Mapping[KernelKey, float] | None,
    why_not: str | None = None,
    as_measured: Callable[[PlanFrontier], PlanFrontier] = lambda frontier: frontier,
) -> Planning | list[OpGraph]:
    """Search on data axes, and where that may pay on tensor axes and in stages too; on rank 0,
    which captures steps for it.

    Args:
        request: what the user asked for.
        trainer: of this fit.
        batch: of this rank, which is captured.
        search: what to search on data axes.
        are_joint: see `TensorLook`.
        kernels: seconds of kernels on slices; None: where they are wanted, the graphs that hold
            them are returned.
        why_not: why data axes alone are looked at, as a clause.
        as_measured: corrects the times of what was found.

    Raises NoPlanFitsError, which says what was left out and why.
    """
    found = [search_plans(search)]
    step = TracedStep(trainer, batch)
    look = TensorLook(request, step, search, found[0], are_joint=are_joint)
    reason, graphs = (why_not, []) if why_not is not None else _reasoned(look.by_formula)
    if graphs and kernels is None:
        return graphs
    if reason is None:
        found.append(look.frontier(kernels or {}))
    no_stages = why_not
    if no_stages is None:
        try:
            no_stages = add_pipelines(request, step, search, found)
        except Exception as error:
            no_stages = one_line(error)
    whys = {
        "Parameters were not split over tensor axes": reason,
        "Stages of a pipeline were left out": no_stages,
        "Activation checkpointing was left out": why_not_recomputed(search.graph),
    }
    left_out = {what: why for what, why in whys.items() if why is not None}
    frontier = as_measured(together(found))
    try:
        return Planning(
            frontier, choose_for(request, frontier, search.cluster), search.graph, left_out
        )
    except NoPlanFitsError as error:
        raise NoPlanFitsError(
            ". ".join([str(error), *(f"{what}: {why}" for what, why in left_out.items())])
        ) from error


def _reasoned(
    function: Callable[[], tuple[str | None, list[OpGraph]]],
) -> tuple[str | None, list[OpGraph]]:
    """What `function` returns; whatever goes wrong in it is a reason."""
    try:
        return function()
    except Exception as error:
        return one_line(error), []


class TensorLook:
    """A search on tensor axes for ranks that have a batch each, where it may beat `best`, which was
    found on data axes.

    `are_joint`: batches of all ranks are alike, so that they can run as one.
    """

    def __init__(
        self,
        request: PlanRequest,
        step: TracedStep,
        search: SearchRequest,
        best: PlanFrontier,
        *,
        are_joint: bool,
    ) -> None:
        self._request, self._step, self._best = request, step, best
        self._are_joint = are_joint
        self._search = search  # of the whole step; from `by_formula` on of a step that can be split

    def by_formula(self) -> tuple[str | None, list[OpGraph]]:
        """Search with kernels on slices by formula. Return why no plan may be chosen, as a clause,
        or their graphs.
        """
        if reason := self._why_not():
            return reason, []
        trainer, batch, graph, trace = (
            self._step.trainer,
            self._step.batch,
            self._step.graph,
            self._step.trace,
        )
        if reason := why_no_turns(trainer, batch, graph):
            return reason, []
        if self._are_joint:  # else turns would be taken in most steps
            _trace_larger(trace, trainer, batch, graph)
        split = split_model(trainer, batch, graph, trace)
        of_turns = {"own_batches": True, "evaluates": trainer.enable_validation, "layout": "tensor"}
        self._search = dataclasses.replace(self._search, graph=graph, split=split, **of_turns)  # type: ignore[arg-type]
        request, frontier = self._request, search_plans(self._search)
        split_best, best = (
            fastest(request, self._search, [each]) for each in (frontier, self._best)
        )
        # Where nothing fits at all, the error is to name the smallest plan, be it one of these.
        if best is not None and (
            split_best is None or (request.objective == "time" and not pays(split_best, best))
        ):
            return "no plan with a tensor axis is better", []
        return None, local_graphs(self._search)

    def frontier(self, kernels: Mapping[KernelKey, float]) -> PlanFrontier:
        """Search with the seconds of `kernels` on slices."""
        kernels = {**self._search.kernel_seconds, **kernels}
        return search_plans(dataclasses.replace(self._search, kernel_seconds=kernels))

    def _why_not(self) -> str | None:
        """Why no plan with a tensor axis can be chosen, as a clause; None where one might be."""
        request, trainer, search = self._request, self._step.trainer, self._search
        (ranks,) = search.device_counts
        sizes = tensor_sizes(search.cluster, ranks)
        if not sizes or any((ranks // trainer.num_nodes) % size for size in sizes):
            return "no node has several ranks"
        if not search.optimizer.elementwise:
            return "the optimizer does not update elements one by one"
        best = fastest(request, search, [self._best])
        if best is not None and request.objective == "time":
            mesh, samples = data_mesh(ranks), search.graph.batch_size
            step = TrainingStep(
                search.graph, search.cluster, search.optimizer, mesh, samples, search.kernel_seconds
            )
            if not pays(min(least_seconds(step, size) for size in sizes), best):
                return "computation alone takes so long that the rest is not worth it"
        return needs_whole_parameters(request, trainer, search.graph) or why_no_turns(trainer)


def _trace_larger(trace: FunctionTrace, trainer: pl.Trainer, batch: Any, graph: OpGraph) -> None:
    """Let `trace` know the shapes of a larger batch too, where the step runs with one: joint
    modules are found by these.
    """
    if graph.batch_scaling:
        return
    larger, samples = FunctionTrace(), graph.step.batch_sizes[1]

    def doubled(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == samples else tensor

    context, device = trainer.precision_plugin.forward_context, trainer.strategy.root_device.type
    options: dict[str, Any] = {
        "forward_context": context,
        "device": device,
        "like": graph,
        "adapt": larger.of,
    }
    with (
        contextlib.suppress(Exception),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        capture(
            trainer.lightning_module, map_tensors(batch, doubled), batch_scaling=False, **options
        )
        trace.first_borders, trace.first_samples = larger.borders, 2 * samples
