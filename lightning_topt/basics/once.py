"""`once_per_object`: what follows from an object alone is worked out once, and forgotten with the
object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Subject = TypeVar("Subject")
Result = TypeVar("Result")


def once_per_object(function: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Return `function` with its results kept by the identity of their subjects: frozen values that
    are dear to hash.

    A result must not refer to its subject, which would live for ever then.
    """
    known: dict[int, tuple[weakref.ref[Any], Result]] = {}

    @wraps(function)
    def found(subject: Subject) -> Result:
        key = id(subject)
        if key not in known:
            result = function(subject)
            known[key] = weakref.ref(subject, lambda _: known.pop(key, None)), result
        return known[key][1]

    return found
