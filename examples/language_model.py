"""Train a causal language model of transformers under a memory limit, on two CPU processes.

    python examples/language_model.py
    python examples/language_model.py --memory-limit 400MiB

The text is the source of Python's standard library, byte by byte, so nothing is downloaded. The
strategy predicts seconds and bytes of every plan that it knows, and runs one that fits the limit.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.monitors import StepMonitor

SEQUENCE = 64


class LanguageModel(L.LightningModule):
    def __init__(self, *, layers: int, hidden: int, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        config = GPT2Config(
            vocab_size=256, n_positions=SEQUENCE, n_layer=layers, n_embd=hidden, n_head=4
        )
        # A pretrained model: AutoModelForCausalLM.from_pretrained(name), with its tokenizer.
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # (B, S) of token numbers
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class StandardLibrary(L.LightningDataModule):
    """The bytes of the standard library's modules, in pieces of `SEQUENCE`."""

    def __init__(self, batch_size: int, *, max_bytes: int) -> None:
        super().__init__()
        self.batch_size, self.max_bytes = batch_size, max_bytes

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[: self.max_bytes]
        self.pieces = torch.tensor(list(text)).unfold(0, SEQUENCE, SEQUENCE)  # (N, S)

    def train_dataloader(self) -> Any:
        return DataLoader(self.pieces, self.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a causal language model of transformers.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--memory-limit", default="300MiB", help="per device")
    options = parser.parse_args()

    L.seed_everything(0)
    monitor = StepMonitor()
    trainer = L.Trainer(
        strategy=AutoParallelStrategy(memory_limit=options.memory_limit),
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.max_steps,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
    )
    model = LanguageModel(layers=options.layers, hidden=options.hidden)
    trainer.fit(model, datamodule=StandardLibrary(8, max_bytes=500_000))
    if trainer.is_global_zero:
        print(f"plan: {trainer.strategy.parallel_plan.summary()}")
        print(f"why: {trainer.strategy.parallel_plan.reason}")
        measured = monitor.measurement
        peak = max(measured.peak_bytes_per_rank) / 2**20
        print(
            f"measured: {measured.median_step_seconds:.3f} s per step, {peak:.0f} MiB at the peak"
        )
        print(f"loss: {float(trainer.callback_metrics['train_loss']):.2f} nats per byte")


if __name__ == "__main__":
    main()
