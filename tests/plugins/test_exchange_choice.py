"""Gradient exchanges among the plans: what is searched, what is allowed, what is chosen."""

from __future__ import annotations

import math
from ast import literal_eval
from dataclasses import replace
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication import BF16, FP16, Dense, GradientMethod, TopK
from lightning_topt.communication.method_registry import method_classes
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plugins import plan_request
from lightning_topt.plugins.plan_request import AllowedExchanges, default_candidates, steps_of_fit
from tests.costs.graphs import profile_of, random_graph

DEFAULT_CANDIDATES = default_candidates()
EXCHANGES = (
    TopK(density=0.1),
    BF16(),
    FP16(),
    Dense(hierarchical=True),
)


def cluster(bandwidth: float, *, overlap: float = 0.5) -> Cluster:
    """Three nodes of two; memory that is fast beside the network."""
    device = Device("toy", 10**6, {"float32": 1e6}, 1e6)
    return Cluster(
        "toy", device, 2, 3, Link(1e-5, max(bandwidth, 1e5)), Link(1e-5, bandwidth), overlap=overlap
    )


def chosen(bandwidth, exchanges):
    graph = random_graph(3)
    machines = cluster(bandwidth)
    frontier = search_plans(
        SearchRequest(graph, machines, profile_of(graph), (6,), 12, exchanges=exchanges)
    )
    return min(frontier.points, key=lambda point: point.step_seconds)


def test_compression_is_chosen_where_it_is_faster_and_only_there():
    assert chosen(30.0, EXCHANGES).plan.gradient_exchange in EXCHANGES[1:3]
    assert chosen(1e9, EXCHANGES).plan.gradient_exchange is None
    assert chosen(30.0, ()).plan.gradient_exchange is None
    assert chosen(30.0, EXCHANGES).step_seconds < chosen(30.0, ()).step_seconds
    assert chosen(1e9, EXCHANGES) == chosen(1e9, ())


def test_a_searched_plan_says_whether_it_exchanges_by_nodes():
    for exchange in (TopK(density=0.1), Dense(hierarchical=True)):
        graph = random_graph(3)
        request = SearchRequest(
            graph, cluster(30.0), profile_of(graph), (6,), 12, exchanges=[exchange]
        )
        points = search_plans(request).points
        assert all(
            p.plan.gradient_exchange.hierarchical is not None
            for p in points
            if p.plan.gradient_exchange
        )
        for p in points:
            assert p.plan == type(p.plan).from_yaml(p.plan.to_yaml())


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
        assert (
            "top-k 1 % was not searched: training with" in left_out
            and "[{'method': 'topk'}]" in left_out
        )
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


def test_what_holds_depends_on_the_length_of_the_training(monkeypatch):
    said, allowed, few = [], AllowedExchanges.read(True), DEFAULT_CANDIDATES[1]
    monkeypatch.setattr(plan_request, "rank_zero_info", said.append)
    optimizer = profile_of_optimizer(torch.optim.AdamW)
    assert allowed.held(optimizer, steps=few.steps_under_adam) == (few, BF16())
    assert allowed.held(optimizer, steps=few.steps_under_adam - 1) == (BF16(),)
    assert f"fewer than {few.steps_under_adam} steps with AdamW" in said[-1]
    entry = literal_eval(said[-1].split("allow_compression=[")[1][:-1])
    assert AllowedExchanges.read([entry]).candidates == (few,)
    said.clear()
    assert allowed.held(optimizer, steps=1, say=False) == (BF16(),) and not said


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_epochs": 3}, 6),
        ({"max_epochs": 3, "max_steps": 5, "accumulate_grad_batches": 2}, 3),
        ({"max_epochs": -1}, math.inf),
    ],
)
def test_steps_of_a_fit(options, steps):
    found = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            found.append(steps_of_fit(trainer))
            trainer.should_stop = True

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        limit_train_batches=2,
        limit_val_batches=0,
        callbacks=[Look()],
        **quiet,
        **options,
    )
    assert steps_of_fit(trainer) == options.get("max_steps", math.inf)  # its data are not there yet
    trainer.fit(BoringModel())
    assert found[0] == steps


class NoPrice(BF16):
    work = GradientMethod.work


def test_a_plan_cannot_have_a_method_without_a_price():
    with pytest.raises(ValueError, match="NoPrice has no price"):
        AutoParallelStrategy(allow_compression=NoPrice())


@pytest.mark.parametrize(
    ("allow", "says"),
    [
        ([], "empty list"),
        ({"method": "topk", "densty": 0.1}, "method 'topk' has no option 'densty'"),
        ("dense", "hierarchical"),
        (TopK(selection="torch"), "selection is not part of a plan"),
    ],
)
def test_wrong_permissions_say_what_is_wrong(allow, says):
    with pytest.raises(ValueError, match=f"allow_compression.*{says}"):
        AutoParallelStrategy(allow_compression=allow)


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


def test_a_hook_of_the_user_is_not_replaced():
    def hook(state, bucket):
        raise AssertionError

    with pytest.raises(ValueError, match="would replace your communication hook"):
        AutoParallelStrategy(allow_compression=True, ddp_comm_hook=hook)
    exact = replace(
        uniform_plan(0, data_parallel_size=2), gradient_exchange=Dense(hierarchical=True)
    )
    with pytest.raises(ValueError, match="would replace"):
        AutoParallelStrategy(plan=exact, ddp_comm_hook=hook)
    assert AutoParallelStrategy(ddp_comm_hook=hook, plan="ddp").request.own_hook
