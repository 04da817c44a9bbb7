"""Is the time to a loss, by which plans are chosen, right on two nodes?

    sudo python -m benchmarks.exchange.time_to_loss --curves   # fits until the loss; nothing timed
    sudo python -m benchmarks.exchange.time_to_loss --seconds  # quiet machine: predict and time
    python -m benchmarks.exchange.time_to_loss --report        # the page from what there is so far
    sudo python -m benchmarks.exchange.time_to_loss --smoke    # a few steps of all; not kept

Two nodes of two ranks in the lab, joined by 1 Gb/s or 200 Mb/s. Predicted: the dense run's steps to
its lowest loss, times the factor that `lightning_topt/plan/step_factors.json` has for a way of
training, times the package's seconds per step of the plan on a cluster that was calibrated in the
lab. Measured: the steps that a fit needed until that loss, times measured seconds per step. How
the loss falls with the steps does not depend on the link, so each way is trained once, on links
without a limit, where other programs may run beside. Two trainings to the loss in the lab compare
with that product. Results are kept one by one in benchmarks/results/time_to_loss.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, machine
from benchmarks.exchange.loss_ways import (
    DENSE,
    FILLING,
    LOCAL,
    MODELS,
    NODES,
    SEQ_LEN,
    SEQUENCES,
    SMOOTH,
    VALIDATION,
    WARMUP,
    WAYS,
    WINDOW,
    Way,
    smooth,
    window_of,
)
from benchmarks.exchange.paired_runs import steps_to
from benchmarks.exchange.step_factors import LENGTHS, RUNS, factors, kendall_tau
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt.communication.exchange_method import read_method
from lightning_topt.plan.step_factors import FactorRow, StepTable, nearest_in_length, pooled
from lightning_topt.weight_prediction import Prediction, make_prediction

FILE = RESULTS / "time_to_loss.json"
RANK = "benchmarks.exchange.loss_ways"  # of a job in the lab
LINKS = ("1gbit", "200mbit")
STEPS, LONGEST, EVERY = 300, 750, 25
# trained to the loss in the lab, and over which links
FULL = {DENSE: LINKS[:1], "2 x (2 stages, two versions), top-k": LINKS[:1]}
WINDOWS, LAST = 4, 5  # windows of a fit that is timed, and last steps, in which pipelines drain


# ---- what is measured ----------------------------------------------------------------------------


def rate_of(model: str, way: Way) -> float:
    """Return the learning rate of the model, times what the table's runs found best for `way`.

    That is the share of the dense run's best rate there; of several parts the smaller. Ways that
    the table's runs lack have the dense run's.
    """
    runs = json.loads(RUNS.read_text())
    name = next(key.split("|")[0] for key in runs)
    dense = runs[f"{name}|{DENSE}|1"]
    keys = [key for key in (f"{name}|{part}" for part in way.keys) if key in runs]
    steps = min(LENGTHS, key=lambda length: abs(math.log(length / STEPS)))
    best = factors(dense, dense, steps)[0]
    own = [factors(runs[key], dense, steps)[0] for key in keys]
    return MODELS[model].rate * min(own, default=best) / best


def load() -> dict[str, Any]:
    found: dict[str, Any] = {"curves": {}, "predicted": {}, "seconds": {}, "full": {}}
    return found | (json.loads(FILE.read_text()) if FILE.exists() else {})


def keep(part: str, key: str, value: Any) -> None:
    """Keep one result."""
    found = load()
    found[part][key] = value
    FILE.write_text(json.dumps(found) + "\n")


def fit_in(
    link: str | None, model: str, way: str, *, steps: int, loss: float = -math.inf, every: int = 0
) -> dict[str, Any]:
    """Return what a fit in a lab of its own gives; see `fit_here`."""
    with Lab(NODES, rate=link) as lab:
        return lab.run_module(
            RANK,
            ranks_per_node=LOCAL,
            timeout=3600,
            model=model,
            way=way,
            rate=rate_of(model, WAYS[way]),
            steps=steps,
            loss=loss,
            every=every,
        )


def every_of(way: Way) -> int:
    """Return the steps between validations, before which ranks that train alone meet."""
    return max(EVERY, way.period)


def goal_of(curves: Mapping[str, Any], model: str) -> tuple[float, float] | None:
    """Return the dense run's lowest smooth loss and its step; None before there is such a run."""
    run = curves.get(f"{model}|{DENSE}")
    if run is None:
        return None
    loss, step = min((loss, step) for step, loss in smooth(run["points"]))
    return loss, step


def train(models: Sequence[str], names: Sequence[str], most: int) -> None:
    """Make fits that are not kept yet, at most so many."""
    for model in models:
        for name in names:
            kept, key, way = load()["curves"], f"{model}|{name}", WAYS[name]
            goal = goal_of(kept, model)
            if key in kept or most <= 0 or (goal is None and name != DENSE):
                continue
            most -= 1
            # the dense run says how far the others have to go
            loss, steps = (-math.inf, STEPS) if goal is None else (goal[0], LONGEST)
            result = fit_in(None, model, name, steps=steps, loss=loss, every=every_of(way))
            keep("curves", key, result)
            print(key, result["points"][-1], flush=True)


def measure(models: Sequence[str], names: Sequence[str]) -> None:
    """Predict and time what is not kept yet, over every link; then trainings to the loss."""
    for link in LINKS:
        if link not in load()["predicted"]:
            with Lab(NODES, rate=link) as lab:
                keep(
                    "predicted",
                    link,
                    lab.run_module(RANK, "--predict", ranks_per_node=LOCAL, timeout=600),
                )
        for model in models:
            for name in names:
                key = f"{link}|{model}|{name}"
                if key not in load()["seconds"]:
                    result = fit_in(link, model, name, steps=timed_steps(WAYS[name]))
                    keep("seconds", key, result["windows"])
                    print(key, result["windows"], flush=True)
    for model in models:
        goal = goal_of(load()["curves"], model)
        for name, link in [(n, link) for n, links in FULL.items() if n in names for link in links]:
            key = f"{link}|{model}|{name}"
            if goal is not None and key not in load()["full"]:
                result = fit_in(
                    link, model, name, steps=LONGEST, loss=goal[0], every=every_of(WAYS[name])
                )
                keep("full", key, result["points"])
                print(key, result["points"][-1], flush=True)


def timed_steps(way: Way) -> int:
    """Return the steps of a fit that is timed."""
    return FILLING + max(WINDOW * WINDOWS, window_of(way)) + LAST


def smoke(names: Sequence[str]) -> None:
    """A few steps of every way, and a prediction; raises where one fails."""
    with Lab(NODES, rate=LINKS[0]) as lab:
        print(lab.run_module(RANK, "--predict", ranks_per_node=LOCAL, timeout=600)["seconds"])
    for model in MODELS:
        for name in names:
            steps = FILLING + WINDOW + LAST
            result = fit_in(LINKS[0], model, name, steps=steps, every=FILLING)
            print(model, name, result, flush=True)


# ---- the page ------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A way over a link: steps, seconds per step and their product, predicted and measured.

    `notes`: what the factor does not rest on; `reached`: within `LONGEST` steps.
    """

    way: str
    factor: float
    predicted: float
    steps: float
    measured: float
    reached: bool
    notes: tuple[str, ...]
    goal: float

    @property
    def predicted_time(self) -> float:
        return self.goal * self.factor * self.predicted

    @property
    def measured_time(self) -> float:
        return self.steps * self.measured


def factor_of(way: Way, rows: Sequence[FactorRow]) -> tuple[float, tuple[str, ...]] | None:
    """Return the table's factor of a way, and where it is that of something similar.

    Of stale weights and compression it is the product. None: a part has no row.
    """
    factor, notes = 1.0, list[str]()
    for own, ranks in _parts_of(way, rows):
        if not own:
            return None
        nearest = min(own, key=lambda row: abs(row.ranks - ranks)).ranks
        near = nearest_in_length([row for row in own if row.ranks == nearest], STEPS)
        if not near:
            return None
        factor *= pooled(near).median
        if nearest != ranks and near[0].method != "dense":
            notes.append(f"of {nearest} ranks, here {ranks}")
    return factor, tuple(notes)


def _parts_of(way: Way, rows: Sequence[FactorRow]) -> list[tuple[list[FactorRow], int]]:
    """Return the rows that each part of a way may take, and its ranks."""
    parts = []
    if way.rule is not None:
        rule = make_prediction(way.rule)
        stale = [
            row
            for row in rows
            if row.method == "dense" and row.staleness == way.missing and _rule_of(row) == rule
        ]
        parts.append((stale, 1))
    if way.method is not None:
        wanted = read_method({k: v for k, v in way.method.items() if k != "hierarchical"})
        alike = [
            row
            for row in rows
            if not row.staleness
            and row.method == wanted.name
            and read_method({"method": row.method, **row.options}) == wanted
        ]
        parts.append((alike, way.senders))
    return parts


def _rule_of(row: FactorRow) -> Prediction:
    given: Any = row.prediction  # a name or a mapping, perhaps as JSON
    is_json = isinstance(given, str) and given.startswith("{")
    return make_prediction(json.loads(given) if is_json else given)


def compared(
    found: Mapping[str, Any], rows: Sequence[FactorRow], link: str, model: str
) -> list[Compared]:
    """Return the ways of which all is measured; a model's own rows do not predict it."""
    rows = [row for row in rows if "LSTM" not in row.model or model != "LSTM"]
    goal = goal_of(found["curves"], model)
    ways: list[Compared] = []
    for name, way in WAYS.items() if goal is not None else ():
        curve = found["curves"].get(f"{model}|{name}")
        windows = found["seconds"].get(f"{link}|{model}|{name}")
        known = found["predicted"].get(link, {}).get("seconds", {}).get(model, {}).get(name)
        if curve is None or windows is None or known is None or goal is None:
            continue
        of_table = factor_of(way, rows)
        steps = steps_to(smooth(curve["points"]), goal[0])
        ways.append(
            Compared(
                name,
                math.nan if of_table is None else of_table[0],
                known,
                float(LONGEST) if steps is None else steps,
                statistics.median(windows),
                steps is not None,
                ("no row",) if of_table is None else of_table[1],
                goal[1],
            )
        )
    return ways


def figures(ways: Sequence[Compared]) -> str:
    """Return Kendall's tau, and how good the chosen way is."""
    known = [way for way in ways if not math.isnan(way.factor)]
    if len(known) < 2:
        return "too few ways have a factor and are measured"
    tau = kendall_tau([(way.predicted_time, way.measured_time) for way in known])
    per_step = kendall_tau([(way.predicted, way.measured) for way in known])
    chosen = min(known, key=lambda way: way.predicted_time)
    best = min(known, key=lambda way: way.measured_time)
    more = 100 * (chosen.measured_time / best.measured_time - 1)
    return (
        f"Kendall tau {tau:.2f} of {len(known)} ways (of seconds per step alone {per_step:.2f}); "
        f"chosen {chosen.way}, {chosen.measured_time:.1f} s, {more:.1f} % above the best, "
        f"{best.way}, {best.measured_time:.1f} s"
    )


def write_page(found: Mapping[str, Any]) -> None:
    """Write the tables."""
    rows = StepTable.read().rows
    lines = [
        "# Time to a loss on two nodes, predicted and measured",
        "",
        "`sudo python -m benchmarks.exchange.time_to_loss --curves`, then `--seconds`",
        "",
        machine(),
        "",
        f"Two nodes of two ranks in the lab. A step has {SEQUENCES} sequences of {SEQ_LEN} bytes "
        f"on all ranks together, under AdamW with a learning rate that rises for {WARMUP} steps "
        f"and stays. The loss: the lowest of the dense run of {STEPS} steps, on {VALIDATION} "
        f"sequences every {EVERY} steps, each the mean of {SMOOTH} steps. The others have up to "
        f"{LONGEST} steps; one run of each. Predicted: the dense run's steps to that loss, times "
        "the factor of the table "
        "(lightning_topt/plan/step_factors.json), times seconds per step of the package's "
        "prediction after a calibration in the lab. Of stale weights and compression together the "
        "factor is the product of both. Measured: steps of a fit until the loss, times the median "
        f"of windows of {WINDOW} steps over that link.",
        "",
    ]
    for model, (_, _, words) in MODELS.items():
        goal = goal_of(found["curves"], model)
        if goal is None:
            continue
        size = found["curves"][f"{model}|{DENSE}"]["parameters"] / 1e6
        lines += [
            f"## {model}: {words}",
            "",
            f"{size:.2f} M parameters; {goal[0]:.3f} bits per byte after {goal[1]:.0f} steps of "
            "the dense run.",
            "",
        ]
        for link in LINKS:
            ways = compared(found, rows, link, model)
            lines += [*_table(link, ways), "", figures(ways) + ".", ""] if ways else []
    lines += _full_lines(found)
    FILE.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def _table(link: str, ways: Sequence[Compared]) -> list[str]:
    lines = [
        f"| {link} | factor | s per step, predicted | measured | steps, predicted | measured "
        "| time, predicted | measured |",
        "|---" * 8 + "|",
    ]
    for way in sorted(ways, key=lambda each: each.measured_time):
        notes = "".join(f" ({note})" for note in way.notes)
        least = "" if way.reached else "over "
        predicted = way.goal * way.factor
        lines.append(
            f"| {way.way} | {way.factor:.2f}{notes} | {way.predicted:.3f} | {way.measured:.3f} | "
            f"{predicted:.0f} | {least}{way.steps:.0f} | {way.predicted_time:.1f} s | "
            f"{least}{way.measured_time:.1f} s |".replace("nan s", "-").replace("nan", "-")
        )
    return lines


def _full_lines(found: Mapping[str, Any]) -> list[str]:
    """Return how the product compares with trainings to the loss in the lab."""
    lines = []
    for key, points in found["full"].items():
        link, model, name = key.split("|")
        goal, windows = goal_of(found["curves"], model), found["seconds"].get(key)
        if goal is None or windows is None:
            continue
        steps = steps_to(smooth(points), goal[0])
        if steps is None:
            lines.append(f"| {model}, {link} | {name} | not reached | - | - |")
            continue
        # seconds at that step, on a line between two validations
        before = max((p for p in points if p[0] <= steps), default=(0, 0.0, 0.0))
        after = next((p for p in points if p[0] >= steps), points[-1])
        share = (steps - before[0]) / max(after[0] - before[0], 1)
        seconds = before[1] + share * (after[1] - before[1])
        product = steps * statistics.median(windows)
        lines.append(
            f"| {model}, {link} | {name} | {steps:.0f} | {seconds:.1f} s | {product:.1f} s |"
        )
    if not lines:
        return []
    return [
        "## Trained to the loss in the lab",
        "",
        "| model | way | steps | seconds | steps times seconds per step |",
        "|---" * 5 + "|",
        *lines,
        "",
    ]


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (
        ("curves", "fits until the loss; nothing is timed"),
        ("seconds", "predict and time; wants a quiet machine"),
        ("report", "the page alone"),
        ("smoke", "a few steps of all; not kept"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--most", type=int, default=10_000, help="fits of --curves, then end")
    options = parser.parse_args()
    end_on_signals()
    try:
        if options.smoke:
            smoke(options.ways)
            return
        if options.curves:
            train(options.models, options.ways, options.most)
        if options.seconds:
            measure(options.models, options.ways)
    except LabError as error:
        sys.exit(f"time_to_loss: {error}")
    write_page(load())


if __name__ == "__main__":
    main()
