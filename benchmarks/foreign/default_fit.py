"""What `strategy="topt"` costs and brings where nothing else is said, against Lightning's `ddp`.

    python -m benchmarks.foreign.default_fit     # about 35 minutes on 2 cores

Each job is `python fit.py` with two CPU ranks of one thread, as a user starts it; rounds are
interleaved.

    whole process   100 steps of a small CNN, from the start of the process to its end
    later steps     the same CNN: steps from the 101st on, median of 200
    sharing         an MLP of 11 M with AdamW or Muon: the last 60 of 160 steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine, spread

FIT = """
import json, os, sys, time
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

kind, optimizer, strategy, steps, out = sys.argv[1:]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        if kind == "cnn":
            self.net = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
            )
        else:
            sizes = [1024, 1792, 1792, 1792, 1792, 10]
            layers = [nn.Sequential(nn.Linear(a, b, bias=False), nn.ReLU())
                      for a, b in zip(sizes, sizes[1:])]
            self.net = nn.Sequential(*layers)
        self.begun, self.seconds, self.losses = 0.0, [], []

    def training_step(self, batch):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_start(self, *args):
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *args):
        self.seconds.append(time.perf_counter() - self.begun)

    def configure_optimizers(self):
        if optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-4)
        return torch.optim.Muon(self.parameters(), lr=1e-3)


L.seed_everything(0, verbose=False)
shape, samples = ((3, 32, 32), 16) if kind == "cnn" else ((1024,), 16)
length = 2 * samples * int(steps)
index = torch.arange(2048)
data = torch.utils.data.TensorDataset(torch.randn(2048, *shape), index % 10)
data = torch.utils.data.Subset(data, [i % 2048 for i in range(length)])
model = Net()
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=int(steps), logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=samples))
if trainer.is_global_zero:
    plan = getattr(trainer.strategy, "parallel_plan", None)
    json.dump({
        "steps": model.seconds, "losses": [float(loss) for loss in model.losses],
        "plan": None if plan is None else plan.summary(),
    }, open(out, "w"))
"""
PEERS = "ddp", "topt"
SHARED = "adamw", "muon"


def job(kind: str, optimizer: str, strategy: str, steps: int) -> dict[str, Any]:
    """Run one fit; return its record, with the seconds of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "fit.py", Path(folder) / "record.json"
        header = "import lightning_topt\n" if strategy == "topt" else ""
        script.write_text(header + FIT)
        command = [sys.executable, str(script), kind, optimizer, strategy, str(steps), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        begun = time.perf_counter()
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
        record: dict[str, Any] = json.loads(out.read_text())
        return {**record, "seconds": seconds}


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cnn", *SHARED))
    options = parser.parse_args()
    lines = ['# What `strategy="topt"` costs and brings by default', "", machine(), ""]
    if options.only in (None, "cnn"):
        lines += _of_cnn(options.rounds)
    for optimizer in SHARED:
        if options.only in (None, optimizer):
            lines.append(_of_mlp(optimizer, options.rounds))
    lines += ["", f"Medians (least to most) of {options.rounds} interleaved rounds, two ranks."]
    if options.only is None:
        (RESULTS / "default_fit.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _of_cnn(rounds: int) -> list[str]:
    whole: dict[str, list[float]] = {name: [] for name in PEERS}
    later: dict[str, list[float]] = {name: [] for name in PEERS}
    equal = True
    for _ in range(rounds):
        losses = []
        for name in PEERS:
            whole[name].append(job("cnn", "adamw", name, 100)["seconds"])
        for name in PEERS:
            record = job("cnn", "adamw", name, 300)
            later[name].append(statistics.median(record["steps"][100:]))
            losses.append(record["losses"])
        equal = equal and losses[0] == losses[1]
        print("cnn", {n: (whole[n][-1], later[n][-1]) for n in PEERS}, flush=True)
    more = [a - b for a, b in zip(whole["topt"], whole["ddp"], strict=True)]
    milliseconds = {name: [1e3 * value for value in later[name]] for name in PEERS}
    return [
        f"- Whole process, 100 steps of a small CNN: ddp {spread(whole['ddp'], 2)} s, topt "
        f"{spread(whole['topt'], 2)} s; {spread(more, 2)} s more.",
        f"- Steps from the 101st on: ddp {spread(milliseconds['ddp'], 2)} ms, topt "
        f"{spread(milliseconds['topt'], 2)} ms; topt / ddp "
        f"{spread(ratios(later['topt'], later['ddp']), 3)}. Losses "
        f"{'equal, bit for bit' if equal else 'differ'}.",
    ]


def _of_mlp(optimizer: str, rounds: int) -> str:
    found: dict[str, list[float]] = {name: [] for name in PEERS}
    equal, plans = True, set()
    for _ in range(rounds):
        losses = []
        for name in PEERS:
            record = job("mlp", optimizer, name, 160)
            found[name].append(1e3 * statistics.median(record["steps"][100:]))
            losses.append(record["losses"])
            if name == "topt":
                plans.add(record["plan"])
        equal = equal and losses[0] == losses[1]
        print(optimizer, {name: values[-1] for name, values in found.items()}, plans, flush=True)
    gain = ratios(found["ddp"], found["topt"])
    return (
        f"- MLP of 11 M with {optimizer}: ddp {spread(found['ddp'], 1)} ms, topt "
        f"{spread(found['topt'], 1)} ms; ddp / topt {spread(gain, 2)} "
        f"({'; '.join(map(str, sorted(plans, key=str)))}). Losses "
        f"{'equal, bit for bit' if equal else 'differ'}."
    )


if __name__ == "__main__":
    main()
