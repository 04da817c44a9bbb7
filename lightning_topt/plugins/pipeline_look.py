"""A search without a plan looks at pipelines as well, where these may be better than all that was
found before.

Every rank has its own batch by then, so the ranks of a pipeline run these as microbatches (see
`pipeline_members`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.stage_layout import written_buffers
from lightning_topt.execution.pipeline.step_flows import StepFlows
from lightning_topt.graph.errors import one_line
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.own_batches import least_own_batch_seconds, search_own_batches
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.found_plans import fastest, seconds_that_pay, together
from lightning_topt.plugins.own_batches import TracedStep, why_no_members, why_steps_may_differ
from lightning_topt.plugins.pipeline_members import takes_index
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.searched_plan import choose_for, needs_whole_parameters
from lightning_topt.plugins.turns import loss_of


def add_pipelines(
    request: PlanRequest, step: TracedStep, search: SearchRequest, found: list[PlanFrontier]
) -> str | None:
    """Add the plans with stages that may be chosen to `found`; or return why there are none, as a
    clause.

    On rank 0, which captures steps for it.
    """
    trainer, batch = step.trainer, step.batch
    if reason := _why_no_look(request, step, search, found):
        return reason
    frontier = _search(
        request, dataclasses.replace(search, evaluates=trainer.enable_validation), found
    )
    if not frontier.points:
        return "no plan with stages is better"
    every = together([*found, frontier])
    try:
        plan = choose_for(request, every, search.cluster).plan
    except NoPlanFitsError:  # the error will name the smallest
        plan = min(every.candidates, key=lambda point: point.peak_bytes).plan
    if not plan.own_batches:
        return "no plan with stages is better"
    if reason := why_not_cut(trainer, batch, plan):
        return reason
    found.append(frontier)
    return None


def _why_no_look(
    request: PlanRequest, step: TracedStep, search: SearchRequest, found: list[PlanFrontier]
) -> str | None:
    """Why no plan with stages can be chosen, as a clause; None where one might be."""
    limit = seconds_that_pay(request, search, found)
    if (
        search.optimizer.by_parameter
        and limit is not None
        and least_own_batch_seconds(search) >= limit
    ):
        return "computation alone takes so long that the rest is not worth it"
    return why_left_out(
        request, step.trainer, step.batch, dataclasses.replace(search, graph=step.graph)
    )


def why_left_out(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    search: SearchRequest,
    *,
    would_shard: Callable[[str], bool] = lambda _: True,
) -> str | None:
    """Return why no fit whose ranks have a batch each runs in stages, as far as that is seen before
    a search, as a clause.

    What torch cannot shard counts where the parameter's name `would_shard`.
    """
    if not search.optimizer.by_parameter:
        return "the optimizer does not update each parameter by itself"
    if _has_words(batch):
        return (
            "batches hold texts or whole numbers, on which a step may depend, so that each would "
            "be traced"
        )
    return (
        needs_whole_parameters(request, trainer, search.graph, would_shard=would_shard)
        or why_no_members(trainer, batch, search.graph)
        or why_steps_may_differ(trainer.lightning_module)
    )


def _search(request: PlanRequest, search: SearchRequest, found: list[PlanFrontier]) -> PlanFrontier:
    """The plans that may be chosen: faster by enough, or within a limit that no other plan
    keeps.
    """
    limit = seconds_that_pay(request, search, found)
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
        return (
            f"training steps change the buffer {sorted(written)[0]!r}, of which ddp keeps what "
            "rank 0's batches make"
        )
    return None


def _has_words(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return any(map(_has_words, batch.values()))
    if isinstance(batch, list | tuple):
        return any(map(_has_words, batch))
    if isinstance(batch, str | bytes | int):
        return not isinstance(batch, bool)
    return False
