"""One measured run of a byte-level GPT on CPU ranks, for other benchmarks.

Started by `common.run_gpt` and `Lab.run_gpt`; rank 0 writes its result as JSON to ``--out``. With
``--cgroup`` every rank first enters a memory cgroup of that many bytes (needs root; v1 or v2), so
that the kernel kills what exceeds them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.common import QUIET
from lightning_topt import AutoParallelStrategy
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule
from lightning_topt.plugins.lost_ranks import destroy_process_group
from lightning_topt.plugins.monitors import StepMonitor

MOST_BEFORE = 40  # steps under DDP, while a search runs beside training
CGROUPS = Path("/sys/fs/cgroup")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", choices=["topt", "ddp"], default="topt")
    parser.add_argument("--memory-limit")
    parser.add_argument("--objective")
    parser.add_argument("--plan", help="a file, a name, or a mapping as JSON")
    parser.add_argument("--allow", type=json.loads, default=[], help="as JSON")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cgroup", type=int)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--frontier", type=Path, help="where the frontier of a search is saved")
    return parser.parse_args()


def enter_cgroup(limit: int) -> None:
    """Join a new memory cgroup of `limit` bytes."""
    version_1 = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if version_1 else CGROUPS) / f"topt-benchmark-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))


class Progress(L.Callback):
    """Counts finished steps in a file, for runs that do not live to write a result."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(str(trainer.global_step))


class Enough(L.Callback):
    """End the fit when as many steps as asked for were measured.

    They count under the plan that a search beside training has found.
    """

    def __init__(self, monitor: StepMonitor, *, steps: int) -> None:
        self.monitor, self.steps = monitor, steps

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        has_plan = getattr(trainer.strategy, "parallel_plan", self) is not None
        trainer.should_stop = has_plan and len(self.monitor._step_seconds) >= self.steps


def main() -> None:
    options = parse()
    if options.cgroup:
        enter_cgroup(options.cgroup)
    torch.set_num_threads(1)
    L.seed_everything(0)
    if options.strategy == "topt":
        is_mapping = options.plan is not None and options.plan.startswith("{")
        strategy: Any = AutoParallelStrategy(
            memory_limit=options.memory_limit,
            objective=options.objective,
            plan=json.loads(options.plan) if is_mapping else options.plan,
            allow=options.allow,
        )
    else:
        strategy = DDPStrategy()
    monitor = StepMonitor(warmup_steps=options.warmup)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        max_steps=options.steps + MOST_BEFORE,
        limit_val_batches=0,
        **QUIET,
        callbacks=[
            monitor,
            Enough(monitor, steps=options.steps - options.warmup),
            Progress(options.out.with_suffix(".progress")),
        ],
    )
    model = ByteGPT(options.layers, options.hidden, options.heads, options.seq_len)
    trainer.fit(
        model, StdlibBytesDataModule(options.seq_len, options.batch_size, max_bytes=2_000_000)
    )
    meter = getattr(strategy, "memory_meter", None)
    base = trainer.strategy.all_gather(
        torch.tensor(float(meter.base_bytes or 0) if meter else 0.0)
    ).reshape(-1)
    if not trainer.is_global_zero:
        return
    assert monitor.measurement is not None
    plan, planning = getattr(strategy, "parallel_plan", None), getattr(strategy, "planning", None)
    if options.frontier is not None and planning is not None:
        planning.frontier.save(options.frontier)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plan": plan.to_dict() if plan else None,
        "summary": plan.summary() if plan else "Lightning ddp",
        "planning_seconds": getattr(strategy, "planning_seconds", None),
        "points": len(planning.frontier.points) if planning else None,
        "base_bytes": max(int(value) for value in base),
        "step_seconds": monitor.measurement.median_step_seconds,
        "peak_bytes": max(p for p in monitor.measurement.peak_bytes_per_rank if p is not None),
        "steps": monitor.measurement.steps,
    }
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
    destroy_process_group()  # Lightning's ddp leaves it
