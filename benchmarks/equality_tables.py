"""Tables of differences between a plan and one process: a row per plan, a column per model, and the
commit of each row.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import ROOT

REFUSED = "refused"


class Refusal(str):
    """Why a model cannot run under a plan, as its user is told."""


def cell(found: Any, *, shows_limits: bool = False) -> str:
    """Return the differences in `found` (quantity: difference and limit); what is above its limit
    is bold.
    """
    if not isinstance(found, dict):
        return REFUSED if isinstance(found, Refusal) else "**failed**" if found else "not run"
    texts = []
    for difference, limit in found.values():
        text = f"{difference:.0e}" + (f" ({limit:.0e})" if shows_limits else "")
        texts.append(text if difference <= limit else f"**{text}**")
    return " / ".join(texts)


def commit() -> str:
    """Return the commit that runs now."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        or "unknown"
    )


def table(
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    lead: Sequence[str] = ("plan", "ranks", "tolerance"),
) -> str:
    """Return the table as Markdown."""
    header = f"| {' | '.join((*lead, *columns))} | commit |"
    return "\n".join([header, "|---" * (len(lead) + len(columns) + 1) + "|", *rows])


def read_rows(text: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the rows of a table that was written with these columns, by plan; none of another
    table.
    """
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    if not lines or [each.strip() for each in lines[0].split("|")[-len(columns) - 2 : -2]] != [
        *columns
    ]:
        return {}
    return {line.split("|")[1].strip(): line for line in lines[1:]}


def count_cells(rows: Sequence[str], columns: int) -> tuple[int, int, int]:
    """Return how many cells of `rows` are within their limits, how many are refused, and how many
    there are.
    """
    cells = [each.strip() for row in rows for each in row.split("|")[-columns - 2 : -2]]
    within = sum(text[0].isdigit() and "**" not in text for text in cells)
    return within, sum(text == REFUSED for text in cells), len(cells)


def reasons(found: Mapping[tuple[str, str], Refusal]) -> str:
    """Return one line for each reason why plans (first of a key) were refused for models (second of
    it).
    """
    by_reason: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for (plan, model), why in found.items():
        models, plans = by_reason.setdefault(why, ({}, {}))
        models[model], plans[plan] = None, None
    lines = [
        f"- {', '.join(models)} ({'; '.join(plans)}): {why}"
        for why, (models, plans) in by_reason.items()
    ]
    return "\n".join(lines) or "- none is refused"
