"""Memory of pipelines without flush on 4 ranks: weight copies, minibatches in flight, peaks.

    python -m benchmarks.pipelines.continuous_memory            # --rules, --steps

A last run of 5,000 updates shows whether memory, open files or threads grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from benchmarks.common import QUIET, RESULTS, machine, mib, run_module
from lightning_topt import PipelineStrategy
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule
from lightning_topt.plugins.lost_ranks import destroy_process_group
from lightning_topt.plugins.monitors import StepMonitor
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, lag_of
from lightning_topt.weight_prediction import make_prediction
from lightning_topt.weight_prediction.rules import StagePlace

RANKS = 4
RUN = "benchmarks.pipelines.continuous_memory"
RULES = ("none", "multistep", "spectrain", "stash", "two_versions")


def rows(rule: str, schedule: str) -> list[str]:
    """Measure one rule, and return a row for each stage."""
    lag = CONTINUOUS_SCHEDULES[schedule]
    accumulate = (RANKS - 1) * lag if rule == "two_versions" else 1
    found = run_module(RUN, "--worker", prediction=rule, schedule=schedule, accumulate=accumulate)
    lines = []
    for stage, rank in enumerate(found["ranks"]):
        sizes = {"stage": stage, "num_stages": RANKS, "lag_per_hop": lag, "accumulate": accumulate}
        copies = make_prediction(rule).copies_at(StagePlace(**sizes))
        flying = lag_of(stage, num_ranks=RANKS, lag_per_hop=lag)
        cells: list[Any] = [
            schedule,
            rule,
            stage,
            copies,
            f"{rank['copied'] / rank['weights']:.2f}",
            flying,
        ]
        cells += [rank["in_flight"], mib(found["peak_bytes"][stage])]
        most = max(found["peak_bytes"])
        if found["peak_bytes"][stage] == most:
            cells += [
                mib(found["predicted_bytes"]),
                f"{100 * (found['predicted_bytes'] / most - 1):+.1f} %",
            ]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--steps", type=int, default=5000, help="of the long run")
    options = parser.parse_args()
    table = []
    for schedule in CONTINUOUS_SCHEDULES:
        for rule in options.rules:
            table += rows(rule, schedule)
            print(*table[-RANKS:], sep="\n", flush=True)
    sizes = {"layers": 4, "hidden": 48, "seq_len": 16, "steps": options.steps}
    long = run_module(RUN, "--worker", timeout=1500, prediction="spectrain", **sizes)
    grown = []
    for stage, rank in enumerate(long["ranks"]):
        (early, before, *others), (late, after, *others_later) = rank["noted"]
        cells = (stage, early, mib(before), *others, late, mib(after), *others_later)
        grown.append(f"| {' | '.join(map(str, cells))} |")
        print(grown[-1])
    lines = [
        f"# Memory of pipelines that never flush, on {RANKS} ranks",
        "",
        "`python -m benchmarks.pipelines.continuous_memory`",
        "",
        machine(),
        "",
        "GPT of 8 layers of width 384, AdamW, 8 sequences of 64 bytes per minibatch. Copies: of "
        "the stage's trained weights,",
        "by the rule's formula and as found; minibatches in flight after an iteration, likewise. "
        "Peaks: of the rank, and what",
        "the plan predicts for the rank with the most.",
        "",
        "| schedule | rule | stage | copies | found | in flight | found | peak MiB | predicted MiB "
        "| error |",
        "|---" * 10 + "|",
        *table,
        "",
        "A small model for longer: MiB of the process, open files and threads.",
        "",
        "| stage | update | MiB | files | threads | update | MiB | files | threads |",
        "|---" * 9 + "|",
        *grown,
    ]
    (RESULTS / "continuous_memory.md").write_text("\n".join(lines) + "\n")


# ---- one measured fit ----------------------------------------------------------------------------


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Held(L.Callback):
    """Note what a rank holds after each of `steps` updates.

    Also the most weight copies and minibatches in flight at the end of an update.
    """

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.noted = steps, list[tuple[int, ...]]()
        self.weights = self.copied = self.in_flight = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the bytes of weights and copies, and the minibatches in flight."""
        run = trainer.strategy._run.engine.continuous  # type: ignore[attr-defined]
        self.copied, self.in_flight = (
            max(self.copied, run.held_bytes[0]),
            max(self.in_flight, run.in_flight),
        )
        self.weights = sum(p.numel() * p.element_size() for p in run._parameters if p.requires_grad)
        if trainer.global_step in self.steps:
            files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            self.noted.append((trainer.global_step, resident_bytes(), files, threads))


def run_worker() -> None:
    """Train once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
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
        **QUIET,
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
    if "--worker" in sys.argv:
        run_worker()
        destroy_process_group()
    else:
        main()
