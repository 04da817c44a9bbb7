"""A frontier for people: a table, and a page that shows the plan of any point.

    points = frontier.shown_with(chosen)
    print_table(points, chosen, console=Console())
    limit = MemoryLimit(2**30)
    save_html("frontier.html", points, chosen, memory_limit=limit)

Both mark the chosen plan, and show in grey what does not fit into the limit. The page
(`frontier_report.html`) loads nothing from elsewhere, and reads its data as JSON from an element
``data``. Its axes have round marks in units that people read (`drawn_axis`).
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.accuracy import Interval
from lightning_topt.costs.plain_values import dump_yaml
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_report import schedule_svg
from lightning_topt.plan.plan_values import config_to_dict, describe_config
from lightning_topt.plan.report_table import block_ranges, table
from lightning_topt.schedules.timing import Simulation

Points = Sequence[PlanPoint]
_KIND = ("runs", "parameters", "gradients", "optimizer_state")  # what a page says of a block
_SCHEDULE = (
    '<section class="card schedule" aria-label="Schedule"><h3>Schedule of the chosen '
    "plan</h3>{}</section>"
)
# units of axes: name, factor, marks of a logarithmic axis
Units = tuple[tuple[str, float, tuple[float, ...]], ...]
_POWERS = tuple(2**k for k in range(10))
_ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500)
BYTES: Units = tuple(
    (name, 1024.0**k, _POWERS) for k, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)
SECONDS: Units = (
    ("us", 1e-6, _ROUND),
    ("ms", 1e-3, _ROUND),
    ("s", 1.0, (*_ROUND, 1000, 2000, 5000, 10000)),
)
_LOG_FROM = 20.0  # an axis is logarithmic when its largest value is so many times its smallest


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
    made = table(*names, left=("plan",), caption=caption)
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
        made.add_row(mark, *numbers, point.plan.summary(), style=style)
    console.print(made)


def _loss_cells(point: PlanPoint) -> list[str]:
    # The cells of the time to a loss, and of the steps that it takes; none without one
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
    # The positions to show of `points`, which are ordered by devices and memory
    if len(points) <= limit:
        return list(range(len(points)))
    kept = {chosen}
    for _, group in itertools.groupby(range(len(points)), key=lambda i: points[i].devices):
        members = list(group)
        kept |= {members[0], min(members, key=lambda i: points[i].compared_seconds)}
    rest = [i for i in range(len(points)) if i not in kept]
    free = max(0, limit - len(kept))
    return sorted(kept | {rest[(2 * k + 1) * len(rest) // (2 * free)] for k in range(free)})


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
    # no "<" in the data: neither "</script>" nor "<!--" can end the element early
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {
        "title": html.escape(_title(title, chosen.plan)),
        "data": embedded,
        "schedule": "" if step is None else _SCHEDULE.format(schedule_svg(step)),
    }
    page = resources.files("lightning_topt.plan") / "frontier_report.html"
    names = r"\{\{ (title|data|schedule) \}\}"
    text = re.sub(names, lambda match: filled[match[1]], page.read_text(encoding="utf-8"))
    Path(path).write_text(text, encoding="utf-8")


def _ordered(points: Points, chosen: PlanPoint) -> tuple[list[PlanPoint], int]:
    # The points by devices and memory, and where the chosen one is (with its reason)
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


# ---- axes


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
    # What the seconds are by which plans are compared
    if point.to_loss is None:
        return "Time per step"
    return "Time to the loss" + (" per dense step" if point.to_loss.steps is None else "")


class DrawnAxis(NamedTuple):
    """The range of an axis in seconds or bytes, and where its marks are."""

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]


def drawn_axis(title: str, values: Sequence[float], *, units: Units) -> DrawnAxis:
    """Return the axis that shows all `values`, with about five round marks."""
    low, high = min(values), max(values)
    # a logarithmic axis where the largest value is many times the least
    log = 0 < _LOG_FROM * low < high
    if log:
        pad = (high / low) ** 0.06
        # marks: round values in their units, at most about seven
        low, high = low / pad, high * pad
        ticks = [
            (mark * factor, f"{mark:,.10g} {name}".rstrip())
            for name, factor, marks in units
            for mark in marks
        ]
        inside = [tick for tick in ticks if low <= tick[0] <= high]
        ticks = inside[:: max(1, math.ceil(len(inside) / 7))]
    else:
        # a linear axis, from 0 where the margin would go below
        margin = 0.08 * (high - low) or 0.25 * high or 1.0
        low, high = max(0.0, low - margin), high + margin
        # about five round values, in the largest unit that is not above `high`
        name, factor, _ = next((unit for unit in reversed(units) if unit[1] <= high), units[0])
        rough = (high - low) / factor / 5
        exponent = math.floor(math.log10(rough))
        # the least of 1, 2, 5 and 10 times a power of ten that makes five marks or fewer
        step = (
            next(m for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough * 0.999) * 10.0**exponent
        )
        # as many decimals as the step needs; 1e-9 is for its rounding
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(low / factor / step - 1e-9), math.floor(high / factor / step + 1e-9)
        ticks = [
            (k * step * factor, f"{k * step:,.{decimals}f} {name}".rstrip())
            for k in range(first, last + 1)
        ]
    return DrawnAxis(title, low, high, log, tuple(ticks))


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
