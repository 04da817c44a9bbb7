"""Frontier and plan for people: a table, a picture, and a self-contained HTML page that shows the
plan of any point.

All three mark the chosen plan. The points are those that `PlanFrontier.shown_with` gives for it.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.plain_values import dump_yaml
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.presets import describe_config
from lightning_topt.plan.report_axes import DrawnAxis, drawn_axes
from lightning_topt.plan.schedule_report import schedule_svg
from lightning_topt.schedules.simulate import Simulation

Points = Sequence[PlanPoint]
_MANY = 150  # more points than this are drawn small
# Okabe and Ito's colours, told apart by colour-blind readers, the ones that are dark enough for a
# white page first
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # 7 markers and 6 colours: 42 different series
_INK, _FAINT, _LINE, _RED = "#1f2430", "#5b6472", "#c3c8d0", "#a3262a"
_HEADING: dict[str, Any] = {"color": _INK, "weight": "bold", "fontsize": 13, "parse_math": False}
_LEGEND: dict[str, Any] = {"frameon": False, "labelcolor": _INK, "handletextpad": 0.3}
_EDGE: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "white"}
_BOX = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": _LINE, "alpha": 0.94}
_POINTER = {"arrowstyle": "-", "color": _INK, "linewidth": 0.9, "shrinkB": 9}
_NOTE: dict[str, Any] = {
    "textcoords": "offset pixels",
    "color": _INK,
    "linespacing": 1.5,
    "bbox": _BOX,
    "zorder": 6,
}
_SCHEDULE = (
    '<section class="card schedule" aria-label="Schedule"><h3>Schedule of the chosen '
    "plan</h3>{}</section>"
)
_NOTE |= {"fontsize": 10, "va": "bottom", "arrowprops": _POINTER}


def print_table(points: Points, chosen: PlanPoint, *, console: Console, limit: int = 20) -> None:
    """Print plans by devices and memory, the chosen one marked with a star.

    Of more than `limit` points it shows an evenly spread selection, always with the chosen plan and
    with the fastest and the smallest for each number of devices (these even when they alone are
    more than `limit`), and says how many are left out. Raises ValueError when `chosen` is not one
    of the points.
    """
    ordered, index = _ordered(points, chosen)
    shown = _selection(ordered, index, limit=limit)
    left_out = len(ordered) - len(shown)
    caption = "* chosen" + (f"; {left_out} of {len(ordered)} plans left out" if left_out else "")
    table = Table(
        "", "devices", "step time", "peak memory", "plan", caption=caption, caption_justify="left"
    )
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "right", True
    for i in shown:
        point = ordered[i]
        numbers = (
            str(point.devices),
            format_seconds(point.step_seconds),
            format_bytes(point.peak_bytes),
        )
        mark, style = ("*", "bold green") if i == index else ("", None)
        table.add_row(mark, *numbers, point.plan.summary(), style=style)
    console.print(table)


def save_png(
    path: str | Path,
    points: Points,
    chosen: PlanPoint,
    *,
    memory_limit: float | None = None,
    title: str = "",
) -> None:
    """Draw the frontier: peak bytes to the right, seconds per step upwards, one series per number
    of devices.

    `memory_limit` is in bytes per device. Raises ValueError when `chosen` is not one of the points.
    """
    ordered, _ = _ordered(points, chosen)
    figure = Figure(figsize=(9, 5.2), dpi=160, facecolor="white", layout="constrained")
    axes = figure.add_subplot(facecolor="white")
    x, y = drawn_axes(ordered, memory_limit)
    _draw_axes(axes, x, y)
    _draw_series(axes, ordered)
    if memory_limit is not None:
        _draw_limit(axes, x, memory_limit)
    counts = len({point.devices for point in ordered})
    columns = min(counts, 6)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, columnspacing=1.4, **_LEGEND
    )
    axes.set_title(
        _title(title, chosen.plan),
        loc="left",
        pad=12 + 18 * math.ceil(counts / columns),
        **_HEADING,
    )
    _annotate(figure, axes, ordered, chosen)
    figure.savefig(path, format="png", facecolor="white")


def save_html(
    path: str | Path,
    points: Points,
    chosen: PlanPoint,
    *,
    memory_limit: float | None = None,
    title: str = "",
    exact: bool = True,
    notes: Sequence[str] = (),
    step: Simulation | None = None,
) -> None:
    """Write one page that loads nothing from elsewhere: the frontier, and the plan of the point
    clicked on.

    `memory_limit` is in bytes per device; `exact` says whether the search proves that the frontier
    is complete; `notes` are lines on the chosen plan, and `step`, where that has stages, is drawn
    as its schedule. Raises ValueError when `chosen` is not one of the points.
    """
    ordered, index = _ordered(points, chosen)
    blocks, entries = _embedded(ordered)
    x, y = drawn_axes(ordered, memory_limit)
    limit = (
        None
        if memory_limit is None
        else {"bytes": memory_limit, "text": format_bytes(memory_limit)}
    )
    data = {
        "chosen": index,
        "reason": chosen.plan.reason,
        "notes": [*notes],
        "exact": exact,
        "limit": limit,
    }
    data |= {"axes": {"x": x._asdict(), "y": y._asdict()}, "blocks": blocks, "points": entries}
    # no "<" in the data: neither "</script>" nor "<!--" can end the element early
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {"title": html.escape(_title(title, chosen.plan)), "data": embedded}
    filled["schedule"] = "" if step is None else _SCHEDULE.format(schedule_svg(step))
    template = (resources.files("lightning_topt.plan") / "report.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{ (title|data|schedule) \}\}", lambda match: filled[match[1]], template)
    Path(path).write_text(page, encoding="utf-8")


def _ordered(points: Points, chosen: PlanPoint) -> tuple[list[PlanPoint], int]:
    """The points by devices and memory, the chosen one (with its reason) in its place; and that
    place.
    """
    ordered = sorted(
        points, key=lambda point: (point.devices, point.peak_bytes, point.step_seconds)
    )
    if chosen not in ordered:
        raise ValueError(
            "the chosen plan is not one of the points; pass what choose() returned for these points"
        )
    index = ordered.index(chosen)
    ordered[index] = chosen
    return ordered, index


def _title(title: str, plan: ParallelPlan) -> str:
    return title or (f"Plans for {plan.model}" if plan.model else "Parallel plans")


def _selection(points: Points, chosen: int, *, limit: int) -> list[int]:
    """Positions in `points` (ordered by devices and memory) of those to show."""
    if len(points) <= limit:
        return list(range(len(points)))
    kept = {chosen}
    for _, group in itertools.groupby(range(len(points)), key=lambda i: points[i].devices):
        members = list(group)
        kept |= {members[0], min(members, key=lambda i: points[i].step_seconds)}
    rest = [i for i in range(len(points)) if i not in kept]
    free = max(0, limit - len(kept))
    return sorted(kept | {rest[(2 * k + 1) * len(rest) // (2 * free)] for k in range(free)})


def _draw_axes(axes: Axes, x: DrawnAxis, y: DrawnAxis) -> None:
    axes.set(xscale="log" if x.log else "linear", yscale="log" if y.log else "linear")
    axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, drawn in ((x, axes.xaxis), (y, axes.yaxis)):
        drawn.set_ticks([value for value, _ in axis.ticks], labels=[text for _, text in axis.ticks])
        drawn.set_ticks([], minor=True)
        drawn.set_label_text(axis.title, color=_INK, fontsize=11)
    axes.grid(color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelsize=10, length=0, pad=6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINE)


def _draw_series(axes: Axes, points: Points) -> None:
    size, edge = (6.5, 0.7) if len(points) <= _MANY else (3.5, 0.0)
    for number, (devices, group) in enumerate(
        itertools.groupby(points, key=lambda point: point.devices)
    ):
        x, y = zip(*((point.peak_bytes, point.step_seconds) for point in group), strict=True)
        # a chosen plan may be beaten
        best = [k for k in range(len(y)) if y[k] < min(y[:k], default=math.inf)]
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        # a step: with memory between two plans, the smaller one is what runs
        line: dict[str, Any] = {"alpha": 0.45, "linewidth": 1.6, "drawstyle": "steps-post"}
        axes.plot([x[k] for k in best], [y[k] for k in best], color=colour, **line)
        axes.plot(
            x,
            y,
            marker,
            color=colour,
            label=_devices(devices),
            markersize=size,
            markeredgewidth=edge,
            **_EDGE,
        )


def _draw_limit(axes: Axes, x: DrawnAxis, memory_limit: float) -> None:
    text, place = (
        f"memory limit {format_bytes(memory_limit)}",
        min(max(memory_limit, x.low), x.high),
    )
    if place == memory_limit:
        axes.axvline(memory_limit, color=_RED, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.axvspan(memory_limit, x.high, color=_RED, alpha=0.06, linewidth=0)
    else:
        text = f"{text} →" if memory_limit > x.high else f"← {text}"
    side, shift = ("right", -5) if place > (x.low + x.high) / 2 else ("left", 5)
    where: dict[str, Any] = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "va": "top",
    }
    axes.annotate(text, (place, 1.0), xytext=(shift, -3), ha=side, color=_RED, fontsize=10, **where)


def _annotate(figure: Figure, axes: Axes, points: Points, chosen: PlanPoint) -> None:
    """Mark the chosen point and write its plan beside it, where that covers fewest points."""
    place = (chosen.peak_bytes, chosen.step_seconds)
    axes.plot(
        *place,
        marker="*",
        markersize=21,
        color="#F0C419",
        markeredgecolor=_INK,
        markeredgewidth=1.1,
        zorder=5,
    )
    numbers = f"{format_seconds(place[1])}, {format_bytes(place[0])}, {_devices(chosen.devices)}"
    text = "\n".join([*textwrap.wrap(f"chosen: {chosen.plan.summary()}", 44), numbers])
    note = axes.annotate(text, place, (0, 0), **_NOTE)
    note.set_in_layout(False)
    figure.draw_without_rendering()  # the layout decides where the points are
    star = axes.transData.transform(place)
    size, frame = np.array(Text.get_window_extent(note).size), axes.get_window_extent()
    ends = [
        (b.peak_bytes, a.step_seconds)
        for a, b in itertools.pairwise(points)
        if a.devices == b.devices
    ]
    taken = axes.transData.transform(
        [*((point.peak_bytes, point.step_seconds) for point in points), *ends]
    )
    room = np.array(frame.size) - size - 80
    corners = [
        np.array(frame.min) + 25 + room * (i / 20, j / 20) for i in range(21) for j in range(21)
    ]

    def cost(corner: NDArray[np.float64]) -> float:
        near = ((taken > corner - 20) & (taken < corner + size + 20)).all(axis=1).sum()
        distance = float(np.hypot(*np.maximum(np.maximum(corner - star, star - corner - size), 0)))
        # neither far away nor on the star
        return 1000.0 * float(near) + max(distance, 180 - 2 * distance)

    note.set_position(tuple(min(corners, key=cost) - star))


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _embedded(points: Points) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The different blocks of all plans, each once; and the points, whose blocks are positions in
    that list.

    The YAML of a plan is its `header` and the `yaml` of its blocks, one after the other, `stages`
    of them in each stage.
    """
    positions: dict[tuple[BlockPlan, tuple[str, ...]], int] = {}
    blocks: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for point in points:
        fields, mesh = point.plan.to_dict(), point.plan.mesh
        stages, of_stages = (
            fields.pop("stages"),
            [block for stage in point.plan.stages for block in stage.blocks],
        )
        for block, values in zip(
            of_stages, (each for stage in stages for each in stage["blocks"]), strict=True
        ):
            if (block, mesh.names) not in positions:
                positions[block, mesh.names] = len(blocks)
                text = textwrap.indent(dump_yaml([values]), "  ")
                placed = {
                    name: _in_words(values[name])
                    for name in ("parameters", "gradients", "optimizer_state")
                }
                blocks.append(
                    {
                        "block": block.block,
                        "runs": describe_config(block.config, mesh),
                        **placed,
                        "yaml": text,
                    }
                )
        entry: dict[str, Any] = {
            "x": point.peak_bytes,
            "y": point.step_seconds,
            "devices": point.devices,
        }
        entry |= {"summary": point.plan.summary(), "numbers": _numbers(point)}
        entry["header"] = dump_yaml(fields) + "stages:\n"
        entry["blocks"] = [positions[block, mesh.names] for block in of_stages]
        entry["stages"] = [len(stage.blocks) for stage in point.plan.stages]
        entries.append(entry)
    return blocks, entries


def _in_words(placed: str | dict[str, str]) -> str:
    return (
        placed
        if isinstance(placed, str)
        else ", ".join(f"{axis}: {word}" for axis, word in placed.items())
    )


def _numbers(point: PlanPoint) -> dict[str, str]:
    plan = point.plan
    numbers = {"Time per step": format_seconds(point.step_seconds)}
    numbers |= {
        "Peak memory per device": format_bytes(point.peak_bytes),
        "Devices": str(point.devices),
    }
    if plan.predicted is not None:
        numbers["Computing"] = format_seconds(plan.predicted.compute_seconds)
        numbers["Waiting for communication"] = format_seconds(
            plan.predicted.exposed_communication_seconds
        )
    if plan.batch_size is not None and point.step_seconds > 0:
        numbers["Samples per second"] = (
            f"{plan.batch_size * plan.data_parallel_size / point.step_seconds:,.1f}"
        )
    return numbers
