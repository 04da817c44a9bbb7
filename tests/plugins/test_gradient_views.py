"""Gradients are tensors of their own, unless a limit, a plan or the user makes them views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, uniform_plan
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks

CLUSTER = Path(__file__).parents[2] / "conf" / "cluster" / "local_cpu.yaml"
Found = tuple[list[float], str, bool, bool]


class SeesWrapper(RecordingGPT):
    """Notes whether the gradients of its wrapper are views."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        model = self.trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        self.views = model.gradient_as_bucket_view


def fit(rank: int, *several: dict[str, Any]) -> list[Found]:
    found = []
    for options in several:
        torch.manual_seed(0)
        module = SeesWrapper(layers=2)
        strategy = AutoParallelStrategy(**{"cluster": CLUSTER, **options})
        make_trainer(strategy, devices=2, limit_train_batches=3).fit(module, OwnShare(8))
        assert strategy.parallel_plan is not None
        plan = strategy.parallel_plan
        found.append((module.losses, plan.reason, plan.gradient_views, module.views))
    return found


def smallest(rank: int, *kinds: bool) -> list[float]:
    """The bytes of the smallest plan of each kind of gradients that a search finds."""
    module, strategy = (
        SeesWrapper(layers=2),
        AutoParallelStrategy(cluster=CLUSTER, memory_limit="4GiB"),
    )
    make_trainer(strategy, devices=2, limit_train_batches=2).fit(module, OwnShare(8))
    if strategy.planning is None:
        return []
    points = strategy.planning.frontier.candidates
    return [min(p.peak_bytes for p in points if p.plan.gradient_views == kind) for kind in kinds]


def test_a_limit_may_make_them_views_and_the_plan_says_so() -> None:
    own, views = on_ranks(smallest, False, True)[0]
    assert views < own
    tight, loose = {"memory_limit": 1.05 * views + 1}, {"memory_limit": "4GiB"}
    given: dict[str, Any] = {
        "plan": uniform_plan(0, data_parallel_size=2),
        "gradient_as_bucket_view": True,
    }
    for rank in on_ranks(fit, {}, loose, tight, given):
        plain = rank[0][0]
        assert all(each[0] == pytest.approx(plain, rel=1e-5) for each in rank)  # the same training
        assert [each[2:] for each in rank] == [
            (False, False),
            (False, False),
            (True, True),
            (False, True),
        ]
        assert (
            "gradients are views of DDP's buckets" in rank[2][1]
            and "gradients are views" not in rank[1][1]
        )


def given_plan(rank: int, plan: ParallelPlan, options: dict[str, Any]) -> str | bool:
    module = SeesWrapper(layers=2)
    strategy = AutoParallelStrategy(plan=plan, **options)
    try:
        make_trainer(strategy, devices=2, limit_train_batches=1).fit(module, OwnShare(8))
    except PlanError as error:
        return str(error)
    return module.views


def test_a_plan_file_may_ask_for_them(tmp_path: Path) -> None:
    plan = ParallelPlan.from_yaml(
        uniform_plan(1, data_parallel_size=2).to_yaml() + "gradient_views: true\n"
    )
    assert on_ranks(given_plan, plan, {}) == [True, True]
    for said in on_ranks(given_plan, plan, {"gradient_as_bucket_view": False}):
        assert "leave it out of the plan" in str(said)
