"""What is compiled by torch: within the module, or by the user before `fit`; as under ddp."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import make_trainer, mean_over_ranks, on_ranks


class Compiled(L.LightningModule):
    """Compiles its network, or is compiled."""

    def __init__(self, inside: bool, width: int = 33) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))
        self.losses: list[float] = []
        if inside:
            self.net = torch.compile(self.net, backend="aot_eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch) - batch).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def fit(plan: str | None, inside: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch._dynamo.reset()
    options = {} if plan == "search" else {"plan": plan}
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(**options)
    module = Compiled(inside)
    model: Any = module if inside else torch.compile(module, backend="aot_eager")
    batches = torch.utils.data.DataLoader(
        torch.randn(96, 8, generator=torch.Generator().manual_seed(1)), batch_size=4
    )
    make_trainer(strategy, devices=2).fit(model, batches)
    return module.losses, module.state_dict()


def beside_ddp(rank: int, plan: str, inside: bool) -> Any:
    return fit(None, inside), fit(plan, inside)


@pytest.mark.parametrize("inside", [True, False], ids=["network", "module"])
@pytest.mark.parametrize("plan", ["search", "ddp", "zero1", "zero2", "zero3"])
def test_compiled_programs_are_those_of_ddp(plan: str, inside: bool) -> None:
    for expected, found in on_ranks(beside_ddp, plan, inside):
        assert found[0] == pytest.approx(expected[0], rel=1e-5) and len(found[0]) == 12
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=2e-6, msg=name)
