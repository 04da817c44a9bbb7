"""A Lightning callback measures what a training step really took: seconds and peak bytes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.costs.measuring import synchronize
from lightning_topt.execution.memory import MemoryMeter, warm_up


@dataclass(frozen=True)
class StepMeasurement:
    """Steady steps of one fit.

    `median_step_seconds` is that of the slowest rank; `peak_bytes_per_rank` (in rank order) are
    above the idle rank, with None where the platform cannot say. `steps` counts the optimizer steps
    measured on this rank; with none, nothing is known.
    """

    steps: int
    median_step_seconds: float | None
    peak_bytes_per_rank: tuple[int | None, ...]


class StepMonitor(pl.Callback):
    """Times optimizer steps after the first `warmup_steps`, and takes the peak memory of all; see
    `measurement` after a fit.

    A step is the time between `on_train_batch_start` and `on_train_batch_end`, summed over the
    batches of an accumulated gradient: forward, backward, exchange and update, with the device idle
    at both ends; not the wait for data, logging of other callbacks, or validation. Peak bytes are
    those of such spans, from the very first step on (DDP holds its buckets twice at the start of
    the second). Under ``"topt"`` both count from the second step of its plan on. See `MemoryMeter`
    for what counts.
    """

    def __init__(self, *, warmup_steps: int = 5) -> None:
        check_whole(warmup_steps, name="warmup_steps (the first builds optimizer state)")
        self.warmup_steps = warmup_steps
        self.measurement: StepMeasurement | None = None
        self._meter: MemoryMeter | None = None
        self._reset(global_step=0)

    def _reset(self, *, global_step: int) -> None:
        self._step_seconds: list[float] = []
        self._peak_bytes: int | None = None
        self._steps_done, self._global_step = 0, global_step
        self._started, self._seconds = 0.0, 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # The process group is up, data sets are loaded, and the module is not on its device yet:
        # the idle rank.
        if stage == "fit":
            self._meter = MemoryMeter(trainer.strategy.root_device)
            warm_up(trainer.strategy.root_device)
            self._meter.mark_base(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset(global_step=trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._meter is not None
        self._meter.reset_peak()
        synchronize(trainer.strategy.root_device)
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self._meter is not None
        synchronize(trainer.strategy.root_device)
        self._seconds += time.perf_counter() - self._started
        # A strategy whose plan has taken over in this step knows its idle rank better. The step's
        # peak is that of planning, and steps before it ran by another plan: this one is the last of
        # the warm-up.
        meter = getattr(trainer.strategy, "memory_meter", None)
        if meter is not None and meter is not self._meter:
            self._meter, self._peak_bytes = meter, None
            self._step_seconds.clear()
            self._steps_done = min(self._steps_done, self.warmup_steps - 1)
        steady = self._steps_done >= self.warmup_steps
        peak = self._meter.peak_bytes()
        if peak is not None:
            self._peak_bytes = max(peak, self._peak_bytes or 0)
        if trainer.global_step > self._global_step:  # not in the middle of an accumulated gradient
            self._global_step = trainer.global_step
            self._steps_done += 1
            if steady:
                self._step_seconds.append(self._seconds)
            self._seconds = 0.0

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        median = statistics.median(self._step_seconds) if self._step_seconds else float("nan")
        peak = float("nan") if self._peak_bytes is None else float(self._peak_bytes)
        mine = torch.tensor(
            [median, peak], dtype=torch.float64, device=trainer.strategy.root_device
        )
        ranks = _of_all_ranks(mine).cpu()
        slowest = ranks[:, 0].max().item()
        self.measurement = StepMeasurement(
            steps=len(self._step_seconds),
            median_step_seconds=None if slowest != slowest else slowest,
            peak_bytes_per_rank=tuple(None if p != p else int(p) for p in ranks[:, 1].tolist()),
        )


def _of_all_ranks(mine: Tensor) -> Tensor:  # (n,) -> (world_size, n)
    if not dist.is_initialized():
        return mine[None]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return torch.stack(ranks)
