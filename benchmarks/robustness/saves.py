"""How long training stands still for a checkpoint: blocking, and written in the background.

    python -m benchmarks.robustness.saves --folder /mnt/checkpoints      # some 7 minutes on 2 cores

A module of 89.5 million parameters under AdamW, 1 GiB of parameters and optimizer states, on one
or two ranks of one thread. Its checkpoint is one file or sharded. A fit saves after every 10 steps,
four times. The time of `Trainer.save_checkpoint` is what training stands still; the first save,
which allocates buffers, is not counted. Both kinds of fits alternate. Then one process reads what
was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common import QUIET, RESULTS, ROOT, machine
from lightning_topt import AutoParallelStrategy, read_sharded_checkpoint

WIDTH, LAYERS = 2730, 12  # 12 * 2730 ** 2 = 89.4 million
STEPS_BETWEEN, SAVES, ROUNDS = 10, 4, 1
CASES = ((1, "full"), (1, "sharded"), (2, "sharded"))


class Layers(L.LightningModule):
    """Linear layers; saves after every `STEPS_BETWEEN` steps."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.path = path
        self.stood: list[float] = []
        self.began = 0.0
        self.steps: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.steps.append(time.perf_counter() - self.began)
        if self.trainer.global_step % STEPS_BETWEEN == 0:
            begin = time.perf_counter()
            self.trainer.save_checkpoint(self.path)
            self.stood.append(time.perf_counter() - begin)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def fit(ranks: int, form: str, in_background: bool, path: str) -> None:
    """One fit, in a process of its own; rank 0 prints what it has measured."""
    L.seed_everything(0, verbose=False)
    strategy = AutoParallelStrategy(
        plan="zero3" if ranks > 1 else "ddp", checkpoint=form, async_checkpoint=in_background
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=STEPS_BETWEEN * SAVES,
        **QUIET,
    )
    module = Layers(path)
    begin = time.perf_counter()
    trainer.fit(module, DataLoader(torch.randn(STEPS_BETWEEN * SAVES * ranks * 4, WIDTH), 4))
    if trainer.is_global_zero:
        found = {
            "stood": module.stood,
            "steps": module.steps,
            "fit": time.perf_counter() - begin,
        }
        print("RESULT " + json.dumps(found), flush=True)


def measure(ranks: int, form: str, in_background: bool, folder: Path) -> dict[str, Any]:
    """Return what a fit measured, and the size and reading time of its checkpoint."""
    path = folder / "last.ckpt"
    arguments = json.dumps([ranks, form, in_background, str(path)])
    job = subprocess.run(
        [sys.executable, "-m", "benchmarks.robustness.saves", "--fit", arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in job.stdout.splitlines() if line.startswith("RESULT ")]
    if job.returncode or not lines:
        raise RuntimeError(job.stdout + job.stderr)
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    found["bytes"] = sum(each.stat().st_size for each in files)
    begin = time.perf_counter()
    if path.is_dir():
        read_sharded_checkpoint(path)
    else:
        torch.load(path, weights_only=True)
    found["read"] = time.perf_counter() - begin
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def report(results: list[dict[str, Any]], where: str) -> str:
    """Return the page of results."""
    rows = []
    for ranks, form in CASES:
        stood, steps, fits, sizes, reads = {}, {}, {}, [], []
        for kind in (False, True):
            own = [r for r in results if r["case"] == [ranks, form] and r["background"] == kind]
            stood[kind] = statistics.median(time for r in own for time in r["stood"][1:])
            # of the steps, the first ones and those beside a save are not alike: the mean
            steps[kind] = statistics.mean(time for r in own for time in r["steps"][STEPS_BETWEEN:])
            fits[kind] = statistics.median(r["fit"] for r in own)
            sizes += [r["bytes"] for r in own]
            reads += [r["read"] for r in own]
        rows.append(
            f"| {ranks} | {form} | {max(sizes) / 2**30:.2f} GiB | {stood[False]:.2f} s "
            f"| {stood[True]:.3f} s | {stood[True] / stood[False]:.1%} | {steps[False]:.3f} s "
            f"| {steps[True]:.3f} s | {fits[False]:.0f} s | {fits[True]:.0f} s "
            f"| {statistics.median(reads):.2f} s |"
        )
    return "\n".join(
        [
            "# Saves in the background",
            "",
            "How long training stands still for a checkpoint of a module under AdamW: blocking,",
            "and with `async_checkpoint=True`, of which the copy to host memory and waits for the",
            "save before the last are counted. Medians of all saves but the first. Steps beside a",
            "save take longer where the writing thread has no core of its own.",
            "",
            f"Command: `python -m benchmarks.robustness.saves`, {ROUNDS} round, {where}.",
            "",
            f"Machine: {machine()}.",
            "",
            "| ranks | form | size | blocking | background | share | step, blocking "
            "| step, background | fit, blocking | fit, background | read by one process |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; by default temporary")
    arguments = parser.parse_args()
    if arguments.fit:
        fit(*json.loads(arguments.fit))
        return
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(ROUNDS):
            for ranks, form in CASES:
                for kind in (False, True):
                    found = measure(ranks, form, kind, Path(folder))
                    results.append({"case": [ranks, form], "background": kind, **found})
                    stood = ", ".join(f"{seconds:.3f}" for seconds in found["stood"])
                    print(ranks, form, "background" if kind else "blocking", stood, flush=True)
    (RESULTS / "saves.json").write_text(json.dumps(results, indent=1))
    text = report(results, "on a local disk")
    (RESULTS / "saves.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
