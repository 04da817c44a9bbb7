"""One measured training for `time_to_quality` on ranks that a launcher started; JSON on rank 0:
loss over seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_topt import PipelineStrategy
from lightning_topt.cli.tasks.byte_lm import StdlibBytesDataModule
from lightning_topt.plugins.ddp_base import destroy_process_group

# bytes of a sequence, sequences and updates between validations
SEQ_LEN, SAMPLES, EVERY = 16, 32, 25


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.cells = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found: Tensor = self.cells(self.norm(x))[0]
        return x + found


class ByteLSTM(L.LightningModule):
    """A language model of bytes."""

    def __init__(self, width: int, layers: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, 256)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        tokens = tokens.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Train on (B, T + 1) bytes."""
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss of all ranks' samples."""
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as fast as it is."""
        return torch.optim.AdamW(self.parameters(), lr=self.rate, fused=True)


class Curve(L.Callback):
    """Seconds of training, without those of validation, and the loss at each validation."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._seconds, self._since = 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock."""
        trainer.strategy.barrier()
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop it: minibatches in flight are done."""
        trainer.strategy.barrier()
        self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Note the loss."""
        self.points.append(
            (trainer.global_step, self._seconds, float(trainer.callback_metrics["loss"]))
        )
        trainer.strategy.barrier()
        self._since = time.perf_counter()


def loaders(ranks: int) -> tuple[Any, Any]:
    """The same samples in the same order whatever the ranks: each has its part of a batch, or the
    ranks one together.
    """
    data = StdlibBytesDataModule(SEQ_LEN, SAMPLES, max_bytes=2_000_000)
    data.setup()
    train, held = data.train_data, data.val_data
    assert train is not None and held is not None
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
    few = torch.randperm(len(held), generator=torch.Generator().manual_seed(2))[
        : 4 * SAMPLES
    ].tolist()
    size = SAMPLES // ranks
    return DataLoader(Subset(train, order), size), DataLoader(Subset(held, few), size)


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--plan", choices=["ddp", "1f1b", "continuous", "continuous_overlapped"], required=True
    )
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-nodes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(options.seed)
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True)
    if options.plan == "1f1b":
        strategy = PipelineStrategy(schedule="1f1b", microbatches=options.microbatches)
    elif options.plan != "ddp":
        strategy = PipelineStrategy(schedule=options.plan, prediction=options.prediction)
    curve = Curve()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options.num_nodes,
        strategy=strategy,
        max_steps=options.steps,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    module = ByteLSTM(options.width, options.layers, options.rate)
    parameters = sum(p.numel() for p in module.parameters())
    train, held = loaders(options.num_nodes if options.plan == "ddp" else 1)
    trainer.fit(module, train, held)
    if trainer.is_global_zero:
        options.out.write_text(json.dumps({"parameters": parameters, "points": curve.points}))


if __name__ == "__main__":
    main()
    destroy_process_group()
