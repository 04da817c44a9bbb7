"""What Python objects hold, described so that two moments can be compared.

    before = describe([module, args])
    module(*args)
    describe([module, args]) == before      # the call has left nothing behind

Descriptions are equal for objects that would behave the same; tensors count by shape, or by
identity. Nothing of the user is copied or called.
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

MAX_NODES = 20_000
MAX_ITEMS = 10_000  # a larger container, such as a replay buffer, counts by its length
# described by their class alone
OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial),
    *(Dataset, DataLoader, Sampler),
)
OWN_NAMES = ("_parameters", "_modules", "forward")  # compared otherwise, or replaced by us


def describe(roots: Iterable[object], *, identities: bool = False) -> object:
    """Return the state of `roots`.

    A module stands for its submodules and what their code can change. With `identities` another
    tensor of the same shape is another state.
    """
    describer = _Describer(identities=identities)
    return [
        describer.module(root) if isinstance(root, nn.Module) else describer.value(root)
        for root in roots
    ]


def describe_surroundings(classes: Iterable[type]) -> object:
    """Return what the code of `classes` can reach outside of its instances.

    These are globals, class attributes and closures; tensors count by identity.
    """
    describer = _Describer(identities=True)
    return [
        describer.value(list(_surroundings(cls)))
        for cls in sorted(classes, key=lambda cls: cls.__qualname__)
    ]


_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules"])


def host_random_state() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's default generators, to be compared."""
    # the second entry is the array of the generator, which == would compare element by element
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


class ModuleState:
    """The attributes of each part of `module` at one moment, and the globals of their files.

    Values are described (see `describe`), tensors by their shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts, self._files = _attributes_of(module), _files_of(module)

    def changed(self) -> set[str]:
        """Return the paths of the modules that have changed since."""
        now, files = _attributes_of(self._module), _files_of(self._module)
        paths = {
            path
            for path in self._parts.keys() | now.keys()
            if self._parts.get(path) != now.get(path)
        }
        # a file that changed counts for all modules whose classes are in it
        classes = {
            name
            for name, (cls, state) in files.items()
            if self._files.get(name, (cls, None))[1] != state
        }
        return paths | {
            path
            for path, part in self._module.named_modules()
            if _class_name(type(part)) in classes
        }


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _attributes_of(module: nn.Module) -> dict[str, object]:
    found = {}
    for path, part in module.named_modules():
        if path:  # the root is no block, and Lightning keeps its own notes there
            own = {
                name: value
                for name, value in vars(part).items()
                if name not in _REGISTRIES and "_hooks" not in name
            }
            found[path] = describe([own])
    return found


def _files_of(module: nn.Module) -> dict[str, tuple[type, object]]:
    classes = {_class_name(type(part)): type(part) for path, part in module.named_modules() if path}
    return {name: (cls, describe_surroundings([cls])) for name, cls in classes.items()}


class _Describer:
    """One description; objects that were met before are referred to by number."""

    def __init__(self, *, identities: bool = False) -> None:
        self._identities = identities
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []

    def module(self, root: nn.Module) -> object:
        """Return the state of a module, its submodules and what their code can change."""
        # attributes of each module first, then what the code of each class can reach
        classes = {type(module) for module in root.modules()}
        return [
            [
                self.value({k: v for k, v in vars(m).items() if k not in OWN_NAMES})
                for m in root.modules()
            ],
            [
                self.value(list(_surroundings(cls)))
                for cls in sorted(classes, key=lambda cls: cls.__qualname__)
            ],
        ]

    def value(self, value: object) -> object:
        # leaves: described by value, or by shape
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
        # True is an int too
        if isinstance(value, (int, str, bytes, type(None), torch.dtype, torch.device)):
            return value
        if isinstance(value, (float, complex)):
            return repr(value)  # not-a-number equals itself
        # containers and objects: each is described once, references to it by number
        if id(value) in self._numbers:
            return "seen", self._numbers[id(value)]
        # from here on all is taken to be the same: a description must end
        if len(self._numbers) >= MAX_NODES:
            return "beyond"
        self._numbers[id(value)] = len(self._numbers)
        self._held.append(value)  # so that no other object gets its id
        return type(value).__qualname__, self._inside(value)

    def _inside(self, value: object) -> object:
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
        # a set has no order; items of other kinds count by their number
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(
                repr(item) for item in value if isinstance(item, (str, int, float))
            )
        # a generator that was drawn from is another state
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        # modules are described as roots; functions and data sets are not looked into
        if isinstance(value, (nn.Module, *OPAQUE)):
            return None
        # any other object by its attributes; with slots alone, by its class
        attributes = getattr(value, "__dict__", None)
        return self.value(dict(attributes)) if isinstance(attributes, dict) else None


def _surroundings(cls: type) -> Iterator[object]:
    """Yield what the code of a user's class can change.

    Globals of its file, attributes of the class, closures of `forward`.
    """
    # what code can change in place or set anew; functions, classes and modules are left out
    plain = (int, float, str, bool, type(None), list, dict, set, Tensor, collections.deque)
    for base in cls.__mro__:
        if not is_users(base.__module__):
            continue
        # `forward` of this class itself: its bases have their own turn
        forward = vars(base).get("forward")
        for cell in getattr(forward, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                content = None
            if not isinstance(content, nn.Module):
                yield content
        for namespace in (vars(sys.modules[base.__module__]), vars(base)):
            for name, value in namespace.items():
                if not name.startswith("__") and isinstance(value, plain):
                    yield name, value
