"""The continuous pipeline on ranks: one minibatch in flight is plain training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_topt.communication import GradientMethod, TopK
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.execution.pipeline.continuous_training import (
    Case,
    Outcome,
    alone,
    continuous_plan,
    nadam,
    sgd,
    train_all,
)
from tests.execution.pipeline.one_process import Twin
from tests.launch import run_on_pool

pytestmark = pytest.mark.usefixtures("one_thread")


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.97**step


def plan(ranks: int, prediction: Any, **more: Any) -> ParallelPlan:
    return continuous_plan(ranks, prediction=prediction, **more)


def compressed(options: GradientMethod) -> ParallelPlan:
    return replace(plan(2, "spectrain", data=2), gradient_exchange=options)


LATE = {"schedule": "continuous_overlapped"}
AS_ONE_PROCESS = {
    "multistep late": Case("chain", plan(2, "multistep", **LATE), clip=0.3, schedule=warm_up),
    "stash, uneven": Case(
        "chain", plan(2, "stash"), sizes=(8, 8, 8, 3), clip=0.3, schedule=warm_up
    ),
    "3 tied, drained": Case(
        "chain tied", plan(3, "multistep", **LATE), steps=16, drain_every=10, accumulate=2, clip=0.3
    ),
    "3 drained between updates": Case(
        "chain", plan(3, "two_versions"), accumulate=4, drain_every=6, optimizer=sgd
    ),
    "3 nesterov, drained": Case(
        "chain", plan(3, "nesterov"), drain_every=8, clip=0.3, schedule=warm_up, optimizer=nadam
    ),
    "4 multistep": Case(
        "chain", plan(4, "multistep", recompute=True), clip=0.3, schedule=warm_up, sizes=(8, 5, 5)
    ),
}
ORDERED = {  # over the twin of NCCL (tests/execution/test_nccl_order.py)
    "4 tied": Case("chain tied", plan(4, "spectrain"), optimizer=sgd, clip=0.3, schedule=warm_up),
    "4 none late": Case("chain", plan(4, "none", **LATE), steps=16, clip=0.3, schedule=warm_up),
}
NOT_IN_ORDER = {  # gradients are summed in another order
    model: Case(model, plan(2, "multistep"), steps=4, drain_every=1, schedule=warm_up)
    for model in ("tied", "skips")  # of other models: test_stage_runs.py
}
# the first stage, and a half of the second
FROZEN = ("embed", "pos", "blocks.0", "blocks.1", "blocks.3")
NOT_IN_ORDER["frozen"] = Case("chain", plan(3, "stash"), steps=6, drain_every=1, frozen=FROZEN)
REPLICAS = {
    "2 replicas": Case("chain", plan(2, "multistep", data=2), steps=8, clip=0.3, schedule=warm_up),
    "2 replicas of tied": Case(
        "chain tied", plan(2, "spectrain", data=2, data_first=True), steps=9, accumulate=3
    ),
}
SENT_WHOLE = TopK(density=1.0)
SENT_IN_PART = TopK(density=0.3, exempt=("bias",))
COMPRESSED = {
    "sent whole": Case(
        "chain tied", compressed(SENT_WHOLE), steps=20, clip=0.3, optimizer=sgd, accumulate=2
    ),
    "sent in part": Case(
        "chain tied", compressed(SENT_IN_PART), steps=20, clip=0.3, optimizer=sgd, accumulate=2
    ),
}
IN_SLICES = {
    width: Case("plain", plan(2, "multistep", tensor=width), steps=6, clip=0.3, schedule=warm_up)
    for width in (1, 2)
}
ONE_IN_FLIGHT = {
    model: Case(model, continuous_plan(3), steps=6, drain_every=1)
    for model in ("chain dropout", "chain normed")
}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Outcome]]:
    found = {}
    cases = {**ONE_IN_FLIGHT, **NOT_IN_ORDER, **AS_ONE_PROCESS, **REPLICAS, **COMPRESSED}
    cases |= {f"{width} slices": case for width, case in IN_SLICES.items()}
    for size in (2, 3, 4):
        names = [name for name, case in cases.items() if case.plan.mesh.size == size]
        ranks = run_on_pool(train_all, size, [cases[name] for name in names], timeout_seconds=240)
        found |= {name: [of_rank[index] for of_rank in ranks] for index, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", ONE_IN_FLIGHT)
def test_one_minibatch_in_flight_is_plain_training(
    name: str, trained: dict[str, list[Outcome]]
) -> None:
    expected = alone(ONE_IN_FLIGHT[name])
    for rank, outcome in enumerate(trained[name]):
        assert outcome.losses.keys() == expected.losses.keys()
        for step, loss in expected.losses.items():
            assert torch.equal(outcome.losses[step], loss), (rank, step)
        assert expected.random is not None and outcome.random is not None
        assert torch.equal(outcome.random, expected.random)
    state = trained[name][0].state
    assert state.keys() == expected.state.keys()
    for parameter, value in expected.state.items():
        assert torch.equal(state[parameter], value), parameter


@pytest.mark.parametrize("name", AS_ONE_PROCESS)
def test_ranks_compute_as_one_process_that_walks_the_schedule(
    name: str, trained: dict[str, list[Outcome]]
) -> None:
    assert_as_one_process(AS_ONE_PROCESS[name], trained[name])
    if "tied" in name:
        assert min(trained[name][0].weights_sent) > 0, "weights are sent before the pass"


def assert_as_one_process(case: Case, outcomes: list[Outcome]) -> None:
    expected = Twin(case).run()
    for outcome in outcomes:
        assert outcome.losses.keys() == expected.losses.keys()
        for step, loss in expected.losses.items():
            torch.testing.assert_close(
                outcome.losses[step], loss, rtol=1e-5, atol=1e-6, msg=lambda m, s=step: f"{s}: {m}"
            )
    close(outcomes[0].state, expected.state)


@pytest.mark.parametrize("name", NOT_IN_ORDER)
def test_one_minibatch_in_flight_of_any_model(name: str, trained: dict[str, list[Outcome]]) -> None:
    """Shared and frozen parameters, and skips."""
    expected = alone(NOT_IN_ORDER[name])
    for outcome in trained[name]:
        assert [*outcome.losses] == [*expected.losses]
        torch.testing.assert_close(
            [*outcome.losses.values()], [*expected.losses.values()], rtol=1e-5, atol=1e-6
        )
    close(trained[name][0].state, expected.state)


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_average_the_gradients_of_a_minibatch(
    name: str, trained: dict[str, list[Outcome]]
) -> None:
    """As one pipeline with their batches together."""
    case = REPLICAS[name]
    stages = len(case.plan.stages)
    twin = replace(
        case, plan=plan(stages, case.plan.prediction), sizes=[2 * size for size in case.sizes]
    )
    expected, replicas = Twin(twin).run(), trained[name]
    for step, loss in expected.losses.items():
        torch.testing.assert_close(
            torch.stack([each.losses[step] for each in replicas]).mean(), loss
        )
    assert replicas[0].norms == replicas[1].norms or case.plan.mesh.pipeline_rank(1) == 1
    close(replicas[0].state, expected.state)


def test_replicas_exchange_compressed_gradients(trained: dict[str, list[Outcome]]) -> None:
    """Sent whole, the same as averages; sent in part, the same on both replicas."""
    case = replace(COMPRESSED["sent whole"], plan=plan(2, "spectrain"), sizes=[16])
    expected = Twin(case).run()
    whole, part = trained["sent whole"], trained["sent in part"]
    close(whole[0].state, expected.state)
    assert any(
        not torch.equal(part[0].state[name], value) for name, value in whole[0].state.items()
    )
    assert all(bool(value.isfinite().all()) for value in part[0].state.values())
    for found in (whole, part):
        kept = found[0].residuals
        assert (kept > 0) == (found is part)
        for one, other in ((0, 1), (2, 3)):  # replicas of a stage
            assert found[one].norms == found[other].norms
    first, last = (
        sum(float(part[0].losses[i] + part[1].losses[i]) for i in steps)
        for steps in (range(4), range(16, 20))
    )
    assert last < first


def test_slices_along_a_tensor_axis_compute_as_whole_parameters(
    trained: dict[str, list[Outcome]],
) -> None:
    whole, cut = trained["1 slices"], trained["2 slices"]
    for outcome in cut:
        for step, loss in whole[0].losses.items():
            torch.testing.assert_close(outcome.losses[step], loss, rtol=1e-4, atol=1e-5)
    close(cut[0].state, whole[0].state)


def close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
