"""The step over a fit where nothing is worth sharing: that of the optimizer itself, until there are
other parameters.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.optim import adaptive_step
from lightning_topt.optim.adaptive_step import TRIAL_STEPS, AdaptiveStep, GatherCost, Sharing
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.step_costs import MEASURED_STEPS, WARMUP_STEPS
from lightning_topt.optim.update_rule import update_rule
from tests.launch import run_ranks

FIRST_STEPS = WARMUP_STEPS + len(MEASURED_STEPS)


@pytest.fixture
def group(tmp_path):
    """Of one rank, for which sharing never pays."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def parameter(seed):
    value = torch.randn(20, 10, generator=torch.Generator().manual_seed(seed))
    made = nn.Parameter(value.clone())
    made.grad = value.roll(1, 0)
    return made


def test_a_declined_step_looks_at_no_parameter_until_there_are_others(group, monkeypatch):
    mine, other = parameter(0), parameter(0)
    optimizer, plain = torch.optim.AdamW([mine], lr=0.01), torch.optim.AdamW([other], lr=0.01)
    said = []
    step = AdaptiveStep(
        optimizer,
        rule=update_rule(optimizer),
        sharing=Sharing(group, frozenset([mine])),
        say=said.append,
    )
    step.start()

    def both():
        optimizer.step()
        plain.step()

    for _ in range(FIRST_STEPS + 1):
        both()
    assert len(step.decisions) == 1 and not step.decisions[0].shared and step.parallel is None
    looked = []
    original = adaptive_step.parameters_of
    monkeypatch.setattr(
        adaptive_step, "parameters_of", lambda found: looked.append(found) or original(found)
    )
    for _ in range(3):
        both()
    assert not looked
    added, twin = parameter(1), parameter(1)
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    plain.add_param_group({"params": [twin], "lr": 0.1})
    both()
    assert looked and len(said) == 2
    looked.clear()
    both()
    assert not looked
    step.finish()
    assert "step" not in vars(optimizer)
    both()
    assert torch.equal(mine, other) and torch.equal(added, twin)


def test_groups_that_a_closure_changes_are_measured_anew(group):
    mine, other = parameter(0), parameter(0)
    optimizer, plain = torch.optim.AdamW([mine], lr=0.01), torch.optim.AdamW([other], lr=0.01)
    added, twin = parameter(1), parameter(1)
    step = AdaptiveStep(
        optimizer,
        rule=update_rule(optimizer),
        sharing=Sharing(group, frozenset([mine, added])),
        say=lambda _: None,
    )
    step.start()
    for number in range(2 * FIRST_STEPS):

        def closure(its, late, number=number):
            if number == FIRST_STEPS - 1:  # in the last one that is measured
                its.add_param_group({"params": [late], "lr": 0.1})
            return float(number)

        for its, late in ((optimizer, added), (plain, twin)):
            assert its.step(functools.partial(closure, its, late)) == float(number)
        assert bool(step.decisions) == (number == 2 * FIRST_STEPS - 1)
    assert [decision.group for decision in step.decisions] == [0, 1]
    step.finish()
    assert torch.equal(mine, other) and torch.equal(added, twin)


def test_hooks_see_each_measured_step_once(group):
    mine = parameter(0)
    optimizer, seen = torch.optim.AdamW([mine], lr=0.01), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    AdaptiveStep(
        optimizer,
        rule=update_rule(optimizer),
        sharing=Sharing(group, frozenset([mine])),
        say=lambda _: None,
    ).start()
    for _ in range(FIRST_STEPS + 2):  # as a whole, by kind, and declined
        optimizer.step(lambda: seen.append("closure"))
    assert seen == ["before", "closure"] * (FIRST_STEPS + 2)


def sparse_rows(rank):
    def make():
        torch.manual_seed(0)
        return nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)

    results = []
    for adaptive in (False, True):
        table, layer = make()
        optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
        if adaptive:
            step = AdaptiveStep(
                optimizer,
                rule=update_rule(optimizer),
                sharing=Sharing(dist.group.WORLD, frozenset(parameters_of(optimizer))),
                say=lambda _: None,
            )
            step.start()
        for number in range(FIRST_STEPS + TRIAL_STEPS + 2):
            optimizer.zero_grad()
            layer(table(torch.tensor([number, 3]))).square().sum().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in parameters_of(optimizer)])
    assert step.parallel is not None and {p.index for p in step.parallel.pieces} == {1, 2}
    step.finish()
    torch.testing.assert_close(results[1], results[0])


def test_sparse_gradients_stay_whole(monkeypatch):
    monkeypatch.setattr(adaptive_step, "measure_gather", lambda *_, **__: GatherCost(0.0, 0.0))
    monkeypatch.setattr(adaptive_step, "is_faster", lambda *_: True)
    run_ranks(sparse_rows, 2)
