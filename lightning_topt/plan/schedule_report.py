"""A simulated step of a pipeline for people: a table, a picture, and a drawing for the page of
plans.

Each shows what every rank runs when, where it waits, and what it holds.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.schedules.schedules import Kind
from lightning_topt.schedules.simulate import MemoryCurve, Simulation, Span

_KINDS: tuple[tuple[Kind, str, str], ...] = (  # what it is called, colour (Okabe and Ito's)
    ("forward", "forward", "#0072B2"),
    ("backward", "backward", "#D55E00"),
    ("backward_input", "gradients of inputs", "#E69F00"),
    ("backward_weight", "gradients of parameters", "#009E73"),
    ("update", "update", "#CC79A7"),
)
_INK, _FAINT, _WAIT = "#1f2430", "#5b6472", "#e4e7eb"
_NUMBERED = 600  # more passes than this have no room for the numbers of their microbatches
_NUMBER_WIDTH = 16.0  # of a pass in the drawing, in its units, that takes a number
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 70.0, 640.0, 8.0, 46.0, 20.0  # of the drawing, whose width is 760


class RankRow(NamedTuple):
    """A rank's step, in seconds and bytes: before its first pass, running passes, waiting between,
    after its last; the peak.
    """

    rank: int
    stages: tuple[int, ...]
    lead_seconds: float
    busy_seconds: float
    waiting_seconds: float
    tail_seconds: float
    peak_bytes: float


def rank_rows(simulation: Simulation) -> list[RankRow]:
    """Return one row for each rank; the four times add up to the step's. Transfers that occupy a
    rank count as waiting.
    """
    rows = []
    for rank, spans in enumerate(_spans_of(simulation)):
        first, last = (spans[0].start, spans[-1].end) if spans else (simulation.step_seconds,) * 2
        busy = simulation.busy_seconds[rank]
        times = (first, busy, max(last - first - busy, 0.0), simulation.step_seconds - last)
        rows.append(
            RankRow(rank, simulation.schedule.stages_of(rank), *times, simulation.peak_bytes[rank])
        )
    return rows


def print_schedule(simulation: Simulation, *, console: Console) -> None:
    """Print a line per rank: what it runs, how long it waits, and its peak."""
    table = Table(title=_title(simulation), title_justify="left")
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
    """Draw the passes of each rank over time, grey where it waits, and below what each rank
    holds.
    """
    ranks = simulation.schedule.num_ranks
    height = min(2.8 + 0.45 * ranks, 20.0)
    figure = Figure(figsize=(11, height + 2.2), dpi=160, facecolor="white", layout="constrained")
    passes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(height, 2.2))
    _draw_passes(passes, simulation)
    _draw_memory(memory, simulation)
    passes.set_title(
        title or _title(simulation),
        loc="left",
        color=_INK,
        weight="bold",
        fontsize=13,
        pad=26,
        parse_math=False,
    )
    figure.savefig(path, format="png", facecolor="white")


def schedule_svg(simulation: Simulation) -> str:
    """Return an HTML fragment for a page with the colours of `report.html`: a line of words, a
    legend, and the drawing.

    It loads nothing and runs nothing.
    """
    kinds = [entry for entry in _KINDS if entry[0] in simulation.walk.kinds]
    keys = [*((name, colour) for _, name, colour in kinds), ("waits", "var(--grid)")]
    legend = "".join(
        '<span><svg viewBox="0 0 16 16" aria-hidden="true"><rect width="16" height="16" '
        f'style="fill: {colour}"/></svg>'
        f"{name}</span>"
        for name, colour in keys
    )
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


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    parts = "minibatches" if "update" in simulation.walk.kinds else "microbatches"
    sizes = (
        f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} {parts}"
    )
    waits = (
        f"ranks run no pass in {100 * simulation.bubble_fraction:.0f} % of "
        f"{format_seconds(simulation.step_seconds)}"
    )
    return f"Schedule {schedule.name}: {sizes}; {waits}"


def _spans_of(simulation: Simulation) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in range(simulation.schedule.num_ranks)]
    for span in simulation.spans:
        spans[span.rank].append(span)
    return spans


def _draw_passes(axes: Axes, simulation: Simulation) -> None:
    axes.barh(
        range(simulation.schedule.num_ranks),
        simulation.step_seconds,
        height=0.8,
        color=_WAIT,
        label="waits",
    )
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
    if len(simulation.spans) <= _NUMBERED:
        for span in simulation.spans:
            if span.end - span.start > simulation.step_seconds / 90:
                where = ((span.start + span.end) / 2, span.rank)
                text = str(span.action.microbatch_index)
                axes.annotate(text, where, color="white", fontsize=8, ha="center", va="center")
    axes.set_yticks(range(simulation.schedule.num_ranks))
    axes.set_ylabel("rank", color=_FAINT)
    axes.set_ylim(simulation.schedule.num_ranks - 0.5, -0.5)
    _plain(axes)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=5,
        frameon=False,
        labelcolor=_INK,
        fontsize=9,
    )


def _draw_memory(axes: Axes, simulation: Simulation) -> None:
    colours = [colour for _, _, colour in _KINDS] + ["#56B4E9"]
    for rank, (curve, colour) in enumerate(zip(simulation.memory, itertools.cycle(colours))):
        curve = _settled(curve)
        seconds = [*curve.seconds, simulation.step_seconds]
        nbytes = np.array([*curve.nbytes, curve.nbytes[-1]])
        label = f"rank {rank}: {format_bytes(simulation.peak_bytes[rank])}"
        axes.step(seconds, nbytes / 2**20, where="post", color=colour, linewidth=1.2, label=label)
    axes.set_xlabel("seconds", color=_FAINT)
    axes.set_ylabel("MiB held", color=_FAINT)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, simulation.step_seconds or 1.0)
    _plain(axes)
    if simulation.schedule.num_ranks <= 16:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_INK, fontsize=8
        )


def _settled(curve: MemoryCurve) -> MemoryCurve:
    """The curve with one point per instant: what is freed as the next pass starts is not shown as a
    dip.
    """
    last = np.append(np.diff(curve.seconds) > 0, True)
    return MemoryCurve(curve.seconds[last], curve.nbytes[last])


def _plain(axes: Axes) -> None:
    axes.tick_params(colors=_FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _svg_row(
    spans: Sequence[Span], memory: MemoryCurve, row: RankRow, *, scale: float, peak: float
) -> str:
    """A rank: its name, a bar of its passes, and below it what it holds as an area, of which `peak`
    is the height.
    """
    top = _TOP + _ROW * row.rank
    found = [
        f'<text x="0" y="{top + 15:g}">rank {row.rank}</text>',
        f'<rect x="{_LEFT:g}" y="{top:g}" width="{_RIGHT - _LEFT:g}" height="{_BAR:g}" '
        'style="fill: var(--grid)"/>',
    ]
    for kind, _, colour in _KINDS:
        bars = [span for span in spans if span.action.kind == kind]
        # one path for all: a rectangle with a title each would make a large page of a large
        # schedule
        if bars:
            path = "".join(
                f"M{_LEFT + span.start * scale:.2f},{top:g}"
                f"h{max((span.end - span.start) * scale - 0.6, 0.2):.2f}"
                f"v{_BAR:g}H{_LEFT + span.start * scale:.2f}z"
                for span in bars
            )
            found.append(f'<path d="{path}" style="fill: {colour}"/>')
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
    height = (_ROW - _BAR - 8) / (peak or 1.0)
    steps: list[Any] = [f"M{_LEFT:g},{bottom:g}"]
    for second, size in zip(memory.seconds.tolist(), memory.nbytes.tolist(), strict=True):
        steps.append(f"H{_LEFT + second * scale:.2f}V{bottom - size * height:.2f}")
    return (
        f'<path d="{"".join(steps)}H{_RIGHT:g}V{bottom:g}z" style="fill: var(--faint)" '
        'fill-opacity="0.45"/>'
    )
