"""LAMB against a few lines of plain torch per parameter."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_topt.optim.adam_variants import LAMB, add_scaled
from tests.optim.test_lars import (
    SHAPES,
    make_parameters,
    set_gradients,
)


class Slow:
    """Algorithm 2 of arXiv 1904.00962, in float64."""

    def __init__(self, parameters):
        self.weights = [parameter.detach().double() for parameter in parameters]
        self.m = [torch.zeros_like(weight) for weight in self.weights]
        self.v = [torch.zeros_like(weight) for weight in self.weights]
        self.t = 0

    def step(
        self,
        gradients,
        *,
        lr,
        betas=(0.9, 0.999),
        eps=1e-6,
        decay=0.01,
        correct=True,
        clip=None,
        adapt=lambda w: True,
    ):
        self.t += 1
        for x, m, v, g in zip(self.weights, self.m, self.v, gradients, strict=True):
            g = g.double()
            m.copy_(betas[0] * m + (1 - betas[0]) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
            m_hat = m / (1 - betas[0] ** self.t) if correct else m
            v_hat = v / (1 - betas[1] ** self.t) if correct else v
            update = m_hat / (v_hat.sqrt() + eps) + decay * x
            ratio = 1.0
            if adapt(x) and x.norm() > 0 and update.norm() > 0:
                ratio = x.norm() / update.norm()
                ratio = ratio if clip is None else min(ratio, clip)
            x.sub_(lr * ratio * update)


@pytest.mark.parametrize(
    ("options", "slow_options"),
    [
        ({}, {}),
        ({"weight_decay": 0.0}, {"decay": 0.0}),
        (
            {"weight_decay": 1.0, "eps": 0.1, "betas": (0.5, 0.9)},
            {"decay": 1.0, "eps": 0.1, "betas": (0.5, 0.9)},
        ),
        ({"bias_correction": False}, {"correct": False}),
        ({"trust_clip": 0.7}, {"clip": 0.7}),
        ({"adapt": "matrices"}, {"adapt": lambda x: x.dim() > 1}),
        ({"adapt": "none"}, {"adapt": lambda x: False}),
    ],
)
def test_follows_the_paper(options, slow_options):
    parameters = make_parameters()
    optimizer, slow = LAMB(parameters, lr=0.01, **options), Slow(parameters)
    for step in range(20):
        set_gradients(parameters, step=step)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
        slow.step([p.grad for p in parameters], lr=0.01 / (1 + step), **slow_options)
    for parameter, weight in zip(parameters, slow.weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=1e-5, atol=1e-5)


def test_without_ratios_it_is_adamw():
    parameters, others = make_parameters(), make_parameters()
    lamb = LAMB(parameters, lr=0.01, weight_decay=0.1, eps=1e-8, adapt="none")
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, eps=1e-8)
    for step in range(10):
        set_gradients(parameters, step=step)
        set_gradients(others, step=step)
        lamb.step()
        adamw.step()
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


def test_zero_norms_give_ratio_one():
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    LAMB([weight], lr=0.5, eps=0.0, weight_decay=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -0.5))  # Adam's first step
    still = torch.nn.Parameter(torch.ones(3))
    still.grad = torch.zeros(3)
    LAMB([still], lr=0.5, weight_decay=0.0).step()
    assert still.tolist() == [1.0] * 3


def test_rates_as_tensors_agree():
    """How updates are applied where the device is not waited for."""
    parameters = [parameter.detach() for parameter in make_parameters()]
    updates, rates = [p.cos() for p in parameters], torch.linspace(0.1, 1.0, len(SHAPES))
    expected = [p + rate * u for p, u, rate in zip(parameters, updates, rates, strict=True)]
    add_scaled(parameters, updates, rates=rates)
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, other)


def test_order_in_memory_does_not_matter():
    [plain] = make_parameters([(8, 4, 3, 3)])
    last = torch.nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    strided = torch.nn.Parameter(plain.detach().new_zeros(8, 8, 3, 3)[:, ::2].copy_(plain.detach()))
    optimizers = [LAMB([p], lr=0.1) for p in (plain, last, strided)]
    for step in range(3):
        for parameter, optimizer in zip((plain, last, strided), optimizers, strict=True):
            set_gradients([parameter], step=step)  # contiguous, whatever the parameter is
            optimizer.step()
        state = optimizers[0].state_dict()
        # contiguous moments for a channels-last parameter
        optimizers[1].load_state_dict(copy.deepcopy(state))
    torch.testing.assert_close(last, plain)
    torch.testing.assert_close(strided, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    parameters = make_parameters(dtype=dtype)
    optimizer, slow = LAMB(parameters, lr=0.1), Slow(parameters)
    for step in range(3):
        set_gradients(parameters, step=step)
        optimizer.step()
        slow.step([p.grad for p in parameters], lr=0.1)
    # step and so the bias corrections are float32
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-7
    for parameter, weight in zip(parameters, slow.weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=tolerance, atol=tolerance)


def test_resumes_exactly():
    parameters, others = make_parameters(), make_parameters()
    optimizer = LAMB(parameters, lr=0.1)
    for step in range(4):
        set_gradients(parameters, step=step)
        optimizer.step()
        if step == 1:
            for other, parameter in zip(others, parameters, strict=True):
                other.data.copy_(parameter)
            resumed = LAMB(others)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 1:
            set_gradients(others, step=step)
            resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_later_gradients_have_their_own_step():
    first, second = make_parameters([(3, 3), (4, 4)])
    optimizer = LAMB([first, second], lr=0.1)
    for step in range(3):
        set_gradients([first] if step == 0 else [first, second], step=step)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (first, second)] == [3, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (1.0, 0.9)}, "betas in"),
        ({"trust_clip": 0.0}, "trust_clip > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LAMB(make_parameters(), **options)
