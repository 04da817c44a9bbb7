"""Helpers that every other folder may import; they import nothing of this package, nor torch.

argument_checks   checks of constructors' arguments
units             quantities with units, to floats and back
forked_call       a function in a forked copy of this process
core_wait         whether threads had cores: a busy machine, or a quiet one
own_files         files that other users cannot have made or changed
jit               kernels compiled by Numba

Here are the two that most packages need: names that are imported at first use, and results that are
computed once for an object.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

Subject = TypeVar("Subject")
Result = TypeVar("Result")


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported at first use.

    Args:
        package: its full name.
        homes: module, below `package`, that each name is imported from (PEP 562).
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        namespace[name] = value  # the next access does not come here
        return value

    return get, lambda: sorted({*namespace, *homes})


def once_per_object(function: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Keep the results of `function` by the identity of their subjects, while these live.

    `functools.lru_cache` would hash its arguments, which takes long for large frozen values, and
    keep them alive. A result must not refer to its subject, which would never be freed then.
    """
    results: dict[int, tuple[weakref.ref[Any], Result]] = {}

    @wraps(function)
    def once(subject: Subject) -> Result:
        # a number that another object gets once this one is gone, and forgotten by then
        key = id(subject)
        if key not in results:
            result = function(subject)
            results[key] = weakref.ref(subject, lambda _: results.pop(key, None)), result
        return results[key][1]

    return once
