"""Pipelines against DDP on nodes joined by 1 Gb/s, for models with large weights and small activations.

    sudo python -m benchmarks.pipeline_lab            # 4 nodes of one rank; --rounds, --rate, --models

Both take the same samples in a step, forward, backward and AdamW. Rounds are interleaved; each is a job of its own. Stages are
cut by measured seconds of blocks, with at most 30 % of the weights in each.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.lab import Lab, LabError, end_on_signals
from benchmarks.pipeline_lab_models import MODELS

NODES = 4
RUN = "benchmarks.pipeline_lab_run"


def row(model: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the row of one model."""
    seconds = {plan: [result["step_seconds"] for result in results] for plan, results in found.items()}
    ratios = [ddp / ours for ddp, ours in zip(seconds["ddp"], seconds["pipeline"], strict=True)]
    peaks = {plan: max(max(result["peak_bytes"]) for result in results) for plan, results in found.items()}
    sent = {plan: max(results[-1]["sent_bytes"]) for plan, results in found.items()}
    parameters = found["ddp"][0]["parameters"] / 1e6
    cells = [
        model, f"{parameters:.1f} M", MODELS[model].samples,
        spread(seconds["ddp"]), spread(seconds["pipeline"]), spread(ratios, 2),
        mib(sent["ddp"]), mib(sent["pipeline"]), mib(peaks["ddp"]), mib(peaks["pipeline"]),
        f"{peaks['pipeline'] / peaks['ddp']:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    rows, cuts = [], []
    with Lab(NODES, rate=options.rate) as lab:
        for model in options.models:
            found: dict[str, list[dict[str, Any]]] = {"ddp": [], "pipeline": []}
            given = {"model": model, "schedule": options.schedule, "microbatches": options.microbatches}
            for _ in range(options.rounds):
                for plan, results in found.items():
                    results.append(lab.run_module(RUN, ranks_per_node=1, plan=plan, **given))
            rows.append(row(model, found))
            cuts.append(f"- {model}: {'; '.join(', '.join(stage) for stage in found['pipeline'][-1]['stages'])}")
            print(rows[-1], flush=True)
    lines = [
        f"# Pipelines against DDP on {NODES} nodes of one rank",
        "",
        f"`sudo python -m benchmarks.pipeline_lab --rounds {options.rounds} --rate {options.rate}`",
        "",
        machine(),
        "",
        f"Schedule {options.schedule} of {options.microbatches} microbatches, one thread per rank. Seconds per step: median",
        "(range) over jobs. MiB sent per step and peak MiB: of the rank with the most.",
        "",
        "| model | parameters | samples | ddp s | pipeline s | ddp / pipeline | ddp MiB sent | pipeline MiB sent "
        "| ddp peak MiB | pipeline peak MiB | pipeline / ddp |",
        "|---" * 11 + "|",
        *rows,
        "",
        "Stages:",
        "",
        *cuts,
    ]
    (RESULTS / "pipeline_lab.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
