"""Reports for people: tables, and a page that shows the plan of any point of a frontier.

    points = frontier.shown_with(chosen)
    print_table(points, chosen, console=Console())
    save_html("frontier.html", points, chosen, memory_limit=MemoryLimit(2**30))
    print_stages(explain_stages(request, plan), console=Console())    # a plan with stages

The table and the page mark the chosen plan, and show in grey what does not fit into the limit. The
page (`frontier_report.html`) loads nothing from elsewhere. It reads its data as JSON from an
element ``data``, and draws its axes.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.accuracy import Interval
from lightning_topt.costs.plain_values import dump_yaml
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import BlockPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_values import config_to_dict, describe_config

if TYPE_CHECKING:  # what explains plans is not imported where none is explained
    from lightning_topt.plan.explanation import StageExplanation

Points = Sequence[PlanPoint]
_KIND = ("runs", "parameters", "gradients", "optimizer_state")  # what a page says of a block


# ---- what all reports share


def table(*columns: str, left: Sequence[str] = (), caption: str | None = None) -> Table:
    """Return a table whose columns are numbers, to the right, but for the first and `left`."""
    made = Table(caption=caption, caption_justify="left", padding=(0, 0, 0, 1), pad_edge=False)
    for place, name in enumerate(columns):
        if place == 0 or name in left:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="right", no_wrap=True)
    return made


def report_title(model: str, cluster: str, devices: Iterable[int]) -> str:
    """Return what a report is about: ``"GPT on a100_8x8, 32 and 64 devices"``."""
    *others, last = map(str, sorted(set(devices)))
    counts = f"{', '.join(others)} and {last}" if others else last
    where = f" on {cluster}" if cluster else ""
    return f"{model or 'A model'}{where}, {counts} device{'' if counts == '1' else 's'}"


def block_ranges(names: Sequence[str], *, most: int = 4) -> str:
    """Return names of blocks with numbers as ranges: ``"embedding, layers.0-79"``.

    Of more than `most` kinds of names the rest is counted. The block ``""`` is what the others
    leave.
    """
    # the same name but for its last number; names without one stand alone
    alike: dict[tuple[str, str | None], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*)(\D*)", name)
        if match is None:
            alike.setdefault((name or "(everything else)", None), [])
        else:
            alike.setdefault((match[1], match[3]), []).append(int(match[2]))
    parts = [
        prefix if suffix is None else f"{prefix}{ranges(sorted(numbers))}{suffix}"
        for (prefix, suffix), numbers in alike.items()
    ]
    rest = sum(max(len(numbers), 1) for numbers in [*alike.values()][most:])
    return ", ".join(parts[:most]) + (f" and {rest} more" if rest else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in order as text, ``"0-62,64"``; of many ranges the first ones."""
    # runs of consecutive numbers
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ",".join(parts) if len(parts) <= 4 else f"{','.join(parts[:3])},... ({len(numbers)})"


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


# ---- the tables


def print_table(
    points: Points,
    chosen: PlanPoint,
    *,
    console: Console,
    memory_limit: MemoryLimit | None = None,
    limit: int = 20,
) -> None:
    """Print plans by devices and memory, the chosen one marked with a star.

    Of more than `limit` points some are left out, evenly for each number of devices, whose first
    and last plan stay. The caption says how many are left out.

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
    # columns that say something: several numbers of devices, a loss, known errors
    several = len({point.devices for point in ordered}) > 1
    names, to_loss = ["", *(["devices"] * several)], chosen.to_loss
    if to_loss is not None:
        goal = "per dense step" if to_loss.steps is None else f"of {to_loss.steps:.0f} steps"
        names += [f"time to the loss\n{goal}", "steps needed"]
    titles = {"step time": chosen.seconds_interval, "peak memory": chosen.bytes_interval}
    for title, interval in titles.items():
        names.append(title if interval is None else f"{title}\n{100 * interval.level:g} % interval")
    made = table(*names, "plan", left=("plan",), caption=caption)
    for i in shown:
        point = ordered[i]
        cells = [str(point.devices)] * several
        if (loss := point.to_loss) is not None:
            cells.append(f"{format_seconds(loss.seconds)}\n{_range_of(loss.low, loss.high)}")
            cells.append(loss.factor_words.replace(" (", "\n("))
        cells.append(_with_ends(point.step_seconds, point.seconds_interval, format_seconds))
        cells.append(_with_ends(point.peak_bytes, point.bytes_interval, format_bytes))
        fits = point.peak_bytes <= most
        mark, style = ("*", "bold green") if i == index else ("", "") if fits else ("!", "dim")
        made.add_row(mark, *cells, point.plan.summary(), style=style)
    console.print(made)


def _range_of(low: float, high: float) -> str:
    # seconds; the end of runs that did not reach the loss is not known
    return f"{format_seconds(low)} to {'?' if math.isinf(high) else format_seconds(high)}"


def _with_ends(value: float, interval: Interval | None, written: Callable[[float], str]) -> str:
    # A number, with its interval in a second line
    if interval is None:
        return written(value)
    return f"{written(value)}\n{written(interval.low)} to {written(interval.high)}"


def _selection(points: Points, chosen: int, *, limit: int) -> list[int]:
    # The positions to show of `points`, which are ordered by devices and memory
    if len(points) <= limit:
        return list(range(len(points)))
    groups = [
        [*group]
        for _, group in itertools.groupby(range(len(points)), key=lambda i: points[i].devices)
    ]
    # the first, which is the smallest, the last, which is the fastest, and some between
    share = max((limit - 1) // len(groups), 2)
    shown = {chosen}
    for group in groups:
        shown |= {group[int(place)] for place in np.linspace(0, len(group) - 1, share)}
    return sorted(shown)


def print_stages(stages: Sequence[StageExplanation], *, console: Console) -> None:
    """Print what each stage of a plan takes in a step, and what its rank holds for it."""
    columns = ["stage", "rank", "blocks", "forward", "backward", "receives", "update", "memory"]
    columns.append("waits")
    caption = (
        "each stage, all microbatches of a step; update: with exchanges between data ranks; waits: "
        "the share of the step in which its rank runs nothing"
    )
    # a column more where forward passes compute without some updates
    is_stale = any(stage.missing_updates for stage in stages)
    if is_stale:
        columns.append("misses")
        caption += "; misses: updates that forward passes are too early for"
    made = table(*columns, left=("blocks",), caption=caption)
    for index, stage in enumerate(stages):
        seconds = (stage.seconds[kind] for kind in ("forward", "backward", "receive", "once"))
        parts = stage.peak_parts
        # activations are gone when the optimizer steps: the larger of both counts
        held = parts["static"] + max(parts["activations"] + parts["running"], parts["update"])
        cells = [*map(format_seconds, seconds), format_bytes(held), f"{100 * stage.bubble:.0f} %"]
        if is_stale:
            cells.append(str(stage.missing_updates))
        made.add_row(str(index), str(stage.rank), escape(block_ranges(stage.blocks)), *cells)
    console.print(made)


# ---- the page


def save_html(
    path: str | Path,
    points: Points,
    chosen: PlanPoint,
    *,
    memory_limit: MemoryLimit | None = None,
    title: str = "",
    exact: bool = True,
    notes: Sequence[str] = (),
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

    Raises:
        ValueError: `chosen` is not one of the points.
    """
    ordered, index = _ordered(points, chosen)
    blocks, entries = _embedded(ordered, index)
    limit: dict[str, object] | None = None
    if memory_limit is not None:
        limit = {**memory_limit._asdict(), "most": memory_limit.most_bytes}
        limit["text"] = str(memory_limit)
    data = {
        "chosen": index,
        "reason": chosen.plan.reason,
        "notes": [*notes],
        "exact": exact,
        "limit": limit,
        "time": _time_title(chosen),
        "blocks": blocks,
        "points": entries,
    }
    # no "<" in the data: neither "</script>" nor "<!--" can end the element early
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    model = chosen.plan.model
    title = title or (f"Plans for {model}" if model else "Parallel plans")
    filled = {"title": html.escape(title), "data": embedded}
    page = resources.files("lightning_topt.plan") / "frontier_report.html"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\{\{ (title|data) \}\}", lambda match: filled[match[1]], text)
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


def _time_title(point: PlanPoint) -> str:
    # What the seconds are by which plans are compared
    if point.to_loss is None:
        return "Time per step"
    return "Time to the loss" + (" per dense step" if point.to_loss.steps is None else "")


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
        mesh, places = point.plan.mesh, list[int]()
        for block in (block for stage in point.plan.stages for block in stage.blocks):
            # equal blocks on meshes of other axes read differently
            key = id(block), mesh.names
            if key not in known:
                known[key] = positions.setdefault((block, mesh.names), len(blocks))
                if known[key] == len(blocks):
                    blocks.append(_embedded_block(block, mesh))
            places.append(known[key])
        entries.append(
            {
                "x": point.peak_bytes,
                "y": point.compared_seconds,
                "ends": {"x": _ends(point.bytes_interval), "y": _time_ends(point)},
                "devices": point.devices,
                "summary": point.plan.summary(),
                "numbers": _numbers(point),
                "header": dump_yaml(point.plan.to_dict(stages=False)) + "stages:\n",
                "blocks": places,
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
    loss = point.to_loss
    if loss is None:
        return _ends(point.seconds_interval)
    return None if math.isinf(loss.high) else [loss.low, loss.high]


def _embedded_block(block: BlockPlan, mesh: Mesh) -> dict[str, object]:
    values: dict[str, Any] = {"block": block.block, **config_to_dict(block.config, mesh)}
    placed = {}
    for name in _KIND[1:]:  # one word, or one for each axis
        along = values[name]
        pairs = along.items() if isinstance(along, dict) else ()
        placed[name] = ", ".join(f"{axis}: {word}" for axis, word in pairs) or along
    runs, text = describe_config(block.config, mesh), textwrap.indent(dump_yaml([values]), "  ")
    return {"block": block.block, "runs": runs, **placed, "yaml": text}


def _numbers(point: PlanPoint) -> dict[str, str]:
    # The numbers of a plan, by what each is, in the order in which the page shows them
    plan, loss, numbers = point.plan, point.to_loss, dict[str, str]()
    if loss is not None:
        numbers[_time_title(point)] = format_seconds(loss.seconds)
        numbers["Range of that"] = _range_of(loss.low, loss.high)
        numbers["Steps needed, by those of dense training"] = loss.factor_words
        numbers["The factor rests on"] = (
            loss.rests_on or "the definition: dense synchronous training"
        )
    costs: tuple[tuple[str, str, float, Interval | None, Callable[[float], str]], ...] = (
        ("Time per step", "time", point.step_seconds, point.seconds_interval, format_seconds),
        (
            *("Peak memory per device", "memory"),
            *(point.peak_bytes, point.bytes_interval, format_bytes),
        ),
    )
    for title, name, value, interval, written in costs:
        numbers[title] = written(value)
        if interval is None:
            numbers[f"Interval of the {name}"] = "its errors are not known"
        else:
            ends = f"{written(interval.low)} to {written(interval.high)}"
            numbers[f"{100 * interval.level:g} % interval of the {name}"] = ends
    numbers["Devices"] = str(point.devices)
    if plan.predicted is not None:
        numbers["Computing"] = format_seconds(plan.predicted.compute_seconds)
        exposed = plan.predicted.exposed_communication_seconds
        numbers["Waiting for communication"] = format_seconds(exposed)
    if plan.batch_size is not None and point.step_seconds > 0:
        samples = plan.accumulate * plan.batch_size * plan.data_parallel_size
        numbers["Samples per second"] = f"{samples / point.step_seconds:,.1f}"
    if plan.accumulate > 1:
        numbers["Micro-batches per step"] = str(plan.accumulate)
    return numbers
