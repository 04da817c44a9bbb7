"""Advice: a number with its formula, what went into it and where the formula is from; as Markdown
and as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
ZOU = "Zou et al., Distributed Training Large-Scale Deep Architectures, arXiv 1709.06622"
MODEL = "the cost model of this package (docs/cost_model.md)"


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Args:
        topic: of what, such as ``"batch size"``.
        advice: one sentence for people.
        value, unit: the number it is about; None where there is none, and `advice` says what is
            missing.
        formula: how the value follows from `inputs`.
        inputs: names and values.
        source: of the formula.
        table: rows with equal keys that show more than the one value.
    """

    topic: str
    advice: str
    value: float | None = None
    unit: str = ""
    formula: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    table: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite number is None."""
        plain = {
            **vars(self),
            "value": _finite(self.value),
            "inputs": {k: _finite(v) for k, v in self.inputs.items()},
        }
        plain["table"] = [{key: _finite(value) for key, value in row.items()} for row in self.table]
        return plain


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(advice: Sequence[Advice], *, title: str, notes: Sequence[str] = ()) -> str:
    """Return a page: a heading for each topic, the sentence, then formula, inputs, source and
    table.
    """
    lines = [f"# {title}", "", *(line for note in notes for line in (note, ""))]
    topics = dict.fromkeys(each.topic for each in advice)
    for topic in topics:
        lines += [f"## {topic[:1].upper()}{topic[1:]}", ""]
        for each in advice:
            if each.topic == topic:
                lines += _section(each)
    return "\n".join(lines).rstrip() + "\n"


def _section(each: Advice) -> list[str]:
    lines = [f"**{each.advice}**", ""]
    if each.formula:
        lines.append(f"- formula: `{each.formula}`")
    if each.inputs:
        lines.append(
            "- inputs: "
            + ", ".join(f"{name} = {shown_number(value)}" for name, value in each.inputs.items())
        )
    if each.source:
        lines.append(f"- source: {each.source}")
    lines.append("")
    if each.table:
        names = list(each.table[0])
        lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        lines += [
            f"| {' | '.join(shown_number(row.get(name)) for name in names)} |" for row in each.table
        ]
        lines.append("")
    return lines


def shown_number(value: Any) -> str:
    """Return a value for people: numbers with three digits that count, "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def save_advice(
    folder: Path, advice: Sequence[Advice], *, title: str, notes: Sequence[str] = ()
) -> str:
    """Write `advice.md` and `advice.json`; return the Markdown."""
    text = to_markdown(advice, title=title, notes=notes)
    (folder / "advice.md").write_text(text, encoding="utf-8")
    record = {
        "schema_version": SCHEMA_VERSION,
        "title": title,
        "notes": [*notes],
        "advice": [each.to_dict() for each in advice],
    }
    (folder / "advice.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return text
