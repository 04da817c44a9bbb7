"""One plan for people: where its seconds and bytes are, and its schedule.

    print_explanation(explain_plan(request, plan), console=Console())    # kinds of blocks
    print_stages(explain_stages(request, plan), console=Console())       # stages
    schedule_svg(step_of_plan(blocks, plan))                             # ranks over time

The drawing of a schedule shows what every rank runs when, where it waits, and what it holds.
"""

from __future__ import annotations

import html
from collections.abc import Hashable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.plan.explanation import PlanExplanation, StageExplanation
from lightning_topt.plan.report_table import block_ranges, table
from lightning_topt.schedules.schedules import Kind
from lightning_topt.schedules.timing import MemoryCurve, Simulation
from lightning_topt.techniques.plan_costs import BlockExplanation

_ROWS = 8  # kinds of blocks that are shown
_COLUMNS = ("blocks", "operators", "update", "data axes", "memory at the peak")
_KINDS: tuple[tuple[Kind, str, str], ...] = (  # passes, their names, colours (Okabe and Ito's)
    ("forward", "forward", "#0072B2"),
    ("backward", "backward", "#D55E00"),
    ("backward_input", "gradients of inputs", "#E69F00"),
    ("backward_weight", "gradients of parameters", "#009E73"),
    ("update", "update", "#CC79A7"),
)
_NUMBER_WIDTH = 16.0  # of a pass in the drawing, in its units, that takes a number
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 70.0, 640.0, 8.0, 46.0, 20.0  # of the drawing, whose width is 760


# ---- costs, by block and by stage


def print_explanation(explained: PlanExplanation, *, console: Console) -> None:
    """Print what each kind of block takes in a step.

    `explained` is of one of the micro-batches of a step. Blocks that cost the same are one row.
    """
    plan = explained.plan
    # the update comes once in a step, and so does the exchange of unsharded gradients
    accumulate, exchanges = plan.accumulate, 1 if plan.keeps_gradients_whole else plan.accumulate

    def cells(block: BlockExplanation) -> tuple[str, ...]:
        seconds = block.seconds
        numbers = (
            accumulate * sum(seconds[kind] for kind in ("forward", "backward", "recompute")),
            seconds["update"],
            exchanges * sum(seconds[kind] for kind in ("gather", "reduce", "broadcast")),
        )
        return *map(format_seconds, numbers), format_bytes(sum(block.peak_parts.values()))

    # rows: blocks of equal cells, those that take most time in all first
    alike: dict[Hashable, list[str]] = {}
    for name, block in explained.blocks.items():
        alike.setdefault(cells(block), []).append(name)
    rows = sorted(
        alike.values(),
        key=lambda names: -len(names) * sum(explained.blocks[names[0]].seconds.values()),
    )
    hidden = len(rows) - _ROWS
    caption = "each block, in a step; operators include exchanges along tensor axes"
    caption += f"; {hidden} more kinds of blocks take less" if hidden > 0 else ""
    made = table(*_COLUMNS, caption=caption)
    for names in rows[:_ROWS]:
        made.add_row(escape(block_ranges(names)), *cells(explained.blocks[names[0]]))
    console.print(made)


def print_stages(stages: Sequence[StageExplanation], *, console: Console) -> None:
    """Print what each stage of a plan takes in a step, and what its rank holds for it."""
    columns = ["stage", "rank", "blocks", "forward", "backward", "receives", "update", "memory"]
    caption = "each stage, all microbatches of a step; update: with exchanges between data ranks"
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
        cells = [*map(format_seconds, seconds), format_bytes(held)]
        if is_stale:
            cells.append(str(stage.missing_updates))
        made.add_row(str(index), str(stage.rank), escape(block_ranges(stage.blocks)), *cells)
    console.print(made)


# ---- the schedule, as a drawing in HTML


def schedule_title(simulation: Simulation) -> str:
    """Return which schedule it is, and how much of a step ranks wait."""
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


def _settled(curve: MemoryCurve) -> MemoryCurve:
    """Return the curve with one point per instant.

    So what is freed as the next pass starts is not shown as a dip.
    """
    # of points at one instant the last one stays
    last = np.append(np.diff(curve.seconds) > 0, True)
    return MemoryCurve(curve.seconds[last], curve.nbytes[last])


def schedule_svg(simulation: Simulation) -> str:
    """Return an HTML fragment: a line of words, a legend, and the drawing.

    It has the colours of the page (`frontier_report.html`), loads nothing and runs nothing.
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
    drawn = "".join(_svg_row(simulation, rank, scale) for rank in range(len(simulation.memory)))
    bottom = _TOP + _ROW * simulation.schedule.num_ranks
    words = html.escape(schedule_title(simulation))
    return (
        f'<p>{words}</p><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 760 {bottom + 24:g}" role="img" aria-label="{words}">{drawn}'
        f'<text x="{_LEFT:g}" y="{bottom + 14:g}">0</text>'
        f'<text x="{_RIGHT:g}" y="{bottom + 14:g}" '
        f'text-anchor="end">{format_seconds(simulation.step_seconds)}</text></svg>'
    )


# a rank: its name, a bar of its passes, and what it holds as an area
def _svg_row(simulation: Simulation, rank: int, scale: float) -> str:
    top = _TOP + _ROW * rank
    spans = [span for span in simulation.spans if span.rank == rank]
    found = [
        f'<text x="0" y="{top + 15:g}">rank {rank}</text>',
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
    peak, memory = max(simulation.peak_bytes), _settled(simulation.memory[rank])
    found.append(_svg_memory(memory, bottom=top + _ROW - 4, scale=scale, peak=peak))
    found.append(
        f'<text x="{_RIGHT + 8:g}" '
        f'y="{top + _ROW - 6:g}">{html.escape(format_bytes(simulation.peak_bytes[rank]))}</text>'
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
