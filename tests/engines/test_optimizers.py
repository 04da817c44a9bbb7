"""Optimizers of other packages: fits equal those under ddp, or are refused.

`dion` (Muon and kin, with owners of matrices), 8-bit Adam of bitsandbytes and torchao, and
`schedulefree`, which has weights of training and of evaluation.
"""

from __future__ import annotations

import importlib
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import make_trainer, mean_over_ranks, on_ranks

Result = tuple[list[float], list[float], dict[str, Tensor]]


def of_dion(module: nn.Module, name: str, **options: Any) -> Any:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    adam = {"algorithm": "adamw", "lr": 1e-2, "epsilon": 1e-4}
    groups = [{"params": matrices}, {"params": vectors, **adam}]
    return getattr(importlib.import_module("dion"), name)(groups, lr=0.01, **options)


def eight_bit(module: nn.Module, package: str) -> Any:
    # a tiny eps would turn rounding of gradients near zero into steps
    optim = importlib.import_module(f"{package}.optim")
    return optim.AdamW8bit(module.parameters(), lr=1e-2, eps=1e-4)


def schedule_free(module: nn.Module) -> Any:
    kind = importlib.import_module("schedulefree").AdamWScheduleFree
    return kind(module.parameters(), lr=1e-2, warmup_steps=2, eps=1e-4)


OPTIMIZERS: dict[str, Any] = {
    "dion Muon": lambda m: of_dion(m, "Muon"),
    "dion NorMuon": lambda m: of_dion(m, "NorMuon"),
    "dion Dion2": lambda m: of_dion(m, "Dion2"),
    "dion Dion": lambda m: of_dion(m, "Dion"),
    "dion Muon, shared": lambda m: of_dion(m, "Muon", distributed_mesh=dist.group.WORLD),
    "dion Dion, shared": lambda m: of_dion(m, "Dion", replicate_mesh=dist.group.WORLD),
    "bitsandbytes": lambda m: eight_bit(m, "bitsandbytes"),
    "torchao": lambda m: eight_bit(m, "torchao"),
    "schedulefree": schedule_free,
}


class Net(L.LightningModule):
    """Matrices of 8192 elements, and biases, which 8-bit optimizers leave in 32 bits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.losses, self.validated = kind, list[float](), list[float]()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch), batch.roll(1, 1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(mean_over_ranks(self.training_step(batch, batch_idx)))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.kind](self)

    def switch(self, *, evaluates: bool) -> None:
        optimizer: Any = self.optimizers()
        if self.kind == "schedulefree":
            optimizer.eval() if evaluates else optimizer.train()

    def on_train_epoch_start(self) -> None:
        self.switch(evaluates=False)

    def on_validation_start(self) -> None:
        self.switch(evaluates=True)

    def on_validation_end(self) -> None:
        self.switch(evaluates=False)

    def on_train_end(self) -> None:
        self.switch(evaluates=True)


def fit(kind: str, plan: str | None) -> Result | str:
    """Train; `plan` None: Lightning's ddp. The sentence of a refusal."""
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    module = Net(kind)
    trainer = make_trainer(strategy, devices=2, max_epochs=2, num_sanity_val_steps=0)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(values, batch_size=8, shuffle=False)
    with torch.compiler.set_stance("force_eager"):  # some compile their update
        try:
            trainer.fit(module, loader, loader)
        except ValueError as error:
            return str(error)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return module.losses, module.validated, state


def fits(rank: int, kind: str, plans: tuple[str | None, ...]) -> list[Result | str]:
    return [fit(kind, plan) for plan in plans]


ZERO = "zero1", "zero2", "zero3"
EQUAL = {
    **dict.fromkeys(("dion Muon", "dion NorMuon", "dion Dion2"), ZERO),
    **dict.fromkeys(("dion Muon, shared", "dion Dion, shared", "torchao"), ("ddp",)),
    "bitsandbytes": ("ddp", *ZERO),
    "schedulefree": ("ddp", "zero2", "zero3"),
}
REFUSED = {
    "dion Dion": (ZERO, "random numbers"),
    "dion Muon, shared": (ZERO, "group of 2 ranks"),
    "dion Dion, shared": (ZERO, "group of 2 ranks"),
    "torchao": (ZERO, "cannot be gathered"),
    "schedulefree": (("zero1",), "moves parameters in train() and eval()"),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_fits_are_those_of_ddp(kind: str) -> None:
    pytest.importorskip(kind.split()[0], reason=f"no {kind.split()[0]}")
    for expected, *found in on_ranks(fits, kind, (None, *EQUAL[kind])):
        for losses, validated, state in found:
            assert losses == pytest.approx(expected[0], rel=1e-5)
            assert validated == pytest.approx(expected[1], rel=1e-5)
            for name, value in expected[2].items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=5e-6, msg=name)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_plans_are_refused(kind: str) -> None:
    pytest.importorskip(kind.split()[0], reason=f"no {kind.split()[0]}")
    plans, word = REFUSED[kind]
    for sentences in on_ranks(fits, kind, plans):
        assert all(isinstance(each, str) for each in sentences), sentences
        assert word in sentences[0]
