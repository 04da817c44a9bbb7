"""Pipelines against DDP on nodes joined by 1 Gb/s, for models with large weights and small
activations.

    sudo python -m benchmarks.pipeline_lab         # 4 nodes of one rank; --rounds, --rate, --models

DDP, a schedule with a flush at every step, and one that never flushes and predicts weights. All
take the same samples between updates: forward, backward and fused AdamW. Rounds are interleaved;
each is a job of its own. Memory is that of one more job of each, in which the C library gives freed
memory back, as it does under a limit: that costs time. Stages are cut by measured seconds of
blocks; with the flush none has more than 30 % of the weights, to show what memory it takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError
from benchmarks.pipeline_lab_models import MODELS

NODES = 4
RUN = "benchmarks.pipeline_lab_run"
WARM_UP = 2 * NODES + 2  # a pipeline that never flushes is full then
PIPELINES = ("pipeline", "continuous")
Found = Mapping[str, Sequence[Mapping[str, Any]]]


def table_row(cells: Sequence[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def seconds_row(model: str, found: Found) -> str:
    """Return seconds per update under each plan, and how many times as long DDP and the schedule
    with flushes take.
    """
    seconds = {
        plan: [result["step_seconds"] for result in results] for plan, results in found.items()
    }

    def times(other: str, ours: str) -> str:
        return spread([a / b for a, b in zip(seconds[other], seconds[ours], strict=True)], 2)

    parameters = f"{found['ddp'][0]['parameters'] / 1e6:.1f} M"
    gains = times("ddp", "pipeline"), times("ddp", "continuous"), times("pipeline", "continuous")
    return table_row(
        [model, parameters, MODELS[model].samples, *map(spread, seconds.values()), *gains]
    )


def claim_row(model: str, found: Found) -> str:
    """Return the medians beside those of a paper."""

    def median(other: str) -> str:
        pairs = zip(found[other], found["continuous"], strict=True)
        return f"{statistics.median(a['step_seconds'] / b['step_seconds'] for a, b in pairs):.2f}"

    set_up = f"{NODES} nodes of one rank, {MODELS[model].samples} samples per update"
    return table_row([f"{model}, here", set_up, median("ddp"), f"{median('pipeline')} (1F1B)"])


def bytes_row(model: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return MiB sent per update and peak MiB of the rank with the most, and peaks as shares of
    DDP's.
    """
    sent = [max(result["sent_bytes"]) for result in found.values()]
    peaks = {plan: max(result["peak_bytes"]) for plan, result in found.items()}
    shares = (f"{peaks[plan] / peaks['ddp']:.2f}" for plan in PIPELINES)
    return table_row([model, *map(mib, sent), *map(mib, peaks.values()), *shares])


def main() -> None:
    """Measure and write the tables."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--schedule", default="1f1b", help="that flushes")
    parser.add_argument("--microbatches", type=int, default=8, help="of the schedule that flushes")
    parser.add_argument(
        "--continuous", default="continuous_overlapped", help="schedule that never flushes"
    )
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    flushing = {"steps": 6, "schedule": options.schedule, "microbatches": options.microbatches}
    continuous = {
        "steps": 16,
        "schedule": options.continuous,
        "prediction": options.prediction,
        "warmup": WARM_UP,
        "microbatches": 1,
        "share": 1,
    }
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"steps": 6},
        "pipeline": flushing,
        "continuous": continuous,
    }
    seconds, claims, sizes, cuts = [], [], [], []
    with Lab(NODES, rate=options.rate) as lab:
        for model in options.models:

            def measured(plan: str, what: str, model: str = model) -> dict[str, Any]:
                return lab.run_module(
                    RUN, ranks_per_node=1, model=model, plan=plan, measure=what, **plans[plan]
                )

            found: dict[str, list[dict[str, Any]]] = {plan: [] for plan in plans}
            for _ in range(options.rounds):
                for plan in plans:
                    found[plan].append(measured(plan, "seconds"))
            seconds.append(seconds_row(model, found))
            claims.append(claim_row(model, found))
            sizes.append(bytes_row(model, {plan: measured(plan, "memory") for plan in plans}))
            for plan in PIPELINES:
                stages = "; ".join(", ".join(stage) for stage in found[plan][-1]["stages"])
                cuts.append(f"- {model}, {plan}: {stages}")
            print(seconds[-1], sizes[-1], sep="\n", flush=True)
    names = f"ddp | {options.schedule} | continuous"
    lines = [
        f"# Pipelines against DDP on {NODES} nodes of one rank",
        "",
        f"`sudo python -m benchmarks.pipeline_lab --rounds {options.rounds} --rate {options.rate} "
        f"--microbatches {options.microbatches} --continuous {options.continuous} --models "
        f"{' '.join(options.models)}`",
        "",
        machine(),
        "",
        f"One thread per rank. With a flush: {options.schedule} of {options.microbatches} "
        "microbatches. Without:",
        f"{options.continuous} with {options.prediction}, minibatches undivided. Seconds per "
        "update, and how many times as",
        "long the others take: median (range) over jobs.",
        "",
        f"| model | parameters | samples | {names} | ddp / {options.schedule} | ddp / continuous | "
        f"{options.schedule} / continuous |",
        "|---" * 9 + "|",
        *seconds,
        "",
        "MiB sent per update and peak MiB, of the rank with the most:",
        "",
        f"| model | sent: {names} | peak: {names} | {options.schedule} / ddp | continuous / ddp |",
        "|---" * 9 + "|",
        *sizes,
        "",
        "Stages:",
        "",
        *cuts,
        "",
        "Beside what Chen et al. (SpecTrain, arXiv 1809.02839) report, at most of their models:",
        "",
        "| | set-up | times data parallelism | times the fastest synchronous way to cut the model "
        "|",
        "|---" * 4 + "|",
        table_row(
            ["SpecTrain", "4 GPUs of one machine", "15.77 (8.91 in a later version)", "2.18"]
        ),
        *claims,
    ]
    (RESULTS / "pipeline_lab.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
