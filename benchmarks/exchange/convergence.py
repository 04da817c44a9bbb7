"""Does training with compressed gradients end where dense training ends?

    python -m benchmarks.exchange.convergence           # about 50 minutes on 2 cores
    python -m benchmarks.exchange.convergence --tasks digits  # 5 minutes
    python -m benchmarks.exchange.convergence --report  # tables and curves of the runs so far

Equal steps, several seeds. Every run is a Trainer on two CPU ranks (gloo). Finished runs are kept
in benchmarks/results/convergence.json and not repeated, so the benchmark may be stopped and
continued. A method's metric lies within the dense spread when its median over the seeds is not
worse than the worst dense seed.
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
from typing import Any

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, Strategy
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from benchmarks.common import QUIET, RESULTS, machine
from examples.digits import DigitsCNN, DigitsDataModule
from lightning_topt import CompressedDDPStrategy, LocalStepsStrategy, SparseLoCo, TopK
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule

RUNS = RESULTS / "convergence.json"
RANKS = 2


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
    # 16 % of both ranks together
    "top-k 8 %, 2 bits": lambda: CompressedDDPStrategy(TopK(density=None, bits=2)),
    "top-k 1 % of updates": lambda: LocalStepsStrategy(
        SparseLoCo(every=1, density=0.01, bits=8, residual_decay=1.0)
    ),
    "top-k 10 % of 10 local steps": lambda: LocalStepsStrategy(
        SparseLoCo(every=10, density=0.1, bits=8, residual_decay=1.0)
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
    """Fit the task's model with one thread; return Trainer and curve of so many validations."""
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
        **QUIET,
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
                    [sys.executable, "-m", "benchmarks.exchange.convergence", *arguments],
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
        "`benchmarks/exchange/convergence.py` has the settings.",
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
    """Return the cells of a table: median, worst and best metric of the runs.

    The last cell says whether the median is within the dense spread.
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


# ---- the task `photographs`: from which part of which picture does a crop come? ------------------
# The pictures are scikit-learn's two. Each is cut into 3 x 4 regions: 24 classes. Training crops
# lie anywhere in the upper two thirds of a region, validation crops in its lower third, so that no
# pixel is in both.

ROWS, COLUMNS, CROP = 3, 4, 32
Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., arXiv 1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    # (B, inputs, H, W) -> (B, outputs, H / stride, W / stride)
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class CropNet(pl.LightningModule):
    """4.8 M parameters; SGD with momentum and a cosine decay over `steps`. Logs `val_accuracy`."""

    def __init__(self, *, steps: int, learning_rate: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            Residual(64, 128, 2),
            Residual(128, 256, 2),
            Residual(256, 512, 2),
        )
        self.classifier = nn.Linear(512, 2 * ROWS * COLUMNS)
        self.val_accuracy = MulticlassAccuracy(num_classes=2 * ROWS * COLUMNS, average="micro")

    def forward(self, crops: Tensor) -> Tensor:  # (B, 3, CROP, CROP) -> (B, 24)
        logits: Tensor = self.classifier(self.features(crops).mean((2, 3)))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_accuracy.update(self(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        rate, momentum = self.hparams["learning_rate"], self.hparams["momentum"]
        optimizer = torch.optim.SGD(
            self.parameters(), lr=rate, momentum=momentum, weight_decay=1e-4
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class CropsDataModule(pl.LightningDataModule):
    """Random crops, the same in every run."""

    def __init__(
        self, batch_size: int = 16, *, training_crops: int = 6144, validation_crops: int = 1200
    ) -> None:
        super().__init__()
        self.batch_size, self.sizes = batch_size, (training_crops, validation_crops)

    def setup(self, stage: str | None = None) -> None:
        pictures = [
            torch.tensor(p).permute(2, 0, 1).float() / 127.5 - 1
            for p in load_sample_images().images
        ]
        generator = torch.Generator().manual_seed(0)
        self.train_data, self.val_data = (
            TensorDataset(*_crops(pictures, size, validation=validation, generator=generator))
            for size, validation in zip(self.sizes, (False, True), strict=True)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_data, batch_size=100)


def _crops(
    pictures: list[Tensor], count: int, *, validation: bool, generator: torch.Generator
) -> Batch:
    crops, classes = [], []
    for index in range(count):
        region = index % (len(pictures) * ROWS * COLUMNS)
        picture = pictures[region // (ROWS * COLUMNS)]
        height, width = picture.shape[1] // ROWS, picture.shape[2] // COLUMNS
        top, left = region % (ROWS * COLUMNS) // COLUMNS * height, region % COLUMNS * width
        cut = height * 2 // 3
        low, high = (cut, height - CROP) if validation else (0, cut - CROP)
        y = top + int(torch.randint(low, high + 1, (), generator=generator))
        x = left + int(torch.randint(0, width - CROP + 1, (), generator=generator))
        crops.append(picture[:, y : y + CROP, x : x + CROP])
        classes.append(region)
    return torch.stack(crops), torch.tensor(classes)
