"""The step over a fit: measured, tried and settled; declined, that of the optimizer itself."""

from __future__ import annotations

import functools
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.optim import adaptive_step
from lightning_topt.optim.adaptive_step import (
    PLAIN_STEPS,
    TRIAL_STEPS,
    WARMUP_STEPS,
    AdaptiveStep,
    Sharing,
    measure_gather,
    time_step,
)
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.update_rule import update_rule
from tests.launch import run_ranks

FIRST_STEPS = WARMUP_STEPS + PLAIN_STEPS


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


def adaptive(optimizer, group, shared, say=lambda _: None, **options):
    step = AdaptiveStep(
        optimizer,
        rule=update_rule(optimizer),
        sharing=Sharing(group, frozenset(shared), **options),
        say=say,
    )
    step.start()
    return step


def test_a_declined_step_looks_at_no_parameter_until_there_are_others(group, monkeypatch):
    mine, other = parameter(0), parameter(0)
    optimizer, plain = torch.optim.AdamW([mine], lr=0.01), torch.optim.AdamW([other], lr=0.01)
    said = []
    step = adaptive(optimizer, group, [mine], said.append)

    def both(count):
        for _ in range(count):
            optimizer.step()
            plain.step()

    both(FIRST_STEPS + 1)
    assert step.decision is not None and not step.decision.shared and step.parallel is None
    looked = []
    original = adaptive_step.parameters_of
    monkeypatch.setattr(
        adaptive_step, "parameters_of", lambda found: looked.append(found) or original(found)
    )
    both(3)
    assert not looked
    added, twin = parameter(1), parameter(1)
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    plain.add_param_group({"params": [twin], "lr": 0.1})
    both(FIRST_STEPS)  # measured again
    assert looked and len(said) == 2
    looked.clear()
    both(1)
    assert not looked
    step.finish()
    assert "step" not in vars(optimizer)
    both(1)
    assert torch.equal(mine, other) and torch.equal(added, twin)


def test_groups_that_a_closure_changes_are_measured_anew(group):
    mine, other = parameter(0), parameter(0)
    optimizer, plain = torch.optim.AdamW([mine], lr=0.01), torch.optim.AdamW([other], lr=0.01)
    added, twin = parameter(1), parameter(1)
    step = adaptive(optimizer, group, [mine, added])
    for number in range(2 * FIRST_STEPS):

        def closure(its, late, number=number):
            if number == FIRST_STEPS - 1:  # in the last one that is measured
                its.add_param_group({"params": [late], "lr": 0.1})
            return float(number)

        for its, late in ((optimizer, added), (plain, twin)):
            assert its.step(functools.partial(closure, its, late)) == float(number)
        assert (step.decision is not None) == (number == 2 * FIRST_STEPS - 1)
    step.finish()
    assert torch.equal(mine, other) and torch.equal(added, twin)


def shared_and_changed(rank, faster, always):
    """Steps through measurement, trial and a new group, against plain ones."""
    adaptive_step.can_pay = lambda *_: True
    adaptive_step.is_faster = lambda *_: faster
    results, decision = [], None
    for is_adaptive in (False, True):
        torch.manual_seed(0)
        table, layer, late = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
        everything = [*table.parameters(), *layer.parameters(), *late.parameters()]
        if is_adaptive:
            step = adaptive(optimizer, dist.group.WORLD, everything, always=always)
        for number in range(FIRST_STEPS + TRIAL_STEPS + 4):
            if number == FIRST_STEPS + TRIAL_STEPS + 1:
                optimizer.add_param_group({"params": [*late.parameters()]})
            optimizer.zero_grad()
            late(layer(table(torch.tensor([number, 3])))).square().sum().backward()
            optimizer.step()
            if is_adaptive and number == FIRST_STEPS + TRIAL_STEPS:
                decision = step.decision
        results.append([p.detach().clone() for p in everything])
    shared = {p.index for p in step.parallel.pieces} if step.parallel else set()
    step.finish()
    torch.testing.assert_close(results[1], results[0])
    return decision.shared, shared


@pytest.mark.parametrize("faster", [True, False])
def test_a_trial_decides_and_sparse_gradients_stay_whole(faster):
    expected = (True, {1, 2, 3, 4}) if faster else (False, set())
    assert run_ranks(shared_and_changed, 2, faster, False) == [expected] * 2


def measured(rank):
    torch.manual_seed(0)
    parameters = [torch.randn(300, 200), torch.randn(7), torch.randn(50, 100).t(), torch.randn(5)]
    before = [p.clone() for p in parameters]
    pieces = [Piece(0, 0, 150, 0), Piece(0, 150, 300, 1), Piece(1, 0, 7, 1), Piece(2, 0, 100, 0)]
    seconds = measure_gather(parameters, pieces, dist.group.WORLD, node=None)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    return seconds


def test_on_a_gpu_events_time_a_step_and_the_host_waits_after_it(monkeypatch):
    log, event = [], Mock(elapsed_time=lambda stop: 1500.0)
    event.synchronize = lambda: log.append("waits")
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    optimizer = Mock(param_groups=[{"params": [Mock(device=torch.device("cuda"))]}])

    def step(closure):
        return closure(), log.append("step")

    output, seconds = time_step(optimizer, step, lambda: 3)  # all of it, without the closure
    assert output == (3, None) and seconds == 1.5 - 1.5 and log == ["step", *["waits"] * 4]
    assert event.record.call_count == 4


def test_all_ranks_have_the_same_seconds():
    seconds, other = run_ranks(measured, 2)
    assert seconds == other and 0 < seconds < 1
