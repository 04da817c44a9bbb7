"""A frontier for people: a table, a picture, and a page that shows the plan of any point.

    points = frontier.shown_with(chosen)
    print_table(points, chosen, console=Console())
    limit = MemoryLimit(2**30)
    save_png("frontier.png", points, chosen, memory_limit=limit)
    save_html("frontier.html", points, chosen, memory_limit=limit)

All three mark the chosen plan, and show in grey what does not fit into the limit.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.intervals import Interval
from lightning_topt.costs.plain_values import dump_yaml
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_report import schedule_svg
from lightning_topt.plan.plan_values import config_to_dict, describe_config
from lightning_topt.plan.report_page import (
    BYTES,
    COLOURS,
    FAINT,
    INK,
    LINE,
    MARKERS,
    RED,
    SECONDS,
    STAR,
    DrawnAxis,
    block_ranges,
    draw_axes,
    drawn_axis,
    save_page,
)
from lightning_topt.schedules.simulate import Simulation

Points = Sequence[PlanPoint]
_MANY = 150  # more points than this are drawn small
_HEADING: dict[str, Any] = {"color": INK, "weight": "bold", "fontsize": 13, "parse_math": False}
_LEGEND: dict[str, Any] = {"frameon": False, "labelcolor": INK, "handletextpad": 0.3}
_EDGE: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "white"}
_BOX = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": LINE, "alpha": 0.94}
_POINTER = {"arrowstyle": "-", "color": INK, "linewidth": 0.9, "shrinkB": 9}
_NOTE: dict[str, Any] = {
    "textcoords": "offset pixels",
    "color": INK,
    "linespacing": 1.5,
    "bbox": _BOX,
    "zorder": 6,
    "fontsize": 10,
    "va": "bottom",
    "arrowprops": _POINTER,
}
_KIND = ("runs", "parameters", "gradients", "optimizer_state")  # what a page says of a block
_SCHEDULE = (
    '<section class="card schedule" aria-label="Schedule"><h3>Schedule of the chosen '
    "plan</h3>{}</section>"
)


class MemoryLimit(NamedTuple):
    """Bytes that a device may hold.

    A plan fits with `margin` of its predicted peak to spare. `name` says what the limit is.
    """

    bytes: float
    margin: float = 0.05
    name: str = "memory limit"

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.bytes)}"

    @property
    def most_bytes(self) -> float:
        """The largest predicted peak that fits."""
        return self.bytes / (1 + self.margin)


def print_table(
    points: Points,
    chosen: PlanPoint,
    *,
    console: Console,
    memory_limit: MemoryLimit | None = None,
    limit: int = 20,
) -> None:
    """Print plans by devices and memory, the chosen one marked with a star.

    Of more than `limit` points it shows an evenly spread selection. The chosen plan is always
    there. So are the fastest and the smallest for each number of devices, even when these alone are
    more than `limit`. The caption says how many are left out.

    Raises:
        ValueError: `chosen` is not one of the points.
    """
    ordered, index = _ordered(points, chosen)
    shown = _selection(ordered, index, limit=limit)
    most = math.inf if memory_limit is None else memory_limit.most_bytes
    caption = "* chosen"
    if any(ordered[i].peak_bytes > most for i in shown):
        caption += f"; ! does not fit ({memory_limit})"
    if left_out := len(ordered) - len(shown):
        caption += f"; {left_out} of {len(ordered)} plans left out"
    # the number of devices is a column where it says something
    several = len({point.devices for point in ordered}) > 1
    titles = {
        "step time": ordered[index].seconds_interval,
        "peak memory": ordered[index].bytes_interval,
    }
    names = ["", *(["devices"] * several)]
    to_loss = ordered[index].to_loss
    if to_loss is not None:
        goal = "per dense step" if to_loss.steps is None else f"of {to_loss.steps:.0f} steps"
        names += [f"time to the loss\n{goal}", "steps needed"]
    for title, interval in titles.items():
        names.append(title if interval is None else f"{title}\n{100 * interval.level:g} % interval")
    names.append("plan")
    if any(_is_outside(ordered[i]) for i in shown):
        caption += "; ~ unlike what was measured"
    table = Table(*names, caption=caption, caption_justify="left")
    for column in table.columns[1:-1]:
        column.justify, column.no_wrap = "right", True
    for i in shown:
        point = ordered[i]
        numbers = [
            *([str(point.devices)] * several),
            *_loss_cells(point),
            _with_ends(point.step_seconds, point.seconds_interval, format_seconds),
            _with_ends(point.peak_bytes, point.bytes_interval, format_bytes),
        ]
        fits = point.peak_bytes <= most
        mark, style = ("*", "bold green") if i == index else ("", "") if fits else ("!", "dim")
        table.add_row(mark, *numbers, point.plan.summary(), style=style)
    console.print(table)


def _loss_cells(point: PlanPoint) -> list[str]:
    """Return the cells of the time to a loss, and of the steps that it takes; none without one."""
    found = point.to_loss
    if found is None:
        return []
    high = "?" if math.isinf(found.high) else format_seconds(found.high)
    ends = f"{format_seconds(found.low)} to {high}"
    return [f"{format_seconds(found.seconds)}\n{ends}", found.factor_words.replace(" (", "\n(")]


def _is_outside(point: PlanPoint) -> bool:
    both = point.seconds_interval, point.bytes_interval
    return any(each is not None and bool(each.outside) for each in both)


def _with_ends(value: float, interval: Interval | None, written: Callable[[float], str]) -> str:
    """Return the cell of a number, with its interval in a second line.

    A unit is written once, where both ends have it.
    """
    if interval is None:
        return written(value)
    low, high = written(interval.low), written(interval.high)
    if low.split()[-1] == high.split()[-1]:
        low = low.split()[0]
    return f"{written(value)}\n{low} to {high}{' ~' if interval.outside else ''}"


def _selection(points: Points, chosen: int, *, limit: int) -> list[int]:
    """Return the positions to show of `points`, which are ordered by devices and memory."""
    if len(points) <= limit:
        return list(range(len(points)))
    kept = {chosen}
    for _, group in itertools.groupby(range(len(points)), key=lambda i: points[i].devices):
        members = list(group)
        kept |= {members[0], min(members, key=lambda i: points[i].compared_seconds)}
    rest = [i for i in range(len(points)) if i not in kept]
    free = max(0, limit - len(kept))
    return sorted(kept | {rest[(2 * k + 1) * len(rest) // (2 * free)] for k in range(free)})


def save_png(
    path: str | Path,
    points: Points,
    chosen: PlanPoint,
    *,
    memory_limit: MemoryLimit | None = None,
    title: str = "",
) -> None:
    """Draw the frontier: peak bytes to the right, seconds per step upwards.

    There is one series per number of devices. What does not fit into `memory_limit` is grey.

    Raises:
        ValueError: `chosen` is not one of the points.
    """
    ordered, _ = _ordered(points, chosen)
    figure = Figure(figsize=(9, 5.2), dpi=160, facecolor="white", layout="constrained")
    axes = figure.add_subplot(facecolor="white")
    x, y = drawn_axes(ordered, memory_limit)
    draw_axes(axes, x, y)
    _draw_series(axes, ordered, memory_limit)
    if memory_limit is not None:
        _draw_limit(axes, x, memory_limit)
    counts = len(axes.get_legend_handles_labels()[1])
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
    memory_limit: MemoryLimit | None = None,
    title: str = "",
    exact: bool = True,
    notes: Sequence[str] = (),
    step: Simulation | None = None,
) -> None:
    """Write a page that loads nothing from elsewhere: the frontier, and the plan clicked on.

    Args:
        path: of the page.
        points: of the frontier.
        chosen: one of them.
        memory_limit: of a device.
        title: of the page.
        exact: whether the search proves that the frontier is complete.
        notes: lines on the chosen plan.
        step: of a chosen plan with stages, drawn as its schedule.

    Raises:
        ValueError: `chosen` is not one of the points.
    """
    ordered, index = _ordered(points, chosen)
    blocks, entries = _embedded(ordered, index)
    x, y = drawn_axes(ordered, memory_limit)
    limit = (
        None
        if memory_limit is None
        else {
            "bytes": memory_limit.bytes,
            "most": memory_limit.most_bytes,
            "margin": memory_limit.margin,
            "text": str(memory_limit),
        }
    )
    data = {
        "chosen": index,
        "reason": chosen.plan.reason,
        "notes": [*notes],
        "exact": exact,
        "limit": limit,
        "axes": {"x": x._asdict(), "y": y._asdict()},
        "time": _time_title(chosen),
        "blocks": blocks,
        "points": entries,
    }
    schedule = "" if step is None else _SCHEDULE.format(schedule_svg(step))
    heading = _title(title, chosen.plan)
    save_page(path, "frontier_report.html", title=heading, data=data, schedule=schedule)


def _ordered(points: Points, chosen: PlanPoint) -> tuple[list[PlanPoint], int]:
    """Return the points by devices and memory, and where the chosen one is (with its reason)."""
    ordered = sorted(
        points, key=lambda point: (point.devices, point.peak_bytes, point.compared_seconds)
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


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


# ---- the picture


def drawn_axes(
    points: Sequence[PlanPoint], memory_limit: MemoryLimit | None
) -> tuple[DrawnAxis, DrawnAxis]:
    """Return the axes of memory and of time that show all points.

    And `memory_limit` where it is not far from them.
    """
    sizes = [point.peak_bytes for point in points]
    # points at one place have half of it as their width
    reach = (max(sizes) - min(sizes)) or 0.5 * max(sizes)
    # farther, it would squeeze the points
    if memory_limit is not None and memory_limit.bytes <= max(sizes) + reach:
        sizes.append(memory_limit.bytes)
    times = [point.compared_seconds for point in points]
    return drawn_axis("Peak memory per device", sizes, units=BYTES), drawn_axis(
        _time_title(points[0]), times, units=SECONDS
    )


def _time_title(point: PlanPoint) -> str:
    """Return what the seconds are by which plans are compared."""
    if point.to_loss is None:
        return "Time per step"
    return "Time to the loss" + (" per dense step" if point.to_loss.steps is None else "")


def _draw_series(axes: Axes, points: Points, memory_limit: MemoryLimit | None) -> None:
    most = math.inf if memory_limit is None else memory_limit.most_bytes
    size, edge = (6.5, 0.7) if len(points) <= _MANY else (3.5, 0.0)
    # a series for each number of devices; points are in this order
    for number, (devices, group) in enumerate(
        itertools.groupby(points, key=lambda point: point.devices)
    ):
        x, y = zip(*((point.peak_bytes, point.compared_seconds) for point in group), strict=True)
        # a chosen plan may be beaten
        best = [k for k in range(len(y)) if y[k] < min(y[:k], default=math.inf)]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        # a step: with memory between two plans, the smaller one is what runs
        line: dict[str, Any] = {"alpha": 0.45, "linewidth": 1.6, "drawstyle": "steps-post"}
        axes.plot([x[k] for k in best], [y[k] for k in best], color=colour, **line)
        # plans that do not fit are grey; the others are named in the legend
        for fits, name in ((True, _devices(devices)), (False, None)):
            at = [k for k in range(len(y)) if (x[k] <= most) == fits]
            if not at and not fits:
                continue
            axes.plot(
                [x[k] for k in at],
                [y[k] for k in at],
                marker,
                color=colour if fits else LINE,
                label=name,
                markersize=size,
                markeredgewidth=edge,
                **_EDGE,
            )
    if any(point.peak_bytes > most for point in points):
        axes.plot([], [], "o", color=LINE, label="does not fit", markersize=6.5, **_EDGE)


def _draw_limit(axes: Axes, x: DrawnAxis, memory_limit: MemoryLimit) -> None:
    text, place = str(memory_limit), min(max(memory_limit.bytes, x.low), x.high)
    # a limit outside of the axes is an arrow at their edge
    if place == memory_limit.bytes:
        axes.axvline(place, color=RED, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.axvspan(place, x.high, color=FAINT, alpha=0.09, linewidth=0)
    else:
        text = f"{text} →" if memory_limit.bytes > x.high else f"← {text}"
    # the words on the side with more room
    side, shift = ("right", -5) if place > (x.low + x.high) / 2 else ("left", 5)
    where: dict[str, Any] = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "va": "top",
    }
    axes.annotate(text, (place, 1.0), xytext=(shift, -3), ha=side, color=RED, fontsize=10, **where)


def _annotate(figure: Figure, axes: Axes, points: Points, chosen: PlanPoint) -> None:
    """Mark the chosen point and write its plan beside it, where that covers fewest points."""
    place = (chosen.peak_bytes, chosen.compared_seconds)
    axes.plot(
        *place,
        marker="*",
        markersize=21,
        color=STAR,
        markeredgecolor=INK,
        markeredgewidth=1.1,
        zorder=5,
    )
    numbers = f"{format_seconds(place[1])}, {format_bytes(place[0])}, {_devices(chosen.devices)}"
    # the note is drawn once at the star, only to learn its size
    text = "\n".join([*textwrap.wrap(f"chosen: {chosen.plan.summary()}", 44), numbers])
    note = axes.annotate(text, place, (0, 0), **_NOTE)
    note.set_in_layout(False)
    figure.draw_without_rendering()  # the layout decides where the points are
    star = axes.transData.transform(place)
    size, frame = np.array(Text.get_window_extent(note).size), axes.get_window_extent()
    # points and corners of their lines, in pixels; places for the note, on a grid
    ends = [
        (b.peak_bytes, a.compared_seconds)
        for a, b in itertools.pairwise(points)
        if a.devices == b.devices
    ]
    taken = axes.transData.transform(
        [*((point.peak_bytes, point.compared_seconds) for point in points), *ends]
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


# ---- the data of the page


def _embedded(
    points: Points, chosen: int
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return the different blocks of all plans, each once, and the points with indices of these.

    The YAML of a plan is its `header` and the `yaml` of its blocks, one after the other, `stages`
    of them in each stage. `ends` are those of its intervals. Its `rows` are neighbours that run
    alike: their names, the index of the first, their number, and 1 where they are not as in the
    plan at `chosen`.
    """
    positions: dict[tuple[BlockPlan, tuple[str, ...]], int] = {}
    known: dict[tuple[int, tuple[str, ...]], int] = {}  # by identity, which is quick to compare
    blocks: list[dict[str, object]] = []
    entries: list[dict[str, Any]] = []
    # plans share most blocks: each is written once, and points refer to it
    for point in points:
        mesh, found = point.plan.mesh, list[int]()
        for block in (block for stage in point.plan.stages for block in stage.blocks):
            # equal blocks on meshes of other axes read differently
            key = id(block), mesh.names
            if key not in known:
                known[key] = positions.setdefault((block, mesh.names), len(blocks))
                if known[key] == len(blocks):
                    blocks.append(_embedded_block(block, mesh))
            found.append(known[key])
        entries.append(
            {
                "x": point.peak_bytes,
                "y": point.compared_seconds,
                "ends": {"x": _ends(point.bytes_interval), "y": _time_ends(point)},
                "devices": point.devices,
                "summary": point.plan.summary(),
                "numbers": _numbers(point),
                "header": dump_yaml(point.plan.to_dict(stages=False)) + "stages:\n",
                "blocks": found,
                "stages": [len(stage.blocks) for stage in point.plan.stages],
            }
        )
    # neighbours that run alike, and as in the chosen plan or not
    kinds = [tuple(each[name] for name in _KIND) for each in blocks]
    of_chosen = {*entries[chosen]["blocks"]}
    for entry in entries:
        entry["rows"] = []
        for (_, differs), group in itertools.groupby(
            entry["blocks"], key=lambda at: (kinds[at], at not in of_chosen)
        ):
            members = list(group)
            names = block_ranges([str(blocks[at]["block"]) for at in members])
            entry["rows"].append([names, members[0], len(members), int(differs)])
    return blocks, entries


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _time_ends(point: PlanPoint) -> list[float] | None:
    found = point.to_loss
    if found is None:
        return _ends(point.seconds_interval)
    return None if math.isinf(found.high) else [found.low, found.high]


def _embedded_block(block: BlockPlan, mesh: Mesh) -> dict[str, object]:
    values: dict[str, Any] = {"block": block.block, **config_to_dict(block.config, mesh)}
    placed = {
        name: _in_words(values[name]) for name in ("parameters", "gradients", "optimizer_state")
    }
    runs, text = describe_config(block.config, mesh), textwrap.indent(dump_yaml([values]), "  ")
    return {"block": block.block, "runs": runs, **placed, "yaml": text}


def _in_words(placed: str | dict[str, str]) -> str:
    return (
        placed
        if isinstance(placed, str)
        else ", ".join(f"{axis}: {word}" for axis, word in placed.items())
    )


def _numbers(point: PlanPoint) -> dict[str, str]:
    plan, accumulate = point.plan, point.plan.accumulate
    numbers = {
        **_loss_numbers(point),
        "Time per step": format_seconds(point.step_seconds),
        **_interval_numbers("time", point.seconds_interval, format_seconds),
        "Peak memory per device": format_bytes(point.peak_bytes),
        **_interval_numbers("memory", point.bytes_interval, format_bytes),
        "Devices": str(point.devices),
    }
    if plan.predicted is not None:
        numbers["Computing"] = format_seconds(plan.predicted.compute_seconds)
        numbers["Waiting for communication"] = format_seconds(
            plan.predicted.exposed_communication_seconds
        )
    if plan.batch_size is not None and point.step_seconds > 0:
        samples = accumulate * plan.batch_size * plan.data_parallel_size
        numbers["Samples per second"] = f"{samples / point.step_seconds:,.1f}"
    if accumulate > 1:
        numbers["Micro-batches per step"] = str(accumulate)
    both = {"times": point.seconds_interval, "peaks": point.bytes_interval}
    for of, interval in both.items():
        if interval is not None and interval.outside:
            numbers[f"Unlike measured {of}"] = ", ".join(interval.outside)
    return numbers


def _loss_numbers(point: PlanPoint) -> dict[str, str]:
    found = point.to_loss
    if found is None:
        return {}
    high = "not known, as some runs did not reach it"
    if math.isfinite(found.high):
        high = format_seconds(found.high)
    return {
        _time_title(point): format_seconds(found.seconds),
        "Range of that": f"{format_seconds(found.low)} to {high}",
        "Steps needed, by those of dense training": found.factor_words,
        "The factor rests on": found.rests_on or "the definition: dense synchronous training",
    }


def _interval_numbers(
    of: str, interval: Interval | None, written: Callable[[float], str]
) -> dict[str, str]:
    if interval is None:
        return {f"Interval of the {of}": "its errors are not known"}
    low, high = written(interval.low), written(interval.high)
    return {f"{100 * interval.level:g} % interval of the {of}": f"{low} to {high}"}
