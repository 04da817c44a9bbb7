"""Steady steps of optimizers in which the host reads nothing from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_topt.optim.clipping import clip_norm_, clip_value_
from lightning_topt.optim.large_batch import LAMB, LARS
from lightning_topt.optim.parallel_step import install_parallel_step
from tests.host_waits import HostWaits, fake_device, no_host_waits, waits_of
from tests.launch import run_ranks
from tests.optim.parallel_cases import loss_of, make_net, pieces_for

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "LAMB": lambda parameters: LAMB(parameters, lr=0.1),
    "LAMB of matrices": lambda parameters: LAMB(parameters, lr=0.1, adapt="matrices"),
    "LARS": lambda parameters: LARS(parameters, lr=0.1),
    "LARS, plain": lambda parameters: LARS(parameters, lr=0.1, adapt="none", nesterov=True),
}


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.tolist(),
        lambda t: t[0].item(),
        lambda t: bool(t[0]),
        torch.nonzero,
        lambda t: float(t.sum()),
    ],
)
def test_waits_fail(call: Any) -> None:
    with pytest.raises(HostWaits), no_host_waits():
        call(torch.ones(3))


def test_copies_to_the_host_fail() -> None:
    with fake_device() as device, pytest.raises(HostWaits), no_host_waits():
        torch.ones(3, device=device).cpu()
    with fake_device() as device, no_host_waits():
        torch.ones(3, device=device).to(device, torch.bfloat16).clone()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_a_device(name: str) -> None:
    with fake_device() as device:
        parameters = [nn.Parameter(torch.ones(4, 3, device=device))]
        parameters += [nn.Parameter(torch.ones(7, device=device))]
        optimizer = OPTIMIZERS[name](parameters)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            if step < 2:
                optimizer.step()
                continue
            with no_host_waits():
                clip_norm_(parameters, 1.0)
                clip_value_(parameters, 0.5)
                optimizer.step()


def waits_of_parallel_steps(rank: int) -> dict[str, int]:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    install_parallel_step(optimizer, pieces=pieces_for(optimizer, 2, True))
    found: dict[str, int] = {}
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        found = waits_of(optimizer.step)
    return found


def test_a_parallel_step() -> None:
    assert run_ranks(waits_of_parallel_steps, 2) == [{}, {}]
