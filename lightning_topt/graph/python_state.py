"""What Python objects hold, described so that two moments can be compared.

    before = describe([module, args])
    module(*args)
    describe([module, args]) == before      # the call has left nothing behind

Descriptions are equal for objects that would behave the same. Nothing of the user is called.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.errors import is_users

MAX_OBJECTS, MAX_ITEMS = 20_000, 10_000  # all beyond, and in larger containers, counts as equal
LEAVES = (int, str, bytes, type(None), torch.dtype, torch.device)
SEQUENCES = (list, tuple, collections.deque)
# described by their class alone
OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial),
    *(nn.Module, Dataset, DataLoader, Sampler),
)
OWN_NAMES = ("_parameters", "_modules", "forward")  # compared otherwise, or replaced by us
CHANGEABLE = (int, float, str, type(None), list, dict, set, Tensor, collections.deque)


Seen = dict[int, tuple[int, object]]  # by id: numbers, and the objects


def describe(roots: Iterable[object]) -> object:
    """Return the state of `roots`, tensors by their shapes.

    A module stands for its submodules and what their code can change.
    """
    seen: Seen = {}
    found: list[object] = []
    for root in roots:
        if isinstance(root, nn.Module):
            for part in root.modules():
                own = {name: v for name, v in vars(part).items() if name not in OWN_NAMES}
                found.append(_describe(own, seen))
            found.append(_describe(_surroundings(map(type, root.modules())), seen))
        else:
            found.append(_describe(root, seen))
    return found


def host_random_state() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's default generators, to be compared."""
    # the second entry is the array of the generator, which == would compare element by element
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


def _describe(value: Any, seen: Seen) -> object:
    # The state of a value; objects in `seen` are referred to by number
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, (float, complex)):
        return repr(value)  # not-a-number equals itself
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes() if value.nbytes < 1 << 16 else b""
    if id(value) in seen or len(seen) >= MAX_OBJECTS:
        return "seen", seen.get(id(value), (MAX_OBJECTS,))[0]
    seen[id(value)] = len(seen), value  # held, so that no other object gets its id
    inside: object = None
    if isinstance(value, torch.Generator):
        inside = value.get_state().tolist()
    elif isinstance(value, (dict, set, frozenset, *SEQUENCES)) and len(value) > MAX_ITEMS:
        inside = len(value)
    elif isinstance(value, (set, frozenset)):  # without an order: of other items the number counts
        inside = len(value), sorted(map(repr, (v for v in value if isinstance(v, (int, str)))))
    elif isinstance(value, SEQUENCES):
        inside = [_describe(item, seen) for item in value]
    elif isinstance(value, dict) or not isinstance(value, OPAQUE):
        items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        inside = [
            (key if isinstance(key, str) else type(key), _describe(v, seen))
            for key, v in items.items()
        ]
    return type(value).__qualname__, inside


def _surroundings(classes: Iterable[type]) -> list[object]:
    # What the code of users' classes can change: globals, attributes, closures
    return [pair for cls in sorted(set(classes), key=str) for pair in _names_around(cls)]


def _names_around(cls: type) -> Iterator[object]:
    for base in cls.__mro__:
        if not is_users(base.__module__):
            continue
        # `forward` of this class itself: its bases have their own turn
        for cell in getattr(vars(base).get("forward"), "__closure__", None) or ():
            try:
                yield None if isinstance(cell.cell_contents, nn.Module) else cell.cell_contents
            except ValueError:  # not filled yet
                yield None
        for namespace in (vars(sys.modules[base.__module__]), vars(base)):
            for name, value in namespace.items():
                if not name.startswith("__") and isinstance(value, CHANGEABLE):
                    yield name, value
