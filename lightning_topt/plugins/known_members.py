"""A name in the source of a function stands for an object, which is found where that is known
without running code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import nn


class _Unknown:
    """A value that only running the code would tell."""


UNKNOWN = _Unknown()


def member_of(owner: Any, name: str, module: pl.LightningModule) -> Any:
    """Return the object that ``owner.name`` stands for, `UNKNOWN` where only running the code would
    tell.
    """
    if owner is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, pl.Trainer):
        return module if name in ("model", "lightning_module") else UNKNOWN
    if isinstance(owner, pl.LightningModule) and name == "trainer":
        return module._trainer or UNKNOWN
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, UNKNOWN)
    if isinstance(owner, nn.Module):
        for values in (owner._modules, owner._parameters, owner._buffers):
            if name in values:
                return values[name]
    try:
        value = inspect.getattr_static(owner, name)
    except AttributeError:
        return UNKNOWN
    if isinstance(value, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(value, owner)
    return UNKNOWN if isinstance(value, property | types.MemberDescriptorType) else value


def property_getter(owner: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that reads the property `name` of `owner`; None where that is none."""
    value = None if owner is UNKNOWN else inspect.getattr_static(owner, name, None)
    return value.fget if isinstance(value, property) else None


def has_parameters(value: Any) -> bool:
    """Return whether `value` is a parameter, or a module that has some."""
    return isinstance(value, nn.Parameter) or (
        isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    )
