"""Rows of pipelines that train alone and meet in outer steps, on running ranks: against one process
for each row, and outer steps written out for each stage.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_topt.communication import LocalSteps
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from tests.execution.pipeline.continuous_training import (
    CPU,
    Case,
    Outcome,
    adam,
    continuous_plan,
    sgd,
    train_all,
)
from tests.execution.pipeline.one_process import Twin
from tests.execution.pipeline.outer_twin import OuterTwin, average_buffers
from tests.execution.pipeline.stage_models import cut, loss_of, make, plan_of
from tests.launch import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = LocalSteps(every=4)
SPARSE = LocalSteps(
    every=4, density=0.3, residual_decay=0.9, outer_momentum=0.0, outer_learning_rate=1.0
)


def plan(ranks: int, prediction: Any, method: LocalSteps, **more: Any) -> ParallelPlan:
    return replace(continuous_plan(ranks, prediction=prediction, **more), local_steps=method)


FEEDBACK = {"rule": "two_versions", "error_feedback": True}
CASES = {
    "dense": Case("chain", plan(2, "spectrain", DENSE, data=2), steps=10, drain_every=4, clip=0.3),
    "sparse, rows first": Case(
        "chain",
        plan(2, FEEDBACK, SPARSE, data=2, data_first=True),
        steps=20,
        drain_every=8,
        accumulate=2,
    ),
    "tied": Case("chain tied", plan(2, "stash", SPARSE, data=2), steps=10, drain_every=4),
    "normed": Case(
        "chain normed", plan(2, "multistep", DENSE, data=2), steps=10, drain_every=4, optimizer=sgd
    ),
    "frozen": Case(
        "chain",
        plan(2, "spectrain", SPARSE, data=2),
        steps=9,
        drain_every=4,
        frozen=("pos", "blocks.0", "head"),
    ),
}


@dataclass
class Row(Case):
    """A training of one of several rows."""

    row: int = 0

    @classmethod
    def of(cls, case: Case, row: int) -> Row:
        return cls(**{each.name: getattr(case, each.name) for each in fields(case)}, row=row)

    def batch(self, step: int, data_rank: int = 0) -> Tensor:
        return super().batch(step, self.row)


def in_rows(case: Case) -> list[Outcome]:
    """Train each row in one process, stage by stage; the state is that after they have met."""
    method = case.plan.local_steps
    assert isinstance(method, LocalSteps) and case.drain_every is not None
    twins = [Twin(Row.of(case, row)) for row in range(case.plan.data_parallel_size)]
    for twin in twins:
        for model in twin.models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(case.frozen or ("nothing",)))
    outer = [
        OuterTwin(method, [[p for p in t.parameters[stage] if p.requires_grad] for t in twins])
        for stage in range(twins[0].count)
    ]
    for start, stop in itertools.pairwise((*range(0, case.steps, case.drain_every), case.steps)):
        for twin in twins:
            twin.segment(start, stop, case.completes)
        for stage, of_stage in enumerate(outer):
            of_stage.meet()
            average_buffers([twin.models[stage] for twin in twins])
    whole = twins[0].models[0]
    for name, stages in twins[0].holders.items():
        whole.get_parameter(name).data.copy_(twins[0].needed[stages[0]][name].data)
    for stage, names in enumerate(twins[0].names):
        for name in names:
            own = twins[0].models[stage].get_submodule(name)
            for buffer, value in zip(
                whole.get_submodule(name).buffers(), own.buffers(), strict=True
            ):
                buffer.copy_(value)
    for twin in twins:
        twin.found.state = whole.state_dict()
    return [twin.found for twin in twins]


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Outcome]]:
    ranks = run_ranks(train_all, 4, list(CASES.values()), timeout_seconds=240)
    return {name: [of_rank[i] for of_rank in ranks] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_rows_train_as_one_process_each_and_meet_by_stages(
    name: str, trained: dict[str, list[Outcome]]
) -> None:
    case = CASES[name]
    expected = in_rows(case)
    assert expected[0].losses != expected[1].losses
    for rank, outcome in enumerate(trained[name]):
        own = expected[case.plan.mesh.data_rank(rank)]
        assert outcome.losses.keys() == own.losses.keys()
        for step, loss in own.losses.items():
            # sums over the samples of a batch keep their order, those of outer steps may not
            torch.testing.assert_close(outcome.losses[step], loss, rtol=1e-4, atol=1e-5)
    state = trained[name][0].state
    assert state.keys() == expected[0].state.keys()
    for key, value in expected[0].state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)
    # every rank has momentum or residual of its own, of all stages on the first
    assert trained[name][0].residuals > 0


# ---- schedules that flush ------------------------------------------------------------------------


def train_flushing(rank: int, model: str, plan: ParallelPlan, steps: int) -> Any:
    module = make(model, seed=rank)
    engine, row = Engine(plan, module, device=CPU), plan.mesh.data_rank(rank)
    of_row = Row(model, plan, steps=steps, row=row)
    engine.apply(example=Example(loss_of, of_row.batch(0).chunk(2)[0]))
    optimizer = adam(module.parameters())
    engine.attach_optimizers([optimizer])
    losses = []
    for step in range(steps):
        losses.append(engine.run_step(of_row.batch(step).chunk(2), loss_of).mean())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in engine.module_state().items()}
    engine.release()
    engine.close()
    return losses, state, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_rows_of_a_flushing_pipeline_meet_by_stages(method: LocalSteps) -> None:
    plan = replace(plan_of(2, "1f1b", data=2), local_steps=method)
    results = run_ranks(train_flushing, 4, "chain", plan, 10, timeout_seconds=120)
    # one process for each row
    rows, stages = [make("chain") for _ in range(2)], cut(2)
    optimizers = [adam(model.parameters()) for model in rows]
    of_stages = [
        [
            [
                p
                for name, p in model.named_parameters()
                if name.startswith(tuple(names)) or (name == "positions" and stage == 0)
            ]
            for model in rows
        ]
        for stage, names in enumerate(stages)
    ]
    assert sum(len(rows[0]) for rows in of_stages) == len(list(rows[0].parameters()))
    outer, expected = [OuterTwin(method, of_stage) for of_stage in of_stages], [[], []]
    for step in range(10):
        for row, (model, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
            loss = loss_of(model, Row("chain", plan, steps=10, row=row).batch(step))
            loss.backward()
            expected[row].append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 4 == 0 or step == 9:
            for each in outer:
                each.meet()
    for rank, (losses, state, whole) in enumerate(results):
        for loss, of_row in zip(losses, expected[plan.mesh.data_rank(rank)], strict=True):
            torch.testing.assert_close(loss, of_row, rtol=1e-4, atol=1e-5)
        for name, value in rows[0].state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(whole[name], results[0][1][name]) and (rank or state)


# ---- what cannot meet ----------------------------------------------------------------------------


def why_not(rank: int, model: str, plan: ParallelPlan, frozen: str) -> str:
    module = make(model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen.split()[0]))
        if name.startswith(tuple(frozen.split())):
            parameter.requires_grad_(False)
    batch = Case(model, plan).batch(0, plan.mesh.data_rank(rank))
    with pytest.raises(PlanError) as raised:
        Engine(plan, module, device=CPU).apply(example=Example(loss_of, batch.chunk(2)[0]))
    return str(raised.value)


@pytest.mark.parametrize(
    ("model", "schedule", "frozen", "message"),
    [
        ("chain tied", "1f1b", "", "is a parameter of several stages, whose outer steps would"),
        ("chain", "continuous", "positions embed blocks.0 blocks.1 blocks.2", "no outer step"),
    ],
)
def test_stages_that_cannot_meet_are_refused(
    model: str, schedule: str, frozen: str, message: str
) -> None:
    made = (
        continuous_plan(2, prediction="stash", data=2)
        if schedule == "continuous"
        else plan_of(2, schedule, data=2)
    )
    for reason in run_ranks(why_not, 4, model, replace(made, local_steps=DENSE), frozen):
        assert message in reason
