"""What the agreement of ranks on their batches costs in each step.

    python -m benchmarks.robustness.uneven_overhead        # some 15 minutes on 2 cores

Compares the defaults, `uneven="join"` and exact evaluation, with `uneven=None` and
`pad_evaluation=True`, whose loops are Lightning's. Two ranks over gloo, one thread each, train a
small module under plan "ddp". A step computes for 20 or 200 ms; all ranks have equally many
batches. Both kinds of fits alternate in the same processes, in changing order. The median step of
each fit is taken, then the ratio within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.common import QUIET, RESULTS, ROOT, machine
from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.presence import Votes

KINDS = {
    "length": "all loaders have a length",
    "stream": "`IterableDataset` without a length",
    "limit": "endless `IterableDataset`, `limit_train_batches`",
}
STEPS = {20.0: 150, 200.0: 30}  # of a fit, by the milliseconds of one
TARGETS = {20.0: 0.005, 200.0: 0.001}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "as Lightning": {"uneven": None, "pad_evaluation": True},
}
WARM_UP = 8  # steps of a fit that do not count
SIZE = 128


class Rows(Dataset[Tensor]):
    """`count` rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(SIZE)


class Stream(IterableDataset[Tensor]):
    """`count` rows, without saying so."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(SIZE) for _ in range(self.count))


class Computes(L.LightningModule):
    """Multiplies matrices `times` times in each step; keeps the seconds from step to step."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.times, self.begun = times, list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.begun.append(perf_counter())
        compute(self.times)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def compute(times: int) -> None:
    value = torch.eye(SIZE)
    for _ in range(times):
        value = value @ value


def times_for(seconds: float) -> int:
    """Return how many products take so long on rank 0 while all ranks compute; alike on all."""
    dist.barrier()
    times = 64
    while True:
        begun = perf_counter()
        compute(times)
        taken = perf_counter() - begun
        if taken > seconds / 4:
            break
        times *= 2
    found = torch.tensor(round(times * seconds / taken))
    dist.broadcast(found, 0)
    return max(1, int(found))


def loader_of(kind: str, batches: int) -> tuple[Any, dict[str, Any]]:
    """Return the training data of one rank, and the Trainer's options for it."""
    if kind == "length":
        return DataLoader(Rows(2 * batches), batch_size=1), {}
    if kind == "stream":
        return DataLoader(Stream(batches), batch_size=1), {}
    return DataLoader(Stream(1_000_000), batch_size=1), {"limit_train_batches": batches}


def median_step(kind: str, options: dict[str, Any], *, times: int, batches: int) -> float:
    """Return the median seconds of the steps of one fit."""
    data, limits = loader_of(kind, batches)
    strategy: Any = AutoParallelStrategy(plan="ddp", **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **{**QUIET, **limits}
    )
    module = Computes(times)
    trainer.fit(module, data)
    assert len(module.begun) == batches, f"{len(module.begun)} steps instead of {batches}"
    begun = module.begun[WARM_UP:]
    return statistics.median(b - a for a, b in pairwise(begun))


def work(rounds: int, scale: float, out: str) -> None:
    """Measure on one of two ranks; the first writes the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for milliseconds, steps in STEPS.items():
        times = times_for(scale * milliseconds / 1e3)
        batches = WARM_UP + 2 + round(scale * steps)
        for kind in KINDS:
            seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
            for index in range(-1, rounds):
                for name in list(OPTIONS)[:: 1 if index % 2 else -1]:
                    step = median_step(kind, OPTIONS[name], times=times, batches=batches)
                    if index >= 0:  # the first round warms up
                        seconds[name].append(step)
            found[f"{kind} {milliseconds}"] = seconds
            if dist.get_rank() == 0:
                print(kind, milliseconds, seconds, flush=True)
    found["calls"] = {"seconds": vote_seconds(times_for(0.02))}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


def vote_seconds(times: int) -> list[float]:
    """Return the median seconds of the calls of a vote, to send it and to read it.

    The vote travels while this rank computes. Ranks come to the second call together, so that it
    has no wait for a slower one.
    """
    votes, sent, read = Votes(), list[float](), list[float]()
    for _ in range(100):
        begun = perf_counter()
        votes.send(1)
        sent.append(perf_counter() - begun)
        compute(times)
        dist.barrier()
        begun = perf_counter()
        votes.read()
        read.append(perf_counter() - begun)
    votes.close()
    return [statistics.median(sent), statistics.median(read)]


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the rows of the table."""
    rows = []
    for milliseconds in STEPS:
        for kind, words in KINDS.items():
            ours, theirs = found[f"{kind} {milliseconds}"].values()
            shares = sorted(a / b - 1 for a, b in zip(ours, theirs, strict=True))
            middle = statistics.median(shares)
            cells = [
                words,
                f"{1e3 * statistics.median(theirs):.2f} ms",
                f"{1e6 * middle * statistics.median(theirs):+.0f} µs",
                f"**{100 * middle:+.2f} %**",
                f"{100 * shares[0]:+.2f} to {100 * shares[-1]:+.2f} %",
                f"{100 * TARGETS[milliseconds]:.1f} %",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="of steps and their number")
    parser.add_argument("--results", type=Path, default=RESULTS / "uneven_overhead.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds, options.scale, options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks += ["--nproc-per-node=2", "-m", "benchmarks.robustness.uneven_overhead", "--worker"]
        ranks += [f"--rounds={options.rounds}", f"--scale={options.scale}", f"--out={out}"]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(ranks, cwd=ROOT, env=surroundings, check=True, timeout=7200)
        found = json.loads(out.read_text())
    lines = [
        "# What the agreement of ranks on their batches costs",
        "",
        machine(),
        "",
        f"Two ranks over gloo, {options.rounds} rounds of both options in changing order. The "
        "share of a round is the ratio of the median steps of its two fits, less one.",
        "",
        "| training data | step, as Lightning | default adds | share, median | rounds | target |",
        "|---|---|---|---|---|---|",
        *rows_of(found),
        "",
        "The calls themselves, where ranks come to them together, at steps of 20 ms: "
        f"{1e6 * found['calls']['seconds'][0]:.0f} µs to send a vote, "
        f"{1e6 * found['calls']['seconds'][1]:.0f} µs to read it.",
    ]
    print("\n".join(lines))
    options.results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
