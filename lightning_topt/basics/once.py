"""`once_per_object`: keep what follows from an object alone, until the object is gone.

A module of its own since `functools.lru_cache` would hash its arguments, and keep them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Subject = TypeVar("Subject")
Result = TypeVar("Result")


def once_per_object(function: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Return `function` with its results kept by the identity of their subjects.

    Subjects are frozen values that take long to hash. A result must not refer to its subject, which
    would never be freed then.
    """
    known: dict[int, tuple[weakref.ref[Any], Result]] = {}

    @wraps(function)
    def found(subject: Subject) -> Result:
        key = id(subject)  # given to another object once this one is gone, and forgotten by then
        if key not in known:
            result = function(subject)
            known[key] = weakref.ref(subject, lambda _: known.pop(key, None)), result
        return known[key][1]

    return found
