"""Steady steps of optimizers in which the host reads nothing from the device."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from lightning_topt.optim.clipping import clip_norm_, clip_value_
from lightning_topt.optim.parallel_step import install_parallel_step
from tests.host_waits import fake_device, no_host_waits, waits_of
from tests.launch import run_ranks
from tests.optim.parallel_cases import loss_of, make_net, pieces_for


def test_clipping_on_a_device() -> None:
    with fake_device() as device:
        parameters = [nn.Parameter(torch.ones(size, device=device)) for size in (12, 7)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with no_host_waits():
            clip_norm_(parameters, 1.0)
            clip_value_(parameters, 0.5)


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
