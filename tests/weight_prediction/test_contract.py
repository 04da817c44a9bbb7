"""What holds for every rule with every optimizer that it knows."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_topt.schedules.staleness import Staleness
from lightning_topt.weight_prediction import PREDICTIONS, Prediction, TwoVersions
from lightning_topt.weight_prediction.rules import StagePlace
from lightning_topt.weight_prediction.weights import num_bytes
from tests.weight_prediction.stage_walk import (
    gradients,
    make_optimizer,
    make_parameters,
    rates_of,
    states,
    values,
    walk,
)

OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RMSprop")
CASES = [
    pytest.param(rule, optimizer, id=f"{name}-{optimizer}")
    for name, rule in PREDICTIONS.items()
    for optimizer in rule.optimizers or OPTIMIZERS
]
every_rule = pytest.mark.parametrize(("rule", "optimizer"), CASES)
# What is kept is counted by passes and updates, whatever an update is.
ONCE = [(rule, (rule.optimizers or OPTIMIZERS)[0]) for rule in PREDICTIONS.values()]
FEEDBACK = functools.partial(TwoVersions, error_feedback=True)


def accumulated(rule: type[Prediction]) -> int:
    return 3 if rule.name == "two_versions" else 1


def near(missing: int, round_trip: int | None = None) -> Staleness:
    return Staleness(0, missing, missing if round_trip is None else round_trip)


def same_bits(left, right) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def flat(tensors) -> list[torch.Tensor]:
    return [tensor.detach().reshape(-1).clone() for tensor in tensors]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_find_the_true_weights(rule, optimizer, dtype):
    """With given gradients the weights are those of a loop of steps, bit for bit."""
    parameters, plain = make_parameters(dtype), make_parameters(dtype)
    stepped, other = make_optimizer(optimizer, parameters), make_optimizer(optimizer, plain)
    accumulate, stage = accumulated(rule), 0
    predicted = []

    def seen(kind, minibatch, at_work):
        predicted.append(kind != "update" and not same_bits(flat(parameters), true))

    true = flat(parameters)
    walk(rule(), stepped, stage=stage, num_stages=4, accumulate=accumulate, seen=seen)
    for minibatch in range(24):
        for parameter, gradient in zip(plain, gradients(minibatch, dtype), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (minibatch + 1) % accumulate == 0:
            other.step()
            other.zero_grad()
    assert same_bits(flat(parameters), flat(plain)) and any(predicted)
    assert same_bits(flat(states(stepped)), flat(states(other)))


@every_rule
def test_a_pass_restores_what_it_found(rule, optimizer):
    """On the first stage, where staleness is largest; also after an error inside the pass."""
    parameters = make_parameters()
    stepped = make_optimizer(optimizer, parameters)
    walk(rule(), stepped, stage=0, num_stages=4, accumulate=accumulated(rule))
    before, versions = flat(parameters), [p._version for p in parameters]
    moments = flat(states(stepped))
    at_work = rule().on(stepped, stage=0, num_stages=4, accumulate=accumulated(rule))
    for way in (at_work.forward, at_work.backward):
        with pytest.raises(ZeroDivisionError), way(0, near(0, 3), rates_of(stepped)):
            assert [p._version for p in parameters] == versions
            raise ZeroDivisionError
        assert same_bits(flat(parameters), before)
        assert same_bits(flat(states(stepped)), moments)
        assert [p._version for p in parameters] == versions


@pytest.mark.parametrize(
    ("rule", "optimizer"), [*ONCE, (FEEDBACK, "SGD")], ids=lambda each: getattr(each, "name", None)
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("accumulate", "lag_per_hop"), [(1, 1), (1, 2), (3, 1), (6, 2)])
def test_copies_are_those_of_the_formula(rule, optimizer, stage, accumulate, lag_per_hop):
    if rule().name == "two_versions":
        accumulate = max(accumulate, 3 * lag_per_hop)  # fewer are refused
    stepped = make_optimizer(optimizer, make_parameters())
    size = num_bytes(p for group in stepped.param_groups for p in group["params"])
    most = 0

    def seen(kind, minibatch, at_work):
        nonlocal most
        most = max(most, at_work.held_bytes)

    sizes = {"accumulate": accumulate, "lag_per_hop": lag_per_hop}
    # 37 of them: the last update is of one minibatch alone
    at_work = walk(
        rule(), stepped, stage=stage, num_stages=4, num_minibatches=37, seen=seen, **sizes
    )
    assert most == rule().copies_at(StagePlace(stage, 4, **sizes)) * size
    at_work.drained()
    assert at_work.held_bytes == 0


@every_rule
def test_one_stage_is_plain_training(rule, optimizer):
    parameters, plain = make_parameters(), make_parameters()
    stepped, other = make_optimizer(optimizer, parameters), make_optimizer(optimizer, plain)
    inside = []
    at_work = walk(
        rule(),
        stepped,
        stage=0,
        num_stages=1,
        seen=lambda kind, index, at: inside.append(values(parameters)),
    )
    walk(PREDICTIONS["none"](), other, stage=0, num_stages=1)
    assert same_bits(flat(parameters), flat(plain)) and at_work.held_bytes == 0
    assert all(same_bits(flat(a), flat(b)) for a, b in zip(inside[::3], inside[1::3], strict=True))


@every_rule
def test_parameters_without_gradients_stay(rule, optimizer):
    """Frozen ones, and those of other stages, one element each; nothing of them is copied."""
    parameters = make_parameters()
    with torch.no_grad():
        parameters[0].data = torch.full((), float("nan")).expand(64, 64)
    parameters[1].requires_grad_(False)
    stepped = make_optimizer(optimizer, parameters)
    expected = num_bytes(parameters[2:])
    at_work = rule().on(stepped, stage=0, num_stages=2)
    for minibatch in range(5):
        with at_work.forward(minibatch, near(min(minibatch, 1)), rates_of(stepped)):
            assert parameters[0].isnan().all() and parameters[0].stride() == (0, 0)
        if minibatch:
            with at_work.backward(minibatch - 1, near(0), rates_of(stepped)):
                pass
            for parameter in parameters[2:]:
                parameter.grad = torch.ones_like(parameter)
            with at_work.update(minibatch - 1):
                stepped.step()
    assert at_work.held_bytes in (0, expected)


@every_rule
def test_backward_passes_in_flight_do_not_complain(rule, optimizer):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    stepped = make_optimizer(optimizer, [weight, *make_parameters()])
    at_work = rule().on(stepped, stage=0, num_stages=2)
    losses = {}
    for minibatch in range(6):
        with at_work.forward(minibatch, near(min(minibatch, 1)), rates_of(stepped)):
            losses[minibatch] = (weight * weight * torch.tensor([1.0, -1.0])).sum()
        if minibatch:
            with at_work.backward(minibatch - 1, near(0), rates_of(stepped)):
                losses.pop(minibatch - 1).backward()
            with at_work.update(minibatch - 1):
                stepped.step()
            stepped.zero_grad()
