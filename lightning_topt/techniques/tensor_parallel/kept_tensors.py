"""Buffers and attributes that are split tensors at the end of a step are made whole.

Code between steps, checkpoints and other ranks know nothing of slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

_INTERNAL = frozenset(vars(nn.Module()))
_FEW = 256  # items of a dictionary that may hold tensors: larger ones are tables of something else
Whole = Callable[[Any], Any]


def places_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries where modules keep tensors: buffers, and attributes where the class
    is not torch's.
    """
    places: list[dict[str, Any]] = [each._buffers for each in module.modules() if each._buffers]
    return places + [
        vars(each) for each in module.modules() if not type(each).__module__.startswith("torch.nn.")
    ]


def keep_whole(places: Sequence[dict[str, Any]], whole: Whole) -> None:
    """Replace split tensors in `places`, and in lists and dictionaries there, by `whole` ones. A
    collective call.

    Of a list, those at its end: what is before them was there after the last step.
    """
    for place in places:
        for name, value in list(place.items()):
            if name in _INTERNAL:
                continue
            if isinstance(value, Tensor):
                if (new := whole(value)) is not value:
                    place[name] = new
            elif isinstance(value, list | deque):
                _end_of(value, whole)
            elif type(value) is dict and len(value) <= _FEW:
                for key, item in value.items():
                    if isinstance(item, list | deque):
                        _end_of(item, whole)
                    elif isinstance(item, Tensor | tuple) and (new := whole(item)) is not item:
                        value[key] = new


def _end_of(values: Any, whole: Whole) -> None:
    for index in range(len(values) - 1, -1, -1):
        item = values[index]
        if not isinstance(item, Tensor | tuple | list | dict) or (new := whole(item)) is item:
            return
        values[index] = new
