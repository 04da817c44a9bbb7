"""The step over a fit where nothing is worth sharing: that of the optimizer itself, until there are
other parameters.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.optim import adaptive_step
from lightning_topt.optim.adaptive_step import AdaptiveStep, Sharing
from lightning_topt.optim.step_costs import MEASURED_STEPS, WARMUP_STEPS
from lightning_topt.optim.update_rule import update_rule

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
