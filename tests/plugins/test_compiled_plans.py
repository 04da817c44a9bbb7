"""Plans whose blocks are compiled: as under ddp, what cannot be compiled as well."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.compilation import CompiledForward
from tests.plugins.trainer_ranks import make_trainer, once_on_ranks, state_of


class Layer(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 32)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        return x + y


class Printing(Layer):
    """Prints in its forward, which no graph can have."""

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return super().forward(x)


class Stack(L.LightningModule):
    """Three layers, whose losses are kept."""

    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.losses: list[float] = []
        self.compiled: list[str | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        for layer in self.layers:
            own = layer.forward
            own = own if isinstance(own, CompiledForward) else getattr(own, "forward", own)
            if isinstance(own, CompiledForward):
                self.compiled.append("in use" if own.failure is None else own.failure)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # rounding grows with it


def fit(rank: int, plan: Any, layer: type[Layer] = Layer) -> tuple[list[float], Any, Any]:
    """Losses of this rank, values at the end, and what became of compiled blocks."""
    torch.manual_seed(0)
    module = Stack(layer)
    source = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(58, 16, generator=source), torch.randint(4, (58,), generator=source)
    data = DataLoader([*zip(rows, labels, strict=True)], batch_size=4)  # of the last batch 1 or 2
    torch.manual_seed(rank)
    trainer = make_trainer(AutoParallelStrategy(plan=plan), devices=2, max_epochs=25)  # 200 steps
    trainer.fit(module, data)
    assert all("forward" not in vars(part) for part in module.layers.modules())
    return module.losses, state_of(module), module.compiled


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "zero3+recompute"])
def test_compiled_blocks_train_as_under_ddp(plan: str) -> None:
    """Draws of dropout are those of eager mode. Tolerance: compiled sums have another order."""
    for (losses, state, _), (found, values, compiled) in zip(
        once_on_ranks(fit, "ddp"), once_on_ranks(fit, f"{plan}+compile"), strict=True
    ):
        assert compiled == ["in use"] * 3
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)


def test_what_does_not_compile_runs_as_it_is_written() -> None:
    """The compiler refuses to print; the fit goes on, equal to the last bit."""
    for (losses, state, _), (found, values, compiled) in zip(
        once_on_ranks(fit, "ddp", Printing),
        once_on_ranks(fit, "ddp+compile", Printing),
        strict=True,
    ):
        assert len(compiled) == 3 and all("Unsupported" in str(why) for why in compiled)
        assert found == losses
        assert all(torch.equal(values[name], value) for name, value in state.items())


def test_files_of_plans_say_which_blocks_are_compiled() -> None:
    """One block of three, read from plain values."""
    blocks = [
        {"block": f"layers.{index}", "storage": "zero1", "recompute": False, "compile": index == 1}
        for index in range(3)
    ]
    rest = {"block": "", "storage": "zero1", "recompute": False}
    plan = ParallelPlan.from_dict(
        {
            "version": 2,
            "mesh": [{"name": "data", "size": 2}],
            "stages": [{"blocks": [*blocks, rest]}],
        }
    )
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert [block.config.compile for block in plan.blocks] == [False, True, False, False]
    assert [found for _, _, found in once_on_ranks(fit, plan)] == [["in use"]] * 2
