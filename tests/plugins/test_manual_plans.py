"""Plans of fits that optimize manually: what ranks keep, limits, resumed fits, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from tests.graph.test_manual_steps import Both
from tests.plugins.trainer_ranks import make_trainer, on_ranks


class Wide(Both):
    """As `Both`, with layers that outweigh what is in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = (
            torch.nn.Sequential(
                torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs)
            )
            for outputs in (8, 1)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)  # before it is decided whose gradients are wanted
        super().training_step(batch, batch_idx)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        with torch.no_grad():  # before the update
            self.critic(self.net(torch.ones(2, 8)))


class Kept(L.Callback):
    """Elements of parameters and of optimizer states that a rank keeps at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = [
            value
            for optimizer in trainer.optimizers
            for each in optimizer.state.values()
            for value in each.values()
            if value.dim()
        ]
        self.parameters, self.states = map(elements, (pl_module.parameters(), states))


def elements(tensors: Any) -> int:
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() for each in local)


def fit(strategy: Any, *, epochs: int = 2, path: str | None = None, save: str | None = None) -> Any:
    L.seed_everything(3, verbose=False)
    module, kept = Wide(), Kept()
    trainer = make_trainer(strategy, devices=2, max_epochs=epochs, callbacks=[kept])
    trainer.fit(module, DataLoader(torch.randn(24, 8), batch_size=4), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return [p.detach().clone() for p in module.parameters()], kept.parameters, kept.states


def check_shards(rank: int, plan: str, folder: str) -> None:
    (expected, parameters, states), own = fit(plain()), fit(AutoParallelStrategy(plan=plan))
    torch.testing.assert_close(own[0], expected, rtol=1e-5, atol=1e-6)  # order of additions
    assert own[1] <= 0.55 * parameters and own[2] <= 0.55 * states
    # a checkpoint in the middle goes on under ddp, and the other way round
    half = str(Path(folder, "half.ckpt"))
    fit(AutoParallelStrategy(plan=plan), epochs=1, save=half)
    torch.testing.assert_close(fit(plain(), path=half)[0], expected, rtol=1e-5, atol=1e-6)
    fit(plain(), epochs=1, save=half)
    resumed = fit(AutoParallelStrategy(plan=plan), path=half)
    torch.testing.assert_close(resumed[0], expected, rtol=1e-5, atol=1e-6)


def plain() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


@pytest.mark.parametrize("plan", ["zero2", "zero3+recompute"])
def test_parameters_and_states_are_in_shards(plan: str, tmp_path: Path) -> None:
    on_ranks(check_shards, plan, str(tmp_path))


REFUSED = {
    "what is in no block": {"plan": uniform_plan(3, data_parallel_size=2)},
    "manual optimization": {"plan": {"mesh": {"tensor": 2}}},
    "needs? automatic optimization": {"allow": "compression"},
    "options of DistributedDataParallel": {"plan": "zero3", "bucket_cap_mb": 1},
}


def check_refusals(rank: int) -> None:
    for words, options in REFUSED.items():
        with pytest.raises((PlanError, RuntimeError, ValueError), match=words):
            fit(AutoParallelStrategy(**options), epochs=1)


def test_what_does_not_go_with_several_passes_is_refused() -> None:
    on_ranks(check_refusals)
