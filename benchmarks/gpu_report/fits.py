"""Part 9: fits of five models, as users start them: Lightning's ``ddp``, and ``strategy="topt"``.

    ddp           Lightning's DDPStrategy
    topt          without options: three watched steps, then the plan that a search finds
    least memory  ``objective="memory"``: watched as well, then another plan takes over
    limit         a ``memory_limit`` between what ddp and the plan of least memory take, which
                  torch's allocator enforces

Beside each stand its step, the peak of what the allocator has reserved, and how far its losses are
from those of ``ddp`` (the same batches in the same order, in the same precision).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader

from benchmarks.common import QUIET
from benchmarks.gpu_report.memory_fractions import limited
from benchmarks.gpu_report.models import Model, clear, make_models
from benchmarks.gpu_report.reporting import MIB, Report, memory_columns, reset_peaks, run_part
from benchmarks.gpu_report.reporting import synchronize as wait_for
from lightning_topt import AutoParallelStrategy

REFERENCE = "ddp"
# Steps of ddp; steps under a plan that are timed; seconds until a plan has to be there.
_STEPS, _TIMED, _PLAN_SECONDS = 40, 10, 12.0
_COMPARED, _CELL_SECONDS = 12, 9.0  # losses; seconds that a fit is begun with
_LIMIT = 0.5  # of the way from the least memory to that of ddp


def run(report: Report) -> None:
    """Fit every model under every strategy that there is time for."""
    models = make_models(report.quick)
    for name in ("llama", "gpt", "vit", "convnext", "lstm"):
        losses: list[float] = []
        peaks: dict[str, int] = {}
        kinds = (REFERENCE, "topt", "least memory", "limit")
        for kind in kinds if report.device.type == "cuda" else kinds[:3]:
            if report.left() < _CELL_SECONDS:
                report.note("not begun", model=name, strategy=kind)
                continue
            with report.attempt(f"{name} {kind}") as row:
                row |= cell(models[name], kind, report.device, losses, peaks)


def cell(
    model: Model, kind: str, device: torch.device, losses: list[float], peaks: dict[str, int]
) -> dict[str, Any]:
    """Fit once; return the columns. `losses` are those of ddp, `peaks` reserved bytes by kind."""
    limit, share = None, 1.0
    if kind == "limit":
        if REFERENCE not in peaks or "least memory" not in peaks:
            raise RuntimeError("ddp or the plan of least memory did not run")
        low, high = peaks["least memory"], peaks[REFERENCE]
        limit = int(low + _LIMIT * (high - low))
        share = limit / torch.cuda.mem_get_info(device)[1]
    strategy: Strategy
    if kind == REFERENCE:
        strategy = DDPStrategy()
    elif limit is None:
        strategy = AutoParallelStrategy(
            plan="search", objective="memory" if kind == "least memory" else "time"
        )
    else:
        strategy = AutoParallelStrategy(memory_limit=f"{limit // MIB}MiB")
    module = model.module(device)  # large ones take long to make on the host
    with torch.device("cpu"):
        batches = model.batch(2 * model.samples)
    watch = Watch(device, planned=kind != REFERENCE)
    trainer = L.Trainer(
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=-1,
        callbacks=[watch],
        **QUIET,
    )
    clear(device)
    reset_peaks(device)
    loader = DataLoader(list(zip(*batches, strict=True)), batch_size=model.samples)
    with limited(share, device):
        start = time.perf_counter()
        trainer.fit(module, loader)
    columns: dict[str, Any] = {"limit_bytes": limit, "fit_s": time.perf_counter() - start}
    columns["first_step_s"] = watch.times[0] - start
    columns |= watch.columns()
    memory = memory_columns(device)
    columns["reserved_bytes"] = memory.get("peak_reserved_bytes")
    columns["allocated_bytes"] = memory.get("peak_allocated_bytes")
    peaks[kind] = watch.reserved
    columns["reserved_under_plan_bytes"] = watch.reserved
    if isinstance(strategy, AutoParallelStrategy):
        plan = strategy.parallel_plan
        columns["planned_by"], columns["planning_s"] = (
            strategy.planned_by,
            strategy.planning_seconds,
        )
        if plan is not None:
            columns["plan"] = plan.summary()
            if plan.predicted is not None:
                columns["predicted_step_seconds"] = plan.predicted.step_seconds
                columns["predicted_reserved_bytes"] = plan.predicted.peak_bytes
    if kind == REFERENCE:
        losses[:] = watch.losses
    else:
        pairs = zip(watch.losses, losses, strict=False)
        off = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        columns["compared"] = len(off)
        columns["off_ddp"] = max(off[:_COMPARED], default=None)
        columns["off_ddp_later"] = max(off[_COMPARED:], default=None)
    return columns


class Watch(L.Callback):
    """Times steps, keeps losses, and ends the fit when enough steps ran under the plan."""

    def __init__(self, device: torch.device, *, planned: bool) -> None:
        self.device, self.planned = device, planned
        self.losses: list[float] = []
        self.times: list[float] = []
        self.plan_from: int | None = None if planned else 0
        self.reserved = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the loss, and so wait for the step."""
        self.losses.append(float(outputs["loss"]))
        wait_for(self.device)
        self.times.append(time.perf_counter())
        done = len(self.times)
        if self.plan_from is None and trainer.strategy.parallel_plan is not None:
            self.plan_from = done
        if self.plan_from is not None and done == self.plan_from + 3:  # the switch is over
            reset_peaks(self.device)
        late = self.times[-1] - self.times[0] > _PLAN_SECONDS
        enough = _STEPS if not self.planned else (self.plan_from or 0) + 3 + _TIMED
        if (self.plan_from is not None and done >= enough) or (self.plan_from is None and late):
            if self.device.type == "cuda":
                self.reserved = torch.cuda.max_memory_reserved(self.device)
            trainer.should_stop = True

    def columns(self) -> dict[str, Any]:
        """Return seconds of the timed steps, of the slowest of all, and when the plan came."""
        spans = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return {
            "measured_step_seconds": statistics.median(spans[-_TIMED:]),
            "longest_step_s": max(spans),
            "steps": len(self.times),
            "plan_from_step": self.plan_from if self.planned else None,
            "last_loss": self.losses[-1],
        }


def main() -> None:
    run_part("fits", run, __doc__)


if __name__ == "__main__":
    main()
