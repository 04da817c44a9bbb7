"""Modules that must behave alike: equal classes, shapes and plain attributes all the way down, and
nothing else inside.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_topt.graph.op_config import LAYOUT
from lightning_topt.graph.python_state import describe_surroundings

ATOMS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)
FUNCTIONS = (types.BuiltinFunctionType, type)
SKIPPED = ("_parameters", "_buffers", "_modules", "forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MIN_REPETITIONS = 3  # two are looked at
MAX_DEPTH = 4  # of attributes


class NotPlain(Exception):
    """A module holds something whose behaviour cannot be compared."""


def find_equal(root: nn.Module) -> dict[str, int]:
    """Return a key for every module below `root`, by path, that has children and at least two
    equals.

    Modules of equal keys differ in nothing but the memory of their parameters and buffers, which no
    other module has, and have no hooks. What their forward reads from elsewhere is not looked at.
    """
    if any(
        getattr(torch_module, name)
        for name in vars(torch_module)
        if name.startswith("_global_") and "hooks" in name
    ):
        return {}
    tensors = (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    )
    owners = Counter(_address(tensor) for _, tensor in tensors if _is_dense(tensor))
    times = Counter(id(m) for _, m in root.named_modules(remove_duplicate=False))
    numbers: dict[Hashable, int] = {}
    keys: dict[str, int] = {}

    def visit(module: nn.Module, path: str) -> int | None:
        children = [
            (name, visit(child, f"{path}.{name}" if path else name))
            for name, child in module._modules.items()
            if child is not None
        ]
        if times[id(module)] > 1 or any(key is None for _, key in children):
            return None
        try:
            own = _own_key(module, owners)
        except NotPlain:
            return None
        number = numbers.setdefault((own, tuple(children)), len(numbers))
        if path and children:
            keys[path] = number
        return number

    visit(root, "")
    counts = Counter(keys.values())
    return {path: key for path, key in keys.items() if counts[key] >= MIN_REPETITIONS}


def state_of(module: nn.Module) -> Hashable | None:
    """Return what decides how a module that `find_equal` found behaves now and may have changed
    meanwhile; None if unknown.

    Equal for modules that behave alike: plain attributes, hooks, which parameters are trained, and
    how they are split.
    """
    try:
        return tuple(
            (
                _attributes(m),
                tuple(len(vars(m)[name]) for name in HOOKS),
                tuple((p.requires_grad, vars(p).get(LAYOUT)) for p in _tensors(m)),
            )
            for m in module.modules()
        )
    except NotPlain:
        return None


def identity_of(module: nn.Module) -> Any:
    """Return which objects a module consists of."""
    return [
        [id(value) for name, value in (*vars(m).items(), *_named(m)) if name not in SKIPPED]
        for m in module.modules()
    ]


def surroundings_of(module: nn.Module) -> Any:
    """Return the globals that the code of a module's classes can read and write, tensors by
    identity.
    """
    return describe_surroundings({type(m) for m in module.modules()})


def _own_key(module: nn.Module, owners: Counter[int]) -> Hashable:
    if any(vars(module).get(name) for name in HOOKS) or "forward" in vars(module):
        raise NotPlain
    tensors: list[Hashable] = []
    for name, tensor in _named(module):
        if tensor is not None:
            if not _is_dense(tensor) or owners[_address(tensor)] > 1:
                raise NotPlain
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors.append(
                (
                    name,
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                    tensor.requires_grad,
                    is_parameter,
                )
            )
        else:
            tensors.append((name,))
    return type(module), tuple(tensors), _attributes(module)


def _attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, _token(value, 0))
        for name, value in vars(module).items()
        if name not in SKIPPED and "_hooks" not in name
    )


def _token(value: Any, depth: int) -> Hashable:
    """A value that is equal for equal plain values. Raises NotPlain for all else."""
    if isinstance(value, ATOMS):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if depth > MAX_DEPTH:
        raise NotPlain
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_token(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_token(item, depth + 1) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value), tuple(
            (_token(k, depth + 1), _token(v, depth + 1)) for k, v in value.items()
        )
    if isinstance(value, FUNCTIONS) or (
        isinstance(value, types.FunctionType) and not value.__closure__
    ):
        return "function", id(value)
    cls: Any = type(value)
    attributes = getattr(value, "__dict__", None)
    if (
        isinstance(value, (Tensor, nn.Module))
        or not isinstance(attributes, dict)
        or not _is_of_python(cls)
    ):
        raise NotPlain
    return cls, tuple((name, _token(item, depth + 1)) for name, item in attributes.items())


@functools.cache
def _is_of_python(cls: type) -> bool:
    """Whether all that instances of `cls` hold is in their attributes."""
    files = [
        getattr(sys.modules.get(base.__module__), "__file__", None) or ""
        for base in cls.__mro__[:-1]
    ]
    return all(file.endswith(".py") for file in files) and not hasattr(cls, "__slots__")


def _named(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in _named(module) if tensor is not None]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
