"""Steps of the engine on CUDA: random states, waits of the host, states, and planning."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.execution.engine import Engine
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.monitors import StepMonitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Dropped(nn.Module):
    """Takes its input by keyword, in an object that torch's pytrees do not open."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)

    def forward(self, *, held: UserDict[str, Tensor]) -> Tensor:
        x = held["x"]
        return x + self.down(self.drop(self.up(x).relu()))


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(3))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(held=UserDict(x=x))
        return x.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def made(device: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def engine_of(module: Net, device: torch.device, *, recompute: bool) -> Engine:
    names = [f"blocks.{index}" for index in range(3)]
    plan = preset_plan(
        PRESETS["ddp"], mesh=data_mesh(1), blocks=names, recompute=names if recompute else ()
    )
    return Engine(plan, module, device=device)


def trained(device: torch.device, *, recompute: bool, steps: int = 4) -> tuple[list[float], Any]:
    module = made(device)
    engine = engine_of(module, device, recompute=recompute)
    model = engine.apply()
    optimizer = module.configure_optimizers()
    engine.attach_optimizers([optimizer])
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(16, 32, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], engine


def test_recomputed_dropout_of_keyword_calls_gives_the_same_training(
    one_rank: None, device: torch.device
) -> None:
    plain, _ = trained(device, recompute=False)
    again, _ = trained(device, recompute=True)
    assert len(set(plain)) == 4
    assert again == pytest.approx(plain, rel=1e-5)


# ---- fits ----------------------------------------------------------------------------------------


def fit(device: torch.device, strategy: Any, **options: Any) -> tuple[list[float], L.Trainer]:
    module = made(torch.device("cpu"))
    trainer = L.Trainer(
        accelerator=device.type,
        devices=1,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(torch.ones(64, 32), batch_size=8))
    return module.losses, trainer


def test_a_step_monitor_leaves_dropout_as_it_is(device: torch.device) -> None:
    plain, _ = fit(device, "auto")
    watched, _ = fit(device, "auto", callbacks=[StepMonitor(warmup_steps=1)])
    assert watched == plain


def test_planning_leaves_dropout_as_it_is(device: torch.device) -> None:
    plain, _ = fit(device, "auto")
    planned, _ = fit(device, AutoParallelStrategy())
    assert planned == pytest.approx(plain, rel=1e-5)


def test_plans_after_torchs_new_setting_of_tf32(device: torch.device) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        strategy = AutoParallelStrategy(memory_limit="4GiB")
        losses, _ = fit(device, strategy)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(losses) == 8
    assert strategy.planned_by == "search"
