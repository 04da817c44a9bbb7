"""Measured steps are steps; what they measure is right in proportion. Times come from a clock that
only the work moves.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from lightning_topt.optim import step_costs
from lightning_topt.optim.step_costs import (
    estimate_seconds,
    measure_step,
    parameter_kinds,
    slowest_of_ranks,
    time_step,
)
from lightning_topt.optim.update_rule import OptimizerCounters
from tests.launch import run_ranks


def make_groups(seed=0):
    torch.manual_seed(seed)
    shapes = [[(8, 4), (4,), (8, 4)], [(8, 4), (3,), ()]]
    return [{"params": [nn.Parameter(torch.randn(s)) for s in group]} for group in shapes]


def set_gradients(optimizer, step):
    torch.manual_seed(100 + step)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.param_groups[1]["params"][1].grad = None if step == 2 else torch.ones(3)


class Counting(optim.Optimizer):
    """The rate follows the number of calls, kept on the optimizer and, as a tensor, in the
    groups.
    """

    def __init__(self, params):
        super().__init__([{**group, "step": torch.zeros(())} for group in params], {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(
                        self.state[p]["m"]
                        * group["lr"]
                        / (self.calls + float(group["step"]) + group["seen"])
                    )


OPTIMIZERS = [
    lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    lambda groups: optim.Adafactor(groups, lr=0.1),
    lambda groups: optim.AdamW(
        [{"params": list(zip("abc", g["params"], strict=True))} for g in groups], lr=0.1
    ),
    Counting,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_measured_step_is_the_plain_step(make):
    plain, measured = make(make_groups()), make(make_groups())
    for step in range(4):
        for optimizer in (plain, measured):
            set_gradients(optimizer, step)
        gradients = [p.grad for p in step_costs.parameters_of(measured)]
        plain.step()
        seconds = measure_step(measured, measured.step, kinds=parameter_kinds(measured))
        assert sorted(seconds) == list(range(6)) and all(value > 0 for value in seconds.values())
        assert all(
            p.grad is g for p, g in zip(step_costs.parameters_of(measured), gradients, strict=True)
        )
    ours, theirs = measured.state_dict(), plain.state_dict()
    assert (
        ours["state"].keys() == theirs["state"].keys()
        and ours["param_groups"] == theirs["param_groups"]
    )
    for index, p in enumerate(step_costs.parameters_of(measured)):
        assert torch.equal(p, step_costs.parameters_of(plain)[index])
        state, twin = ours["state"][index], theirs["state"][index]
        torch.testing.assert_close(state, twin, rtol=0, atol=0)
    assert getattr(measured, "calls", 0) == getattr(plain, "calls", 0)


def test_a_failing_step_leaves_the_groups_whole():
    optimizer = optim.SGD(make_groups(), lr=0.1)
    before = copy.copy([group["params"] for group in optimizer.param_groups])

    def step():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_step(optimizer, step, kinds=parameter_kinds(optimizer))
    assert [group["params"] for group in optimizer.param_groups] == before


def test_time_goes_to_whom_it_belongs(monkeypatch):
    optimizer, now = optim.SGD(make_groups(), lr=0.1), [0.0]
    set_gradients(optimizer, 0)
    monkeypatch.setattr(step_costs, "perf_counter", lambda: now[0])

    def step():
        now[0] += sum(p.numel() ** 2 for p in step_costs.parameters_of(optimizer))

    assert time_step(optimizer, lambda _: step())[1] == 3 * 32**2 + 4**2 + 3**2 + 1

    def closure():
        now[0] += 1e6
        return "loss"

    def step_with(asked):
        step()
        loss = asked()
        step()
        return loss

    assert time_step(optimizer, step_with, closure) == ("loss", 2 * (3 * 32**2 + 4**2 + 3**2 + 1))
    seconds = measure_step(optimizer, step, kinds=parameter_kinds(optimizer))
    assert seconds == {0: 32**2, 1: 4**2, 2: 32**2, 3: 32**2, 4: 3**2, 5: 1}


def test_counters_are_set_back():
    optimizer = Counting(make_groups())
    set_gradients(optimizer, 0)
    optimizer.step()
    counters, tensor = OptimizerCounters(optimizer), optimizer.param_groups[0]["step"]
    optimizer.step()
    optimizer.param_groups[0]["new"] = 3
    counters.restore()
    group = optimizer.param_groups[0]
    assert optimizer.calls == group["seen"] == 1 and "new" not in group
    assert group["step"] is tensor and float(tensor) == 1


def test_estimates_where_nothing_can_be_told_apart():
    optimizer = optim.SGD(
        [nn.Parameter(torch.zeros(s)) for s in ((8, 4), (2, 4, 4), (32,), (5,))], lr=0.1
    )
    for p in step_costs.parameters_of(optimizer)[:3]:
        p.grad = torch.zeros_like(p)
    assert estimate_seconds(optimizer, work="elements", whole_seconds=[3.0]) == pytest.approx(
        [1.0, 1.0, 1.0, 0.0]
    )
    # 8 * 4^2 + 32 = 160, 16 * 2^2 + 32 = 96, 32
    by_matrix = estimate_seconds(optimizer, work="matrices", whole_seconds=[288.0, 288.0, 1e3])
    assert by_matrix == pytest.approx([160.0, 96.0, 32.0, 0.0])


def _slowest(rank):
    values = [[1.0, 5.0, 1 / 3], [3.0, 4.0, 2 / 3], [2.0, 2.0, 2.0]][rank]
    return slowest_of_ranks(values, device=torch.device("cpu")), slowest_of_ranks(
        [], device=torch.device("cpu")
    )


def test_the_slowest_rank_counts_on_all():
    assert run_ranks(_slowest, 3) == [([3.0, 4.0, 2 / 3], [])] * 3
