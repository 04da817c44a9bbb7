"""The axes of a drawn frontier: their ranges, and round marks in units that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_topt.plan.plan_frontier import PlanPoint

Units = tuple[tuple[str, float, tuple[int, ...]], ...]  # name, factor, marks of a logarithmic axis
_POWERS = tuple(2**k for k in range(10))
_BYTES: Units = tuple(
    (name, 1024.0**k, _POWERS) for k, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)
_ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_SECONDS: Units = (
    ("us", 1e-6, _ROUND),
    ("ms", 1e-3, _ROUND),
    ("s", 1.0, (*_ROUND, 1000, 2000, 5000, 10000)),
)
# an axis becomes logarithmic when its largest value is this many times its smallest
_LOG_FROM = 20.0


class DrawnAxis(NamedTuple):
    """A `DrawnAxis` has the range of an axis in seconds or bytes, and where its marks stand."""

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]


def drawn_axes(
    points: Sequence[PlanPoint], memory_limit: float | None
) -> tuple[DrawnAxis, DrawnAxis]:
    """Return the axes of memory and of time that show all points, and `memory_limit` where it is
    not far from them.
    """
    sizes = [point.peak_bytes for point in points]
    reach = (max(sizes) - min(sizes)) or 0.5 * max(sizes)
    # farther, it would squeeze the points
    if memory_limit is not None and memory_limit <= max(sizes) + reach:
        sizes.append(memory_limit)
    times = [point.step_seconds for point in points]
    return _axis("Peak memory per device", sizes, units=_BYTES), _axis(
        "Time per step", times, units=_SECONDS
    )


def _axis(title: str, values: Sequence[float], *, units: Units) -> DrawnAxis:
    low, high = min(values), max(values)
    log = 0 < _LOG_FROM * low < high
    if log:
        pad = (high / low) ** 0.06
        low, high = low / pad, high * pad
        ticks = _log_ticks(low, high, units=units)
    else:
        margin = 0.08 * (high - low) or 0.25 * high or 1.0
        low, high = max(0.0, low - margin), high + margin
        ticks = _linear_ticks(low, high, units=units)
    return DrawnAxis(title, low, high, log, tuple(ticks))


def _linear_ticks(low: float, high: float, *, units: Units) -> list[tuple[float, str]]:
    """About five round values, all in the largest unit that is not above `high`."""
    name, factor, _ = next((unit for unit in reversed(units) if unit[1] <= high), units[0])
    rough = (high - low) / factor / 5
    exponent = math.floor(math.log10(rough))
    step = next(m for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough * 0.999) * 10.0**exponent
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / factor / step - 1e-9), math.floor(high / factor / step + 1e-9)
    return [(k * step * factor, f"{k * step:.{decimals}f} {name}") for k in range(first, last + 1)]


def _log_ticks(low: float, high: float, *, units: Units) -> list[tuple[float, str]]:
    ticks = [(mark * factor, f"{mark} {name}") for name, factor, marks in units for mark in marks]
    inside = [tick for tick in ticks if low <= tick[0] <= high]
    return inside[:: max(1, math.ceil(len(inside) / 7))]
