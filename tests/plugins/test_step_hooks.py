"""Fits whose optimizers are observed at work: by hooks around their steps, in checkpoints of every
step, by schedules. All as under ``ddp``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt import AutoParallelStrategy, ParallelOptimizerStep
from lightning_topt.optim.adaptive_step import PLAIN_STEPS, TRIAL_STEPS, WARMUP_STEPS
from tests.plugins.test_parallel_optimizer import FREE, forced
from tests.plugins.trainer_ranks import make_trainer, on_ranks

SETTLED = WARMUP_STEPS + PLAIN_STEPS + TRIAL_STEPS
SAVED = (2, WARMUP_STEPS + PLAIN_STEPS + 1, SETTLED + 2)  # before sharing, on trial, and settled
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class Observed(L.LightningModule):
    """Keeps the order of its calls; `hooks` move weights before steps, and norm them after."""

    def __init__(self, optimizer: str, hooks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.unused = nn.Identity() if hooks else nn.Linear(3, 3)
        self.optimizer, self.hooks = optimizer, hooks
        self.calls: list[Any] = []
        self.handles: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        self.calls.append(("step", round(float(loss), 5)))
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def before(self, optimizer: Any, *_: Any) -> None:
        self.calls.append("before")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.95)

    @torch.no_grad()
    def after(self, optimizer: Any, *_: Any) -> None:
        self.calls.append("after")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(1 / max(1.0, float(p.norm())))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        every = self.hooks.startswith("all ")
        if "pre" in self.hooks:
            register = (
                register_optimizer_step_pre_hook if every else optimizer.register_step_pre_hook
            )
            self.handles.append(register(self.before))
        if "post" in self.hooks:
            register = (
                register_optimizer_step_post_hook if every else optimizer.register_step_post_hook
            )
            self.handles.append(register(self.after))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=2.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"},
        }

    def on_fit_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class Saves(L.Callback):
    """Keeps checkpoints of three steps; `folder` is the same on all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in SAVED:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(
    how: str,
    optimizer: str,
    hooks: str,
    *,
    callbacks: tuple[Any, ...] = (),
    resume: str | None = None,
    **options: Any,
) -> tuple[list[Any], dict[str, Tensor], float]:
    strategy: Any = DDPStrategy(find_unused_parameters=not hooks)
    if how in ("zero1", "zero3"):
        strategy = AutoParallelStrategy(plan=how)
    steps = {"always": [ParallelOptimizerStep(always=True)], "measured": [ParallelOptimizerStep()]}
    module = Observed(optimizer, hooks)
    trainer = make_trainer(
        strategy,
        devices=dist.get_world_size(),
        callbacks=[*steps.get(how, []), *callbacks],
        max_epochs=2,
        **options,
    )
    data = torch.randn(6 * SETTLED, 4, generator=torch.Generator().manual_seed(3))
    with forced(FREE):
        trainer.fit(
            module, DataLoader(TensorDataset(data), batch_size=2, shuffle=False), ckpt_path=resume
        )
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return module.calls, {k: v.clone() for k, v in module.state_dict().items()}, rate


def hooked(rank: int, how: str, optimizer: str, hooks: str) -> None:
    calls, state, rate = fit("ddp", optimizer, hooks)
    assert calls[0] == "before" or "pre" not in hooks
    our_calls, our_state, our_rate = fit(how, optimizer, hooks)
    assert our_calls == calls and our_rate == rate
    torch.testing.assert_close(our_state, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "hooks", "optimizer"),
    [
        ("zero1", "pre and post", "Adam"),
        ("always", "pre and post", "SGD"),
        ("measured", "all pre and post", "SGD"),
        ("zero3", "pre", "Adam"),
    ],
)
def test_step_hooks_run_where_they_do_under_ddp(how: str, hooks: str, optimizer: str) -> None:
    on_ranks(hooked, how, optimizer, hooks)


def saved_and_resumed(rank: int, folder: Path, accumulated: int) -> None:
    paths = {how: folder / how for how in ("ddp", "measured")}
    results = {}
    for how, path in paths.items():
        results[how] = fit(
            how, "Adam", "", callbacks=(Saves(path),), accumulate_grad_batches=accumulated
        )
    calls, state, rate = results["ddp"]
    assert results["measured"][0] == calls and results["measured"][2] == rate < 0.01
    torch.testing.assert_close(results["measured"][1], state, rtol=1e-5, atol=1e-6)
    for step in SAVED:
        theirs, ours = (torch.load(paths[how] / f"{step}.ckpt") for how in paths)
        (plain,), (shared,) = theirs["optimizer_states"], ours["optimizer_states"]
        assert plain["param_groups"] == shared["param_groups"]
        torch.testing.assert_close(shared["state"], plain["state"], rtol=1e-5, atol=1e-6)
        resumed = [
            fit(
                how,
                "Adam",
                "",
                resume=str(path / f"{step}.ckpt"),
                accumulate_grad_batches=accumulated,
            )
            for how, path in paths.items()
        ]
        assert resumed[0][0] == resumed[1][0] and resumed[0][2] == resumed[1][2]
        torch.testing.assert_close(resumed[1][1], resumed[0][1], rtol=1e-5, atol=1e-6)


def test_checkpoints_of_every_phase_are_those_of_ddp(tmp_path: Path) -> None:
    on_ranks(saved_and_resumed, tmp_path, 2)
