"""The first steps under a plan are compared with its prediction; what they do not bear out is
measured again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_topt import AutoParallelStrategy
from lightning_topt.basics import core_wait
from lightning_topt.costs.cluster import Accuracy, Cluster, ErrorFigure
from lightning_topt.plan.parallel_plan import StepEstimate, uniform_plan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plugins import plan_controller, step_clock, traced_planning
from lightning_topt.plugins.plan_controller import PlanController
from lightning_topt.plugins.planning import PlanDecision, Planning
from lightning_topt.plugins.step_clock import STEPS_OF_PLAN, StepsOfPlan
from tests.clock import Clock
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_new_ranks

LOCAL = Cluster.load(Path(__file__).parents[2] / "conf" / "cluster" / "local_cpu.yaml")
KNOWN = replace(LOCAL, accuracy=Accuracy(ErrorFigure(0.1, 0.2, 9)))


# ---- Their times ---------------------------------------------------------------------------------


class Waits:
    """In place of `CoreWait`: what a clock has `waited` from now on."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.before = clock, clock.waited

    def seconds(self) -> float:
        return float(self.clock.waited - self.before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands still but for what the test says; a core is missing for `waited` of it."""
    clock: Any = Clock()
    clock.waited = 0.0
    monkeypatch.setattr(step_clock, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(step_clock, "CoreWait", lambda *, threads: Waits(clock))
    monkeypatch.setattr(core_wait, "usable_cores", lambda: 64)
    return clock


def test_the_median_of_twenty_steps_of_all_their_batches_without_the_wait_for_data(clock: Any):
    said: list[tuple[float, bool]] = []
    steps = StepsOfPlan(torch.device("cpu"), ranks=2, then=lambda *found: said.append(found))
    for step in range(STEPS_OF_PLAN + 5):
        for updates in (False, True):
            steps.begin_batch()  # of a batch that a callback skips
            clock.now += 7.0  # data
            steps.begin_batch()
            clock.now += 100.0 if step < 3 else 1.0  # the first ones set up
            clock.waited += 0.5
            assert said == ([] if step < STEPS_OF_PLAN else [(2.0, False)])
            steps.end_batch(updates=updates)
    assert said == [(2.0, False)]


def test_a_core_that_others_had_in_these_steps(clock: Any):
    said: list[tuple[float, bool]] = []
    steps = StepsOfPlan(torch.device("cpu"), ranks=2, then=lambda *found: said.append(found))
    for _ in range(STEPS_OF_PLAN):
        clock.waited += 9.0  # between steps: of no interest
        steps.begin_batch()
        clock.now, clock.waited = clock.now + 1.0, clock.waited + 0.4
        steps.end_batch(updates=True)
    assert said == [(1.0, True)]


def test_an_accelerator_is_not_waited_for(clock: Any, monkeypatch: pytest.MonkeyPatch):
    """Marks in its work are read once it has passed them."""
    passed = False

    class Mark:
        def __init__(self, device: Any, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def query(self) -> bool:
            return passed

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * float(end.at - self.at)

    monkeypatch.setattr(torch, "Event", Mark)
    said: list[tuple[float, bool]] = []
    steps = StepsOfPlan(torch.device("meta"), ranks=1, then=lambda *found: said.append(found))
    for step in range(STEPS_OF_PLAN + 3):
        passed = step == STEPS_OF_PLAN + 1
        steps.begin_batch()
        assert bool(said) == (step > STEPS_OF_PLAN)
        clock.now += 0.5
        steps.end_batch(updates=True)
    assert said == [(0.5, False)]


# ---- What is said of them ------------------------------------------------------------------------


class Measured:
    """In place of `Measurements`."""

    def __init__(self, busy_share: float = 0.0, *, is_old: bool = True) -> None:
        self.busy_share, self.is_old, self.renewed = busy_share, is_old, 0

    def renew(self) -> bool:
        self.renewed += 1
        return self.is_old


def compared(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    measured: Any,
    *,
    was_busy: bool = False,
    cluster: Cluster | None = None,
    parts: int = 1,
) -> list[str]:
    """What a fit says whose plan's step was predicted to take a second."""
    said: list[str] = []
    monkeypatch.setattr(plan_controller, "rank_zero_info", said.append)
    request: Any = SimpleNamespace(cluster=cluster, saves_memory=False, needs_batch=False)
    controller = PlanController(request)
    predicted = StepEstimate(1.0, 1, 1.0, 0.0)
    plan = replace(uniform_plan(0, data_parallel_size=2), predicted=predicted)
    point, graph = PlanPoint(1.0, 1.0, 2, plan), SimpleNamespace(parameters=(), ops=())
    planning: Any = Planning(SimpleNamespace(), point, graph)  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        is_global_zero=True,
        accumulate_grad_batches=parts,
        world_size=2,
        num_nodes=1,
        callbacks=[],
    )
    decision = PlanDecision(plan, planning, "search", measured)
    monkeypatch.setattr(traced_planning, "decide_plan", lambda *_: decision)
    assert controller.decide(trainer) is plan
    controller.begin_plan(trainer)
    if controller._compared is not None:
        controller._compared._then(seconds, was_busy)
    return said


@pytest.mark.parametrize(
    ("seconds", "options", "measured", "words", "renewed"),
    [
        (1.45, {}, Measured(), None, 0),
        (0.4, {}, Measured(0.5), "the machine was busy when it was measured", 0),
        (1.6, {"was_busy": True}, Measured(0.5), "the machine is busy now", 0),
        (0.4, {"was_busy": True}, Measured(), "the next fit measures again", 1),
        (1.6, {}, Measured(), "the next fit measures again", 1),
        (1.6, {}, Measured(is_old=False), "the cost model is wrong here", 1),
        (9.0, {"cluster": LOCAL}, None, None, 0),
        (1.3, {"cluster": KNOWN}, None, "outside of the 833 ms to 1.2 s that were predicted", 0),
        (1.3, {"cluster": replace(KNOWN, busy_share=0.4)}, None, "when it was measured", 0),
        (9.0, {"parts": 2}, Measured(), None, 0),
    ],
)
def test_steps_outside_of_the_interval_are_told_with_their_cause(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    options: dict[str, Any],
    measured: Any,
    words: str | None,
    renewed: int,
):
    said = compared(monkeypatch, seconds, measured, **options)
    if words is None:
        assert said == []
    else:
        (sentence,) = said
        assert sentence.startswith("topt: a step takes ") and words in sentence
    assert measured is None or measured.renewed == renewed


# ---- In a fit ------------------------------------------------------------------------------------


class Sleeps(RecordingGPT):
    """Each of its batches takes 10 ms more than can be predicted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def said_in_fits(rank: int) -> list[tuple[int, str | None]]:
    """How often fits say that their steps take longer, and how they were planned."""
    found = []
    for cluster, samples, parts in (
        (KNOWN, 104, 1),
        (KNOWN, 200, 2),
        (KNOWN, 60, 1),
        (LOCAL, 104, 1),
    ):
        said: list[str] = []
        plan_controller.rank_zero_info = said.append  # type: ignore[assignment]
        strategy = AutoParallelStrategy(cluster=cluster, objective="memory")
        trainer = make_trainer(strategy, devices=2, accumulate_grad_batches=parts)
        trainer.fit(Sleeps(), loader(2, length=samples))
        found.append((len(said), strategy.planned_by))
    return found


def test_a_fit_says_once_that_its_steps_take_longer():
    """After 20 steps under the plan, of one batch or two; not after fewer, nor where nobody knows
    how far predictions are off.
    """
    first, other = on_new_ranks(said_in_fits)
    assert first == [(1, "search"), (1, "search"), (0, "search"), (0, "search")]
    assert other == [(0, "search")] * 4
