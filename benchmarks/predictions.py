"""Predicted and measured seconds and bytes of plans on 2 and 4 ranks, in one node and in two joined by a link.

    sudo python -m benchmarks.predictions            # about 20 minutes on 4 cores; --rate, --steps

For each setting a job plans a GPT under a memory limit that every plan keeps, and saves the frontier. From it come, for three
limits between the smallest and the largest plan, the plan that `choose` takes and the one that is predicted to be fastest;
each runs in a job of its own. Regret: how much slower the chosen plan was than the fastest of all executed ones that fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, mib, run_gpt
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt.plan.choose import PlanFrontier, PlanPoint, choose

ROOM = "64GiB"  # kept by every plan; freed memory is given back, as under any limit
SHARES = (0.1, 0.4, 1.0)  # of the way from the smallest plan to the largest
SMALL = {"layers": 8, "hidden": 384, "heads": 6, "seq-len": 128, "batch-size": 4}
LARGE = {"layers": 5, "hidden": 768, "heads": 12, "seq-len": 128, "batch-size": 4}
Job = Callable[..., dict[str, Any]]


def plans_of(frontier: PlanFrontier) -> dict[float, tuple[PlanPoint, PlanPoint]]:
    """The chosen and the fastest plan for each limit."""
    sizes = sorted(point.peak_bytes for point in frontier.candidates)
    found = {}
    for share in SHARES:
        limit = 1.0501 * (sizes[0] + share * (sizes[-1] - sizes[0]))
        fitting = [point for point in frontier.candidates if 1.05 * point.peak_bytes <= limit]
        fastest = min(fitting, key=lambda point: (point.step_seconds, point.peak_bytes))
        found[limit] = choose(frontier.candidates, memory_limit=limit), fastest
    return found


def measure(setting: str, job: Job) -> tuple[list[dict[str, Any]], list[float]]:
    """Rows of one setting, and the regret at each limit."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "frontier.json"
        job(**{"memory-limit": ROOM, "frontier": saved, "steps": 2, "warmup": 1})
        frontier = PlanFrontier.from_json(saved.read_text())
        wanted = plans_of(frontier)
        rows: dict[str, dict[str, Any]] = {}
        for point in (point for pair in wanted.values() for point in pair):
            text = point.plan.to_dict()
            key = json.dumps(text["stages"]) + json.dumps(text["mesh"])
            if key not in rows:
                file = Path(folder) / f"plan{len(rows)}.yaml"
                point.plan.save(file)
                result = job(**{"memory-limit": ROOM, "plan": file})
                rows[key] = {**result, "setting": setting, "plan": point.plan.summary(), "point": point}
                print(line(rows[key]), flush=True)
    regrets = []
    for limit, (chosen, _) in wanted.items():
        executed = [row for row in rows.values() if 1.05 * row["point"].peak_bytes <= limit]
        own = next(row for row in executed if row["plan"] == chosen.plan.summary())
        regrets.append(own["step_seconds"] / min(row["step_seconds"] for row in executed) - 1)
    return [*rows.values()], regrets


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    point: PlanPoint = row["point"]
    errors = point.step_seconds / row["step_seconds"] - 1, point.peak_bytes / row["peak_bytes"] - 1
    return (
        f"| {row['setting']} | {row['plan']} | {point.step_seconds:.3f} | {row['step_seconds']:.3f} | {100 * errors[0]:+.1f} % "
        f"| {mib(point.peak_bytes)} | {mib(row['peak_bytes'])} | {100 * errors[1]:+.1f} % |"
    )


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    steps = {"steps": options.steps, "warmup": 3}
    rows: list[dict[str, Any]] = []
    regrets: list[float] = []
    settings: dict[str, tuple[Lab | None, int, dict[str, int]]] = {
        "2 ranks, small": (None, 2, SMALL),
        "2 ranks, large": (None, 2, LARGE),
        "4 ranks, small": (None, 4, SMALL),
        "2 nodes of 1, small": (Lab(2, rate=options.rate), 1, SMALL),
        "2 nodes of 2, small": (Lab(2, rate=options.rate), 2, SMALL),
    }
    for name, (lab, devices, sizes) in settings.items():
        given = {**sizes, **steps, "devices": devices}
        if lab is None:
            found = measure(name, lambda given=given, **more: run_gpt(**{**given, **more}))
        else:
            with lab:
                found = measure(
                    name,
                    lambda lab=lab, given=given, **more: lab.run_gpt(
                        ranks_per_node=given["devices"], **{**given, "num-nodes": 2, **more}
                    ),
                )
        rows += found[0]
        regrets += found[1]
    errors = [
        (abs(row["point"].step_seconds / row["step_seconds"] - 1), abs(row["point"].peak_bytes / row["peak_bytes"] - 1))
        for row in rows
    ]
    time_error, memory_error = (100 * statistics.median(part) for part in zip(*errors, strict=True))
    lines = [
        "# Plans predicted and measured on 2 and 4 ranks",
        "",
        f"`sudo python -m benchmarks.predictions --rate {options.rate} --steps {options.steps}`",
        "",
        machine(),
        "",
        f"- {len(rows)} plans: median |error| of time {time_error:.1f} %, of bytes {memory_error:.1f} %",
        f"- regret at {len(regrets)} limits: median {100 * statistics.median(regrets):.1f} %, "
        f"largest {100 * max(regrets):.1f} %",
        "",
        "| setting | plan | predicted s | measured s | error | predicted MiB | measured MiB | error |",
        "|---|---|---|---|---|---|---|---|",
        *map(line, rows),
    ]
    (RESULTS / "predictions.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[6:9]))


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
