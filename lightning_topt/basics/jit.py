"""Compile kernels with Numba: without the GIL, and kept on disk where that can be written.

A compilation takes a few seconds, once. Importing Numba takes 0.4 s, so what imports this module is
loaded where work is large (`importlib.import_module`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numba

from lightning_topt.basics.forked_call import writable_files

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function` as NumPy computes: no checks of bounds, no error of division by 0."""
    return compiled(function, boundscheck=False, error_model="numpy")


def compiled(function: Function, **options: Any) -> Function:
    """Compile `function` for the CPU; `options` are those of `numba.njit`."""
    made: Any
    try:
        made = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no place to write a cache to: compiled anew in each process
        made = numba.njit(nogil=True, **options)(function)
    else:
        made._cache.save_overload = partial(_save, made._cache.save_overload)
    return made  # type: ignore[no-any-return]


def _save(save: Callable[..., None], *compiled_code: object) -> None:
    """Keep what was compiled; on a full disk, the next process compiles it again."""
    with suppress(OSError), writable_files():
        save(*compiled_code)
