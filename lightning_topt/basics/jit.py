"""Compile kernels with Numba: without the GIL, and kept on disk where that can be written.

A compilation takes a few seconds, once. Importing Numba takes 0.4 s, so what imports this module is
loaded where work is large (`importlib.import_module`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

from lightning_topt.basics.forked_call import writable_files

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function` as NumPy computes: no checks of bounds, no error of division by 0."""
    return compiled(function, boundscheck=False, error_model="numpy")


def compiled(function: Function, **options: Any) -> Function:
    """Compile `function` for the CPU; `options` are those of `numba.njit`.

    Once for the types of its arguments: left alone, Numba compiles it again for each constant that
    a compiled caller passes.
    """
    made: Any
    try:
        made = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no place to write a cache to: compiled anew in each process
        made = numba.njit(nogil=True, **options)(function)
    else:
        made._cache.save_overload = partial(_save, made._cache.save_overload)
    made.get_call_template = partial(_call_template, made.get_call_template)
    return made  # type: ignore[no-any-return]


def typed_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` an intrinsic of Numba, typed as a function."""
    return cast(Callable[..., Any], intrinsic(function))


def _call_template(of_types: Callable[..., Any], args: Any, kws: dict[str, Any]) -> Any:
    # Choose the code for a call in compiled code by types alone, not by values of constants
    type_of: Any = numba.types.unliteral
    return of_types(tuple(map(type_of, args)), {name: type_of(kind) for name, kind in kws.items()})


def _save(save: Callable[..., None], *compiled_code: object) -> None:
    # Keep what was compiled; on a full disk, the next process compiles it again
    with suppress(OSError), writable_files():
        save(*compiled_code)
