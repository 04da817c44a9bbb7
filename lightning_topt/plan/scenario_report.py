"""Estimates of several scenarios for people and programs: table, picture, page, JSON.

    print_scenarios(best_of_each, chosen, limits=limits, console=Console())
    save_scenarios(folder, all_estimates, best_of_each, chosen, limits=limits, reason=why, notes=())

Time, memory and money of every plan of every frontier; the page lets the reader choose axes and
filters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_duration, format_money, format_seconds
from lightning_topt.costs.intervals import Interval
from lightning_topt.plan.report_page import (
    COLOURS,
    INK,
    LINE,
    MARKERS,
    PLAIN,
    RED,
    STAR,
    draw_axes,
    drawn_axis,
    report_title,
    save_page,
)
from lightning_topt.plan.scenarios import Estimate, Limits

SCHEMA_VERSION = 1
_MOST_POINTS = 4000  # on the page
_WIDE, _MIDDLE = 130, 100  # columns of a terminal: then plans, or samples/s, stand in the table


def print_scenarios(
    chosen_of: Sequence[Estimate],
    chosen: Estimate,
    *,
    limits: Limits,
    console: Console,
    limit: int = 40,
) -> None:
    """Print the best plan of every scenario, the chosen one marked with a star.

    At most `limit` rows, those that are nearest to the limits first. What is the same in all rows
    is said once, above the table.
    """
    # rows nearest to the limits, in the order of the scenarios
    order = sorted(chosen_of, key=lambda each: (each is not chosen, limits.excess(each)))[:limit]
    rows = [each for each in chosen_of if any(each is other for other in order)]
    columns = _columns(chosen_of, limits.currency)
    same = [name for name in ("batch", "tokens") if len({*map(columns[name], rows)}) == 1]
    for name in same:
        del columns[name]
    parts = f" in {chosen.accumulate} micro-batches" if chosen.accumulate > 1 else ""
    said = [f"steps of {chosen.scenario.batch_size} samples{parts}"] if "batch" in same else []
    if "tokens" in same and chosen.scenario.seq_len:
        said.append(f"samples of {chosen.scenario.seq_len} tokens")
    title = ", ".join(said).capitalize()
    # samples/s follow from batch and step
    if console.width < _MIDDLE:
        del columns["samples/s"]
    if console.width >= _WIDE:
        columns["plan"] = plan_in_words

    left = len(chosen_of) - len(rows)
    caption = "* chosen; others: the best plan of each" + (f"; {left} left out" if left else "")
    if any(limits.excess(each) > 1 for each in chosen_of):
        caption += f"; ! not {limits.in_words()}"
    table = Table(
        "",
        *columns,
        caption=caption,
        caption_justify="left",
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    # numbers are not broken over lines and stand to the right; cluster and plan may be broken
    table.columns[1].overflow = "fold"
    for column in table.columns[2:]:
        if column.header != "plan":
            column.no_wrap, column.justify = True, "right"
    for each in rows:
        mark = "*" if each is chosen else "!" if limits.excess(each) > 1 else ""
        cells = [escape(cell(each)) for cell in columns.values()]
        style = "bold green" if each is chosen else "dim" if mark else None
        table.add_row(mark, *cells, style=style)
    if title:
        console.print(title, highlight=False, markup=False)
    console.print(table)
    console.print(f"plan: {plan_in_words(chosen)}", highlight=False, markup=False)


def _columns(chosen_of: Sequence[Estimate], currency: str) -> dict[str, Callable[[Estimate], str]]:
    """Return what the columns show; those that no row would fill are left out."""

    def batch(each: Estimate) -> str:
        # "32 in 4": a batch of 32 samples in 4 micro-batches
        parts = f" in {each.accumulate}" if each.accumulate > 1 else ""
        return f"{each.scenario.batch_size}{parts}"

    def money(each: Estimate) -> str:
        # of the whole run where its length is known, else of 1000 samples
        per_sample = each.money_per_sample
        amount = each.money if with_run else None if per_sample is None else 1000 * per_sample
        return "no price" if amount is None else format_money(amount)

    with_run = any(each.run is not None for each in chosen_of)
    columns: dict[str, Callable[[Estimate], str]] = {
        "cluster": _series,
        "devices": lambda each: str(each.scenario.devices),
        "batch": batch,
        "tokens": lambda each: str(each.scenario.seq_len or ""),
        "step": lambda each: format_seconds(each.step_seconds),
        "samples/s": lambda each: f"{each.samples_per_second:.4g}",
        "memory": lambda each: format_bytes(each.peak_bytes),
    }
    if with_run:
        columns["run"] = lambda each: "" if each.run is None else format_duration(each.run.seconds)
    if any(each.money_per_sample is not None for each in chosen_of):
        columns[f"{currency or 'money'}{'' if with_run else ' per 1000'}"] = money
    return columns


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
    model: str,
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
        model: its name and size, for the titles.
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
            estimate_to_dict(each, limits, chosen=each is chosen, best=k < len(chosen_of))
            for k, each in enumerate(every)
        ],
    }
    (folder / "scenarios.json").write_text(json.dumps(record, indent=1) + "\n")
    clusters = [*dict.fromkeys(str(each.scenario.cluster.name) for each in chosen_of)]
    where = ", ".join(clusters) if len(clusters) < 4 else f"{len(clusters)} clusters"
    title = report_title(model, where, (each.scenario.devices for each in chosen_of))
    save_scenarios_png(
        folder / "scenarios.png", chosen_of, shown, chosen, limits=limits, title=title
    )
    save_scenarios_html(folder / "scenarios.html", record, title=title)


def estimate_to_dict(
    each: Estimate, limits: Limits, *, chosen: bool = False, best: bool = False
) -> dict[str, Any]:
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
        "seconds_interval": _interval(each.point.seconds_interval),
        "bytes_interval": _interval(each.point.bytes_interval),
        "samples_per_second": each.samples_per_second,
        "tokens_per_second": each.tokens_per_second,
        "peak_bytes": each.peak_bytes,
        "device_bytes": scenario.cluster.device.memory_bytes,
        "run_seconds": None if run is None else _finite(run.seconds),
        "overhead": None if run is None else _finite(run.overhead),
        "checkpoint_interval_seconds": None if run is None else _finite(run.interval_seconds),
        "failures": None if run is None else _finite(run.failures),
        "money": None if each.money is None else _finite(each.money),
        "money_per_sample": each.money_per_sample,
        "time_error": each.error.share,
        "time_error_source": each.error.source,
        "plan": plan_in_words(each),
        "within_limits": limits.excess(each) <= 1,
        "best": best,
        "chosen": chosen,
    }


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


def _finite(value: float) -> float | None:
    # JSON has no infinity
    return value if math.isfinite(value) else None


def save_scenarios_html(path: Path, record: dict[str, Any], *, title: str) -> None:
    """Write one page that loads nothing from elsewhere, of the record in `scenarios.json`."""
    # the best of each scenario, and of the others as many as a page can draw
    entries = record["estimates"]
    best = [each for each in entries if each["best"]]
    others = [each for each in entries if not each["best"]]
    # every step-th of them; the best of each scenario are all kept
    step = max(math.ceil(len(others) / _MOST_POINTS), 1)
    data = {**record, "estimates": best + others[::step]}
    save_page(path, "scenario_report.html", title=title, data=data)


# ---- the picture


def save_scenarios_png(
    path: Path,
    chosen_of: Sequence[Estimate],
    shown: Sequence[Estimate],
    chosen: Estimate | None,
    *,
    limits: Limits,
    title: str = "",
) -> None:
    """Draw time against memory of all plans.

    And time against money of the best of each scenario, where prices are known. Clusters differ by
    colour, numbers of devices by shape; what is beyond a limit is grey.
    """
    has_money = any(each.money_per_sample is not None for each in chosen_of)
    figure = Figure(
        figsize=(14 if has_money else 8, 5.6), dpi=140, facecolor="white", layout="constrained"
    )
    # memory to the right in the first panel, money in the second; time upwards in both
    panels = figure.subplots(1, 2 if has_money else 1, squeeze=False)[0]
    for axes, money in zip(panels, (False, True), strict=False):
        # with money, the best of each scenario alone
        drawn = [
            each
            for each in (chosen_of if money else [*shown, *chosen_of])
            if (x := _x(each, money)) is not None and x < math.inf and _time(each) < math.inf
        ]
        if drawn:
            _draw_panel(axes, drawn, chosen_of, chosen, limits=limits, money=money)
    panels[0].legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2 if has_money else 1,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, weight="bold", parse_math=False)
    figure.savefig(path, format="png", facecolor="white")


def _draw_panel(
    axes: Axes,
    drawn: Sequence[Estimate],
    chosen_of: Sequence[Estimate],
    chosen: Estimate | None,
    *,
    limits: Limits,
    money: bool,
) -> None:
    has_run = any(each.run is not None for each in drawn)
    # limits that are not far off are drawn, and named
    across, up = [_x(each, money) or 0.0 for each in drawn], [*map(_time, drawn)]
    lines = [
        (axis, values, limit, text)
        for axis, values, limit, text in _limit_lines(across, up, limits, money, has_run)
        if limit is not None and min(values) / 4 < limit < 4 * max(values)
    ]
    for _, values, limit, _ in lines:
        values.append(limit)
    titles = _axis_titles(limits.currency, money=money, has_run=has_run)
    x, y = (
        drawn_axis(name, values, units=PLAIN)
        for name, values in zip(titles, (across, up), strict=True)
    )
    draw_axes(axes, x, y)
    for axis, _, limit, text in lines:
        style: dict[str, Any] = {"color": RED, "linewidth": 1.2, "linestyle": (0, (5, 3))}
        words: dict[str, Any] = {"color": RED, "fontsize": 9, "textcoords": "offset points"}
        if axis == "x":
            axes.axvline(limit, **style)
            words |= {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top"}
            axes.annotate(text, (limit, 0.99), (3, 0), **words)
        else:
            axes.axhline(limit, **style)
            words |= {"xycoords": ("axes fraction", "data"), "ha": "right"}
            axes.annotate(text, (0.99, limit), (0, 3), **words)

    # a series for each cluster and number of devices; the same in both panels
    clusters = [*dict.fromkeys(map(_series, chosen_of))]
    counts = sorted({each.scenario.devices for each in chosen_of})
    size = 46 if money else 16
    for cluster, devices in sorted({(_series(e), e.scenario.devices) for e in drawn}):
        of_series = [e for e in drawn if (_series(e), e.scenario.devices) == (cluster, devices)]
        colour = COLOURS[clusters.index(cluster) % len(COLOURS)]
        marker = MARKERS[counts.index(devices) % len(MARKERS)]
        # the first call has the entry of the legend, also where all are beyond a limit
        for within in (True, False):
            kept = [each for each in of_series if (limits.excess(each) <= 1) is within]
            axes.scatter(
                [_x(each, money) or 0.0 for each in kept],
                [_time(each) for each in kept],
                s=size,
                color=colour if within else LINE,
                marker=marker,
                linewidths=0,
                label=f"{cluster}, {devices} devices" if within else None,
                zorder=2 + within,
            )
    if chosen is not None and (place_of := _x(chosen, money)) is not None:
        axes.plot(
            place_of,
            _time(chosen),
            marker="*",
            markersize=19,
            color=STAR,
            markeredgecolor=INK,
            zorder=5,
        )


def _limit_lines(
    across: list[float], up: list[float], limits: Limits, money: bool, has_run: bool
) -> list[tuple[str, list[float], float | None, str]]:
    """Return the axis, its values, the limit in their unit, and words for each limit."""
    deadline, budget, step = limits.deadline, limits.budget, limits.step_seconds
    found: list[tuple[str, list[float], float | None, str]] = []
    if has_run and deadline is not None:
        found.append(("y", up, deadline / 86400, f"deadline {format_duration(deadline)}"))
    if not has_run and step is not None:
        found.append(("y", up, step, f"limit {format_seconds(step)}"))
    if money and has_run and budget is not None:
        text = f"budget {format_money(budget, limits.currency)}"
        found.append(("x", across, budget, text))
    return found


def _axis_titles(currency: str, *, money: bool, has_run: bool) -> tuple[str, str]:
    unit = f", {currency}" if currency else ""
    cost = f"Money of the run{unit}" if has_run else f"Money of 1000 samples{unit}"
    return (
        cost if money else "GiB per device at the peak",
        "Days of the run" if has_run else "Seconds per step",
    )


def _series(each: Estimate) -> str:
    return f"{each.scenario.cluster.name}{' (spot)' if each.scenario.spot else ''}"


def _time(each: Estimate) -> float:
    return each.step_seconds if each.run is None else each.run.seconds / 86400


def _x(each: Estimate, money: bool) -> float | None:
    if not money:
        return each.peak_bytes / 2**30
    per_sample = each.money_per_sample
    return each.money if each.run is not None else None if per_sample is None else 1000 * per_sample
