"""Pipelines over all ranks, each schedule: does it end, and are its losses those of one process?

Fits by Lightning's Trainer, whose watchdog is the case's: a schedule that deadlocks on NCCL is a
line, and the next one goes on. `predicted` is the plan's own step; without flush another training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from benchmarks.common import QUIET
from benchmarks.gpu_report.reporting import memory_columns, reset_peaks
from benchmarks.gpu_report.two_processes import difference
from benchmarks.multi_gpu.job import Job
from lightning_topt import PipelineStrategy
from lightning_topt.demo import VOCABULARY, ByteGPT
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES

STEPS, SAMPLES = 12, 16
_LAYERS_PER_RANK, _SECONDS = 2, 150.0
_QUICK = ("1f1b", "continuous")


def run(job: Job) -> None:
    names = _QUICK if job.report.quick else (*SCHEDULES, *CONTINUOUS_SCHEDULES)
    if not (left := job.left(names)):
        return
    small = job.report.quick or job.device.type == "cpu"
    sizes = (_LAYERS_PER_RANK * job.ranks, *((64, 4, 32) if small else (1024, 16, 512)))
    shape = (STEPS, SAMPLES, sizes[3] + 1)
    batches = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(7))
    expected = plain_losses(sizes, batches, job)
    for name in left:
        with job.case(name, seconds=_SECONDS) as row:
            microbatches = None if name in CONTINUOUS_SCHEDULES else min(SAMPLES, 2 * job.ranks)
            strategy = PipelineStrategy(
                schedule=name, microbatches=microbatches, process_group_backend=backend_of(job)
            )
            row["microbatches"] = microbatches
            reset_peaks(job.device)
            fit(lambda: ByteGPT(*sizes), Batches(batches), strategy, job, record := Record())
            assert strategy.parallel_plan is not None
            if (predicted := strategy.parallel_plan.predicted) is not None:
                row["predicted_step_seconds"] = predicted.step_seconds
            half = STEPS // 2
            seconds = (record.times[-1] - record.times[half]) / (STEPS - 1 - half)
            row["measured_step_seconds"] = job.largest(seconds)
            if name not in CONTINUOUS_SCHEDULES:
                row["off_one_process"] = difference(record.losses, expected)
            row["last_loss"] = record.losses[-1]
            row.update(memory_columns(job.device))


def backend_of(job: Job) -> str:
    return "nccl" if job.device.type == "cuda" else "gloo"


class Batches:
    """A loader of these batches (Lightning takes a list for several loaders)."""

    def __init__(self, batches: Tensor) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Record(pl.Callback):
    """Keeps the loss of each step, which all ranks of a pipeline have, and when it ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note both."""
        self.losses.append(float(outputs["loss"]))
        self.times.append(time.perf_counter())


def fit(
    make: Callable[[], pl.LightningModule],
    loader: Any,
    strategy: Strategy,
    job: Job,
    *callbacks: pl.Callback,
) -> None:
    """Train an epoch. Modules that `make` draws, and what they draw, are the same on all ranks."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator=job.device.type,
        devices=job.ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=list(callbacks),
        **QUIET,
        use_distributed_sampler=False,
    )
    trainer.fit(make(), loader)


def plain_losses(sizes: tuple[int, ...], batches: Tensor, job: Job) -> list[float]:
    """Return the losses of the same steps in this process alone."""
    pl.seed_everything(0, verbose=False)
    module = ByteGPT(*sizes).to(job.device)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    made: Any = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    losses = []
    for batch in batches:
        loss = module.training_step(batch.to(job.device), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses
