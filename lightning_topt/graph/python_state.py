"""A description of what Python objects hold, equal for objects that would behave the same; tensors
count by shape.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.containers import is_users

MAX_NODES = 20_000
MAX_ITEMS = 10_000  # a larger container, such as a replay buffer, counts by its length
OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    Dataset,
    DataLoader,
    Sampler,
)
REGISTRIES = ("_parameters", "_modules", "forward")  # looked at otherwise, or ours


def describe(roots: Iterable[Any], *, identities: bool = False) -> Any:
    """Return the state of `roots`: of modules with their submodules, user globals of their files
    and closures.

    With `identities` another tensor of the same shape is another state.
    """
    describer = _Describer(identities=identities)
    return [
        describer.module(root) if isinstance(root, nn.Module) else describer.value(root)
        for root in roots
    ]


def describe_surroundings(classes: Iterable[type]) -> Any:
    """Return what the code of `classes` can reach outside of its instances, with tensors by
    identity.
    """
    describer = _Describer(identities=True)
    return [
        describer.value(list(_surroundings(cls)))
        for cls in sorted(classes, key=lambda cls: cls.__qualname__)
    ]


class _Describer:
    def __init__(self, *, identities: bool = False) -> None:
        self._identities = identities
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def module(self, root: nn.Module) -> Any:
        classes = {type(module) for module in root.modules()}
        return [
            [
                self.value({k: v for k, v in vars(m).items() if k not in REGISTRIES})
                for m in root.modules()
            ],
            [
                self.value(list(_surroundings(cls)))
                for cls in sorted(classes, key=lambda cls: cls.__qualname__)
            ],
        ]

    def value(self, value: Any) -> Any:
        if isinstance(value, Tensor) and self._identities:
            return "tensor", id(value)
        if isinstance(value, Tensor):
            return "tensor", tuple(value.shape), str(value.dtype), value.requires_grad
        if isinstance(value, np.ndarray):
            return (
                "array",
                value.shape,
                str(value.dtype),
                hash(value.tobytes()) if value.nbytes < 1 << 16 else 0,
            )
        if isinstance(value, (int, str, bytes, type(None), torch.dtype, torch.device)):
            return value
        if isinstance(value, (float, complex)):
            return repr(value)  # not-a-number equals itself
        if id(value) in self._numbers:
            return "seen", self._numbers[id(value)]
        if len(self._numbers) >= MAX_NODES:
            return "beyond"
        self._numbers[id(value)] = len(self._numbers)
        self._held.append(value)
        return type(value).__qualname__, self._inside(value)

    def _inside(self, value: Any) -> Any:
        if (
            isinstance(value, (dict, list, tuple, collections.deque, set, frozenset))
            and len(value) > MAX_ITEMS
        ):
            return "items", len(value)
        if isinstance(value, dict):
            return [
                (str(key) if isinstance(key, str) else type(key), self.value(item))
                for key, item in value.items()
            ]
        if isinstance(value, (list, tuple, collections.deque)):
            return [self.value(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(
                repr(item) for item in value if isinstance(item, (str, int, float))
            )
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, (nn.Module, *OPAQUE)):
            return None
        attributes = getattr(value, "__dict__", None)
        return self.value(dict(attributes)) if isinstance(attributes, dict) else None


def _surroundings(cls: type) -> Iterator[Any]:
    """Yield what the code of a user's class can change: globals of its file, attributes of the
    class, closures of `forward`.
    """
    plain = (int, float, str, bool, type(None), list, dict, set, Tensor, collections.deque)
    for base in cls.__mro__:
        if not is_users(base.__module__):
            continue
        forward = vars(base).get("forward")
        for cell in getattr(forward, "__closure__", None) or ():
            content = _content(cell)
            if not isinstance(content, nn.Module):
                yield content
        for namespace in (vars(sys.modules[base.__module__]), vars(base)):
            for name, value in namespace.items():
                if not name.startswith("__") and isinstance(value, plain):
                    yield name, value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
