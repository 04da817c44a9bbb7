"""Checks of constructors' arguments.

    self.depth = check_whole(depth, name="depth")     # "depth is at least 1, a whole number; ..."

Each check returns the value, or raises ValueError with one sentence that names the argument.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import parse_bytes


def check_whole(value: Any, *, name: str, least: int | None = 1, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`, if these are given; True and 2.0 are none."""
    # True is an Integral in Python; numpy's whole numbers are too
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if (
        not is_whole
        or (least is not None and int(value) < least)
        or (most is not None and int(value) > most)
    ):
        # a text times False is empty: only the bounds that are given are named
        bounds = f"at least {least}, " * (least is not None) + f"at most {most}, " * (
            most is not None
        )
        raise ValueError(f"{name} is {bounds}a whole number; got {reprlib.repr(value)}")
    return int(value)


def check_real(value: object, *, name: str, positive: bool = False) -> float:
    """Return a finite number, with `positive` one above 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is a finite number; got {reprlib.repr(value)}")
    # also refuses what becomes 0.0 as a float
    if positive and not float(value) > 0:
        raise ValueError(f"{name} is positive; got {value}")
    return float(value)


def check_size(value: Any, *, name: str, least: int = 1) -> int:
    """Return bytes, from a whole number of them or text such as "8GiB"."""
    # 8e9 is a whole number of bytes although it is a float
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value == int(value):
        value = int(value)
    elif not isinstance(value, str):
        raise ValueError(
            f"{name} is a whole number of bytes or text such as '8GiB'; got {reprlib.repr(value)}"
        )
    nbytes = parse_bytes(value, name=name)
    if nbytes < least:
        raise ValueError(
            f"{name} is at least {least} byte{'s' * (least != 1)}; got {reprlib.repr(value)}"
        )
    return nbytes


def check_flag(value: object, *, name: str, optional: bool = False) -> bool | None:
    """Return True or False, or None where that is `optional`."""
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ValueError(
            f"{name} is True or False{', or None' if optional else ''}; got {reprlib.repr(value)}"
        )
    return value


def check_choice(value: object, *, name: str, allowed: Iterable[str]) -> str:
    """Return one of the texts `allowed`."""
    if not isinstance(value, str) or value not in (allowed := tuple(allowed)):
        raise ValueError(f"{name} is one of {', '.join(allowed)}; got {reprlib.repr(value)}")
    return value


def check_text(value: object, *, name: str) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is a text that is not empty; got {reprlib.repr(value)}")
    return value


def check_texts(value: Any, *, name: str) -> tuple[str, ...]:
    """Return the texts of a list or tuple.

    A single text is refused: it would be read letter by letter.
    """
    # an iterator is no Sequence: the check would use it up
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not listed or not all(isinstance(item, str) for item in value):
        raise ValueError(
            f"{name} is a list of texts such as ['norm', 'bias']; got {reprlib.repr(value)}"
        )
    return tuple(value)


def check_version(value: object, *, name: str) -> str | None:
    """Return a text or whole number that names a version, as text; None stays None."""
    # 3 and "3" name the same version
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(value)
    return None if value is None else check_text(value, name=name)


def check_folder(value: object, *, name: str) -> Path:
    """Return a path, given as text or as a Path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is a folder, as text or a Path; got {reprlib.repr(value)}")
    path = os.fspath(value)
    # PathLike may also give bytes; no file's name has a zero byte
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ValueError(f"{name} is the name of a folder; got {reprlib.repr(value)}")
    return Path(path)
