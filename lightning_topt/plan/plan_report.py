"""One plan for people: where its seconds and bytes are, and its schedule.

    print_explanation(explain_plan(request, plan), console=Console())    # kinds of blocks
    print_stages(explain_stages(request, plan), console=Console())       # stages
    print_schedule(step_of_plan(blocks, plan), console=Console())        # ranks over time
    save_schedule_png("schedule.png", step_of_plan(blocks, plan))

A schedule shows what every rank runs when, where it waits, and what it holds: as a table, as a
picture, and as a drawing for the page of a frontier.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.plan.explanation import PlanExplanation, StageExplanation
from lightning_topt.plan.report_page import FAINT, INK, block_ranges
from lightning_topt.schedules.schedules import Kind
from lightning_topt.schedules.simulate import MemoryCurve, PassSpan, Simulation
from lightning_topt.techniques.explain import BlockExplanation, TensorCollective
from lightning_topt.techniques.tensor_parallel.split_prices import WholeOperator

_ROWS, _OPERATORS = 8, 5  # kinds of blocks, and functions that are not split, that are shown


_COLUMNS = (
    "blocks",
    "operators",
    "of these, tensor axis",
    "update",
    "data axes",
    "memory at the peak",
)
_KINDS: tuple[tuple[Kind, str, str], ...] = (  # passes, their names, colours (Okabe and Ito's)
    ("forward", "forward", "#0072B2"),
    ("backward", "backward", "#D55E00"),
    ("backward_input", "gradients of inputs", "#E69F00"),
    ("backward_weight", "gradients of parameters", "#009E73"),
    ("update", "update", "#CC79A7"),
)
_WAIT = "#e4e7eb"
_NUMBERED = 600  # more passes than this have no room for the numbers of their microbatches
_NUMBER_WIDTH = 16.0  # of a pass in the drawing, in its units, that takes a number


_LEFT, _RIGHT, _TOP, _ROW, _BAR = 70.0, 640.0, 8.0, 46.0, 20.0  # of the drawing, whose width is 760


# ---- costs, by block and by stage


def print_explanation(explained: PlanExplanation, *, console: Console) -> None:
    """Print what each kind of block takes in a step, and what is not split.

    `explained` is of one of the micro-batches of a step.
    """
    _blocks(explained, console)
    for line in whole_sentences(explained.whole):
        console.print(line, highlight=False, markup=False)


def _blocks(explained: PlanExplanation, console: Console) -> None:
    """Print a table of blocks, those that cost the same in one row, then what they exchange."""
    keeps_whole, accumulate = explained.plan.keeps_gradients_whole, explained.plan.accumulate

    def cells_of(block: BlockExplanation) -> tuple[str, ...]:
        return _cells(block, accumulate, keeps_whole=keeps_whole)

    # rows: blocks of equal cells and exchanges, those that take most time in all first
    alike: dict[Hashable, list[str]] = {}
    for name, block in explained.blocks.items():
        alike.setdefault((cells_of(block), _exchanged(block.collectives)), []).append(name)
    order = sorted(
        alike.values(),
        key=lambda names: -len(names) * sum(explained.blocks[names[0]].seconds.values()),
    )
    hidden = len(order) - _ROWS
    caption = "each block, in a step"
    caption += f"; {hidden} more kinds of blocks take less" if hidden > 0 else ""
    table = Table(*_COLUMNS, caption=caption, caption_justify="left")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    titles = [block_ranges(names) for names in order]
    for title, names in zip(titles[:_ROWS], order, strict=False):
        table.add_row(escape(title), *cells_of(explained.blocks[names[0]]))
    console.print(table)
    # below the table, what the kinds of blocks in it exchange along the tensor axis
    for title, names in zip(titles[:_ROWS], order, strict=False):
        if exchanged := _exchanged(explained.blocks[names[0]].collectives):
            of = " of a micro-batch" if accumulate > 1 else ""
            console.print(
                f"{title} along the tensor axis{of}: {exchanged}", highlight=False, markup=False
            )


def _cells(block: BlockExplanation, accumulate: int, *, keeps_whole: bool) -> tuple[str, ...]:
    """Return the times of a step and the memory.

    The update comes once in a step, and so does the exchange of unsharded gradients.
    """
    seconds, exchanges = block.seconds, 1 if keeps_whole else accumulate
    # four columns of time: operators, of these the tensor axis, update, data axes
    numbers = (
        accumulate * sum(seconds[kind] for kind in ("forward", "backward", "recompute")),
        accumulate * sum(each.seconds for each in block.collectives),
        seconds["update"],
        exchanges * sum(seconds[kind] for kind in ("gather", "reduce", "broadcast")),
    )
    return *map(format_seconds, numbers), format_bytes(sum(block.peak_parts.values()))


def _exchanged(collectives: Sequence[TensorCollective]) -> str:
    return ", ".join(
        f"{each.during} {each.calls} {each.op} ({format_bytes(each.bytes)})" for each in collectives
    )


def print_stages(stages: Sequence[StageExplanation], *, console: Console) -> None:
    """Print what each stage of a plan takes in a step, and what its rank holds for it."""
    columns = ("stage", "rank", "blocks", "forward", "backward", "receives", "update", "memory")
    caption = "each stage, all microbatches of a step; update: with exchanges between data ranks"
    # a column more where forward passes compute without some updates
    is_stale = any(stage.missing_updates for stage in stages)
    table = Table(
        *columns,
        *(("misses",) if is_stale else ()),
        caption=f"{caption}; misses: updates that forward passes are too early for"
        if is_stale
        else caption,
        caption_justify="left",
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.columns[2].overflow = "fold"
    for column in table.columns[3:]:
        column.justify = "right"
    # seconds of each kind, and the most that the rank holds for the stage
    for index, stage in enumerate(stages):
        shown = block_ranges(stage.blocks)
        seconds = (stage.seconds[kind] for kind in ("forward", "backward", "receive", "once"))
        parts = stage.peak_parts
        # activations are gone when the optimizer steps: the larger of both counts
        held = parts["static"] + max(parts["activations"] + parts["running"], parts["update"])
        cells = (
            *map(format_seconds, seconds),
            format_bytes(held),
            *((str(stage.missing_updates),) if is_stale else ()),
        )
        table.add_row(str(index), str(stage.rank), escape(shown), *cells)
    console.print(table)


def whole_sentences(operators: Sequence[WholeOperator]) -> list[str]:
    """Return what is not split with its share of time and memory; nothing for none.

    First all of it, then by function.
    """
    if not operators:
        return []
    shown, rest = operators[:_OPERATORS], operators[_OPERATORS:]
    lines = [f"Not split, the same on every rank of the tensor axis: {_shares(operators)}."]
    lines += [
        f"- {each.function} ({each.calls} call{'' if each.calls == 1 else 's'}, first in "
        f"{each.module or 'the model itself'}; {each.why}): {_shares([each])}"
        for each in shown
    ]
    return lines + ([f"- {len(rest)} other functions: {_shares(rest)}"] if rest else [])


def _shares(operators: Sequence[WholeOperator]) -> str:
    seconds, size = (
        sum(each.share_of_seconds for each in operators),
        sum(each.share_of_bytes for each in operators),
    )
    return f"{100 * seconds:.1f} % of the operators' time, {100 * size:.1f} % of the activations"


# ---- the schedule, as a table and a picture


class RankRow(NamedTuple):
    """A rank's step: seconds before its first pass, in passes, waiting between, after its last.

    And the peak bytes.
    """

    rank: int
    stages: tuple[int, ...]
    lead_seconds: float
    busy_seconds: float
    waiting_seconds: float
    tail_seconds: float
    peak_bytes: float


def rank_rows(simulation: Simulation) -> list[RankRow]:
    """Return one row for each rank; the four times add up to the step's.

    Transfers that occupy a rank count as waiting.
    """
    rows = []
    for rank, spans in enumerate(_spans_of(simulation)):
        # a rank without passes waits for the whole step
        first, last = (spans[0].start, spans[-1].end) if spans else (simulation.step_seconds,) * 2
        busy = simulation.busy_seconds[rank]
        times = (first, busy, max(last - first - busy, 0.0), simulation.step_seconds - last)
        rows.append(
            RankRow(rank, simulation.schedule.stages_of(rank), *times, simulation.peak_bytes[rank])
        )
    return rows


def print_schedule(simulation: Simulation, *, console: Console) -> None:
    """Print a line per rank: what it runs, how long it waits, and its peak."""
    console.print(_title(simulation), highlight=False, markup=False)
    table = Table(padding=(0, 0, 0, 1), pad_edge=False)
    for column in (
        "rank",
        "stages",
        "starts after",
        "runs",
        "waits between",
        "ends before",
        "peak memory",
    ):
        table.add_column(column, justify="left" if column == "stages" else "right")
    for row in rank_rows(simulation):
        times = (row.lead_seconds, row.busy_seconds, row.waiting_seconds, row.tail_seconds)
        stages = ", ".join(map(str, row.stages))
        table.add_row(
            str(row.rank), stages, *map(format_seconds, times), format_bytes(row.peak_bytes)
        )
    console.print(table)


def save_schedule_png(path: str | Path, simulation: Simulation, *, title: str = "") -> None:
    """Draw the passes of each rank over time, grey where it waits, and what each rank holds."""
    ranks = simulation.schedule.num_ranks
    # passes above, memory below, over one axis of time; taller for more ranks
    height = min(2.8 + 0.45 * ranks, 20.0)
    figure = Figure(figsize=(11, height + 2.2), dpi=160, facecolor="white", layout="constrained")
    passes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(height, 2.2))
    _draw_passes(passes, simulation)
    _draw_memory(memory, simulation)
    passes.set_title(
        title or _title(simulation),
        loc="left",
        color=INK,
        weight="bold",
        fontsize=13,
        pad=26,
        parse_math=False,
    )
    figure.savefig(path, format="png", facecolor="white")


def _draw_passes(axes: Axes, simulation: Simulation) -> None:
    # grey from start to end: what no pass covers is waiting
    axes.barh(
        range(simulation.schedule.num_ranks),
        simulation.step_seconds,
        height=0.8,
        color=_WAIT,
        label="waits",
    )
    # one call for each kind and rank, and a label for the legend once
    for kind, name, colour in _KINDS:
        if kind not in simulation.walk.kinds:
            continue
        for rank, spans in enumerate(_spans_of(simulation)):
            bars = [
                (span.start, span.end - span.start) for span in spans if span.action.kind == kind
            ]
            label = name if rank == 0 else None
            axes.broken_barh(
                bars, (rank - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.6, label=label
            )
    # numbers of microbatches, where they are readable
    if len(simulation.spans) <= _NUMBERED:
        for span in simulation.spans:
            if span.end - span.start > simulation.step_seconds / 90:
                where = ((span.start + span.end) / 2, span.rank)
                text = str(span.action.microbatch_index)
                axes.annotate(text, where, color="white", fontsize=8, ha="center", va="center")
    axes.set_yticks(range(simulation.schedule.num_ranks))
    axes.set_ylabel("rank", color=FAINT)
    axes.set_ylim(simulation.schedule.num_ranks - 0.5, -0.5)
    _plain(axes)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=5,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )


def _draw_memory(axes: Axes, simulation: Simulation) -> None:
    colours = [colour for _, _, colour in _KINDS] + ["#56B4E9"]
    # one line per rank; colours come again after the last
    for rank, (curve, colour) in enumerate(zip(simulation.memory, itertools.cycle(colours))):
        curve = _settled(curve)
        # to the end of the step with what is held then
        seconds = [*curve.seconds, simulation.step_seconds]
        nbytes = np.array([*curve.nbytes, curve.nbytes[-1]])
        label = f"rank {rank}: {format_bytes(simulation.peak_bytes[rank])}"
        axes.step(seconds, nbytes / 2**20, where="post", color=colour, linewidth=1.2, label=label)
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_ylabel("MiB held", color=FAINT)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, simulation.step_seconds or 1.0)
    _plain(axes)
    if simulation.schedule.num_ranks <= 16:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK, fontsize=8
        )


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    # continuous schedules run minibatches, the others parts of one
    parts = "minibatches" if "update" in simulation.walk.kinds else "microbatches"
    sizes = (
        f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, {schedule.num_microbatches} "
        f"{parts}"
    )
    waits = (
        f"ranks run no pass in {100 * simulation.bubble_fraction:.0f} % of "
        f"{format_seconds(simulation.step_seconds)}"
    )
    return f"Schedule {schedule.name}: {sizes}; {waits}"


def _spans_of(simulation: Simulation) -> list[list[PassSpan]]:
    spans: list[list[PassSpan]] = [[] for _ in range(simulation.schedule.num_ranks)]
    for span in simulation.spans:
        spans[span.rank].append(span)
    return spans


def _settled(curve: MemoryCurve) -> MemoryCurve:
    """Return the curve with one point per instant.

    So what is freed as the next pass starts is not shown as a dip.
    """
    # of points at one instant the last one stays
    last = np.append(np.diff(curve.seconds) > 0, True)
    return MemoryCurve(curve.seconds[last], curve.nbytes[last])


def _plain(axes: Axes) -> None:
    axes.tick_params(colors=FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


# ---- the schedule, as a drawing in HTML


def schedule_svg(simulation: Simulation) -> str:
    """Return an HTML fragment: a line of words, a legend, and the drawing.

    It has the colours of the pages (`report_head.html`), loads nothing and runs nothing.
    """
    # legend: the kinds that this schedule runs, and waiting
    kinds = [entry for entry in _KINDS if entry[0] in simulation.walk.kinds]
    keys = [*((name, colour) for _, name, colour in kinds), ("waits", "var(--grid)")]
    legend = "".join(
        '<span><svg viewBox="0 0 16 16" aria-hidden="true"><rect width="16" height="16" '
        f'style="fill: {colour}"/></svg>'
        f"{name}</span>"
        for name, colour in keys
    )
    # units of the drawing per second; a step without time is drawn as one second
    scale = (_RIGHT - _LEFT) / (simulation.step_seconds or 1.0)
    rows = zip(
        _spans_of(simulation), map(_settled, simulation.memory), rank_rows(simulation), strict=True
    )
    peak = max(simulation.peak_bytes, default=0.0)
    drawn = "".join(
        _svg_row(spans, memory, row, scale=scale, peak=peak) for spans, memory, row in rows
    )
    bottom = _TOP + _ROW * simulation.schedule.num_ranks
    words = html.escape(_title(simulation))
    return (
        f'<p>{words}</p><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 760 {bottom + 24:g}" role="img" aria-label="{words}">{drawn}'
        f'<text x="{_LEFT:g}" y="{bottom + 14:g}">0</text>'
        f'<text x="{_RIGHT:g}" y="{bottom + 14:g}" '
        f'text-anchor="end">{format_seconds(simulation.step_seconds)}</text></svg>'
    )


def _svg_row(
    spans: Sequence[PassSpan], memory: MemoryCurve, row: RankRow, *, scale: float, peak: float
) -> str:
    """Return a rank: its name, a bar of its passes, and what it holds as an area.

    `peak` is the height of the area.
    """
    top = _TOP + _ROW * row.rank
    found = [
        f'<text x="0" y="{top + 15:g}">rank {row.rank}</text>',
        f'<rect x="{_LEFT:g}" y="{top:g}" width="{_RIGHT - _LEFT:g}" height="{_BAR:g}" '
        'style="fill: var(--grid)"/>',
    ]
    # the passes of one kind
    for kind, _, colour in _KINDS:
        bars = [span for span in spans if span.action.kind == kind]
        # one path for all: a rectangle with a title each would make a large page of a large
        # schedule
        if bars:
            drawn = [(_LEFT + s.start * scale, (s.end - s.start) * scale - 0.6) for s in bars]
            path = "".join(
                f"M{left:.2f},{top:g}h{max(width, 0.2):.2f}v{_BAR:g}H{left:.2f}z"
                for left, width in drawn
            )
            found.append(f'<path d="{path}" style="fill: {colour}"/>')
    # numbers of microbatches, where a pass is wide enough
    for span in spans:
        if (span.end - span.start) * scale >= _NUMBER_WIDTH:
            middle = _LEFT + (span.start + span.end) / 2 * scale
            found.append(
                f'<text x="{middle:.2f}" y="{top + 15:g}" text-anchor="middle" style="fill: #fff">'
                f"{span.action.microbatch_index}</text>"
            )
    found.append(_svg_memory(memory, bottom=top + _ROW - 4, scale=scale, peak=peak))
    found.append(
        f'<text x="{_RIGHT + 8:g}" '
        f'y="{top + _ROW - 6:g}">{html.escape(format_bytes(row.peak_bytes))}</text>'
    )
    return "".join(found)


def _svg_memory(memory: MemoryCurve, *, bottom: float, scale: float, peak: float) -> str:
    # the highest rank fills what is left of a row below its bar
    height = (_ROW - _BAR - 8) / (peak or 1.0)
    steps: list[str] = [f"M{_LEFT:g},{bottom:g}"]
    for second, size in zip(memory.seconds.tolist(), memory.nbytes.tolist(), strict=True):
        steps.append(f"H{_LEFT + second * scale:.2f}V{bottom - size * height:.2f}")
    return (
        f'<path d="{"".join(steps)}H{_RIGHT:g}V{bottom:g}z" style="fill: var(--faint)" '
        'fill-opacity="0.45"/>'
    )
