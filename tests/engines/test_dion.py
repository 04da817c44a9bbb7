"""Microsoft's `dion`: its Muon and kin at owners of matrices, and what is refused."""

from __future__ import annotations

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

dion = pytest.importorskip("dion", reason="no dion (github.com/microsoft/dion, not on PyPI)")

Result = tuple[list[float], dict[str, Tensor]]


class Net(L.LightningModule):
    def __init__(self, kind: str, *, shares: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.shares, self.losses = kind, shares, list[float]()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch), batch.roll(1, 1))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() == 2]},
            {
                "params": [p for p in self.parameters() if p.dim() == 1],
                "algorithm": "adamw",
                "lr": 1e-2,
                "epsilon": 1e-4,
            },
        ]
        options = {
            "replicate_mesh" if self.kind == "Dion" else "distributed_mesh": dist.group.WORLD
        }
        optimizer: torch.optim.Optimizer = getattr(dion, self.kind)(
            groups, lr=0.01, **(options if self.shares else {})
        )
        return optimizer


def fit(kind: str, plan: str | None, *, shares: bool = False) -> Result:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    module = Net(kind, shares=shares)
    trainer = make_trainer(strategy, devices=2)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, DataLoader(values, batch_size=8, shuffle=False))
    return module.losses, {name: value.clone() for name, value in module.state_dict().items()}


def beside_ddp(rank: int, kind: str, plan: str) -> Any:
    return fit(kind, None), fit(kind, plan)


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", ["Muon", "NorMuon", "Dion2"])
def test_matrices_have_owners(kind: str, plan: str) -> None:
    for (losses, weights), found in on_ranks(beside_ddp, kind, plan):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


def refusals(rank: int, kind: str, shares: bool) -> list[str]:
    found = []
    for plan in ("zero1", "zero2", "zero3"):
        try:
            fit(kind, plan, shares=shares)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("was not refused")
    return found


@pytest.mark.parametrize(("kind", "shares"), [("Dion", False), ("Dion", True), ("Muon", True)])
def test_what_shares_its_step_or_wants_a_mesh_is_refused(kind: str, shares: bool) -> None:
    for sentences in on_ranks(refusals, kind, shares):
        for sentence in sentences:
            assert "Choose plan='ddp'" in sentence, sentences
        assert "group of 2 ranks" in sentences[0] if shares else "random numbers" in sentences[0]


@pytest.mark.parametrize("kind", ["Dion", "Muon"])
def test_under_ddp_a_step_may_share_itself(kind: str) -> None:
    for expected, found in on_ranks(sharing, kind):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)


def sharing(rank: int, kind: str) -> Any:
    return fit(kind, None, shares=True), fit(kind, "ddp", shares=True)
