"""An explanation of a plan that was found: where its seconds and bytes are, block by block, and
what it does not split.

found = search_plans(request)
chosen = choose(found.candidates)
explain_plan(request, chosen.plan).blocks["blocks.0"].collectives

Plans with a tensor axis are explained by the step of one rank on its slices, which the search has
captured. Nothing of this is worked out before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.search_request import SearchRequest, step_on
from lightning_topt.plan.tensor_meshes import (
    joint_step_in,
    layout_of_plan,
    prices_on,
    split_of,
    step_in,
    step_under,
)
from lightning_topt.techniques.explain import BlockExplanation, Explanation, explain, explain_blocks
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.tensor_parallel.whole_operators import WholeOperator, whole_operators


@dataclass(frozen=True)
class PlanExplanation:
    """The costs that `plan` is expected to have on each rank: in all, by block, and the functions
    that run whole on every rank of its tensor axis (none without one; not known where tensors
    between layers are split too, and beside joint modules).
    """

    plan: ParallelPlan
    total: Explanation
    blocks: Mapping[str, BlockExplanation]
    whole: tuple[WholeOperator, ...] = ()


def explain_plan(request: SearchRequest, plan: ParallelPlan) -> PlanExplanation:
    """Return what `plan`, one that `search_plans(request)` found, costs.

    Raises PlanError for a plan with other splits than those of the search, and for one with stages.
    """
    if plan.schedule is not None:
        raise PlanError(
            "blocks of a plan with stages are not explained one by one: explain_stages says what "
            "each stage takes"
        )
    step = step_of(request, plan)
    plain: dict[str, Any] = dict.fromkeys(
        ("parameters", "inputs", "outputs", "sums", "gathers"), ()
    )
    configs = {block.block: replace(block.config, **plain) for block in plan.blocks}
    costs = PlanCosts(step)
    total, blocks = explain(costs, configs), explain_blocks(costs, configs)
    if (
        not plan.mesh.tensor_axes
        or request.split is None
        or plan.joint
        or layout_of_plan(plan).rules
    ):
        return PlanExplanation(plan, total, blocks)
    return PlanExplanation(plan, total, blocks, unsplit_operators(request, plan))


def unsplit_operators(request: SearchRequest, plan: ParallelPlan) -> tuple[WholeOperator, ...]:
    """Return the functions that run whole on every rank of the one tensor axis of `plan`; none
    without one.
    """
    if not plan.mesh.tensor_axes or request.split is None:
        return ()
    prices = prices_on(step_on(request, plan.mesh), request.split, mesh=plan.mesh)
    return tuple(whole_operators(request.split.priced_calls(split_of(plan), prices)))


def step_of(request: SearchRequest, plan: ParallelPlan) -> TrainingStep:
    """Return the step of one rank under `plan`, as the search priced it. Raises PlanError as
    `explain_plan`.
    """
    shards = any(block.config.storage.sharded_axes("gradients") for block in plan.blocks)
    whole = replace(
        step_on(request, plan.mesh),
        exchange=plan.gradient_exchange,
        returns_memory=request.returns_memory or shards,
        gradient_views=plan.gradient_views,
    )
    if not plan.mesh.tensor_axes:
        return whole
    if request.split is None:
        raise PlanError(
            "a plan with a tensor axis is explained by the model that can be split: give it in the "
            "request"
        )
    layout = layout_of_plan(plan)
    if plan.joint:
        step = joint_step_in(
            replace(layout, joint=plan.joint), whole, request.split, mesh=plan.mesh
        )
    elif layout.rules:
        step = step_in(layout, whole, request.split, mesh=plan.mesh)
    else:
        step = step_under(split_of(plan), whole, request.split, mesh=plan.mesh)
    if step is None:
        ranks = plan.mesh.ranks_along(plan.mesh.tensor_axes)
        raise PlanError(f"the plan's step on slices is not known: {request.split.why_whole(ranks)}")
    return step
