"""The page of a benchmark that times a search, by this package and, where wanted, by that of
another checkout in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine, measure_at

Result = dict[str, Any]


def write_page(
    name: str,
    *,
    title: str,
    heads: Sequence[str],
    heads_before: Sequence[str],
    notes: Sequence[str],
    cases: Sequence[Sequence[Any]],
    cells: Callable[[Any, Result], Sequence[str]],
    cells_before: Callable[[Result], Sequence[str]],
) -> None:
    """Measure the `cases` of ``benchmarks.<name>`` and write a row for each of them: `cells` of
    what this package found, and with ``--against``, a checkout, `cells_before` of what that one
    did, and whether the frontiers are the same.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    against = parser.parse_args().against
    against = against.resolve() if against else None
    heads = (
        [*heads, *(f"before: {head}" for head in heads_before), "frontier"] if against else heads
    )
    lines = [
        f"# {title}",
        "",
        f"`python -m benchmarks.{name}" + (" --against <checkout>`" if against else "`"),
        "",
        machine(),
        f"- load average before the run: {os.getloadavg()[0]:.1f}",
        *(f"- {note}" for note in notes),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for case in cases:
        mine = measure_at(ROOT, name, case)
        row = [*cells(case, mine)]
        if against:
            before = measure_at(against, name, case)
            same = "the same" if before["frontier"] == mine["frontier"] else "others"
            row += [*cells_before(before), same]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


def least_and_median(seconds: Sequence[float]) -> str:
    """Return both, which is what noise leaves of CPU seconds."""
    return f"{min(seconds):.2f}, {statistics.median(seconds):.2f}"


def error_of(result: Result) -> str:
    """Return the error bound of the search."""
    return "0 (exact)" if not result["error"] else f"{100 * result['error']:.2g} %"
