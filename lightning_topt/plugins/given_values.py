"""Arguments of plugins, checked where they are given: each function returns the value, or raises ValueError that names it."""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import parse_bytes


def whole(value: Any, *, name: str, least: int | None = None, most: int | None = None) -> int:
    """A whole number within bounds; no truth value, no fraction, no text."""
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is a whole number{bounds}, not {value!r}")
    return int(value)


def seconds(value: Any, *, name: str) -> float:
    """A finite number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is a number of seconds above 0, not {value!r}")
    return float(value)


def size(value: Any, *, name: str, least: int = 1) -> int:
    """Bytes, from a whole number of them or text such as "8GiB"."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value == int(value):
        value = int(value)
    elif not isinstance(value, str):
        raise ValueError(f"{name} is a whole number of bytes or text such as '8GiB', not {value!r}")
    nbytes = parse_bytes(value, name=name)
    if nbytes < least:
        raise ValueError(f"{name} is at least {least} byte{'s' * (least != 1)}, not {value!r}")
    return nbytes


def truth(value: Any, *, name: str) -> bool:
    """True or False, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, not {value!r}")
    return value


def text(value: Any, *, name: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is a text that is not empty, not {value!r}")
    return value


def version(value: Any, *, name: str) -> str | None:
    """A text or whole number that names a version; None stays None."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(value)
    return None if value is None else text(value, name=name)


def folder(value: Any, *, name: str) -> Path:
    """A path, given as text or as a Path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is a folder, as text or a Path, not {value!r}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ValueError(f"{name} is the name of a folder, not {value!r}")
    return Path(path)
