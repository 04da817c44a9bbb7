"""Plans whose ranks train alone, run by a Trainer on gloo ranks: against `LocalStepsStrategy`,
resumed, and chosen by the time to a loss.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_topt import AutoParallelStrategy, LocalSteps, LocalStepsStrategy, SparseLoCo
from lightning_topt.communication import LocalMethod
from lightning_topt.plan.parallel_plan import ParallelPlan, uniform_plan
from tests.plugins.test_plan_exchange import SLOWEST, StopEarly
from tests.plugins.trainer_ranks import (
    RecordingGPT,
    SgdGPT,
    loader,
    make_trainer,
    on_ranks,
    state_of,
)

DILOCO = LocalSteps(every=3, hierarchical=False)
LOCO = SparseLoCo(every=2, density=0.2, hierarchical=False)


def plan_of(method: LocalMethod) -> ParallelPlan:
    plan = uniform_plan(0, data_parallel_size=2, blocks=["blocks.0"], recompute=["blocks.0"])
    return replace(plan, local_steps=method)


def fit(strategy: Any, *, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    module = SgdGPT()
    options = {"devices": 2, "max_epochs": 2, "limit_val_batches": 2, **kwargs}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, loader(4, length=32), loader(4, length=16), ckpt_path=ckpt_path)
    return trainer, module


def given(method: LocalMethod) -> AutoParallelStrategy:
    return AutoParallelStrategy(plan=plan_of(method), allow={"local_steps": method.name})


def against_twin(rank: int, method: LocalMethod) -> Any:
    trainer, module = fit(given(method))
    twin, other = fit(LocalStepsStrategy(method))
    metrics = trainer.callback_metrics["val_loss"], twin.callback_metrics["val_loss"]
    statistics = trainer.strategy.exchange_statistics()
    return module.losses, other.losses, state_of(module), state_of(other), metrics, statistics


@pytest.mark.parametrize("method", [DILOCO, LOCO], ids=lambda method: method.name)
def test_a_plan_trains_as_the_strategy_of_local_steps_does(method: LocalMethod) -> None:
    results = on_ranks(against_twin, method)
    for ours, twin, actual, expected, (own, other), statistics in results:
        assert len(ours) == 8
        assert ours == pytest.approx(twin, rel=1e-6)
        assert float(own) == pytest.approx(float(other), rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value)
            assert torch.equal(actual[name], results[0][2][name])  # equal on all ranks
        assert statistics.steps == 8
        assert 0 < statistics.bytes_sent < statistics.dense_bytes


def save_and_resume(rank: int, method: LocalMethod, form: str, path: str) -> Any:
    """Two epochs; one that is saved, and one that goes on."""

    def strategy() -> AutoParallelStrategy:
        options = {"allow": "local_steps", "checkpoint": form}
        return AutoParallelStrategy(plan=plan_of(method), **options)

    _, whole = fit(strategy())
    trainer, half = fit(strategy(), max_epochs=1)
    trainer.save_checkpoint(path)
    _, resumed = fit(strategy(), ckpt_path=path)
    return whole.losses, half.losses + resumed.losses, state_of(whole), state_of(resumed)


@pytest.mark.parametrize(("method", "form"), [(DILOCO, "full"), (LOCO, "sharded")])
def test_a_checkpoint_has_what_ranks_keep(method: LocalMethod, form: str, tmp_path: Path) -> None:
    # four steps an epoch: with every=2 ranks meet at its end anyway; with every=3 validation lets
    # them meet, in both runs
    results = on_ranks(save_and_resume, method, form, str(tmp_path / "half.ckpt"))
    for whole, both, expected, actual in results:
        assert both == pytest.approx(whole, rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value)


def crossed(rank: int, method: LocalMethod, path: str) -> Any:
    """An epoch under a plan goes on under the strategy, and the other way round."""
    found = []
    for first, second in (
        (given, LocalStepsStrategy),
        (LocalStepsStrategy, given),
        (LocalStepsStrategy, LocalStepsStrategy),
    ):
        trainer, half = fit(first(method), max_epochs=1)
        trainer.save_checkpoint(path)
        trainer, resumed = fit(second(method), ckpt_path=path)
        outer = trainer.strategy.exchange
        found.append((half.losses + resumed.losses, outer.local_steps, state_of(resumed)))
        torch.distributed.barrier()
    return found


def test_plan_and_strategy_go_on_from_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    for *crossing, (losses, steps, expected) in on_ranks(crossed, LOCO, path):
        for ours, own_steps, actual in crossing:
            assert ours == pytest.approx(losses, rel=1e-6) and own_steps == steps == 8
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value)


# ---- chosen --------------------------------------------------------------------------------------


def chosen(rank: int, allow: Any) -> Any:
    strategy = AutoParallelStrategy(objective="time_to_loss", cluster=SLOWEST, allow=allow)
    torch.manual_seed(0)
    module = RecordingGPT()
    trainer = make_trainer(
        strategy, devices=2, max_steps=1000, min_steps=3, max_epochs=-1, callbacks=[StopEarly(12)]
    )
    trainer.fit(module, loader(4, length=64))
    plan, planning = strategy.parallel_plan, strategy.planning
    statistics = strategy.exchange_statistics()
    frontier = None if planning is None else planning.frontier
    return plan, plan.reason, statistics, state_of(module), module.losses, frontier


def test_without_a_word_on_exchanges_all_that_was_measured_is_compared() -> None:
    results = on_ranks(chosen, None)
    for plan, reason, statistics, final, losses, _ in results:
        # on this network a step with an exchange takes seconds
        assert isinstance(plan.local_steps, SparseLoCo), reason
        assert plan.local_steps.every == 5
        assert "x the steps" in reason or "the steps. The factor rests on" in reason
        assert statistics.steps >= 5
        assert losses[-1] < losses[0]
        assert all(torch.equal(value, results[0][3][name]) for name, value in final.items())
    frontier = results[0][-1]
    ways = {point.plan.local_steps or point.plan.gradient_exchange for point in frontier.candidates}
    assert {None if way is None else way.name for way in ways} >= {
        *(None, "bf16", "topk", "sparse_loco")
    }
    # DiLoCo did not get to the loss of the dense run with one of the models of the table
    (why,) = [reason for reason in frontier.left_out if "did not reach" in reason]
    assert "every=50" in why or "50 steps" in why
    # one frontier: nothing on it is beaten in time to the loss and in memory
    points = frontier.points
    assert all(point.to_loss is not None and point.to_loss.steps == 1000 for point in points)
    for point in frontier.candidates:
        assert any(
            other.to_loss.seconds <= point.to_loss.seconds and other.peak_bytes <= point.peak_bytes
            for other in points
        )


def test_who_forbids_it_gets_exact_plans_alone() -> None:
    for plan, reason, statistics, *_ in on_ranks(chosen, []):
        assert plan.local_steps is None and plan.gradient_exchange is None, reason
        assert statistics is None
