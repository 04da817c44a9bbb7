"""LARS and LAMB against a few lines of plain torch per parameter."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_topt.optim.large_batch import LAMB, LARS

SHAPES = [(64, 3, 3, 3), (64,), (33, 65), (1,), (), (5, 0), (7, 9)]
ADAPTED = {"all": lambda w: True, "matrices": lambda w: w.dim() > 1, "none": lambda w: False}


def make_parameters(shapes=SHAPES, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_gradients(parameters, *, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1


def slow_lars(w, g, state, *, lr, momentum, weight_decay, trust_coefficient, eps, nesterov, adapt):
    """Algorithm 1 of arXiv 1708.03888."""
    ratio = 1.0
    if ADAPTED[adapt](w) and w.norm() > 0 and g.norm() > 0:
        ratio = trust_coefficient * w.norm() / (g.norm() + weight_decay * w.norm() + eps)
    update = lr * ratio * (g + weight_decay * w)
    v = state["v"] = momentum * state.get("v", torch.zeros_like(w)) + update
    w.sub_(update + momentum * v if nesterov else v)


def slow_lamb(w, g, state, *, lr, betas, eps, weight_decay, bias_correction, trust_clip, adapt):
    """Algorithm 2 of arXiv 1904.00962."""
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", torch.zeros_like(w)) + (1 - betas[1]) * g * g
    if bias_correction:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    update, ratio = m / (v.sqrt() + eps) + weight_decay * w, 1.0
    if ADAPTED[adapt](w) and w.norm() > 0 and update.norm() > 0:
        ratio = min(float(w.norm() / update.norm()), trust_clip or torch.inf)
    w.sub_(lr * ratio * update)


SLOW = {LARS: slow_lars, LAMB: slow_lamb}
CASES = [
    (LARS, {}),
    (LARS, {"weight_decay": 0.1}),
    (LARS, {"momentum": 0.0, "weight_decay": 0.1}),
    (LARS, {"nesterov": True, "weight_decay": 0.1, "adapt": "matrices"}),
    (LARS, {"eps": 0.5, "momentum": 0.5, "adapt": "none"}),
    (LAMB, {}),
    (LAMB, {"weight_decay": 1.0, "eps": 0.1, "betas": (0.5, 0.9)}),
    (LAMB, {"bias_correction": False, "weight_decay": 0.0}),
    (LAMB, {"trust_clip": 0.7, "adapt": "matrices"}),
    (LAMB, {"adapt": "none"}),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-7}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_follows_the_paper(cls, options, dtype):
    if cls is LARS:
        options = {"trust_coefficient": 0.01, **options}
    parameters = make_parameters(dtype=dtype)
    # two groups with their own rates, which follow a schedule
    optimizer = cls(
        [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}], lr=0.05, **options
    )
    slow = [(p.detach().double(), {}) for p in parameters]
    for step in range(4 if dtype == torch.bfloat16 else 15):
        set_gradients(parameters, step=step)
        parameters[1].grad = None if step == 2 else parameters[1].grad
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        for index, (parameter, (weight, state)) in enumerate(zip(parameters, slow, strict=True)):
            if parameter.grad is not None:
                group = optimizer.param_groups[index >= 3]
                given = {key: value for key, value in group.items() if key != "params"}
                SLOW[cls](weight, parameter.grad.double(), state, **given)
    for parameter, (weight, _) in zip(parameters, slow, strict=True):
        torch.testing.assert_close(
            parameter.double(), weight, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("cls", SLOW)
def test_order_in_memory_does_not_matter(cls):
    [plain] = make_parameters([(8, 4, 3, 3)])
    last = torch.nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    strided = torch.nn.Parameter(plain.detach().new_zeros(8, 8, 3, 3)[:, ::2].copy_(plain.detach()))
    optimizers = [cls([p], lr=0.1) for p in (plain, last, strided)]
    for step in range(3):
        for parameter, optimizer in zip((plain, last, strided), optimizers, strict=True):
            set_gradients([parameter], step=step)  # contiguous, whatever the parameter is
            optimizer.step()
        # contiguous moments for a channels-last parameter
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    torch.testing.assert_close(last, plain)
    torch.testing.assert_close(strided, plain)


@pytest.mark.parametrize("cls", SLOW)
def test_resumes_exactly_and_takes_closures(cls):
    parameters, others = make_parameters(), make_parameters()
    optimizer = cls(parameters, lr=0.1)
    for step in range(4):
        set_gradients(parameters, step=step)
        assert optimizer.step(lambda step=step: step) == step
        if step == 1:
            for other, parameter in zip(others, parameters, strict=True):
                other.data.copy_(parameter)
            resumed = cls(others, lr=7.0)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 1:
            set_gradients(others, step=step)
            resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


@pytest.mark.parametrize(
    ("cls", "options", "word"),
    [
        (LARS, {"momentum": 0.0, "nesterov": True}, "momentum"),
        (LARS, {"adapt": "some"}, "matrices"),
        (LARS, {"weight_decay": -1.0}, "weight_decay"),
        (LAMB, {"betas": (1.0, 0.9)}, "betas"),
        (LAMB, {"trust_clip": 0.0}, "trust_clip"),
    ],
)
def test_bad_options(cls, options, word):
    with pytest.raises(ValueError, match=word):
        cls(make_parameters(), lr=1.0, **options)


@pytest.mark.parametrize("cls", SLOW)
def test_gradients_that_are_no_dense_real_numbers(cls):
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        cls(table.parameters(), lr=1.0).step()
    with pytest.raises(ValueError, match="complex"):
        cls([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=1.0)
