"""A fit begins as under ddp, or under the plan asked for: hooks, batches, parameters."""

from __future__ import annotations

import random
import warnings
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks

PLANS = [None, "zero1", "zero3+recompute"]
HOOKS = [name for name in dir(L.LightningModule) if name.startswith("on_") and name != "on_gpu"]
HOOKS += ["configure_optimizers", "configure_callbacks", "configure_gradient_clipping"]
HOOKS += ["prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader"]
HOOKS += ["training_step", "validation_step", "optimizer_step", "backward"]


def strategy_of(plan: str | None) -> Any:
    return DDPStrategy() if plan == "Lightning" else AutoParallelStrategy(plan=plan)


class Traced(RecordingGPT):
    """Notes every hook that is called on it, and the batch of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []
        self.seen: list[Tensor] = []
        for name in HOOKS:
            setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, hook: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.trace.append(name)
            if name == "on_before_batch_transfer":
                self.seen.append(args[0][0].clone())
            return hook(*args, **kwargs)

        return noted

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(4)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(4, length=16)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in HOOKS}


def trace(rank: int, plan: str | None) -> tuple[list[str], list[Tensor]]:
    module = Traced()
    make_trainer(strategy_of(plan), devices=2, max_steps=3).fit(module)
    return module.trace, module.seen


def traces(rank: int) -> list[Any]:
    return [trace(rank, plan) for plan in ("Lightning", *PLANS)]


def but_for_loaders(trace: list[str]) -> list[str]:
    """Loaders are there earlier under plans that are made of a batch."""
    return [name for name in trace if name != "train_dataloader"]


def test_hooks_fire_once_and_in_the_order_of_ddp_on_the_same_batches() -> None:
    for (expected, batches), *others in on_ranks(traces):
        assert expected.count("configure_optimizers") == expected.count("train_dataloader") == 1
        for (got, seen), plan in zip(others, PLANS, strict=True):
            assert but_for_loaders(got) == but_for_loaders(expected), plan
            assert len(got) == len(expected) and (got == expected or plan is not None), plan
            assert len(seen) == len(batches) and all(map(torch.equal, seen, batches)), plan


# ---- nothing is watched --------------------------------------------------------------------------


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) + random.random() + np.random.rand()


class RandomStep(RecordingGPT):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Draws()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.noise(loss)


def seeded_losses(rank: int) -> list[Any]:
    results = []
    for plan in ("Lightning", None):
        L.seed_everything(3, verbose=False)
        module = RandomStep()
        strategy = DDPStrategy() if plan == "Lightning" else AutoParallelStrategy()  # measures
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(strategy, devices=2, max_steps=6).fit(module, loader(4))
        said = [str(w.message) for w in caught if "topt" in str(w.message)]
        results.append((module.losses, getattr(strategy, "planned_by", None), said))
    return results


def test_a_seeded_run_is_that_of_ddp_bit_for_bit() -> None:
    for (expected, _, _), (losses, planned_by, said) in on_ranks(seeded_losses):
        assert losses == expected and len(losses) == 6
        assert planned_by == "clock" and not said
