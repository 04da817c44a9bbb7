"""Memory of pipelines that never flush on 4 ranks: copies of weights and minibatches in flight,
peaks, and 5,000 updates.

python -m benchmarks.continuous_memory            # --rules, --steps
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import RESULTS, machine, mib, run_script
from lightning_topt.prediction import make_prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, lag_of

RANKS = 4
RULES = ("none", "pipeoptim", "spectrain", "stash", "two_versions")


def rows(rule: str, schedule: str) -> list[str]:
    """Measure one rule, and return a row for each stage."""
    lag = CONTINUOUS_SCHEDULES[schedule]
    accumulate = (RANKS - 1) * lag if rule == "two_versions" else 1
    found = run_script(
        "continuous_memory_run.py", prediction=rule, schedule=schedule, accumulate=accumulate
    )
    lines = []
    for stage, rank in enumerate(found["ranks"]):
        sizes = {"stage": stage, "num_stages": RANKS, "lag_per_hop": lag, "accumulate": accumulate}
        copies = make_prediction(rule).weight_copies(**sizes)
        flying = lag_of(stage, num_ranks=RANKS, lag_per_hop=lag)
        cells: list[Any] = [
            schedule,
            rule,
            stage,
            copies,
            f"{rank['copied'] / rank['weights']:.2f}",
            flying,
        ]
        cells += [rank["in_flight"], mib(found["peak_bytes"][stage])]
        most = max(found["peak_bytes"])
        if found["peak_bytes"][stage] == most:
            cells += [
                mib(found["predicted_bytes"]),
                f"{100 * (found['predicted_bytes'] / most - 1):+.1f} %",
            ]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--steps", type=int, default=5000, help="of the long run")
    options = parser.parse_args()
    table = []
    for schedule in CONTINUOUS_SCHEDULES:
        for rule in options.rules:
            table += rows(rule, schedule)
            print(*table[-RANKS:], sep="\n", flush=True)
    sizes = {"layers": 4, "hidden": 48, "seq_len": 16, "steps": options.steps}
    long = run_script("continuous_memory_run.py", timeout=1500, prediction="spectrain", **sizes)
    grown = []
    for stage, rank in enumerate(long["ranks"]):
        (early, before, *others), (late, after, *others_later) = rank["noted"]
        cells = (stage, early, mib(before), *others, late, mib(after), *others_later)
        grown.append(f"| {' | '.join(map(str, cells))} |")
        print(grown[-1])
    lines = [
        f"# Memory of pipelines that never flush, on {RANKS} ranks",
        "",
        "`python -m benchmarks.continuous_memory`",
        "",
        machine(),
        "",
        "GPT of 8 layers of width 384, AdamW, 8 sequences of 64 bytes per minibatch. Copies: of "
        "the stage's trained weights,",
        "by the rule's formula and as found; minibatches in flight after an iteration, likewise. "
        "Peaks: of the rank, and what",
        "the plan predicts for the rank with the most.",
        "",
        "| schedule | rule | stage | copies | found | in flight | found | peak MiB | predicted MiB "
        "| error |",
        "|---" * 10 + "|",
        *table,
        "",
        "A small model for longer: MiB of the process, open files and threads.",
        "",
        "| stage | update | MiB | files | threads | update | MiB | files | threads |",
        "|---" * 9 + "|",
        *grown,
    ]
    (RESULTS / "continuous_memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
