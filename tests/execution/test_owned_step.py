"""The owned step beside learning-rate schedulers and closures (its numbers are in test_engine)."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from lightning_topt.execution.owned_step import OwnedStep, install_owned_step, remove_owned_step
from tests.launch import run_ranks


def schedulers(rank: int) -> list[float]:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    install_owned_step(optimizer, owners={a: 0, b: 1}, rank=rank)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # the LR finder makes one while training

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = a.sum() + 2 * b.sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = optimizer.step(closure)
        before.step()
        after.step()
    assert loss.item() == 3 + 8 and a.grad is not None and b.grad is not None
    assert len(optimizer.state) == 0 and optimizer.param_groups[0]["lr"] == 0.25
    remove_owned_step(optimizer)
    assert not isinstance(optimizer.step, OwnedStep)
    optimizer.step()
    return [a[0].item(), b[0, 0].item(), float(dist.get_rank())]


def test_schedulers_and_closures() -> None:
    # 1 - 1.0 * gradient, then 0.25 * gradient on every rank
    assert run_ranks(schedulers, 2) == [[-0.25, -1.5, 0.0], [-0.25, -1.5, 1.0]]


def not_owned(rank: int) -> bool:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    install_owned_step(optimizer, owners={}, rank=rank)
    return isinstance(optimizer.step, OwnedStep)


def test_nothing_owned_changes_nothing() -> None:
    assert run_ranks(not_owned, 2) == [False, False]
