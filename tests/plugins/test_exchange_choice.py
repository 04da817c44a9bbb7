"""Gradient exchanges among the plans: what is allowed, and what holds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication import BF16, FP16, Dense, TopK
from lightning_topt.communication.exchange_method import method_classes
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from lightning_topt.plugins import plan_request
from lightning_topt.plugins.plan_request import AllowedExchanges, default_candidates

DEFAULT_CANDIDATES = default_candidates()


# ---- what is allowed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "candidates", "methods"),
    [
        (False, (), ()),
        (True, DEFAULT_CANDIDATES, tuple(method_classes())),
        ("bf16", (BF16(),), ("bf16",)),
        ({"method": "topk", "density": 0.001}, (TopK(density=0.001),), ("topk",)),
        (FP16(), (FP16(),), ("fp16",)),
        (
            ["topk", {"density": 0.1}, {"method": "fp16", "dense_steps": 4}, "topk"],
            (TopK(), TopK(density=0.1), FP16(dense_steps=4)),
            ("topk", "fp16"),
        ),
    ],
)
def test_forms_of_the_permission(allow, candidates, methods):
    assert AllowedExchanges.read(allow) == AllowedExchanges(
        candidates, methods, only_what_holds=allow is True
    )


@pytest.mark.parametrize(
    ("optimizer", "held"),
    [
        (torch.optim.AdamW, DEFAULT_CANDIDATES[1:]),
        (torch.optim.Adafactor, DEFAULT_CANDIDATES[1:]),
        (torch.optim.Adagrad, DEFAULT_CANDIDATES[1:]),
        (partial(torch.optim.SGD, momentum=0.9), DEFAULT_CANDIDATES),
    ],
)
def test_what_holds_depends_on_the_optimizer(optimizer, held, monkeypatch):
    said = []
    monkeypatch.setattr(plan_request, "rank_zero_info", said.append)
    assert AllowedExchanges.read(True).held(profile_of_optimizer(optimizer), steps=math.inf) == held
    if held == DEFAULT_CANDIDATES:
        assert not said
    else:
        left_out, needs = said
        assert "top-k 1 % was not searched: training with" in left_out and "['topk']" in left_out
        assert (
            "2 bits is searched" in needs
            and "a learning rate that rises for 100 steps or more" in needs
        )
    said.clear()
    named = AllowedExchanges.read(["topk"])
    assert named.held(profile_of_optimizer(optimizer), steps=1) == (TopK(),) and not said


def profile_of_optimizer(make):
    parameter = torch.nn.Parameter(torch.zeros(3))
    return read_optimizer([make([parameter], lr=0.1)], named_parameters=[("weight", parameter)])


def test_a_given_plan_needs_the_permission(tmp_path):
    plan = replace(
        uniform_plan(0, data_parallel_size=2), gradient_exchange=TopK(hierarchical=False)
    )
    plan.save(tmp_path / "plan.yaml")
    for given in (plan, plan.to_dict(), tmp_path / "plan.yaml"):
        for allow in (False, "bf16"):
            with pytest.raises(
                PlanError, match=r"compressed \(top-k 1 %\).*allow_compression=True, or \['topk'\]"
            ):
                AutoParallelStrategy(plan=given, allow_compression=allow)
        for allow in (True, "topk", ["bf16", {"method": "topk", "density": 0.5}]):
            assert AutoParallelStrategy(plan=given, allow_compression=allow).request.plan == plan
    exact = replace(plan, gradient_exchange=Dense(hierarchical=True))
    assert AutoParallelStrategy(plan=exact).request.plan == exact
