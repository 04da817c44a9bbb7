"""Checks of constructors' arguments: each raises ValueError with one sentence that names the argument."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any


def check_whole(value: Any, *, name: str, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`; True and 2.0 are none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name} is at least {least}, a whole number; got {reprlib.repr(value)}")


def check_real(value: Any, *, name: str, positive: bool = False) -> None:
    """Refuse what is not a finite number, with `positive` also what is not above 0."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is a finite number; got {reprlib.repr(value)}")
    if positive and not float(value) > 0:
        raise ValueError(f"{name} is positive; got {value}")


def check_flag(value: Any, *, name: str, optional: bool = False) -> None:
    """Refuse what is not True or False, nor None where that is `optional`."""
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ValueError(f"{name} is True or False{', or None' if optional else ''}; got {reprlib.repr(value)}")


def check_choice(value: Any, *, name: str, allowed: Iterable[str]) -> None:
    """Refuse what is not one of the texts `allowed`."""
    if not isinstance(value, str) or value not in (allowed := tuple(allowed)):
        raise ValueError(f"{name} is one of {', '.join(allowed)}; got {reprlib.repr(value)}")


def check_texts(value: Any, *, name: str) -> None:
    """Refuse what is not a list or tuple of texts, a single text above all: that would be read letter by letter."""
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not listed or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} is a list of texts such as ['norm', 'bias']; got {reprlib.repr(value)}")
