"""Estimates of several scenarios for people and programs: table, picture, page, JSON.

    print_scenarios(best_of_each, chosen, limits=limits, console=Console())
    save_scenarios(folder, all_estimates, best_of_each, chosen, limits=limits, reason=why, notes=())

Time, memory and money of every plan of every frontier; the page lets the reader choose axes and
filters.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_duration, format_money, format_seconds
from lightning_topt.plan.report_page import COLOURS, FAINT, INK, RED, STAR, save_page
from lightning_topt.plan.scenarios import Estimate, Limits

SCHEMA_VERSION = 1
_MOST_POINTS = 4000  # on the page
_WIDE = 130  # columns of a terminal: then plans stand in the table


def print_scenarios(
    chosen_of: Sequence[Estimate],
    chosen: Estimate,
    *,
    limits: Limits,
    console: Console,
    limit: int = 40,
) -> None:
    """Print the best plan of every scenario, the chosen one marked with a star.

    At most `limit` rows, those that are nearest to the limits first.
    """
    # columns that no row would fill are left out
    with_run = any(each.run is not None for each in chosen_of)
    with_money = any(each.money_per_sample is not None for each in chosen_of)
    names = ["", "cluster", "devices", "batch", "tokens", "step time", "samples/s", "memory"]
    names += ["run"] * with_run + ["money" if with_run else "per 1000"] * with_money
    with_plan = console.width >= _WIDE
    # rows nearest to the limits, in the order of the scenarios
    order = sorted(chosen_of, key=lambda each: (each is not chosen, limits.excess(each)))[:limit]
    rows = [each for each in chosen_of if any(each is other for other in order)]
    left = len(chosen_of) - len(rows)
    caption = "* chosen; others: the best plan of each" + (f"; {left} left out" if left else "")
    if any(limits.excess(each) > 1 for each in chosen_of):
        caption += "; ! beyond a limit"
    table = Table(
        *names,
        *(["plan"] if with_plan else []),
        caption=caption,
        caption_justify="left",
        padding=(0, 0, 0, 1),
    )
    # numbers are not broken over lines and stand to the right; only the plan may be broken
    for column in table.columns[: len(names)]:
        column.no_wrap = True
    for column in table.columns[2 : len(names)]:
        column.justify = "right"
    for each in rows:
        mark = "*" if each is chosen else "!" if limits.excess(each) > 1 else ""
        cells = [mark, *_cells(each, with_run=with_run, with_money=with_money)]
        cells += [escape(plan_in_words(each))] if with_plan else []
        table.add_row(*cells, style="bold green" if each is chosen else None)
    console.print(table)
    console.print(f"plan: {plan_in_words(chosen)}", highlight=False, markup=False)


def _cells(each: Estimate, *, with_run: bool, with_money: bool) -> list[str]:
    scenario = each.scenario
    cells = [
        escape(f"{scenario.cluster.name}{' (spot)' if scenario.spot else ''}"),
        str(scenario.devices),
    ]
    # "32 in 4": a batch of 32 samples in 4 micro-batches
    parts = f" in {each.accumulate}" if each.accumulate > 1 else ""
    cells += [f"{scenario.batch_size}{parts}", str(scenario.seq_len or "")]
    cells += [
        format_seconds(each.step_seconds),
        f"{each.samples_per_second:.4g}",
        format_bytes(each.peak_bytes),
    ]
    if with_run:
        cells.append("" if each.run is None else format_duration(each.run.seconds))
    if with_money:
        per_sample = each.money_per_sample
        # of the whole run where its length is known, else of 1000 samples
        amount = each.money if with_run else None if per_sample is None else 1000 * per_sample
        cells.append("no price" if amount is None else format_money(amount))
    return cells


def plan_in_words(each: Estimate) -> str:
    """Return how the blocks of a plan run, on which mesh and in which schedule, in a few words."""
    plan = each.point.plan
    # other meshes are named by the summary
    mesh = f" on data {plan.mesh.size}" if plan.mesh.names == ("data",) else ""
    return f"{plan.summary()}{mesh}"


def save_scenarios(
    folder: Path,
    shown: Sequence[Estimate],
    chosen_of: Sequence[Estimate],
    chosen: Estimate | None,
    *,
    limits: Limits,
    reason: str,
    notes: Sequence[str],
) -> None:
    """Write `scenarios.json`, `scenarios.png` and `scenarios.html`.

    Args:
        folder: for the files.
        shown: all plans.
        chosen_of: the best of each scenario.
        chosen: the one that was chosen; None: none keeps the limits.
        limits: of the choice.
        reason: of the choice.
        notes: lines on the search.
    """
    # the best of each scenario come first, and are known by that
    every = [*chosen_of, *shown]
    record = {
        "schema_version": SCHEMA_VERSION,
        "limits": vars(limits),
        "reason": reason,
        "notes": [*notes],
        "estimates": [
            estimate_to_dict(each, chosen=each is chosen, best=k < len(chosen_of))
            for k, each in enumerate(every)
        ],
    }
    (folder / "scenarios.json").write_text(json.dumps(record, indent=1) + "\n")
    save_scenarios_png(folder / "scenarios.png", chosen_of, shown, chosen, limits=limits)
    save_scenarios_html(folder / "scenarios.html", record)


def estimate_to_dict(each: Estimate, *, chosen: bool = False, best: bool = False) -> dict[str, Any]:
    """Return an estimate as `scenarios.json` has it."""
    scenario, run = each.scenario, each.run
    return {
        "cluster": scenario.cluster.name,
        "devices": scenario.devices,
        "batch_size": scenario.batch_size,
        "seq_len": scenario.seq_len,
        "spot": scenario.spot,
        "price_per_hour": scenario.price_per_hour,
        "accumulate": each.accumulate,
        "step_seconds": each.step_seconds,
        "samples_per_second": each.samples_per_second,
        "tokens_per_second": each.tokens_per_second,
        "peak_bytes": each.peak_bytes,
        "run_seconds": None if run is None else _finite(run.seconds),
        "overhead": None if run is None else _finite(run.overhead),
        "checkpoint_interval_seconds": None if run is None else _finite(run.interval_seconds),
        "failures": None if run is None else _finite(run.failures),
        "money": None if each.money is None else _finite(each.money),
        "money_per_sample": each.money_per_sample,
        "time_error": each.error.share,
        "time_error_source": each.error.source,
        "plan": plan_in_words(each),
        "best": best,
        "chosen": chosen,
    }


def _finite(value: float) -> float | None:
    # JSON has no infinity
    return value if math.isfinite(value) else None


def save_scenarios_html(path: Path, record: dict[str, Any]) -> None:
    """Write one page that loads nothing from elsewhere, of the record in `scenarios.json`."""
    # the best of each scenario, and of the others as many as a page can draw
    entries = record["estimates"]
    best = [each for each in entries if each["best"]]
    others = [each for each in entries if not each["best"]]
    # every step-th of them; the best of each scenario are all kept
    step = max(math.ceil(len(others) / _MOST_POINTS), 1)
    data = {**record, "estimates": best + others[::step]}
    title = "What each choice would take: time, memory, money"
    save_page(path, "scenario_report.html", title=title, data=data)


def save_scenarios_png(
    path: Path,
    chosen_of: Sequence[Estimate],
    shown: Sequence[Estimate],
    chosen: Estimate | None,
    *,
    limits: Limits,
) -> None:
    """Draw time against memory of all plans.

    And time against money of the best of each scenario, where prices are known.
    """
    has_money = any(each.money_per_sample is not None for each in chosen_of)
    has_run = any(each.run is not None for each in chosen_of)
    figure = Figure(
        figsize=(14 if has_money else 8, 5.2), dpi=140, facecolor="white", layout="constrained"
    )
    # memory to the right in the first panel, money in the second; time upwards in both
    panels = figure.subplots(1, 2 if has_money else 1, squeeze=False)[0]
    names = [*dict.fromkeys(_series(each) for each in chosen_of)]
    for axes, money in zip(panels, (False, True), strict=False):
        # a cluster has the same colour in both panels
        for name, colour in zip(names, itertools.cycle(COLOURS)):
            of_series = [
                each
                # with money, the best of each scenario alone
                for each in (chosen_of if money else [*shown, *chosen_of])
                if _series(each) == name
            ]
            points = [
                (x, y)
                for each in of_series
                if (x := _x(each, money)) is not None
                and x < math.inf
                and (y := _time(each)) < math.inf
            ]
            if points:
                style: dict[str, Any] = {
                    "s": 46 if money else 14,
                    "alpha": 0.9 if money else 0.5,
                    "linewidths": 0,
                }
                axes.scatter(*zip(*points, strict=True), color=colour, label=name, **style)
        if chosen is not None and (x := _x(chosen, money)) is not None:
            axes.plot(x, _time(chosen), marker="*", markersize=19, color=STAR, markeredgecolor=INK)
        _finish(axes, money=money, has_run=has_run, limits=limits)
    panels[0].legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    figure.savefig(path, format="png", facecolor="white")


def _series(each: Estimate) -> str:
    return f"{each.scenario.cluster.name}{' (spot)' if each.scenario.spot else ''}"


def _time(each: Estimate) -> float:
    return each.step_seconds if each.run is None else each.run.seconds / 86400


def _x(each: Estimate, money: bool) -> float | None:
    if not money:
        return each.peak_bytes / 2**30
    per_sample = each.money_per_sample
    return each.money if each.run is not None else None if per_sample is None else 1000 * per_sample


def _finish(axes: Axes, *, money: bool, has_run: bool, limits: Limits) -> None:
    # scenarios differ by orders of magnitude: on such axes equal ratios are equal lengths
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(
        ("Money of the run" if has_run else "Money of 1000 samples")
        if money
        else "GiB per device at the peak"
    )
    axes.set_ylabel("Days of the run" if has_run else "Seconds per step")
    # limits as dashed lines, in the units of the axes
    if has_run and limits.deadline is not None:
        axes.axhline(limits.deadline / 86400, color=RED, linestyle=(0, (5, 3)), linewidth=1.2)
    if money and has_run and limits.budget is not None:
        axes.axvline(limits.budget, color=RED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.grid(color="#e6e8ec", linewidth=0.8, which="both")
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, which="both")
    axes.spines[["top", "right"]].set_visible(False)
