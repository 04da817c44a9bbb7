"""Does training end where dense training ends when lost packets stay lost?

    sudo python -m benchmarks.exchange.bounded_loss_accuracy      # 95 minutes on 2 cores
    sudo python -m benchmarks.exchange.bounded_loss_accuracy --tasks digits  # 20 minutes
    python -m benchmarks.exchange.bounded_loss_accuracy --report  # the table of the runs so far

Equal steps, five seeds, real losses. Two nodes of one rank share a link of 1 Gb/s. Receivers
lose 1 or 3 % of all packets; the tolerance has the same size. The dense runs have a link that
loses nothing: TCP sends again what is lost, so only time would differ. Models and data are those of
`benchmarks.exchange.convergence`, `digits` also under SGD. Finished runs are kept in
benchmarks/results/bounded_loss_accuracy.json and not repeated. A method holds when its median over
the seeds is not worse than the worst dense seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.common import RESULTS, machine
from benchmarks.exchange.convergence import TASKS, Task, compared, train
from benchmarks.lab import Lab, LabError, end_on_signals
from examples.digits import DigitsCNN
from lightning_topt import BoundedLoss, CompressedDDPStrategy
from lightning_topt.plugins.monitors import ExchangeMonitor

RUNS = RESULTS / "bounded_loss_accuracy.json"
# Bytes of a packet. Small models have few of 1500 bytes, and of less than 100 for a shard of a
# tensor none may be lost at 1 %.
MTU = {"byte_lm": 256, "digits": 576, "digits_sgd": 576}


class DigitsSGD(DigitsCNN):
    """The net of `digits` under SGD with momentum instead of AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


CHOSEN = {
    "byte_lm": TASKS["byte_lm"],
    "digits": TASKS["digits"],
    "digits_sgd": replace(TASKS["digits"], model=lambda steps: DigitsSGD()),
}


@dataclass(frozen=True)
class Method:
    """What is given to `BoundedLoss`, None: DDP; and the share of packets that receivers lose."""

    options: dict[str, Any] | None
    loss: float


METHODS = {
    "dense": Method(None, 0.0),
    **{f"{100 * loss:g} %": Method({"tolerance": loss}, loss) for loss in (0.01, 0.03)},
    **{
        f"{100 * loss:g} %, no error feedback": Method(
            {"tolerance": loss, "error_feedback": False}, loss
        )
        for loss in (0.01, 0.03)
    },
}


def run(task: Task, method: Method, seed: int, out: Path) -> None:
    """Train once, as a rank of two nodes.

    Rank 0 writes its curve, the share lost, and whether ranks ended equal.
    """
    end, strategy = End(), DDPStrategy()
    callbacks: list[pl.Callback] = []
    if method.options is not None:
        strategy = CompressedDDPStrategy(BoundedLoss(**method.options))
        # so that statistics at the end are of all steps
        callbacks.append(ExchangeMonitor(every_n_steps=10**9))
    trainer, curve = train(
        task,
        strategy,
        seed=seed,
        validations=4,
        devices=1,
        num_nodes=2,
        callbacks=[*callbacks, end],
    )
    if trainer.is_global_zero:
        out.write_text(json.dumps({"curve": curve.points, **end.found}))


class End(pl.Callback):
    """The share of gradients lost in a run, and whether all ranks ended bit for bit equal."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sums = torch.stack(
            [p.detach().view(torch.int32).long().sum() for p in pl_module.parameters()]
        )
        everyone = trainer.strategy.all_gather(sums)
        self.found = {"equal": bool((everyone == everyone[0]).all())}
        if isinstance(trainer.strategy, CompressedDDPStrategy):
            exchanged = trainer.strategy.exchange_statistics()
            assert exchanged is not None
            self.found["lost_share"] = exchanged.details["lost_share"]


def measure(tasks: Sequence[str], methods: Sequence[str], seeds: int) -> None:
    """Make every run that is not kept yet, seed by seed."""
    for seed in range(seeds):
        for task in tasks:
            for name in methods:
                runs, key = load(), f"{task}|{name}|{seed}"
                if key in runs:
                    continue
                with Lab(2, rate="1gbit", loss=METHODS[name].loss, mtu=MTU[task]) as lab:
                    found = lab.run_module(
                        "benchmarks.exchange.bounded_loss_accuracy",
                        ranks_per_node=1,
                        timeout=1200,
                        task=task,
                        method=name,
                        seed=seed,
                    )
                RUNS.write_text(json.dumps(runs | {key: found}) + "\n")
                print(key, found["curve"][-1], found.get("lost_share"), flush=True)


def load() -> dict[str, Any]:
    runs: dict[str, Any] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return runs


def report() -> str:
    """Return the table of all runs so far."""
    runs = load()
    lines = [
        "# Training whose lost packets stay lost",
        "",
        machine(),
        "",
        "`python -m benchmarks.exchange.bounded_loss_accuracy`",
        "",
    ]
    lines += [
        "Two nodes of one rank, 1 Gb/s, receivers lose that share of all packets and the tolerance "
        "is as large; equal steps.",
        f"Packets have {' and '.join(f'{size} bytes ({task})' for task, size in MTU.items())}, "
        "since the models are small.",
        "Final validation metric over the seeds; lost: the share of gradients that did not arrive "
        "in their step, mean of runs.",
        "",
        "| task | method | seeds | median | worst | best | lost | equal on all ranks | within the "
        "dense spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in CHOSEN:
        dense = [
            run["curve"][-1][1] for key, run in runs.items() if key.startswith(f"{task}|dense|")
        ]
        for name in METHODS:
            found = [run for key, run in runs.items() if key.startswith(f"{task}|{name}|")]
            if not found:
                continue
            finals = [run["curve"][-1][1] for run in found]
            numbers, within = compared(
                CHOSEN[task], finals, dense=None if name == "dense" else dense
            )
            lost = (
                "-"
                if name == "dense"
                else f"{100 * statistics.mean(run['lost_share'] for run in found):.2f} %"
            )
            equal = "yes" if all(run["equal"] for run in found) else "**no**"
            lines.append(f"| {task} | {name} | {numbers} | {lost} | {equal} | {within} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=CHOSEN, default=list(CHOSEN))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--report", action="store_true")
    for name in ("task", "method", "seed", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run(CHOSEN[options.task], METHODS[options.method], int(options.seed), Path(options.out))
        return
    end_on_signals()
    try:
        if not options.report:
            measure(options.tasks, options.methods, options.seeds)
    except LabError as error:
        sys.exit(f"bounded_loss_accuracy: {error}")
    text = report()
    RUNS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
