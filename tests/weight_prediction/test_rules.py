"""Predicted weights against the rules' definitions, each written out plainly; and rules by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from lightning_topt.schedules.staleness import Staleness
from lightning_topt.weight_prediction import (
    PREDICTIONS,
    default_prediction,
    make_prediction,
    prediction_to_value,
)
from tests.weight_prediction.stage_walk import (
    gradients,
    make_optimizer,
    make_parameters,
    rates_of,
    values,
    walk,
)

FEEDBACK = {"rule": "two_versions", "error_feedback": True}
SGD = {"lr": 0.1, "momentum": 0.9}
SGD_VARIANTS = [
    {},
    {"weight_decay": 0.1},
    {"nesterov": True, "weight_decay": 0.1},
    {"dampening": 0.5, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"foreach": False},
    {"fused": True, "weight_decay": 0.1},
]
ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}
ADAM_VARIANTS = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"amsgrad": True, "weight_decay": 0.3},
    {"maximize": True},
    {"foreach": True},
    {"fused": True, "weight_decay": 0.3},
    {"lr": torch.tensor(0.01), "weight_decay": 0.3},
]


def trained(kind, variant, *, dtype=torch.float32, steps=4, **options):
    """Parameters after steps of random gradients; with Adam the last had one less."""
    parameters = make_parameters(dtype)
    optimizer = kind(parameters, **{**options, **variant})
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step, dtype), strict=True):
            parameter.grad = gradient
        if step == 0 and kind is not optim.SGD:  # fused SGD cannot begin with some parameters later
            parameters[-1].grad = None
        optimizer.step()
    optimizer.zero_grad()
    return parameters, optimizer


def predicted(rule, parameters, optimizer, *, count, rates=None):
    at_work = make_prediction(rule).on(optimizer, stage=0, num_stages=count + 1)
    staleness = Staleness(0, count, count)
    with at_work.forward(0, staleness, rates_of(optimizer) if rates is None else rates):
        return values(parameters)


def close(left, right, **tolerance):
    torch.testing.assert_close([x.detach() for x in left], [x.detach() for x in right], **tolerance)


@pytest.mark.parametrize("variant", SGD_VARIANTS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_multistep_is_sgd_with_gradients_of_zero(variant, count):
    parameters, optimizer = trained(optim.SGD, variant, **SGD)
    found = predicted("multistep", parameters, optimizer, count=count)
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    close(found, parameters)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("variant", ADAM_VARIANTS, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_multistep_of_adam(kind, variant, count):
    """Step by step, one parameter after the other, with rates that change."""
    parameters, optimizer = trained(kind, variant, **ADAM)
    # the last one stays
    rates = [[{**rates_of(optimizer)[0][0], "lr": 0.01 / (n + 1)}] for n in range(2)]
    expected = []
    for parameter in parameters:
        group, state, weight = (
            optimizer.param_groups[0],
            optimizer.state[parameter],
            parameter.detach().clone(),
        )
        mean, square = (
            state["exp_avg"].clone(),
            state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"],
        )
        for step in range(count):
            rate, decay, time = (
                rates[min(step, 1)][0]["lr"],
                group["weight_decay"],
                int(state["step"]) + step + 1,
            )
            gradient = torch.zeros_like(weight)
            if kind is optim.AdamW:
                weight = weight - rate * decay * weight
            else:
                gradient = decay * weight
            mean = 0.8 * mean + 0.2 * gradient
            corrected = mean / (1 - 0.8**time)
            weight = weight - rate * corrected / ((square / (1 - 0.95**time)).sqrt() + group["eps"])
        expected.append(weight)
    assert {int(optimizer.state[p]["step"]) for p in parameters} == {3, 4}
    close(predicted("multistep", parameters, optimizer, count=count, rates=rates), expected)


def test_multistep_takes_the_momentum_of_the_future():
    parameters, optimizer = trained(optim.SGD, {}, **SGD)
    rates = [
        [{**rates_of(optimizer)[0][0], "momentum": momentum, "lr": rate}]
        for momentum, rate in ((0.5, 1), (0.2, 2))
    ]
    factor = 1 * 0.5 + 2 * 0.5 * 0.2
    found = predicted("multistep", parameters, optimizer, count=2, rates=rates)
    close(found, [p - factor * optimizer.state[p]["momentum_buffer"] for p in parameters])


@pytest.mark.parametrize("variant", SGD_VARIANTS, ids=str)
def test_spectrain_repeats_the_smoothed_update_of_sgd(variant):
    parameters, optimizer = trained(optim.SGD, variant, **SGD)
    expected = [p - 3 * 0.1 * optimizer.state[p]["momentum_buffer"] for p in parameters]
    close(predicted("spectrain", parameters, optimizer, count=3), expected)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("variant", ADAM_VARIANTS, ids=str)
def test_spectrain_repeats_the_last_update_of_adam(kind, variant):
    """Which is the difference of two versions, but for decoupled decay."""
    parameters, optimizer = trained(kind, variant, steps=3, **ADAM)
    before = values(parameters)
    for parameter, gradient in zip(parameters, gradients(3), strict=True):
        parameter.grad = gradient
    optimizer.step()
    kept = 1 - 0.01 * optimizer.param_groups[0]["weight_decay"] if kind is optim.AdamW else 1.0
    expected = [p + 2 * (p - kept * old) for p, old in zip(parameters, before, strict=True)]
    close(predicted("spectrain", parameters, optimizer, count=2), expected)


@pytest.mark.parametrize("rule", ["spectrain", "multistep"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_predictions_in_half_precision(rule, dtype):
    parameters, optimizer = trained(optim.AdamW, {}, dtype=dtype, eps=1e-4, lr=0.01)
    found = predicted(rule, parameters, optimizer, count=2)
    expected, reference = trained(optim.AdamW, {}, dtype=torch.float32, eps=1e-4, lr=0.01)
    for whole, half in zip(expected, parameters, strict=True):
        whole.data.copy_(half)
        for name in ("exp_avg", "exp_avg_sq"):
            reference.state[whole][name] = optimizer.state[half][name].float()
    close(
        [x.float() for x in found],
        predicted(rule, expected, reference, count=2),
        atol=0.03,
        rtol=0.03,
    )
    assert all(x.dtype == dtype for x in found)
    assert not all(torch.equal(x, p) for x, p in zip(found, parameters, strict=True))


@pytest.mark.parametrize("rule", ["spectrain", "multistep"])
def test_parameters_that_were_never_updated_are_not_predicted(rule):
    parameters = make_parameters()
    optimizer = optim.AdamW(parameters, lr=0.1)
    assert all(
        map(torch.equal, predicted(rule, parameters, optimizer, count=3), values(parameters))
    )
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    found = predicted(rule, parameters, optimizer, count=3)
    assert [*map(torch.equal, found, parameters)] == [False, True, True, True]


def test_large_parameters_are_predicted_in_pieces(monkeypatch):
    from lightning_topt.weight_prediction import weights

    whole = predicted("multistep", *trained(optim.Adam, {}, **ADAM), count=2)
    monkeypatch.setattr(weights, "CACHE_BYTES", 48)
    close(predicted("multistep", *trained(optim.Adam, {}, **ADAM), count=2), whole, rtol=0, atol=0)


def walked(rule, parameters):
    """What passes see of `parameters`, the last values, and whether contents were exchanged."""
    with torch.no_grad():
        for parameter, value in zip(parameters, make_parameters(), strict=True):
            parameter.copy_(value)
    seen, optimizer = [], make_optimizer("AdamW", parameters)
    at_work = walk(
        make_prediction(rule),
        optimizer,
        stage=0,
        num_stages=3,
        accumulate=2,
        seen=lambda kind, index, at: seen.append(values(parameters)),
    )
    swaps = at_work._swaps
    at_work.drained()
    assert at_work.held_bytes == 0
    return seen, values(parameters), swaps


def one_memory(*, more: int = 0) -> list[nn.Parameter]:
    """Parameters one after the other in one memory, as those of recurrent layers, and some more."""
    sizes = [each.numel() for each in make_parameters()]
    flat = torch.zeros(sum(sizes) + more).split([*sizes, more])
    return [
        nn.Parameter(part.view_as(each))
        for part, each in zip(flat, make_parameters(), strict=False)
    ]


@pytest.mark.parametrize("rule", ["stash", "two_versions", FEEDBACK], ids=str)
@pytest.mark.parametrize("held", ["nothing", "view", "row", "more memory", "shared"])
def test_versions_are_pointed_to_or_exchanged_equally(rule, held):
    """Contents are exchanged where others refer to the memory: their views follow the weights."""
    expected = walked(rule, make_parameters())
    parameters = one_memory(more=2 * (held == "more memory"))
    if held == "shared":
        parameters = make_parameters()
        parameters[0].data.share_memory_()
    views = {"view": lambda p: p.data, "row": lambda p: p.detach()[1:]}
    view = views[held](parameters[0]) if held in views else None
    pointers = [parameter.data_ptr() for parameter in parameters]
    seen, ends, swaps = walked(rule, parameters)
    assert swaps == (held != "nothing") and not expected[2]
    for mine, theirs in zip([*seen, ends], [*expected[0], expected[1]], strict=True):
        assert all(map(torch.equal, mine, theirs))
    if swaps:
        assert [parameter.data_ptr() for parameter in parameters] == pointers
    else:  # still one after the other
        places = [parameter.storage_offset() for parameter in parameters]
        assert places == [parameter.storage_offset() for parameter in one_memory()]
        assert len({parameter.untyped_storage()._cdata for parameter in parameters}) == 1
    if view is not None:
        assert torch.equal(view, parameters[0].detach()[-len(view) :])


def test_graphs_in_flight_keep_the_version_of_their_forward_pass():
    """Autograd saves the transpose, a view, of one operand, and the parameter itself of another."""
    parameters = [nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4, 4))]
    optimizer = optim.SGD(parameters, lr=0.5, momentum=0.9)
    at_work = make_prediction("stash").on(optimizer, stage=0, num_stages=4)
    losses, expected, near = {}, {}, Staleness
    batches = torch.rand(12, 3, 4, generator=torch.Generator().manual_seed(0))

    def loss_of(one, other, batch):
        return (torch.nn.functional.linear(batch, one).sin() * (batch @ other)).square().sum()

    for index, batch in enumerate(batches):
        missing = min(index, 3)
        with at_work.forward(index, near(missing, missing, 0), rates_of(optimizer)):
            losses[index] = loss_of(*parameters, batch.clone().requires_grad_())
            copies = [p.detach().clone().requires_grad_() for p in parameters]
            expected[index] = torch.autograd.grad(loss_of(*copies, batch), copies)
        if index >= 3:
            with at_work.backward(index - 3, near(0, 0, 0), rates_of(optimizer)):
                losses.pop(index - 3).backward()
            for parameter, gradient in zip(parameters, expected.pop(index - 3), strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
            with at_work.update(index - 3):
                optimizer.step()
            optimizer.zero_grad()
    assert not at_work._swaps


def test_feedback_by_pieces_is_that_of_whole_tensors(monkeypatch):
    from lightning_topt.weight_prediction import weights

    expected = walked(FEEDBACK, make_parameters())
    monkeypatch.setattr(weights, "CACHE_BYTES", 12)
    parameters = make_parameters()
    parameters[0].data = parameters[0].data.t().contiguous().t()
    found = walked(FEEDBACK, parameters)
    for mine, theirs in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert parameters[0].stride() == (1, 3)


@pytest.mark.parametrize(
    ("rule", "make", "word"),
    [
        ("spectrain", optim.RMSprop, "RMSprop"),
        ("multistep", lambda p: optim.SGD(p, lr=0.1), "momentum"),
        ("spectrain", lambda p: optim.Adam(p, differentiable=True), "differentiable"),
        ("multistep", lambda p: Stepping(p, lr=1, momentum=1), "Stepping"),
        ("spectrain", lambda p: optim.Adam([nn.Parameter(p[0] * 1j)]), "real"),
        ("nesterov", optim.Adam, "NAdam"),
        ("nesterov", lambda p: optim.NAdam(p, weight_decay=0.1), "decoupled_weight_decay"),
    ],
)
def test_optimizers_that_a_rule_does_not_know_are_refused(rule, make, word):
    with pytest.raises(ValueError, match=word):
        make_prediction(rule).on(make(make_parameters()), stage=0, num_stages=2)


class Stepping(optim.SGD):
    """Steps in a way of its own."""

    def step(self, closure=None):
        return None


def test_subclasses_that_step_alike_are_known():
    class Mine(optim.AdamW):
        pass

    assert make_prediction("spectrain").on(Mine(make_parameters()), stage=0, num_stages=2)


@pytest.mark.parametrize(
    "value", [*PREDICTIONS, {"rule": "two_versions", "synchronous_updates": 7}], ids=str
)
def test_rules_to_values_and_back(value):
    rule = make_prediction(value)
    assert prediction_to_value(rule) == value and make_prediction(rule) is rule
    assert make_prediction(prediction_to_value(rule)) == rule


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop"])
@pytest.mark.parametrize(("flight", "accumulate"), [(1, 1), (7, 1), (31, 1), (63, 2), (3, 3)])
def test_every_optimizer_has_a_default_that_takes_it(name, flight, accumulate):
    optimizer, places = make_optimizer(name, make_parameters()), (flight, accumulate)
    rule = default_prediction(optimizer, flight=flight, accumulate=accumulate)
    assert rule == default_prediction(name, flight=flight, accumulate=accumulate)
    stage = rule.on(optimizer, stage=0, num_stages=flight + 1, accumulate=accumulate)
    assert stage.held_bytes == 0, places


@pytest.mark.parametrize(
    ("name", "flight", "accumulate", "rule"),
    [
        ("AdamW", 1, 1, "spectrain"),
        ("AdamW", 7, 1, "spectrain"),
        ("AdamW", 7, 4, "spectrain"),  # cut, but two updates are missed
        ("AdamW", 7, 7, FEEDBACK),
        ("AdamW", 1, 2, FEEDBACK),
        ("Adam", 3, 4, FEEDBACK),
        ("SGD", 15, 1, "spectrain"),
        ("SGD", 16, 1, "multistep"),
        ("SGD", 99, 1, "multistep"),
        ("Adagrad", 1, 1, "stash"),
    ],
)
def test_the_default_is_the_row_of_the_table(name, flight, accumulate, rule):
    found = default_prediction(name, flight=flight, accumulate=accumulate)
    assert found == make_prediction(rule)


def test_optimizers_that_the_default_does_not_know_stash():
    for optimizer in (
        optim.SGD(make_parameters(), lr=0.1),
        optim.NAdam(make_parameters(), weight_decay=0.1),
    ):
        assert default_prediction(optimizer) == make_prediction("stash")


@pytest.mark.parametrize("rule", ["spectrain", "multistep"])
def test_autocast_casts_predicted_weights_and_keeps_the_casts(rule):
    """Masters are float32 and predicted so; backward uses the casts of the forward pass."""
    torch.manual_seed(0)
    linear, inputs = nn.Linear(4, 4, bias=False), torch.randn(2, 4, requires_grad=True)
    optimizer = optim.AdamW(linear.parameters(), lr=0.1)
    linear.weight.grad = torch.randn(4, 4)
    optimizer.step()
    at_work = make_prediction(rule).on(optimizer, stage=0, num_stages=4)
    with at_work.forward(0, Staleness(0, 3, 3), rates_of(optimizer)):
        weights = linear.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = linear(inputs)
    assert weights.dtype == torch.float32 and not torch.equal(weights, linear.weight)
    close([outputs], [inputs.bfloat16() @ weights.bfloat16().T], rtol=0, atol=0)
    with at_work.backward(0, Staleness(0, 0, 0), rates_of(optimizer)):
        outputs.sum().backward()
    close(
        [inputs.grad], [(torch.ones(2, 4).bfloat16() @ weights.bfloat16()).float()], rtol=0, atol=0
    )


def test_the_loop_in_the_documentation_runs():
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "plain_pytorch.md").read_text()
    (code,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "make_prediction" in code
    )
    names = {}
    exec(compile(code, "plain_pytorch.md", "exec"), names)
    assert names["stage"].weight.grad is not None and names["rule"].held_bytes == 0
