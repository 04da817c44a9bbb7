"""What all reports share: colours, axes, names of blocks, and one head of self-contained pages.

A page loads nothing from elsewhere. Its head (`report_head.html`) has the colours of light and dark
pages and the common styles. The rest of the page has its own styles, body and script, and reads its
data as JSON from an element ``data``:

    save_page("frontier.html", "frontier_report.html", title="Plans", data={"points": [...]})

Axes have round marks in units that people read, on pages and in pictures (`drawn_axis`).
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by colour-blind readers, those that are dark enough for a
# white page first
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, RED, STAR = "#1f2430", "#5b6472", "#a3262a", "#F0C419"
LINE = "#c3c8d0"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # 7 markers and 6 colours: 42 different series
Units = tuple[
    tuple[str, float, tuple[float, ...]], ...
]  # name, factor, marks of a logarithmic axis
_POWERS = tuple(2**k for k in range(10))
BYTES: Units = tuple(
    (name, 1024.0**k, _POWERS) for k, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)
_ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500)
SECONDS: Units = (
    ("us", 1e-6, _ROUND),
    ("ms", 1e-3, _ROUND),
    ("s", 1.0, (*_ROUND, 1000, 2000, 5000, 10000)),
)
# numbers without a unit, such as days or money
PLAIN: Units = (("", 1.0, tuple(m * 10.0**k for k in range(-6, 13) for m in (1, 2, 5))),)
# an axis becomes logarithmic when its largest value is this many times its smallest
_LOG_FROM = 20.0


def save_page(
    path: str | Path, body: str, *, title: str, data: Mapping[str, object], schedule: str = ""
) -> None:
    """Write the page of the file `body`, with `title` and `data`; `schedule` is HTML."""
    # no "<" in the data: neither "</script>" nor "<!--" can end the element early
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {"title": html.escape(title), "data": embedded, "schedule": schedule}
    folder = resources.files("lightning_topt.plan")
    parts = [(folder / name).read_text(encoding="utf-8") for name in ("report_head.html", body)]
    names = r"\{\{ (title|data|schedule) \}\}"
    page = re.sub(names, lambda match: filled[match[1]], "".join(parts))
    Path(path).write_text(page, encoding="utf-8")


# ---- words: titles, and names of blocks


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


# ---- axes: ranges, and round marks in units that people read


class DrawnAxis(NamedTuple):
    """The range of an axis in seconds or bytes, and where its marks are."""

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]


def drawn_axis(title: str, values: Sequence[float], *, units: Units) -> DrawnAxis:
    """Return the axis that shows all `values`, with about five round marks."""
    low, high = min(values), max(values)
    # a logarithmic axis where the largest value is many times the least
    log = 0 < _LOG_FROM * low < high
    if log:
        pad = (high / low) ** 0.06
        # marks: round values in their units, at most about seven
        low, high = low / pad, high * pad
        ticks = [
            (mark * factor, f"{mark:,.10g} {name}".rstrip())
            for name, factor, marks in units
            for mark in marks
        ]
        inside = [tick for tick in ticks if low <= tick[0] <= high]
        ticks = inside[:: max(1, math.ceil(len(inside) / 7))]
    else:
        # a linear axis, from 0 where the margin would go below
        margin = 0.08 * (high - low) or 0.25 * high or 1.0
        low, high = max(0.0, low - margin), high + margin
        # about five round values, in the largest unit that is not above `high`
        name, factor, _ = next((unit for unit in reversed(units) if unit[1] <= high), units[0])
        rough = (high - low) / factor / 5
        exponent = math.floor(math.log10(rough))
        # the least of 1, 2, 5 and 10 times a power of ten that makes five marks or fewer
        step = (
            next(m for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough * 0.999) * 10.0**exponent
        )
        # as many decimals as the step needs; 1e-9 is for its rounding
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(low / factor / step - 1e-9), math.floor(high / factor / step + 1e-9)
        ticks = [
            (k * step * factor, f"{k * step:,.{decimals}f} {name}".rstrip())
            for k in range(first, last + 1)
        ]
    return DrawnAxis(title, low, high, log, tuple(ticks))


def draw_axes(axes: Axes, x: DrawnAxis, y: DrawnAxis) -> None:
    """Give the axes of a picture the ranges and marks of `x` and `y`; matplotlib adds none."""
    axes.set(xscale="log" if x.log else "linear", yscale="log" if y.log else "linear")
    axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, drawn in ((x, axes.xaxis), (y, axes.yaxis)):
        drawn.set_ticks([value for value, _ in axis.ticks], labels=[text for _, text in axis.ticks])
        drawn.set_ticks([], minor=True)
        drawn.set_label_text(axis.title, color=INK, fontsize=11)
    axes.grid(color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=10, length=0, pad=6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
