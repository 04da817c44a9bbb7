"""Containers of modules whose iteration is the user's own train as under ``ddp``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import OwnShare, make_trainer, on_ranks


class Alternating(nn.ModuleList):
    """Goes through its modules from the start and from the end in turn."""

    times = 0

    def __iter__(self) -> Iterator[nn.Module]:
        self.times += 1
        return iter([*self._modules.values()][:: 1 if self.times % 2 else -1])  # type: ignore[list-item]


class Twice(nn.Sequential):
    """Calls each of its modules twice, from the end, and says that it has one."""

    def __iter__(self) -> Iterator[nn.Module]:
        for module in [*self._modules.values()][::-1]:
            yield module  # type: ignore[misc]
            yield module  # type: ignore[misc]

    def __len__(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class InOrder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.first = Alternating(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.second = Twice(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.first:
            x = layer(x)
        loss = nn.functional.cross_entropy(
            self.head(self.second(x)).flatten(0, 1), batch[1].flatten()
        )
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def fits(rank: int, plans: tuple[str, ...]) -> list[tuple[list[float], int]]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        module = InOrder()
        strategy = {"ddp": "ddp", "search": AutoParallelStrategy()}.get(
            plan
        ) or AutoParallelStrategy(plan=plan)
        make_trainer(strategy, devices=2).fit(module, OwnShare(8))
        found.append((module.losses, module.first.times))
    return found


def test_own_iteration_is_that_of_ddp() -> None:
    plans = ("ddp", "search", "zero1", "zero2", "zero3", "zero3+recompute")
    for (losses, times), *others in on_ranks(fits, plans):
        for plan, (found, counted) in zip(plans[1:], others, strict=True):
            assert found == pytest.approx(losses, rel=1e-5), plan
            assert counted == times, plan
