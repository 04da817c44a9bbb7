"""Functions of torch that are written in Python, in words of other torch functions, run under the
mode as they are written.

Attention as `torch.nn.MultiheadAttention` calls it, losses, norms: each function inside takes a row
of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_PLACES = (vars(F), vars(torch.functional), vars(torch._tensor))


@cache
def body_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what `func` does after it has asked whether somebody else runs it; None for a function
    that is not Python's.
    """
    if not isinstance(func, types.FunctionType) or not any(
        func.__globals__ is place for place in _PLACES
    ):
        return None
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, _nobody)}
    body = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _nobody(*_: Any) -> bool:
    return False
