"""Predicted and measured seconds and bytes of plans on 2 and 4 ranks, on one and two nodes.

    sudo python -m benchmarks.prediction.predictions  # --rate, --steps, --only PART, --techniques

For each setting a job plans a GPT under a memory limit that every plan keeps, and saves the
frontier. Under three limits between its smallest and its largest plan, jobs search and run what
they choose. Then come uniform plans by name, and those with compressed gradients from a search that
may compress. Plans on meshes with stages or slices are searched by the job that runs them. Their
batch gives all plans of a setting the same samples per step. Predictions are made before a
job's steps, from what was measured of kernels and links alone. Regret: how much slower the chosen
plan was than the fastest executed one that fits and that it could have been.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, JobFailed, machine, mib, run_gpt
from benchmarks.lab import Lab, LabError, end_on_signals
from benchmarks.prediction.saved_frontier import frontier_of_json
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_values import PRESETS

ROOM = "64GiB"  # kept by every plan; freed memory is given back, as under any limit
GIVEN = {"objective": "memory"}  # a plan that is given has no limit; it gives memory back too
SHARES = (0.1, 0.4, 1.0)  # of the way from the smallest plan to the largest
COMPRESSED = ("topk", "bf16")
SMALL = {"layers": 8, "hidden": 384, "heads": 6, "seq-len": 128, "batch-size": 4}
LARGE = {"layers": 5, "hidden": 768, "heads": 12, "seq-len": 128, "batch-size": 4}
# Plans that the job itself searches, by name: the mesh (data: of the ranks that are left), and what
# is given beside it.
SEARCHED: dict[str, dict[str, Any]] = {
    "tensor": {"mesh": {"data": 0, "tensor": 2}},
    "stages of slices": {"mesh": {"pipeline": 2, "data": 0, "tensor": 2}},
    "sequence": {"preset": "tensor_sequence"},
    "gpipe": {"mesh": {"pipeline": 2, "data": 0}, "schedule": "gpipe", "num_microbatches": 4},
    "1f1b": {"mesh": {"pipeline": 2, "data": 0}, "schedule": "1f1b", "num_microbatches": 4},
    "1f1b of 4": {"mesh": {"pipeline": 4, "data": 0}, "schedule": "1f1b", "num_microbatches": 8},
    "interleaved": {
        "mesh": {"pipeline": 2, "data": 0},
        "schedule": "interleaved",
        "num_microbatches": 4,
    },
    "zero bubble": {
        "mesh": {"pipeline": 2, "data": 0},
        "schedule": "zero_bubble",
        "num_microbatches": 4,
    },
    "continuous": {"mesh": {"pipeline": 2, "data": 0}, "schedule": "continuous"},
}
Job = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A model on nodes of so many ranks, and further techniques to run.

    They run beside what is chosen at the limits.
    """

    sizes: Mapping[str, int]
    nodes: int
    ranks: int
    techniques: Sequence[str]

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks


SETTINGS = {
    "2 ranks, small": Setting(
        SMALL, 1, 2, ("zero2", "zero3+recompute", "tensor", "1f1b", "continuous")
    ),
    "2 ranks, large": Setting(
        LARGE, 1, 2, ("zero1", "zero3", "ddp+recompute", "sequence", "zero bubble")
    ),
    "4 ranks, small": Setting(
        SMALL, 1, 4, ("zero1", "zero3", "tensor", "1f1b of 4", "stages of slices")
    ),
    "2 nodes of 1, small": Setting(
        SMALL, 2, 1, ("ddp", "ddp, topk", "ddp, bf16", "zero2", "gpipe", "interleaved")
    ),
    "2 nodes of 2, small": Setting(
        SMALL, 2, 2, ("hybrid", "hybrid_zero2", "ddp, topk", "tensor", "1f1b")
    ),
}


@dataclass(frozen=True)
class Row:
    """One plan: seconds and bytes, predicted and measured."""

    setting: str
    technique: str
    plan: str
    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Shares by which predictions of seconds and bytes are off."""
        seconds, size = (a / b - 1 for a, b in zip(self.predicted, self.measured, strict=True))
        return seconds, size

    def line(self) -> str:
        """The row of the table."""
        of_time, of_bytes = (f"{100 * error:+.1f} %" for error in self.errors)
        seconds = f"{self.predicted[0]:.3f} | {self.measured[0]:.3f} | {of_time}"
        sizes = f"{mib(self.predicted[1])} | {mib(self.measured[1])} | {of_bytes}"
        return f"| {self.setting} | {self.technique} | {self.plan} | {seconds} | {sizes} |"


def limits_of(frontier: PlanFrontier) -> list[float]:
    """The limits, which leave the smallest plan its margin."""
    sizes = sorted(point.peak_bytes for point in frontier.candidates)
    return [1.0501 * (sizes[0] + share * (sizes[-1] - sizes[0])) for share in SHARES]


def uniform_of(frontier: PlanFrontier, technique: str) -> PlanPoint:
    """Return the plan with the storage of a preset everywhere.

    Or ``ddp+recompute``, or with gradients compressed, ``ddp, topk``.
    """
    name, _, exchange = technique.partition(", ")
    name, _, again = name.partition("+")
    preset, found = PRESETS[name], []
    for point in frontier.uniform:
        plan, sent = point.plan, point.plan.gradient_exchange
        if (
            plan.schedule is not None
            or plan.mesh.tensor_axes
            or len(plan.mesh.axes) != 1 + preset.inner
        ):
            continue
        named = [block for block in plan.blocks if block.block]
        # the rest keeps ZeRO-2 beside ZeRO-3
        storages = {block.config.storage for block in named or plan.blocks}
        recomputes = any(block.config.recompute for block in plan.blocks)
        name_sent = "" if sent is None else sent.name
        if (storages, recomputes, name_sent) == (
            {preset.storage(plan.mesh)},
            bool(again),
            exchange,
        ):
            found.append(point)
    if not found:
        raise ValueError(f"the frontier has no uniform plan {technique!r}")
    return min(found, key=lambda point: point.step_seconds)


def searched_options(setting: Setting, technique: str) -> dict[str, Any]:
    """Return the options of the job that searches and runs `technique`.

    It has as many samples per step as all others.
    """
    wanted = dict(SEARCHED[technique])
    stale = wanted.get("schedule") == "continuous"
    options: dict[str, Any] = {"allow": json.dumps(["staleness"] if stale else [])}
    if (preset := wanted.pop("preset", None)) is not None:
        options |= GIVEN
        data, options["plan"] = 1, preset
    else:
        options["memory-limit"] = ROOM
        mesh = wanted["mesh"]
        data = setting.world_size // math.prod(size for size in mesh.values() if size)
        options["plan"] = json.dumps({**wanted, "mesh": {**mesh, "data": data}})
    options["batch-size"] = setting.sizes["batch-size"] * setting.world_size // data
    return options


def measure(
    name: str, setting: Setting, job: Job, techniques: Sequence[str]
) -> tuple[list[Row], list[float]]:
    """Rows of one setting, and the regret at each limit."""
    rows: list[Row] = []
    chosen: dict[float, Row] = {}

    def add(row: Row) -> Row:
        rows.append(row)
        print(row.line(), flush=True)
        return row

    with tempfile.TemporaryDirectory() as folder:
        frontiers = {"": searched_frontier(job, Path(folder))}
        for limit in limits_of(frontiers[""]):
            result = job(**{"memory-limit": f"{limit / 2**20:.2f}MiB"})
            chosen[limit] = add(searched_row(name, "searched", result))
        for technique in techniques:
            if technique in SEARCHED:
                add(searched_row(name, technique, job(**searched_options(setting, technique))))
                continue
            methods = json.dumps({"compression": COMPRESSED}) if ", " in technique else ""
            allowed = {"allow": methods} if methods else {}
            if methods not in frontiers:
                frontiers[methods] = searched_frontier(job, Path(folder), **allowed)
            point = uniform_of(frontiers[methods], technique)
            point.plan.save(file := Path(folder) / "plan.yaml")
            result = job(**{**GIVEN, "plan": file, **allowed})
            measured = result["step_seconds"], result["peak_bytes"]
            add(
                Row(
                    name,
                    technique,
                    point.plan.summary(),
                    (point.step_seconds, point.peak_bytes),
                    measured,
                )
            )
    return rows, [*regrets(chosen, rows)]


def searched_frontier(job: Job, folder: Path, **options: Any) -> PlanFrontier:
    """What a search finds that a limit does not bind."""
    saved = folder / "frontier.json"
    job(**{"memory-limit": ROOM, "frontier": saved, "steps": 2, "warmup": 1, **options})
    return frontier_of_json(saved.read_text())


def searched_row(name: str, technique: str, result: Mapping[str, Any]) -> Row:
    """The row of a plan that the job has searched."""
    predicted = result["plan"]["predicted"]
    of_plan = predicted["step_seconds"], predicted["peak_bytes"]
    return Row(
        name, technique, result["summary"], of_plan, (result["step_seconds"], result["peak_bytes"])
    )


def regrets(chosen: Mapping[float, Row], rows: Sequence[Row]) -> list[float]:
    """Return how much slower the chosen plan of each limit was than the fastest executed one.

    That one is predicted to fit, and computes the same in the same program: plans of a given mesh
    want one batch for several ranks.
    """
    others = (*SEARCHED, *(f"ddp, {name}" for name in COMPRESSED))
    same = [row for row in rows if row.technique not in others]
    found = []
    for limit, own in chosen.items():
        fitting = [row.measured[0] for row in same if 1.05 * row.predicted[1] <= limit]
        found.append(own.measured[0] / min(fitting) - 1)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    given = [*values]
    return [sum(other < value for other in given) + (given.count(value) - 1) / 2 for value in given]


def summary(rows: Sequence[Row], found_regrets: Sequence[float]) -> list[str]:
    """Lines with the figures of all rows."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    lines = [
        f"- {len(rows)} plans, {len({row.technique for row in rows} - {'searched'})} techniques "
        "beside what is chosen"
    ]
    for index, what in enumerate(("time", "bytes")):
        errors = [abs(row.errors[index]) for row in rows]
        median, p90 = np.quantile(errors, (0.5, 0.9))
        lines.append(
            f"- |error| of {what}: median {100 * median:.1f} %, 90th percentile {100 * p90:.1f} %"
        )
    ranks = {
        name: spearman([r.predicted[0] for r in own], [r.measured[0] for r in own])
        for name, own in by_setting.items()
        if len(own) > 2
    }
    lines.append(
        "- Spearman of times: " + ", ".join(f"{name}: {value:.2f}" for name, value in ranks.items())
    )
    lines.append(
        f"- regret at {len(found_regrets)} limits: median "
        f"{100 * statistics.median(found_regrets):.1f} %, largest {100 * max(found_regrets):.1f} %"
    )
    return lines


def job_of(setting: Setting, lab: Lab | None, steps: Mapping[str, int]) -> Job:
    """What runs one job of `setting`."""
    given = {**setting.sizes, **steps, "devices": setting.ranks}
    if lab is None:
        return lambda **more: run_gpt(**{**given, **more})
    given["num-nodes"] = setting.nodes
    return lambda **more: lab.run_gpt(ranks_per_node=setting.ranks, **{**given, **more})


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--only", default="", help="settings whose names have this in them; nothing is written"
    )
    parser.add_argument("--techniques", nargs="*", help="instead of those of a setting")
    options = parser.parse_args()
    measured = tempfile.TemporaryDirectory()  # what jobs measure: now, not in another moment
    os.environ["XDG_CACHE_HOME"] = measured.name
    rows: list[Row] = []
    found_regrets: list[float] = []
    start = time.perf_counter()
    for name, setting in SETTINGS.items():
        if options.only not in name:
            continue
        techniques = setting.techniques if options.techniques is None else options.techniques
        steps = {"steps": options.steps, "warmup": 3}
        if setting.nodes == 1:
            found = measure(name, setting, job_of(setting, None, steps), techniques)
        else:
            with Lab(setting.nodes, rate=options.rate) as lab:
                found = measure(name, setting, job_of(setting, lab, steps), techniques)
        rows += found[0]
        found_regrets += found[1]
    figures = summary(rows, found_regrets)
    print("\n".join(figures))
    if options.only or options.techniques is not None:
        return
    lines = [
        "# Plans predicted and measured on 2 and 4 ranks",
        "",
        f"`sudo python -m benchmarks.prediction.predictions --rate {options.rate} --steps "
        f"{options.steps}`, {(time.perf_counter() - start) / 60:.0f} minutes",
        "",
        machine(),
        "",
        *figures,
        "",
        "| setting | technique | plan | predicted s | measured s | error | predicted MiB | "
        "measured MiB | error |",
        "|---" * 9 + "|",
        *(row.line() for row in rows),
    ]
    (RESULTS / "predictions.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
    except JobFailed as failed:
        sys.exit(f"{failed}\n{failed.output[-4000:]}")
