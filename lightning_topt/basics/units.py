"""Quantities with units, as people write them, to plain floats and back.

    parse_bytes("80GB")         8e10 bytes             parse_bytes("2GiB")     2 * 2**30 bytes
    parse_bandwidth("2TB/s")    2e12 bytes/s           parse_flops("312TFLOP/s")
    parse_bandwidth("25Gb/s")   3.125e9 bytes/s        parse_seconds("5us")

b is a bit, B a byte. A bare number is in the base unit. `parse_*` raise ValueError on negative or
infinite values, unknown units and other types; `name` is used in the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

# k and K are both a thousand; there is no m, a thousandth
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_BYTES = {prefix + "B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}
# bits count an eighth of a byte, and have decimal prefixes only, as links are sold
_BANDWIDTH = {
    **{unit + "/s": factor for unit, factor in _BYTES.items()},
    **{prefix + bit: factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("b/s", "bit/s")},
}
_FLOPS = {
    prefix + unit: factor for prefix, factor in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS")
}
_LONGEST = 80  # characters of a quantity: the pattern takes time by the square of them
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*")


def parse_bytes(value: int | float | str, *, name: str = "size") -> int:
    """Convert ``"2GiB"``, ``"80GB"``, ``"512 MB"`` or a number, to bytes (rounded)."""
    return round(_parse(value, _BYTES, name=name, example="'80GB' or '2GiB'"))


def parse_bandwidth(value: int | float | str, *, name: str = "bandwidth") -> float:
    """Convert ``"2TB/s"``, ``"25Gb/s"`` or a number, to bytes per second."""
    return _parse(value, _BANDWIDTH, name=name, example="'2TB/s' or '25Gb/s'")


def parse_flops(value: int | float | str, *, name: str = "flops") -> float:
    """Convert ``"312TFLOP/s"`` or a number, to floating-point operations per second."""
    return _parse(value, _FLOPS, name=name, example="'312TFLOP/s'")


def parse_seconds(value: int | float | str, *, name: str = "time") -> float:
    """Convert ``"5us"``, ``"1.5 ms"`` or a number, to seconds."""
    return _parse(value, _SECONDS, name=name, example="'5us'")


def format_bytes(size: float) -> str:
    """Format bytes for people: ``"1.50 GiB"``."""
    # binary units, the largest in which the number is at least 1
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Format seconds for people: ``"12.3 ms"``."""
    if abs(seconds) < 1e-11:  # the rounding of a difference
        return "0 us"
    # the largest unit in which the number is at least 1; what is shorter stays in microseconds
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor or unit == "us":
            return f"{seconds / factor:.3g} {unit}"
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """Format minutes, hours or days for people: ``"3.2 h"``, ``"17.4 d"``.

    What is shorter is formatted by `format_seconds`.
    """
    # from two of a unit on: 90 minutes say more than 1.5 h
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return format_seconds(seconds)


def format_count(count: float) -> str:
    """Format a large number for people: ``"70.6 B"``, ``"812"``."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:g}"


def format_money(amount: float) -> str:
    """Format money for people: ``"12,300"``, ``"0.42"``."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _parse(
    value: int | float | str, units: Mapping[str, float], *, name: str, example: str
) -> float:
    # A number, or a text with one of `units`, in the base unit
    if isinstance(value, str):
        # the length first: see _LONGEST
        match = _QUANTITY.fullmatch(value) if len(value) <= _LONGEST else None
        if not match:
            raise ValueError(
                f"{name}: {value[:_LONGEST]!r} is not a quantity; write for instance {example}"
            )
        number, unit = float(match[1]), match[2]
        if unit and unit not in units:
            raise ValueError(
                f"{name}: {value!r} has the unit {unit!r}, which is not known here; write {example}"
            )
        result = number * (units[unit] if unit else 1.0)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # a whole number may be too large for a float, which is refused below like infinity
        result = float(value) if abs(value) < 2**1000 else math.inf
    else:
        raise ValueError(f"{name}: expected a number or text such as {example}, got {value!r}")
    # "1e999" and a product that overflows end here too
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"{name}: {value!r} must be finite and not negative")
    return result
