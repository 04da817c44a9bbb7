"""An optimizer of whole matrices beside sharded plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks


class ByMatrix(RecordingGPT):
    """Trains its matrices by Muon."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(vocab=33)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(kind: type[ByMatrix], plan: str | None) -> tuple[list[float], dict[str, Tensor]]:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    module = kind()
    make_trainer(strategy, devices=2).fit(module, OwnShare(8, length=40))
    return module.losses, module.state_dict()


def beside_ddp(rank: int, plan: str) -> Any:
    return fit(ByMatrix, None), fit(ByMatrix, plan)


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_muon_is_that_of_ddp(plan: str) -> None:
    """To the rounding of its products in bfloat16, which shards add up in another order."""
    for expected, found in on_ranks(beside_ddp, plan):
        assert found[0] == pytest.approx(expected[0], rel=1e-3)
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-2, atol=3e-3, msg=name)
