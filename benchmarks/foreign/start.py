"""Seconds from `Trainer.fit` to the end of the first step: Lightning's `ddp`, `topt`, `topt_full`.

    python -m benchmarks.foreign.start           # about 25 minutes on 2 cores

`topt_full` searches a plan first: on a "new" machine, one without measurements, and then once more.
Rounds are interleaved; each is a job of its own (two CPU ranks, one thread each).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from benchmarks.common import QUIET, RESULTS, machine, spread
from lightning_topt import AutoParallelStrategy
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule

MODELS = {
    "0.2 M": {"num_layers": 3, "hidden": 64, "num_heads": 4, "seq_len": 64, "batch_size": 8},
    "1 M": {"num_layers": 4, "hidden": 144, "num_heads": 4, "seq_len": 64, "batch_size": 8},
    "26 M": {"num_layers": 8, "hidden": 512, "num_heads": 8, "seq_len": 128, "batch_size": 4},
    "100 M": {"num_layers": 12, "hidden": 832, "num_heads": 13, "seq_len": 64, "batch_size": 2},
}
RECURRENT = "LSTM cell, 600 steps"
MODELS[RECURRENT] = {"seq_len": 600, "batch_size": 4}
SEEN = ("ddp", "topt", "topt_full, new", "topt_full, again")
STEPS = 8


class Steps(L.Callback):
    """Write down, on rank 0, when the first step is over, and how long each step takes.

    Also notes the plan that runs.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.start, self.begun = out, 0.0, 0.0
        self.record: dict[str, Any] = {"seconds": None, "steps": [], "losses": [], "plan": None}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, record = time.perf_counter(), self.record
        plan = getattr(trainer.strategy, "parallel_plan", None)
        if record["seconds"] is None:
            record["seconds"] = now - self.start
        record["steps"].append(now - self.begun)
        record["losses"].append(float(outputs["loss"]))
        if plan is not None and record["plan"] is None:
            record["plan"] = plan.summary()
        if trainer.is_global_zero:
            self.out.write_text(json.dumps(record))


class Recurrent(L.LightningModule):
    """A cell of an LSTM, called 600 times in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(256, 64),
            nn.LSTMCell(64, 128),
            nn.Linear(128, 256),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.long()
        state, embedded = None, self.embed(batch[:, :-1])
        outputs = []
        for step in range(embedded.shape[1]):
            state = self.cell(embedded[:, step], state)
            outputs.append(state[0])
        return F.cross_entropy(
            self.head(torch.stack(outputs, 1)).flatten(0, 1), batch[:, 1:].flatten()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(model: str, strategy: str, out: Path) -> None:
    """One fit on two ranks, forked so that no second start of the interpreter is in the figures."""
    sizes = dict(MODELS[model])
    batch_size, context = sizes.pop("batch_size"), sizes["seq_len"]
    torch.manual_seed(0)
    module = Recurrent() if model == RECURRENT else ByteGPT(**sizes)
    steps = Steps(out)
    started = {"start_method": "fork"}
    chosen: Any = DDPStrategy(**started)
    if strategy != "ddp":
        plan = "search" if strategy == "topt_full" else None
        chosen = AutoParallelStrategy(plan=plan, **started)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=chosen, max_steps=STEPS, callbacks=[steps], **QUIET
    )
    data = StdlibBytesDataModule(context, batch_size, max_bytes=1_000_000)
    steps.start = time.perf_counter()
    trainer.fit(module, data)


def job(model: str, strategy: str, cache: str) -> dict[str, Any]:
    """The record of one job that keeps its measurements in `cache`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.foreign.start",
            "--model",
            model,
            "--strategy",
            strategy,
            "--out",
            str(out),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
        subprocess.run(
            command,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        record: dict[str, Any] = json.loads(out.read_text())
        return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--strategy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        run(options.model, options.strategy, options.out)
        return
    lines = ["# Seconds from `fit` to the end of the first step", "", machine(), ""]
    lines += [
        "| model | "
        + " | ".join(SEEN)
        + " | topt / ddp | topt_full again, more than ddp | plan | losses |"
    ]
    lines += ["|---" * (len(SEEN) + 5) + "|"]
    for model in MODELS:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in SEEN}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                for name in SEEN:
                    found[name].append(job(model, name.partition(",")[0], cache))
                print(
                    model,
                    {name: round(records[-1]["seconds"], 2) for name, records in found.items()},
                    flush=True,
                )
        lines.append(_row(model, found))
    lines += [
        "",
        f"Medians (least to most) of {options.rounds} rounds of {STEPS} steps. The ranks are "
        "started in `fit`, also under ddp.",
    ]
    (RESULTS / "start.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _row(model: str, found: dict[str, list[dict[str, Any]]]) -> str:
    seconds = {name: [record["seconds"] for record in records] for name, records in found.items()}
    ddp = seconds["ddp"]
    ratio = [ours / theirs for ours, theirs in zip(seconds["topt"], ddp, strict=True)]
    more = [ours - theirs for ours, theirs in zip(seconds["topt_full, again"], ddp, strict=True)]
    ours = [record for name in SEEN[1:] for record in found[name]]
    plans = sorted({record["plan"] for record in ours if record["plan"]})
    losses = found["ddp"][0]["losses"]
    same = [record["losses"] == losses for records in found.values() for record in records]
    close = [
        math.isclose(a, b, rel_tol=1e-4)
        for record in ours
        for a, b in zip(record["losses"], losses, strict=True)
    ]
    equal = "equal, bit for bit" if all(same) else "equal to 1e-4" if all(close) else "differ"
    cells = [spread(values, 2) for values in (*seconds.values(), ratio, more)]
    return f"| {model} | {' | '.join(cells)} | {'; '.join(plans)} | {equal} |"


if __name__ == "__main__":
    main()
