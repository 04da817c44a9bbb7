"""A search without a plan looks at tensor axes as well, where these may be better than all that data axes offer, and then at
pipelines.

Every rank has its own batch by then, so the ranks of a tensor group run them in joint modules (`joint_batches`) or in turns
(`turns`), whichever is faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import local_graphs, search_plans
from lightning_topt.plan.search_request import SearchRequest
from lightning_topt.plan.tensor_meshes import least_seconds, tensor_sizes
from lightning_topt.plugins.found_plans import fastest, pays, together
from lightning_topt.plugins.joint_batches import are_alike
from lightning_topt.plugins.own_batches import WatchedTrace, why_no_turns
from lightning_topt.plugins.pipeline_look import look_at_pipelines
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.planning_ranks import on_rank_0
from lightning_topt.plugins.searched_plan import (
    RunCosts,
    capture_on_ranks,
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
    """Return the best plan for ranks that have a batch each, and on rank 0 what was searched. A collective call."""
    costs = read_costs(request, trainer, graph)
    search = search_request(request, trainer, graph, costs)
    found: list[PlanFrontier] = []

    def on_data_axes() -> str | None:
        found.append(search_plans(search))
        return _why_no_look(request, trainer, batch, search, found[0])

    if (reason := on_rank_0(on_data_axes)) is None:
        try:
            reason = _look(request, trainer, batch, costs, search, found)
        except Exception as error:
            if is_of_collective(error):
                raise
            reason = " ".join(str(error).split())
    logging.getLogger(__name__).debug("tensor axes: %s", reason or "searched")
    no_stages = _stages(request, trainer, batch, search, found)
    planning: Planning | None = None

    def decide() -> dict[str, Any]:
        nonlocal planning
        frontier = together(found)
        try:
            chosen = choose_for(request, frontier, costs.cluster)
        except NoPlanFitsError as error:
            whys = {
                "Parameters were not split over tensor axes": reason,
                "Stages of a pipeline were left out": no_stages,
                "Activation checkpointing was left out": why_not_recomputed(graph),
            }
            sentences = [f"{what}: {why}" for what, why in whys.items() if why is not None]
            if not sentences:
                raise
            raise NoPlanFitsError(". ".join([str(error), *sentences])) from error
        planning = Planning(frontier, chosen, graph)
        return planning.chosen.plan.to_dict()

    plan = ParallelPlan.from_dict(on_rank_0(decide))
    say(plan)
    return plan, planning


def _stages(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, search: SearchRequest, found: list[PlanFrontier]
) -> str | None:
    """Look at pipelines; whatever goes wrong there is a reason against them. A collective call."""
    try:
        reason = look_at_pipelines(request, trainer, batch, search, found)
    except Exception as error:
        if is_of_collective(error):
            raise
        reason = " ".join(str(error).split())
    logging.getLogger(__name__).debug("pipelines: %s", reason or "searched")
    return reason


def _why_no_look(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, search: SearchRequest, found: PlanFrontier
) -> str | None:
    """Why no plan with a tensor axis can be chosen, as a clause; None where one might be."""
    (ranks,) = search.device_counts
    sizes = tensor_sizes(search.cluster, ranks)
    if not sizes or any((ranks // trainer.num_nodes) % size for size in sizes):
        return "no node has several ranks"
    if not search.optimizer.elementwise:
        return "the optimizer does not update elements one by one"
    best = fastest(request, search, [found])
    if best is not None and request.objective == "time":
        mesh, samples = data_mesh(ranks), search.graph.batch_size
        step = TrainingStep(search.graph, search.cluster, search.optimizer, mesh, samples, search.kernel_seconds)
        if not pays(min(least_seconds(step, size) for size in sizes), best):
            return "computation alone takes so long that the rest is not worth it"
    return needs_whole_parameters(request, trainer, search.graph) or why_no_turns(trainer, batch, search.graph)


def _trace_larger(trace: FunctionTrace, trainer: pl.Trainer, batch: Any, graph: OpGraph) -> None:
    """Let `trace` know the shapes of a larger batch too, where the step runs with one: joint modules are found by these."""
    if graph.batch_scaling:
        return
    larger, samples = FunctionTrace(), graph.step.batch_sizes[1]

    def doubled(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == samples else tensor

    context, device = trainer.precision_plugin.forward_context, trainer.strategy.root_device.type
    options: dict[str, Any] = {"forward_context": context, "device": device, "like": graph, "adapt": larger.of}
    with contextlib.suppress(Exception), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        capture(trainer.lightning_module, map_tensors(batch, doubled), batch_scaling=False, **options)
        trace.first_borders, trace.first_samples = larger.borders, 2 * samples


def _look(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    costs: RunCosts,
    search: SearchRequest,
    found: list[PlanFrontier],
) -> str | None:
    """Add the plans with a tensor axis to `found`, on rank 0; or return why not, as a clause. A collective call."""
    watched = WatchedTrace(FunctionTrace())
    are_joint = are_alike(batch, None, device=trainer.strategy.root_device)
    graph = capture_on_ranks(trainer, batch, trace=watched)
    split = split_model(trainer, batch, graph, watched.trace)
    of_turns = {"own_batches": True, "evaluates": trainer.enable_validation, "layout": "tensor"}
    search = dataclasses.replace(search, graph=graph, split=split, **of_turns)  # type: ignore[arg-type]

    def by_formula() -> tuple[str | None, list[OpGraph]]:
        if watched.changes:
            return "training_step changes objects that the next step finds changed", []
        if are_joint:  # else turns would be taken in most steps
            _trace_larger(watched.trace, trainer, batch, graph)
        frontier = search_plans(search)
        split_best, best = fastest(request, search, [frontier]), fastest(request, search, found[:1])
        if split_best is None or (best is not None and request.objective == "time" and not pays(split_best, best)):
            return "no plan with a tensor axis is better", []
        return None, [] if costs.measurements is None else local_graphs(search)

    reason, graphs = on_rank_0(by_formula)
    if reason is not None:
        return reason
    kernels = {**search.kernel_seconds, **costs.measured(graphs)}
    on_rank_0(lambda: found.append(search_plans(dataclasses.replace(search, kernel_seconds=kernels))))
    return None
