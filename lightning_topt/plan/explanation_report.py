"""The explanation of a plan for people: with a tensor axis its blocks, and what is not split; with
stages each of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.plan.plan_explanation import PlanExplanation
from lightning_topt.plan.stage_explanation import StageExplanation
from lightning_topt.techniques.explain import BlockExplanation, TensorCollective
from lightning_topt.techniques.tensor_parallel.whole_operators import WholeOperator

_ROWS, _OPERATORS = 8, 5
_COLUMNS = (
    "blocks",
    "operators",
    "of these, tensor axis",
    "update",
    "data axes",
    "memory at the peak",
)


def print_explanation(explained: PlanExplanation, *, console: Console) -> None:
    """Print what each kind of block takes, and what is not split."""
    _blocks(explained, console)
    for line in whole_sentences(explained.whole):
        console.print(line, highlight=False, markup=False)


def print_stages(stages: Sequence[StageExplanation], *, console: Console) -> None:
    """Print what each stage of a plan takes in a step, and what its rank holds for it."""
    columns = ("stage", "rank", "blocks", "forward", "backward", "receives", "update", "memory")
    caption = "each stage, all microbatches of a step; update: with the exchange of gradients"
    is_stale = any(stage.missing_updates for stage in stages)
    table = Table(
        *columns,
        *(("misses",) if is_stale else ()),
        caption=f"{caption}; misses: updates that forward passes are too early for"
        if is_stale
        else caption,
        caption_justify="left",
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for index, stage in enumerate(stages):
        names = stage.blocks
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
        seconds = (stage.seconds[kind] for kind in ("forward", "backward", "receive", "once"))
        parts = stage.peak_parts
        held = parts["static"] + max(parts["activations"] + parts["running"], parts["update"])
        cells = (
            *map(format_seconds, seconds),
            format_bytes(held),
            *((str(stage.missing_updates),) if is_stale else ()),
        )
        table.add_row(str(index), str(stage.rank), escape(shown), *cells)
    console.print(table)


def whole_sentences(operators: Sequence[WholeOperator]) -> list[str]:
    """Return what is not split with its share of time and memory, first all of it, then by
    function; nothing for none.
    """
    if not operators:
        return []
    shown, rest = operators[:_OPERATORS], operators[_OPERATORS:]
    lines = [f"Not split, the same on every rank of the tensor axis: {_shares(operators)}."]
    lines += [
        f"- {each.function} ({_calls(each.calls)}, first in {each.module or 'the model itself'}; "
        f"{each.why}): {_shares([each])}"
        for each in shown
    ]
    return lines + ([f"- {len(rest)} other functions: {_shares(rest)}"] if rest else [])


def _shares(operators: Sequence[WholeOperator]) -> str:
    seconds, size = (
        sum(each.share_of_seconds for each in operators),
        sum(each.share_of_bytes for each in operators),
    )
    return f"{100 * seconds:.1f} % of the operators' time, {100 * size:.1f} % of the activations"


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def _blocks(explained: PlanExplanation, console: Console) -> None:
    """A table of blocks, those that cost the same in one row, then what they exchange."""
    alike: dict[Hashable, list[str]] = {}
    for name, block in explained.blocks.items():
        alike.setdefault((_cells(block), _exchanged(block.collectives)), []).append(name)
    order = sorted(
        alike.values(),
        key=lambda names: -len(names) * sum(explained.blocks[names[0]].seconds.values()),
    )
    hidden = len(order) - _ROWS
    caption = f"each block; {hidden} more kinds of blocks take less" if hidden > 0 else "each block"
    table = Table(*_COLUMNS, caption=caption, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    titles = [
        f"{_shown(names[0])} ... {_shown(names[-1])} ({len(names)})"
        if names[1:]
        else _shown(names[0])
        for names in order
    ]
    for title, names in zip(titles[:_ROWS], order, strict=False):
        table.add_row(escape(title), *_cells(explained.blocks[names[0]]))
    console.print(table)
    for title, names in zip(titles[:_ROWS], order, strict=False):
        if exchanged := _exchanged(explained.blocks[names[0]].collectives):
            console.print(
                f"{title} along the tensor axis: {exchanged}", highlight=False, markup=False
            )


def _shown(block: str) -> str:
    return block or '""'


def _cells(block: BlockExplanation) -> tuple[str, ...]:
    seconds = block.seconds
    numbers = (
        sum(seconds[kind] for kind in ("forward", "backward", "recompute")),
        sum(each.seconds for each in block.collectives),
        seconds["update"],
        sum(seconds[kind] for kind in ("gather", "reduce", "broadcast")),
    )
    return *map(format_seconds, numbers), format_bytes(sum(block.peak_parts.values()))


def _exchanged(collectives: Sequence[TensorCollective]) -> str:
    return ", ".join(
        f"{each.during} {each.calls} {each.op} ({format_bytes(each.bytes)})" for each in collectives
    )
