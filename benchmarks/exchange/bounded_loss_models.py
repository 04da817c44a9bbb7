"""Training steps of two models where buffers are shallow: bounded loss, DDP, other methods.

    sudo python -m benchmarks.exchange.bounded_loss_models --rounds 5 --out models.md

Forward, backward and SGD of a GPT and of a convolutional net of 25 M parameters with little to
compute (`benchmarks.exchange.shared`). DDP runs with each method's hook, so that the exchange
overlaps the backward pass as it does for users. Nodes of one rank, links of 1 Gb/s; methods
alternate in every round. Seconds are medians over rounds of the slowest rank's median step. Needs
root (see `benchmarks.lab`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.exchange.shared import ALONE, DENSE, LOSSY
from benchmarks.lab import Lab, end_on_signals

METHODS = (ALONE, DENSE, *LOSSY, "ours, bf16", "ours, flat top-k, 1 %")


def measure(model: str, nodes: int, queue: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a job of `network` found for one model on one network."""
    deep = queue == "deep"
    burst, limit = ("256kb", None) if deep else ("16kb", queue)
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(nodes, rate="1gbit", burst=burst, queue=limit) as lab,
    ):
        out = Path(folder) / "result.json"
        command = [
            "-m",
            "benchmarks.exchange.network",
            "--worker",
            "--steady",
            "--out",
            str(out),
            "--model",
            model,
        ]
        counts = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        lab.run([*command, *counts, "--methods", *METHODS], ranks_per_node=1, timeout=900)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def rows(model: str, nodes: int, queue: str, result: dict[str, Any]) -> list[str]:
    """Return the table's rows of one network."""
    dense, lines = statistics.median(result["seconds"][DENSE]), []
    for name in METHODS:
        seconds = result["seconds"][name]
        middle = statistics.median(seconds)
        equal = "-" if name == ALONE else "yes" if result["equal"][name] else "**no**"
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        lines.append(
            f"| {model} | {nodes} | {queue} | {name} | {middle:.3f} | {spread} | "
            f"{dense / middle:.2f} | {equal} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt", "cnn"], choices=["gpt", "cnn"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--queues", nargs="+", default=["32kb"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_on_signals()
    lines = [__doc__ or "", machine(), "", f"`{vars(options)}`", ""]
    lines += [
        "| model | nodes | queue | method | s per step | spread | times DDP | ranks equal |",
        "|" + "---|" * 8,
    ]
    for model in options.models:
        for nodes in options.nodes:
            for queue in options.queues:
                lines += rows(model, nodes, queue, measure(model, nodes, queue, options))
                print("\n".join(lines[-len(METHODS) :]), flush=True)
                if options.out:
                    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
