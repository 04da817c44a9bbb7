"""Seconds of training until a validation loss is reached: pipelines that never flush, 1F1B and DDP
on nodes joined by 1 Gb/s.

    sudo python -m benchmarks.time_to_quality  # 4 nodes of a rank; --rounds, --rate, --predictions

An LSTM on bytes of source code under AdamW: the same weights at first, the same samples in the same
order, the same learning rate. Each training is a fit of a Trainer in a job of its own, one of each
in turn; validations are not counted. The loss to be reached is the highest of the lowest losses of
all trainings, so that all reach it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import RESULTS, machine, spread
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError

NODES = 4
RUN = "benchmarks.time_to_quality_run"
Points = Sequence[Sequence[float]]  # updates, seconds, loss


def reached(points: Points, loss: float) -> Sequence[float]:
    """The first point that is not above `loss`."""
    return next(point for point in points if point[2] <= loss)


def draw(found: Mapping[str, Sequence[Points]], target: float) -> None:
    """Draw the loss over seconds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, several) in enumerate(found.items()):
        for number, points in enumerate(several):
            _, seconds, losses = zip(*points, strict=True)
            axes.plot(seconds, losses, color=f"C{index}", alpha=0.7, label=None if number else name)
    axes.axhline(target, color="gray", linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_xscale("log")
    axes.legend()
    figure.savefig(RESULTS / "time_to_quality.png", dpi=120)


def report(
    found: Mapping[str, Sequence[Points]], parameters: int, options: argparse.Namespace
) -> None:
    """Draw and write the table of the rounds so far."""
    target = max(
        min(point[2] for point in points) for several in found.values() for points in several
    )
    rows = []
    for name, several in found.items():
        seconds = [reached(points, target)[1] for points in several]
        gains = [
            reached(other, target)[1] / mine
            for other, mine in zip(found["ddp"], seconds, strict=True)
        ]
        updates = [reached(points, target)[0] for points in several]
        each = [points[-1][1] / points[-1][0] for points in several]
        losses = [min(point[2] for point in points) for points in several]
        cells = (
            spread(each),
            spread(updates, 0),
            spread(seconds, 1),
            spread(gains, 2),
            spread(losses, 3),
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    draw(found, target)
    (RESULTS / "time_to_quality.json").write_text(json.dumps(found))
    lines = [
        f"# Seconds until a validation loss on {NODES} nodes of one rank",
        "",
        f"`sudo python -m benchmarks.time_to_quality --rounds {len(found['ddp'])} --rate "
        f"{options.rate} --steps {options.steps} --width {options.width} --microbatches "
        f"{options.microbatches} --predictions {' '.join(options.predictions)}`",
        "",
        machine(),
        "",
        f"LSTM of {parameters / 1e6:.1f} M parameters, AdamW (fused), 32 sequences of 16 bytes per "
        f"update, {options.steps}",
        f"updates; validation loss to be reached: {target:.3f}. Median (range) over seeds, one "
        "training of each plan and seed.",
        "",
        "| plan | seconds per update | updates | seconds | ddp's seconds / these | lowest loss |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "![curves](time_to_quality.png)",
    ]
    (RESULTS / "time_to_quality.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure, and report after each round."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--more", action="store_true", help="go on from the rounds that are in the results"
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=8, help="of 1F1B")
    parser.add_argument("--predictions", nargs="+", default=["spectrain", "multistep"])
    options = parser.parse_args()
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"plan": "ddp"},
        "1f1b": {"plan": "1f1b", "microbatches": options.microbatches},
    }
    for rule in options.predictions:
        plans[f"continuous, {rule}"] = {"plan": "continuous", "prediction": rule}
    kept = json.loads((RESULTS / "time_to_quality.json").read_text()) if options.more else {}
    found: dict[str, list[Points]] = {name: kept.get(name, []) for name in plans}
    if any(points[-1][0] != options.steps for several in found.values() for points in several):
        parser.error(
            f"the results are of trainings with another number of steps than {options.steps}"
        )
    parameters, done = 0, min(map(len, found.values()))
    with Lab(NODES, rate=options.rate) as lab:
        for seed in range(done, options.rounds):
            for name, given in plans.items():
                sizes = {"steps": options.steps, "width": options.width, "seed": seed}
                result = lab.run_module(RUN, ranks_per_node=1, timeout=1500, **given, **sizes)
                found[name].append(result["points"])
                parameters = result["parameters"]
                print(name, seed, result["points"][-1], flush=True)
            report(found, parameters, options)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
