"""What is read from an optimizer, against the same optimizer stepped on the real model."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import measure_update_seconds
from lightning_topt.costs.cluster import Device
from lightning_topt.costs.optimizer import read_optimizer

CASES = [
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.RMSprop, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adafactor, {}),
]
ids = [f"{cls.__name__}{sorted(options)}" for cls, options in CASES]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def loss(self):
        return sum((p**2).sum() for p in self.parameters() if p.requires_grad)


def real_state_bytes(model, optimizers):
    for optimizer in optimizers:
        for _ in range(2):
            model.zero_grad()
            model.loss().backward()
            optimizer.step()
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: sum(v.nbytes for v in state.values() if torch.is_tensor(v))
        for optimizer in optimizers
        for p, state in optimizer.state.items()
    }


@pytest.mark.parametrize(("cls", "options"), CASES, ids=ids)
def test_state_is_that_of_a_real_step(cls, options):
    model = Model()
    optimizer = cls(model.parameters(), **options)
    before = repr(optimizer.state_dict()), [p.clone() for p in model.parameters()]
    profile = read_optimizer([optimizer], named_parameters=model.named_parameters())
    assert repr(optimizer.state_dict()) == before[0]  # nothing happened to the user's optimizer
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[1], strict=True))
    real = real_state_bytes(model, [optimizer])
    real.pop("frozen", None)  # which Adagrad makes when it is built, and nobody counts
    assert {name: profile.state_bytes(name) for name in real} == real
    assert profile.elementwise == (cls is not optim.Adafactor)
    assert profile.by_parameter


def test_several_optimizers_and_groups():
    model = Model()
    optimizers = [
        optim.SGD(
            [
                {"params": [model.embed.weight], "momentum": 0.9},
                {"params": model.conv.parameters()},
            ],
            lr=0.1,
        ),
        optim.AdamW(model.head.parameters()),
    ]
    profile = read_optimizer(optimizers, named_parameters=model.named_parameters())
    assert profile.name == "SGD + AdamW"
    assert profile.state_bytes("embed.weight") == 4 * 66
    assert profile.state_bytes("conv.weight") == 0
    assert profile.state_bytes("head.weight") == 2 * 4 * 6 + 4
    assert "norm.weight" not in profile.updates
    real = real_state_bytes(model, optimizers)
    assert all(profile.state_bytes(name) == size for name, size in real.items())


def test_fake_tensors_tensor_rates_and_schedulers():
    with FakeTensorMode():
        model = nn.Linear(20_000, 20_000)
        optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=True)
        optim.lr_scheduler.StepLR(optimizer, 1)
    profile = read_optimizer([optimizer], named_parameters=model.named_parameters())
    assert profile.state_bytes("weight") == 2 * 4 * 20_000**2 + 4


def test_temporaries_and_traffic():
    model = nn.Linear(100, 100)

    def read(device_type="cpu", **options):
        optimizer = optim.AdamW(model.parameters(), **options)
        named = model.named_parameters()
        return read_optimizer([optimizer], named_parameters=named, device_type=device_type).updates[
            "weight"
        ]

    loop, foreach, fused = read(), read(foreach=True), read(fused=True)
    assert not loop.temporaries_add and loop.temporary_bytes > 0
    assert foreach.temporaries_add and foreach.temporary_bytes == pytest.approx(40_000, rel=0.1)
    assert fused.temporary_bytes == 0
    # parameter, gradient and two states are read; all but the gradient are written
    assert 7 * 40_000 <= fused.moved_bytes < 8.5 * 40_000 < loop.moved_bytes
    assert loop.calls > foreach.calls >= fused.calls
    assert read(device_type="cuda") == foreach  # torch's default there


def test_a_step_that_is_unknown_keeps_everything_whole():
    class Norm(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
                    p.data.sub_(p.grad / p.grad.norm())

    model = nn.Linear(3, 2)
    profile = read_optimizer([Norm(model.parameters())], named_parameters=model.named_parameters())
    assert not profile.elementwise and not profile.by_parameter
    assert profile.state_bytes("weight") == 24


def test_measured_seconds():
    model = Model()
    optimizers = [
        optim.SGD([model.embed.weight], lr=0.1),
        optim.AdamW([model.head.weight, model.head.bias]),
    ]
    named = dict(model.named_parameters())
    seconds = measure_update_seconds(
        optimizers, named_parameters=named.items(), device=torch.device("cpu"), budget_seconds=0.1
    )
    assert set(seconds) == {"embed.weight", "head.weight", "head.bias"}
    assert all(0 < value < 1e-3 for value in seconds.values())
    device = Device("d", 1, {"float32": 1.0}, 100.0, 0.0)
    profile = read_optimizer(optimizers, named_parameters=named.items())
    assert profile.update_seconds("embed.weight", numel=66, device=device) == pytest.approx(
        66 * 12 / 100
    )
    assert profile.update_seconds("frozen", numel=4, device=device) == 0


class Shared(optim.SGD):
    """Communicates in its step; `steps` counts those of all copies that got past it."""

    steps = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.broadcast(parameter.data, 0)
        Shared.steps += 1
        return super().step(closure)


def test_a_step_that_communicates_is_not_timed():
    model = Model()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        seconds = measure_update_seconds(
            [Shared(model.parameters(), lr=0.1)],
            named_parameters=model.named_parameters(),
            device=torch.device("cpu"),
        )
    finally:
        dist.destroy_process_group()
    assert seconds == {} and Shared.steps == 0
