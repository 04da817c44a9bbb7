"""One measured fit for `continuous_memory` on 4 ranks of this machine; JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lightning_topt import PipelineStrategy
from lightning_topt.cli.tasks.byte_lm import ByteGPT, StdlibBytesDataModule
from lightning_topt.plugins.ddp_base import destroy_process_group
from lightning_topt.plugins.monitors import StepMonitor

RANKS = 4


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Held(L.Callback):
    """Notes what a rank holds after each of `steps` updates, and the most copies and minibatches at
    the end of an update.
    """

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.noted = steps, list[tuple[int, ...]]()
        self.weights = self.copied = self.in_flight = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Look at the run."""
        run = trainer.strategy._engine.continuous  # type: ignore[attr-defined]
        self.copied, self.in_flight = (
            max(self.copied, run.held_bytes[0]),
            max(self.in_flight, run.in_flight),
        )
        self.weights = sum(p.numel() * p.element_size() for p in run._parameters if p.requires_grad)
        if trainer.global_step in self.steps:
            files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            self.noted.append((trainer.global_step, resident_bytes(), files, threads))


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schedule", default="continuous")
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0)
    strategy = PipelineStrategy(schedule=options.schedule, prediction=options.prediction)
    monitor, held = StepMonitor(warmup_steps=10), Held((options.steps // 5, options.steps))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor, held],
    )
    model = ByteGPT(options.layers, options.hidden, 6, options.seq_len)
    trainer.fit(model, StdlibBytesDataModule(options.seq_len, 8, max_bytes=2_000_000))
    plan = strategy.parallel_plan
    assert plan is not None and plan.predicted is not None
    mine = {
        "weights": held.weights,
        "copied": held.copied,
        "in_flight": held.in_flight,
        "noted": held.noted,
    }
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, mine)
    if trainer.is_global_zero:
        assert monitor.measurement is not None
        result = {
            "ranks": found,
            "predicted_bytes": plan.predicted.peak_bytes,
            "peak_bytes": monitor.measurement.peak_bytes_per_rank,
        }
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    destroy_process_group()
