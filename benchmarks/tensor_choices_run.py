"""One measured fit for `tensor_choices`: one of three models, a global batch, a plan or a search.
Writes JSON on rank 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt import AutoParallelStrategy
from lightning_topt.cli.tasks.byte_lm import ByteGPT
from lightning_topt.plugins.monitors import StepMonitor

SAMPLES = 4096


class Perceptron(L.LightningModule):
    """`layers` blocks of two wide linear layers with a residual."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Convolutions(L.LightningModule):
    """`layers` residual blocks of two convolutions, `width` channels."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def made(options: argparse.Namespace) -> tuple[L.LightningModule, Any]:
    """The model and its data, invented: only times and bytes are read."""
    if options.model == "gpt":
        tokens = torch.randint(0, 256, (SAMPLES, options.seq_len + 1))
        model: L.LightningModule = ByteGPT(
            options.layers, options.width, options.width // 64, options.seq_len
        )
        return model, tokens
    labels = torch.randint(0, 10, (SAMPLES,))
    if options.model == "mlp":
        inputs = torch.randn(SAMPLES, options.width)
        return Perceptron(options.layers, options.width, 4 * options.width), TensorDataset(
            inputs, labels
        )
    return Convolutions(options.layers, options.width), TensorDataset(
        torch.randn(SAMPLES, 3, 32, 32), labels
    )


def read_plan(text: str | None) -> Any:
    """A mesh as JSON, a name, or None for a search."""
    return json.loads(text) if text and text.startswith("{") else text


def data_ranks(plan: Any, world_size: int) -> int:
    """Ranks that get samples of their own: without a given tensor axis all."""
    if isinstance(plan, dict):
        return world_size // int(plan["mesh"].get("tensor", 1))
    return 1 if isinstance(plan, str) and plan.startswith(("tensor", "context")) else world_size


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=["gpt", "mlp", "conv"], default="gpt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--plan")
    parser.add_argument("--memory-limit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    L.seed_everything(0)
    plan = read_plan(options.plan)
    strategy = AutoParallelStrategy(memory_limit=options.memory_limit, plan=plan)
    monitor = StepMonitor(warmup_steps=options.warmup)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor],
    )
    model, data = made(options)
    batch = options.global_batch // data_ranks(plan, options.devices * options.num_nodes)
    trainer.fit(model, DataLoader(data, batch_size=batch, shuffle=True))
    if not trainer.is_global_zero:
        return
    assert monitor.measurement is not None
    assert strategy.parallel_plan is not None
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "summary": strategy.parallel_plan.summary(),
        "reason": strategy.parallel_plan.reason,
        "predicted_seconds": predicted.step_seconds
        if (predicted := strategy.parallel_plan.predicted)
        else None,
        "planning_seconds": strategy.planning_seconds,
        "step_seconds": monitor.measurement.median_step_seconds,
        "peak_bytes": max(p for p in monitor.measurement.peak_bytes_per_rank if p is not None),
    }
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
