"""Reports of `topt calibrate` on its own table: tables for people, and ``calibration.json``
(docs/schemas.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_topt.costs.calibration_check import (
    Change,
    CheckedPoint,
    largest_and_median,
    summarize,
)

SCHEMA_VERSION = 1


def save_calibration(
    path: Path, points: Sequence[CheckedPoint], changes: Sequence[Change] | None, *, seconds: float
) -> None:
    """Write all points and changes as JSON; `changes` None: there was no earlier calibration."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "seconds": seconds,
        "constants": [each.to_dict() for each in summarize(points)],
        "points": [asdict(point) for point in points],
        "changes": None if changes is None else [each.to_dict() for each in changes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def print_calibration(points: Sequence[CheckedPoint], changes: Sequence[Change] | None) -> None:
    """Print how far the table is from what was measured again, by constant, and what changed since
    an earlier one.
    """
    console = Console()
    table = _table(
        "the table against what was measured again",
        "constant",
        "points",
        "median error",
        "largest",
        "where",
    )
    for each in summarize(points):
        row = (
            each.constant,
            str(each.points),
            _percent(each.median),
            _percent(each.largest),
            each.at,
        )
        table.add_row(*row)
    console.print(table)
    if changes is None:
        console.print(
            "No calibration of these ranks was kept before, so there is none to compare this one "
            "with."
        )
        return
    table = _table(
        "since the calibration before",
        "constant",
        "before",
        "now",
        "largest change",
        "median",
        "where",
    )
    for change in changes:
        values = f"{change.before:.4g}", f"{change.now:.4g}"
        shown = (
            f"{v:.3f}" if change.is_share else _percent(v) for v in (change.largest, change.median)
        )
        table.add_row(change.constant, *values, *shown, change.at)
    console.print(table)
    if (found := largest_and_median(changes)) is not None:
        worst, median = found
        where = f" ({worst.at})" if worst.at else ""
        console.print(
            f"Half of the constants changed by at most {_percent(median)}; the most, "
            f"{worst.constant}{where}, by {_percent(worst.largest)}.",
            highlight=False,
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("constant", "where") else "right")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
