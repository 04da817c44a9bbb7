"""The package's rules in a simulated pipeline against its definition with all weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from benchmarks.pipelines.simulators import (
    ContinuousTraining,
    DefinedTraining,
    Step,
    passes_by_clock,
)
from lightning_topt.schedules.schedules import continuous_schedule
from lightning_topt.schedules.staleness import staleness

MINIBATCHES = 32
FEEDBACK = {"rule": "two_versions", "error_feedback": True}
RULES = {
    "SGD": ("none", "stash", "spectrain", "multistep"),
    "Adam": ("spectrain", "multistep"),
    "AdamW": ("none", "stash", "spectrain", "multistep"),
    "NAdam": ("nesterov",),
}
CASES = [(optimizer, rule) for optimizer, rules in RULES.items() for rule in rules]


class Layer(nn.Module):
    """Two operators whose gradients need their weights: both kinds of weights count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.second(torch.tanh(self.norm(self.first(x))))


def make_stages(num_stages):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(num_stages)))


def make_batches(count=MINIBATCHES):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator))
        for _ in range(count)
    ]


def make_optimizer(name, named):
    groups = [
        {"params": [p for n, p in named if p.dim() == 2], "weight_decay": 0.05},
        {"params": [p for n, p in named if p.dim() == 1], "lr": 0.02},
    ]
    if name == "SGD":
        return optim.SGD(groups, lr=0.05, momentum=0.8, nesterov=True)
    if name == "NAdam":
        return optim.NAdam(groups, lr=0.01, betas=(0.99, 0.999), decoupled_weight_decay=True)
    return getattr(optim, name)(groups, lr=0.01, betas=(0.8, 0.95))


def rate(minibatch):
    return min(1.0, (minibatch + 1) / 10) * (0.6 + 0.4 * math.cos(minibatch / 15))


def run_parts(training, parts):
    """The losses of so many minibatches each, with a drain after each part."""
    batches = iter(make_batches())
    return [loss for part in parts for loss in training.run([next(batches) for _ in range(part)])]


def by_definition(optimizer, rule, num_stages, *, max_norm=1.0, parts=(MINIBATCHES,), **sizes):
    model = make_stages(num_stages)
    training = DefinedTraining(
        model,
        stage_of={name: int(name.split(".")[0]) for name, _ in model.named_parameters()},
        num_stages=num_stages,
        loss=lambda module, batch: F.mse_loss(module(batch[0]), batch[1]),
        make_optimizer=lambda named: make_optimizer(optimizer, named),
        rule=rule["rule"] if isinstance(rule, dict) else rule,
        error_feedback=rule == FEEDBACK,
        rate=rate,
        max_norm=max_norm,
        **sizes,
    )
    return model, run_parts(training, parts)


def by_rules(optimizer, rule, num_stages, *, max_norm=1.0, parts=(MINIBATCHES,), **sizes):
    model = make_stages(num_stages)
    training = ContinuousTraining(
        list(model),
        [make_optimizer(optimizer, list(stage.named_parameters())) for stage in model],
        rule=rule,
        loss=F.mse_loss,
        step=Step(rate, max_norm),
        **sizes,
    )
    return model, run_parts(training, parts)


def assert_equal_training(left, right):
    """The models' parameters, each on the scale on which it was changed, and losses."""
    (one, losses), (other, others) = left, right
    start = dict(make_stages(len(one)).named_parameters())
    for name, parameter in one.named_parameters():
        moved = (parameter - start[name]).abs().max()
        assert moved > 1e-3, name
        torch.testing.assert_close(
            parameter, dict(other.named_parameters())[name], rtol=0, atol=2e-4 * moved.item()
        )
    assert losses == pytest.approx(others, rel=1e-4)


@pytest.mark.parametrize(("optimizer", "rule"), CASES)
def test_rules_are_as_defined(optimizer, rule):
    """Every parameter after 32 updates, with a learning-rate schedule and clipping."""
    assert_equal_training(by_rules(optimizer, rule, 4), by_definition(optimizer, rule, 4))


@pytest.mark.parametrize("rule", ["none", "stash", "spectrain", "multistep", "two_versions"])
@pytest.mark.parametrize("sizes", [{"accumulate": 3}, {"accumulate": 6, "lag_per_hop": 2}], ids=str)
def test_rules_are_as_defined_with_accumulation(rule, sizes):
    """32 minibatches, so that the last update is of fewer."""
    assert_equal_training(
        by_rules("AdamW", rule, 4, **sizes), by_definition("AdamW", rule, 4, **sizes)
    )


@pytest.mark.parametrize("rule", ["stash", "two_versions", "spectrain", "multistep"])
def test_rules_are_as_defined_from_drain_to_drain(rule):
    sizes = {"parts": (14, 3, 15), "accumulate": 2 if rule == "two_versions" else 1}
    assert_equal_training(
        by_rules("AdamW", rule, 3, **sizes), by_definition("AdamW", rule, 3, **sizes)
    )


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_error_feedback_is_as_defined(optimizer, accumulate):
    sizes = {"parts": (17, 4, 11), "accumulate": accumulate}
    fed = by_rules(optimizer, FEEDBACK, 3, **sizes)
    assert_equal_training(fed, by_definition(optimizer, FEEDBACK, 3, **sizes))
    plain = by_rules(optimizer, "two_versions", 3, **sizes)[1]
    assert plain[:2] == fed[1][:2] and abs(plain[-1] - fed[1][-1]) > 1e-5


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("make", [by_definition, by_rules])
def test_one_stage_is_plain_training_bit_for_bit(optimizer, make):
    plain = make_stages(1)
    stepped = make_optimizer(optimizer, list(plain.named_parameters()))
    rates = [group["lr"] for group in stepped.param_groups]
    for minibatch, (inputs, targets) in enumerate(make_batches()):
        for group, base in zip(stepped.param_groups, rates, strict=True):
            group["lr"] = base * rate(minibatch)
        F.mse_loss(plain(inputs), targets).backward()
        stepped.step()
        stepped.zero_grad()
    for rule in ("none", "spectrain", "multistep", "stash", "two_versions", FEEDBACK):
        model, _ = make(optimizer, rule, 1, max_norm=None)
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("lag_per_hop", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("count", [1, 4, 23])
def test_staleness_is_those_of_the_clock(num_stages, lag_per_hop, accumulate, count):
    sizes = {"lag_per_hop": lag_per_hop, "accumulate": accumulate}
    found = staleness(continuous_schedule(num_ranks=num_stages, num_minibatches=count, **sizes))
    for of_stage, passes in zip(
        found, passes_by_clock(num_stages, count, lag_per_hop, accumulate), strict=True
    ):
        for index in range(count):
            for kind in ("forward", "backward"):
                of_pass = getattr(of_stage, kind)[index]
                version = getattr(passes, f"{kind}_version")[index]
                expected = (
                    version,
                    index // accumulate - version,
                    getattr(passes, f"{kind}_trip")[index],
                )
                assert tuple(of_pass) == expected
