"""A verification for people: tables of what ranks hold and exchange, then problems, notes and the
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_topt.basics.units import format_bytes
from lightning_topt.execution.held_bytes import KINDS
from lightning_topt.execution.verify_plan import Verification

_ROWS, _PROBLEMS = 8, 8


def print_verification(verification: Verification, *, console: Console) -> None:
    """Print all that is known of a plan, the answer last."""
    plan = verification.plan
    console.print(f"{plan.summary()}, {plan.mesh.size} rank(s)", highlight=False, markup=False)
    if verification.held:
        console.print(_ranks(verification))
        console.print(_blocks(verification))
    if verification.collectives:
        console.print(_collectives(verification))
    if verification.messages:
        console.print(_messages(verification))
    if verification.peak_bytes is not None:
        console.print(
            "peak of a step on the fullest rank, predicted: "
            f"{format_bytes(verification.peak_bytes)}",
            highlight=False,
        )
    for note in verification.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for problem in verification.problems[:_PROBLEMS]:
        console.print(f"[bold red]problem[/]: {escape(problem)}", highlight=False)
    if (hidden := len(verification.problems) - _PROBLEMS) > 0:
        console.print(f"and {hidden} more problems", highlight=False)
    console.print(
        "[bold green]would run[/]" if verification.would_run else "[bold red]would not run[/]"
    )


def _table(*columns: str, left: int, caption: str = "") -> Table:
    """With the first `left` columns flush left."""
    table = Table(*columns, caption=caption or None, caption_justify="left")
    for column in table.columns[left:]:
        column.justify, column.no_wrap = "right", True
    return table


def _ranks(verification: Verification) -> Table:
    groups, held = verification.equal_ranks(), verification.held_by_rank
    hidden = len(groups) - _ROWS
    caption = f"{hidden} more kinds of ranks, which hold less" if hidden > 0 else ""
    table = _table(
        "ranks", *(kind.replace("_", " ") for kind in KINDS), "together", left=1, caption=caption
    )
    for ranks, one in groups[:_ROWS]:
        sizes = held[one].tolist()
        table.add_row(ranges(ranks), *map(format_bytes, (*sizes, sum(sizes))))
    return table


def _blocks(verification: Verification) -> Table:
    """By block, with blocks of equal size in one row."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for block, held in verification.held.items():
        alike.setdefault(tuple(held.max(axis=0).tolist()), []).append(block)
    order = sorted(alike, key=lambda sizes: -sum(sizes))
    hidden = len(order) - _ROWS
    caption = "on the fullest rank of each" + (
        f"; {hidden} more kinds of blocks are smaller" if hidden > 0 else ""
    )
    columns = (kind.replace("_", " ") for kind in KINDS)
    table = _table("blocks", *columns, left=1, caption=caption)
    for sizes in order[:_ROWS]:
        names = [name or '""' for name in alike[sizes]]
        text = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
        table.add_row(escape(text), *map(format_bytes, sizes))
    return table


def _collectives(verification: Verification) -> Table:
    table = _table("pass", "collective", "along", "ranks", "calls", "bytes", left=3)
    for row in verification.collectives:
        table.add_row(
            row.during, row.op, row.axis, str(row.ranks), str(row.count), format_bytes(row.nbytes)
        )
    return table


def _messages(verification: Verification) -> Table:
    hidden = len(verification.messages) - _ROWS
    caption = "places along the pipeline; of one step" + (f"; {hidden} more" if hidden > 0 else "")
    table = _table("from", "to", "what", "messages", "bytes", left=3, caption=caption)
    for row in sorted(verification.messages, key=lambda row: -row.nbytes)[:_ROWS]:
        table.add_row(
            str(row.sender), str(row.receiver), row.what, str(row.count), format_bytes(row.nbytes)
        )
    return table


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks in order as text, ``"0-62, 64"``."""
    starts = [ranks[0], *(after for before, after in pairwise(ranks) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ranks) if after != before + 1), ranks[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return (
        ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])}, ... ({len(ranks)} ranks)"
    )
