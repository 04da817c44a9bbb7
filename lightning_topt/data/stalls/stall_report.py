"""A stall measurement for people: what the wait consists of and what would remove it.

`print_report` prints tables and advice (rich), `save_png` draws the same (matplotlib).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.data.stalls.measurement import StallMeasurement
from lightning_topt.data.stalls.model import (
    NEARLY,
    Stalls,
    WhatIf,
    best_num_workers,
    least_cache,
    samples_per_second,
)

_PARTS = (  # name, attribute of Stalls, colour (Okabe and Ito's), what removes it
    ("step", "step_seconds", "#0072B2", "a faster accelerator"),
    ("fetching", "fetch_seconds", "#D55E00", "a cache, a faster link, more workers"),
    ("preparing", "prepare_seconds", "#E69F00", "a cache, more cores"),
    ("loading", "loading_seconds", "#CC79A7", "another number of workers (see below)"),
)
_INK, _FAINT = "#1f2430", "#5b6472"
_CURVE = 21  # points of the curve of throughput by cache size
_FAR_OFF = 0.10  # error of the model on its own runs, from which on it is mentioned


def print_report(
    measurement: StallMeasurement, rows: Sequence[WhatIf], *, console: Console
) -> None:
    """Print the parts of the wait, the costs behind them, the predictions and the advice.

    `rows` are those of `what_if`.
    """
    # what is, what it follows from, what would be, what to do
    console.print(_parts_table(measurement))
    console.print(_costs_line(measurement), highlight=False)
    console.print(_what_if_table(rows))
    for sentence in advice(measurement):
        console.print(sentence, highlight=False)


def _parts_table(measurement: StallMeasurement) -> Table:
    stalls, size = measurement.stalls, measurement.costs.batch_size
    title = (
        f"{100 * stalls.fraction:.0f} % of training waits for data ({_setup_words(measurement)})"
    )
    table = Table(title=title, title_justify="left")
    # numbers to the right, words to the left
    for column in ("per batch", "time", "share", "what removes it"):
        table.add_column(column, justify="right" if column in ("time", "share") else "left")
    # a row for each part; they add up to the last row
    for name, attribute, _, remedy in _PARTS:
        seconds = getattr(stalls, attribute)
        table.add_row(
            name, format_seconds(seconds), f"{100 * seconds / stalls.total_seconds:.0f} %", remedy
        )
    table.add_row(
        "all",
        format_seconds(stalls.total_seconds),
        "100 %",
        f"{size / stalls.total_seconds:.0f} samples/s",
    )
    return table


def _setup_words(measurement: StallMeasurement) -> str:
    setup = measurement.setup
    return (
        f"{setup.num_workers} workers, {setup.cores} cores, batches of "
        f"{measurement.costs.batch_size}"
    )


def _costs_line(measurement: StallMeasurement) -> str:
    c = measurement.costs
    rate = (
        "its rate not told apart"
        # sizes of samples too much alike to fit a rate
        if c.link_bytes_per_second == inf
        else f"{8e-6 * c.link_bytes_per_second:.0f} Mb/s"
    )
    return (
        f"a sample: {format_bytes(c.source_bytes)} from the source "
        f"({format_seconds(c.latency_seconds)} latency, {rate}), "
        f"{format_seconds(c.prepare_seconds)} of a core; from the cache "
        f"{format_bytes(c.entry_bytes)}, {format_seconds(c.hit_seconds)} of a core"
    )


def _what_if_table(rows: Sequence[WhatIf]) -> Table:
    now = rows[0].samples_per_second
    table = Table("", "what if", "samples/s", "x now", title="Predicted", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    # the name of a group stands at its first row
    group = ""
    for row in rows:
        speed = (f"{row.samples_per_second:.0f}", f"{row.samples_per_second / now:.2f}")
        table.add_row("" if row.group == group else row.group, row.change, *speed)
        group = row.group
    return table


def advice(measurement: StallMeasurement) -> list[str]:
    """Return sentences of advice.

    They give the least cache worth having, the best number of workers, and how far to trust the
    model.
    """
    costs, setup = measurement.costs, measurement.setup
    # The cache, the workers, and a warning where the model does not fit.
    # share of the data set's items, as entries of the cache
    share = least_cache(costs, setup)
    needed, whole = share * costs.entry_bytes * costs.num_items, costs.entry_bytes * costs.num_items
    if share == 0:
        sentences = ["A cache would not make this loop faster: the rest takes as long as the data."]
    else:
        sentences = [
            f"The least cache worth having is {format_bytes(needed)} ({100 * share:.0f} % of the "
            f"data set's {format_bytes(whole)}): with all of it in memory the loop would be at "
            f"most {100 * NEARLY:.0f} % faster."
        ]
    best = best_num_workers(costs, setup)
    # with all in memory there is less to wait for, so often fewer workers do
    warm = best_num_workers(costs, replace(setup, memory_share=1.0))
    sentences.append(
        f"Best num_workers on {setup.cores} cores: {best} without a cache, {warm} with everything "
        "in it."
    )
    # the worst of the runs that were measured
    off = max(abs(error) for error in measurement.model_errors.values())
    if off > _FAR_OFF:
        sentences.append(
            "Take the predictions with care: on the measured runs themselves the model is off by "
            f"{100 * off:.0f} % (other work on this machine, or too short a measurement: raise "
            "seconds)."
        )
    return sentences


def save_png(
    path: str | Path, measurement: StallMeasurement, rows: Sequence[WhatIf], *, title: str = ""
) -> None:
    """Draw the parts of a batch's time, the throughput by cache size, and the predictions.

    `rows` are those of `what_if`.
    """
    figure = Figure(figsize=(11, 7), dpi=140, facecolor="white", layout="constrained")
    # the bar over the whole width, below it the curve and the predictions
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 4))
    _draw_parts(
        figure.add_subplot(grid[0, :]), measurement.stalls, title or _setup_words(measurement)
    )
    _draw_curve(figure.add_subplot(grid[1, 0]), measurement)
    _draw_rows(figure.add_subplot(grid[1, 1]), rows)
    figure.savefig(path, format="png", facecolor="white")


def _draw_parts(axes: Axes, stalls: Stalls, title: str) -> None:
    # One horizontal bar, its parts side by side.
    left = 0.0
    for name, attribute, colour, _ in _PARTS:
        # a difference of two measurements may be below 0; a bar may not
        seconds = max(0.0, getattr(stalls, attribute))
        label = f"{name} {format_seconds(seconds)}"
        axes.barh(
            [0], [1e3 * seconds], left=1e3 * left, color=colour, edgecolor="white", label=label
        )
        left += seconds
    axes.set_yticks([])
    axes.set_xlabel("ms per batch", color=_FAINT)
    title_style: dict[str, Any] = {
        "loc": "left",
        "color": _INK,
        "fontsize": 12,
        "fontweight": "bold",
        "parse_math": False,
    }
    axes.set_title(
        f"{100 * stalls.fraction:.0f} % of training waits for data: {title}", **title_style
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, -0.95),
        ncols=len(_PARTS),
        frameon=False,
        labelcolor=_INK,
    )
    _plain(axes)


def _draw_curve(axes: Axes, measurement: StallMeasurement) -> None:
    # The prediction as a line, the two measured runs as points, the step alone as the limit.
    costs, setup = measurement.costs, measurement.setup
    shares = [i / (_CURVE - 1) for i in range(_CURVE)]
    speeds = [samples_per_second(costs, replace(setup, memory_share=share)) for share in shares]
    axes.plot([100 * share for share in shares], speeds, color=_PARTS[0][2], label="predicted")
    # seconds per batch to samples per second
    size = costs.batch_size
    measured = [size / measurement.cold.batch_seconds, size / measurement.cached.batch_seconds]
    axes.plot([0, 100], measured, "o", color=_PARTS[1][2], label="measured")
    axes.axhline(
        size / measurement.synthetic.batch_seconds,
        color=_FAINT,
        linestyle="--",
        label="no wait for data",
    )
    # 0: no cache is worth having, so no line
    least = least_cache(costs, setup)
    if least:
        axes.axvline(
            100 * least, color=_FAINT, linestyle=":", label=f"worth having: {100 * least:.0f} %"
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(
        "items in a cache in memory, % (100 % = "
        f"{format_bytes(costs.entry_bytes * costs.num_items)})"
    )
    axes.set_ylabel("samples/s")
    axes.legend(frameon=False, labelcolor=_INK)
    _plain(axes)


def _draw_rows(axes: Axes, rows: Sequence[WhatIf]) -> None:
    names = [f"{row.group}: {row.change}" for row in rows]
    # the first row on top
    places = range(len(rows), 0, -1)
    axes.barh(
        list(places), [row.samples_per_second for row in rows], color=_PARTS[0][2], height=0.7
    )
    # the first row is the loop as it is: gains lie to the right of the line
    axes.axvline(rows[0].samples_per_second, color=_FAINT, linewidth=0.8)
    axes.set_yticks(list(places), names, fontsize=7.5)
    axes.set_xlabel("samples/s, predicted")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_FAINT)
