"""A rank of the job that `benchmarks.robustness.elastic` measures.

It trains for longer than is measured, and writes when process groups and steps begin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_topt import AutoParallelStrategy

EVENTS, PARAMETERS, BATCH_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
LAYERS = 4
WIDTH = max(8, int((PARAMETERS / LAYERS) ** 0.5))


def write(what: str, **values: Any) -> None:
    """Write that something happens now."""
    line = json.dumps({"what": what, "at": time.time(), **values}) + "\n"
    with EVENTS.open("a") as file:
        file.write(line)


init_process_group = dist.init_process_group


def noted(*args: Any, **kwargs: Any) -> None:
    """Make a process group, whose ranks have all met, and write that."""
    write("group")
    init_process_group(*args, **kwargs)


class Numbers(Dataset[torch.Tensor]):
    """As many samples as an epoch of a thousand steps has, about."""

    def __len__(self) -> int:
        return 10**5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index % 97 / 97)


class Module(L.LightningModule):
    """Linear layers with as many parameters as were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def on_train_start(self) -> None:
        write("begun", rank=self.global_rank, training=os.getpid())

    def on_train_batch_start(self, *_: Any) -> None:
        write("batch", rank=self.global_rank)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            write("step", step=self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


if __name__ == "__main__":
    dist.init_process_group = noted
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=AutoParallelStrategy(elastic=True, plan="ddp"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
    )
    trainer.fit(Module(), DataLoader(Numbers(), batch_size=BATCH_SIZE))
