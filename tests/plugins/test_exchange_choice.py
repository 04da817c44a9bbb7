"""Gradient exchanges among the plans: what is allowed, and what holds."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication import BF16, FP16, Dense, LocalSteps, SparseLoCo, TopK
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from lightning_topt.plugins import plan_request
from lightning_topt.plugins.plan_request import CHANGES, Allowed, default_candidates
from lightning_topt.weight_prediction import make_prediction

DEFAULT_CANDIDATES = default_candidates()


# ---- what is allowed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        # names
        (None, {"is_given": False}),
        ([], {}),
        ({}, {}),
        ("compression", {"compression": True}),
        (["local_steps"], {"local_steps": True}),
        (("compression", "staleness"), {"compression": True, "staleness": True}),
        ([*CHANGES], dict.fromkeys(CHANGES, True)),
        # options
        ({"staleness": True, "compression": False}, {"staleness": True}),
        ({"local_steps": None, "compression": []}, {}),
        ({"compression": "bf16"}, {"compression": (BF16(),)}),
        (
            {"compression": {"method": "topk", "density": 0.001}},
            {"compression": (TopK(density=0.001),)},
        ),
        ({"compression": FP16()}, {"compression": (FP16(),)}),
        (
            {
                "compression": [
                    *("topk", {"density": 0.1}, {"method": "fp16", "dense_steps": 4}, "topk")
                ]
            },
            {"compression": (TopK(), TopK(density=0.1), FP16(dense_steps=4))},
        ),
        (
            {"compression": True, "local_steps": ["local_steps", SparseLoCo(every=5)]},
            {
                "compression": True,
                "local_steps": (LocalSteps(), SparseLoCo(every=5, hierarchical=False)),
            },
        ),
        ({"staleness": "spectrain"}, {"staleness": make_prediction("spectrain")}),
    ],
)
def test_forms_of_the_permission(allow, expected):
    assert Allowed.read(allow) == Allowed(**expected)


@pytest.mark.parametrize(
    ("allow", "words"),
    [
        # all names are listed
        ("speed", "compression, local_steps, staleness, compile; got 'speed'"),
        (["compression", "topk"], "compression, local_steps, staleness, compile; got 'topk'"),
        ({"topk": False}, "compression, local_steps, staleness, compile; got 'topk'"),
        ([{"compression": True}], "compression, local_steps, staleness, compile; got {"),
        (True, "compression, local_steps, staleness, compile; got True"),
        (TopK(), r"compression, local_steps, staleness, compile; got TopK\("),
        # wrong places and options
        ({"compression": ["bf16", "sparse_loco"]}, "sparse_loco belongs under 'local_steps'"),
        ({"local_steps": TopK()}, "topk belongs under 'compression'"),
        ({"compression": "topkk"}, "allow={'compression': 'topkk'}: method is one of"),
        ({"local_steps": [True]}, "a method of exchange is a name"),
        ({"local_steps": LocalSteps(hierarchical=True)}, "leave out hierarchical"),
        ({"staleness": "oracle"}, "allow={'staleness': 'oracle'}: prediction"),
    ],
)
def test_what_cannot_be_read_is_named(allow, words):
    with pytest.raises(ValueError, match=words):
        Allowed.read(allow)


@pytest.mark.parametrize(
    ("allow", "exchanges", "local_steps"),
    [
        (None, [FP16()], [SparseLoCo(every=5)]),
        ([], [], []),
        ("compression", [*DEFAULT_CANDIDATES], []),
        ("local_steps", [], [SparseLoCo(every=5)]),
        (["compression", "local_steps"], [*DEFAULT_CANDIDATES], [SparseLoCo(every=5)]),
        ({"compression": "bf16", "local_steps": "local_steps"}, [BF16()], [LocalSteps()]),
    ],
)
def test_what_is_searched_by_the_time_to_a_loss(allow, exchanges, local_steps, monkeypatch):
    table = SimpleNamespace(methods=lambda optimizer, ranks: [FP16(), SparseLoCo(every=5)])
    monkeypatch.setattr(plan_request, "step_table_of", lambda trainer: table)
    request = AutoParallelStrategy(allow=allow, objective="time_to_loss").request
    trainer = SimpleNamespace(train_dataloader=None, max_steps=1000)
    optimizer = profile_of_optimizer(partial(torch.optim.SGD, momentum=0.9))
    found = plan_request.allowed_ways(request, trainer, optimizer, ranks=[2])
    assert found == (exchanges, local_steps)


def test_local_steps_are_not_searched_by_seconds_per_step():
    for allow in ("local_steps", {"local_steps": "sparse_loco"}):
        with pytest.raises(ValueError, match=r"allow has local_steps.*time_to_loss"):
            AutoParallelStrategy(allow=allow).request.check_local_steps()
        AutoParallelStrategy(allow=allow, objective="time_to_loss").request.check_local_steps()
        AutoParallelStrategy(allow=allow, plan="ddp").request.check_local_steps()


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
    allowed = Allowed.read("compression")
    assert allowed.held(profile_of_optimizer(optimizer), steps=math.inf) == held
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
        allowed.held(profile_of_optimizer(optimizer), steps=1)
        words = next(text for text in said if "2 bits was not searched" in text)
        option = ast.literal_eval(words.split("allow=")[1].split(" searches")[0])
        assert Allowed.read(option).compression == (TopK(density=None, bits=2),)
    said.clear()
    named = Allowed.read({"compression": ["topk"]})
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
        words = r"compressed \(top-k 1 %\).*allow='compression', or {'compression': \['topk'\]}"
        for allow in (None, [], "local_steps", {"compression": "bf16"}):
            with pytest.raises(PlanError, match=words):
                AutoParallelStrategy(plan=given, allow=allow)
        for option in (True, "topk", ["bf16", {"method": "topk", "density": 0.5}]):
            strategy = AutoParallelStrategy(plan=given, allow={"compression": option})
            assert strategy.request.plan == plan
    exact = replace(plan, gradient_exchange=Dense(hierarchical=True))
    assert AutoParallelStrategy(plan=exact).request.plan == exact
    alone = replace(exact, gradient_exchange=None, local_steps=LocalSteps())
    words = r"train alone \(.*allow='local_steps', or {'local_steps': \['local_steps'\]}"
    for allow in ([], "compression", {"local_steps": "sparse_loco"}):
        with pytest.raises(PlanError, match=words):
            AutoParallelStrategy(plan=alone, allow=allow)
    for allow in ("local_steps", {"local_steps": "local_steps"}):
        assert AutoParallelStrategy(plan=alone, allow=allow).request.plan == alone
