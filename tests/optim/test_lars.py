"""LARS against a few lines of plain torch per parameter."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from lightning_topt.optim.lars import LARS, layer_norms, update_each, update_together

SHAPES = [(64, 3, 3, 3), (64,), (33, 65), (1,), (), (5, 0), (7, 9)]


def make_parameters(shapes=SHAPES, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_gradients(parameters, *, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1


class Slow:
    """Algorithm 1 of arXiv 1708.03888, in float64."""

    def __init__(self, parameters):
        self.weights = [parameter.detach().double() for parameter in parameters]
        self.v = [torch.zeros_like(weight) for weight in self.weights]

    def step(
        self,
        gradients,
        *,
        lr,
        momentum=0.9,
        weight_decay=0.0,
        trust=1e-3,
        eps=1e-8,
        nesterov=False,
        adapt=None,
    ):
        for w, v, g in zip(self.weights, self.v, gradients, strict=True):
            g = g.double()
            ratio = 1.0
            if (adapt is None or adapt(w)) and w.norm() > 0 and g.norm() > 0:
                ratio = trust * w.norm() / (g.norm() + weight_decay * w.norm() + eps)
            update = lr * ratio * (g + weight_decay * w)
            v.copy_(momentum * v + update)
            w.sub_(update + momentum * v if nesterov else v)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1},
        {"nesterov": True, "weight_decay": 0.1},
        {"eps": 0.5, "momentum": 0.5},
        {"lr": 1e-9},  # below what the fused kernel takes
    ],
)
def test_follows_the_paper(options):
    parameters = make_parameters()
    options = {"lr": 3.0, **options}
    optimizer, slow = LARS(parameters, trust_coefficient=0.01, **options), Slow(parameters)
    for step in range(20):
        set_gradients(parameters, step=step)
        rate = options["lr"] / (1 + step)  # a schedule: momentum holds the rate of its time
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        slow.step([p.grad for p in parameters], trust=0.01, **{**options, "lr": rate})
    for parameter, weight in zip(parameters, slow.weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("adapt", "rule"), [("matrices", lambda w: w.dim() > 1), ("none", lambda w: False)]
)
def test_excluded_parameters_get_the_plain_rate(adapt, rule):
    parameters = make_parameters()
    optimizer, slow = LARS(parameters, lr=0.1, weight_decay=0.1, adapt=adapt), Slow(parameters)
    plain = make_parameters()
    # the same with a constant rate
    sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(10):
        set_gradients(parameters, step=step)
        set_gradients(plain, step=step)
        optimizer.step()
        sgd.step()
        slow.step([p.grad for p in parameters], lr=0.1, weight_decay=0.1, adapt=rule)
    for parameter, weight, reference in zip(parameters, slow.weights, plain, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=2e-6, atol=2e-6)
        if not rule(parameter):
            torch.testing.assert_close(parameter, reference, rtol=2e-6, atol=2e-6)


def test_groups_have_their_own_options():
    parameters, alone = make_parameters(), make_parameters()
    optimizer = LARS(
        [
            {"params": parameters[:3], "weight_decay": 0.1},
            {"params": parameters[3:], "adapt": "none"},
        ],
        lr=0.1,
    )
    first = LARS(alone[:3], lr=0.1, weight_decay=0.1)
    second = LARS(alone[3:], lr=0.1, adapt="none")
    for step in range(3):
        set_gradients(parameters, step=step)
        set_gradients(alone, step=step)
        for each in (optimizer, first, second):
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, alone, strict=True))


def test_zero_norms_give_ratio_one():
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))]
    weights[0].grad, weights[1].grad = torch.ones(3), torch.zeros(3)
    LARS(weights, lr=0.5, momentum=0.0, weight_decay=0.0, eps=0.0).step()
    assert weights[0].tolist() == [-0.5] * 3 and weights[1].tolist() == [1.0] * 3


def test_bad_gradients_are_not_hidden():
    parameter, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    parameter.grad, other.grad = torch.tensor([1.0, math.nan, 1.0]), torch.ones(3)
    LARS([parameter, other], lr=0.1).step()
    assert parameter[1].isnan() and other.isfinite().all()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_both_ways_to_update_agree(nesterov, momentum, weight_decay):
    """On CPU one parameter at a time, elsewhere all together."""
    results = []
    for update in (update_each, update_together):
        parameters = [parameter.detach() for parameter in make_parameters()]
        gradients = [2 * parameter + 1 for parameter in parameters]
        buffers = [parameter.cos() for parameter in parameters] if momentum else []
        rates = torch.linspace(1e-6, 1.0, len(parameters))
        given = rates.tolist() if update is update_each else rates
        options = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov and momentum > 0,
        }
        update(parameters, gradients, buffers, rates=given, **options)
        results.append([*parameters, *buffers])
    for each, together in zip(*results, strict=True):
        torch.testing.assert_close(each, together, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    parameters = make_parameters(dtype=dtype)
    optimizer, slow = LARS(parameters, lr=1.0, trust_coefficient=0.01), Slow(parameters)
    for step in range(5):
        set_gradients(parameters, step=step)
        optimizer.step()
        slow.step([p.grad for p in parameters], lr=1.0, trust=0.01)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-12
    for parameter, weight in zip(parameters, slow.weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=tolerance, atol=tolerance)


def test_resumes_and_copies_exactly():
    parameters, others = make_parameters(), make_parameters()
    optimizer = LARS(parameters, lr=1.0)
    for step in range(4):
        set_gradients(parameters, step=step)
        optimizer.step()
        if step == 1:
            for other, parameter in zip(others, parameters, strict=True):
                other.data.copy_(parameter)
            resumed = LARS(others, lr=7.0)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 1:
            set_gradients(others, step=step)
            resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    copy.deepcopy(optimizer).step()


def test_missing_gradients_and_closures():
    parameters = make_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = LARS(parameters, lr=1.0)
    optimizer.step()  # no gradient at all

    def closure():
        optimizer.zero_grad()
        loss = parameters[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before[0].square().sum().item())
    assert [torch.equal(a, b) for a, b in zip(parameters, before, strict=True)] == [False] + [
        True
    ] * 6
    assert len(optimizer.state) == 1


def test_norms_do_not_depend_on_company():
    """Bit for bit: what sharing norms between ranks relies on."""
    tensors = [parameter.detach() for parameter in make_parameters()]
    together = layer_norms(tensors, tensors[::-1])
    alone = [
        torch.stack([layer_norms([a], [a])[0, 0] for a in some])
        for some in (tensors, tensors[::-1])
    ]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 1.0, "momentum": 0.0, "nesterov": True}, "momentum above 0"),
        ({"lr": 1.0, "adapt": "some"}, "matrices"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LARS(make_parameters(), **options)
