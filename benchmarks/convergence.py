"""Does training with compressed gradients end where dense training ends? Equal steps, several
seeds, curves.

    python -m benchmarks.convergence           # about 50 minutes on 2 cores; --tasks digits takes 5
    python -m benchmarks.convergence --report  # tables and curves of the runs so far

Every run is a Trainer on two CPU ranks (gloo). Finished runs are kept in
benchmarks/results/convergence.json and not repeated, so the benchmark may be stopped and continued.
A method's metric is said to lie within the dense spread when its median over the seeds is not worse
than the worst dense seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from typing_extensions import override

from benchmarks.common import RESULTS, machine
from benchmarks.photographs import CropNet, CropsDataModule
from lightning_topt import CompressedDDPStrategy, LocalSteps, LocalStepsStrategy, TopK
from lightning_topt.cli.tasks.byte_lm import ByteGPT, StdlibBytesDataModule
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

RUNS = RESULTS / "convergence.json"
RANKS = 2
WARM_UP = 300


@dataclass(frozen=True)
class Task:
    """A model, its data, the number of steps, and what counts at the end."""

    model: Callable[[int], pl.LightningModule]
    data: Callable[[], pl.LightningDataModule]
    steps: int
    metric: str
    higher_is_better: bool


def _byte_gpt(steps: int, warmup_steps: int = 20) -> pl.LightningModule:
    schedule = {"warmup_steps": warmup_steps, "decay_steps": steps}
    return ByteGPT(num_layers=2, hidden=64, num_heads=4, seq_len=32, learning_rate=4e-3, **schedule)


def _crop_net(steps: int) -> pl.LightningModule:
    return CropNet(steps=steps)


TASKS = {
    "byte_lm": Task(
        _byte_gpt, lambda: StdlibBytesDataModule(32, 16), 3000, "val_bits_per_byte", False
    ),
    "byte_lm, slow start": Task(
        partial(_byte_gpt, warmup_steps=100),
        lambda: StdlibBytesDataModule(32, 16),
        3000,
        "val_bits_per_byte",
        False,
    ),
    "digits": Task(
        lambda steps: DigitsCNN(), lambda: DigitsDataModule(), 1320, "val_accuracy", True
    ),
    "photographs": Task(_crop_net, lambda: CropsDataModule(), 500, "val_accuracy", True),
}
METHODS: dict[str, Callable[[], Strategy]] = {
    "dense": DDPStrategy,
    "top-k 1 %": lambda: CompressedDDPStrategy(TopK(density=0.01)),
    "top-k 1 %, warm-up": lambda: CompressedDDPStrategy(TopK(density=0.01, warmup_steps=WARM_UP)),
    # 16 % of both ranks together
    "top-k 8 %, 2 bits": lambda: CompressedDDPStrategy(TopK(density=None, bits=2)),
    "top-k 1 % of updates": lambda: LocalStepsStrategy(
        LocalSteps(every=1, density=0.01, outer_learning_rate=1.0, outer_momentum=0.0)
    ),
    "top-k 10 % of 10 local steps": lambda: LocalStepsStrategy(
        LocalSteps(every=10, density=0.1, outer_learning_rate=1.0, outer_momentum=0.0)
    ),
}


class Curve(pl.Callback):
    """The validation metric and the step of each validation."""

    def __init__(self, metric: str) -> None:
        self.metric, self.points = metric, []  # type: str, list[tuple[int, float]]

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.points.append((trainer.global_step, float(trainer.callback_metrics[self.metric])))


def run(task_name: str, method: str, seed: int, out: Path) -> None:
    """Train once; rank 0 writes its curve."""
    trainer, curve = train(
        TASKS[task_name], METHODS[method](), seed=seed, validations=12, devices=RANKS
    )
    if trainer.is_global_zero:
        out.write_text(json.dumps(curve.points))


def train(
    task: Task,
    strategy: Strategy,
    *,
    seed: int,
    validations: int,
    devices: int,
    num_nodes: int = 1,
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[pl.Trainer, Curve]:
    """Fit the task's model with one thread; the Trainer after it, and the curve of so many
    validations.
    """
    torch.set_num_threads(1)
    pl.seed_everything(seed, workers=True, verbose=False)
    curve = Curve(task.metric)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        max_steps=task.steps,
        max_epochs=-1,
        val_check_interval=task.steps // validations,
        check_val_every_n_epoch=None,
        limit_val_batches=40,
        num_sanity_val_steps=0,
        callbacks=[curve, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task.model(task.steps), datamodule=task.data())
    return trainer, curve


def measure(tasks: list[str], methods: list[str], seeds: int) -> None:
    """Every run that has not been made, one job each, seed by seed."""
    for seed in range(seeds):
        for task in tasks:
            for method in methods:
                runs = load()
                key = f"{task}|{method}|{seed}"
                if key in runs:
                    continue
                out = RESULTS / "convergence.tmp"
                out.unlink(missing_ok=True)
                arguments = ["--run", task, method, str(seed), str(out)]
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.convergence", *arguments],
                    check=True,
                    timeout=1800,
                )
                runs[key] = json.loads(out.read_text())
                out.unlink()
                RUNS.write_text(json.dumps(runs) + "\n")
                print(key, runs[key][-1], flush=True)


def load() -> dict[str, list[tuple[int, float]]]:
    runs: dict[str, list[tuple[int, float]]] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return runs


def report() -> None:
    """Table and curves of all runs so far."""
    runs = load()
    lines = ["# Convergence under compressed gradients", "", machine(), ""]
    lines += [
        "Two CPU ranks, equal steps; final validation metric over the seeds. "
        "`benchmarks/convergence.py` has the settings.",
        "",
    ]
    lines += [
        "| task | method | seeds | median | worst | best | within the dense spread |",
        "|---|---|---|---|---|---|---|",
    ]
    figure, axes = plt.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 4), constrained_layout=True)
    for axis, (name, task) in zip(axes, TASKS.items(), strict=True):
        finals: dict[str, list[float]] = {}
        for colour, method in enumerate(METHODS):
            curves = [curve for key, curve in runs.items() if key.startswith(f"{name}|{method}|")]
            if not curves:
                continue
            for index, curve in enumerate(curves):
                label = None if index else method
                axis.plot(
                    *zip(*curve, strict=True),
                    color=f"C{colour}",
                    alpha=0.6,
                    linewidth=1,
                    label=label,
                )
            finals[method] = [curve[-1][1] for curve in curves]
        for method, values in finals.items():
            numbers, within = compared(
                task, values, dense=None if method == "dense" else finals.get("dense")
            )
            lines.append(f"| {name} | {method} | {numbers} | {within} |")
        axis.set(title=name, xlabel="optimizer steps", ylabel=task.metric)
        axis.legend()
    figure.savefig(RESULTS / "convergence.png", dpi=110)
    text = "\n".join([*lines, "", "![curves](convergence.png)", ""])
    (RESULTS / "convergence.md").write_text(text)
    print(text)


def compared(
    task: Task, finals: Sequence[float], *, dense: Sequence[float] | None
) -> tuple[str, str]:
    """Cells of a table: runs with their median, worst and best metric, and whether the median is
    within the dense spread.
    """
    order = sorted(finals, reverse=not task.higher_is_better)  # worst first
    median = statistics.median(finals)
    within = "-"
    if dense:
        held = median >= min(dense) if task.higher_is_better else median <= max(dense)
        within = "yes" if held else "**no**"
    return f"{len(finals)} | {median:.4f} | {order[0]:.4f} | {order[-1]:.4f}", within


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--report", action="store_true")
    parser.add_argument(
        "--run", nargs=4, metavar=("TASK", "METHOD", "SEED", "OUT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.run:
        task, method, seed, out = options.run
        run(task, method, int(seed), Path(out))
        return
    if not options.report:
        measure(options.tasks, options.methods, options.seeds)
    report()


if __name__ == "__main__":
    main()
