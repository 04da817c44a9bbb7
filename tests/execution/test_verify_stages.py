"""Plans with stages verified without ranks, and against ranks that run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.verify_plan import Verification, verify_plan
from lightning_topt.graph.capture import call_training_step
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.plan.plan_values import PRESETS
from tests.execution.observed_ranks import Seen, observe
from tests.launch import run_on_pool
from tests.models import GPT, batch_for

WIDTH, CONTEXT, SAMPLES, PARTS = 16, 8, 8, 4


def gpt(tied: bool = False) -> GPT:
    return GPT(layers=4, width=WIDTH, context=CONTEXT, tied=tied)


def plan_of(
    stages: int = 2, *, ranks: int = 2, data: int = 1, schedule: str = "1f1b", storage: str = "ddp"
) -> ParallelPlan:
    mesh = Mesh((Axis("pipeline", ranks), *([Axis("data", data)] if data > 1 else [])))
    config = OpConfig(PRESETS[storage].storage(mesh))
    names = [f"blocks.{index}" for index in range(4)]
    size = len(names) // stages
    parts = [
        [BlockPlan(name, config) for name in names[s * size : (s + 1) * size]]
        for s in range(stages)
    ]
    parts[0].append(BlockPlan("", config))
    return ParallelPlan(
        mesh, tuple(StagePlan(tuple(p)) for p in parts), schedule=schedule, num_microbatches=PARTS
    )


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    return [module.configure_optimizers()]


def parts() -> list[Any]:
    return list(
        zip(*(tensor.split(SAMPLES // PARTS) for tensor in batch_for(gpt(), SAMPLES)), strict=True)
    )


def verified(plan: ParallelPlan, *, tied: bool = False) -> Verification:
    with torch.device("meta"):
        module = gpt(tied)
    return verify_plan(
        plan, module, optimizers_of=optimizers_of, example=Example(call_training_step, parts()[0])
    )


@pytest.mark.parametrize("data", [1, 256])
def test_any_number_of_ranks(data: int) -> None:
    plan = plan_of(data=data)
    found = verified(plan)
    assert found.would_run, found.problems
    first, last = found.held_by_rank[0], found.held_by_rank[-1]
    assert first[0] + last[0] == sum(parameter.nbytes for parameter in gpt().parameters())
    assert not found.held["blocks.3"][0].any() and not found.held["blocks.0"][-1].any()


def test_shared_parameters_are_on_both_ranks() -> None:
    found = verified(plan_of(), tied=True)
    whole = sum(parameter.nbytes for parameter in gpt(tied=True).parameters())
    assert found.held_by_rank[:, 0].sum() == whole + gpt().tokens.weight.nbytes


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(plan_of(), schedule="2f2b"), "2f2b"),
        (plan_of(4), "1f1b"),
        (replace(plan_of(), stages=plan_of().stages[::-1]), "stage"),
    ],
)
def test_what_would_not_run(plan: ParallelPlan, words: str) -> None:
    found = verified(plan)
    assert not found.would_run and words in found.problems[-1], found.problems


def test_a_step_is_asked_for() -> None:
    (problem,) = verify_plan(plan_of(), gpt()).problems
    assert "an example of its steps" in problem


PLANS = [plan_of(), plan_of(4, schedule="zbv")]
PLANS.append(replace(plan_of(), schedule="continuous", num_microbatches=1))
DATA_PLANS = [plan_of(data=2, storage="zero1")]


def observe_all(rank: int, plans: list[ParallelPlan], tied: bool) -> list[Seen]:
    return [observe(plan, gpt(tied), None, optimizers_of, parts=parts()) for plan in plans]


@pytest.mark.parametrize(("plans", "tied"), [(PLANS, False), (DATA_PLANS, True)])
def test_real_ranks_hold_what_was_said(plans: list[ParallelPlan], tied: bool) -> None:
    seen = run_on_pool(observe_all, plans[0].mesh.size, plans, tied)
    for index, plan in enumerate(plans):
        found = verified(plan, tied=tied)
        assert found.would_run, found.problems
        for rank, of_rank in enumerate(seen):
            said = {block: tuple(sizes[rank].tolist()) for block, sizes in found.held.items()}
            assert of_rank[index].held == said
