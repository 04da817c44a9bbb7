"""All that the decision about a call depends on, as a key that is cheap to compare; and what the
call looks like whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.graph.op_config import Shard
from lightning_topt.techniques.tensor_parallel.decisions import Known
from lightning_topt.techniques.tensor_parallel.kinds import Call, Operand, replaced
from lightning_topt.techniques.tensor_parallel.layout import Layout, layout_of

_CHANGES = {
    *(
        "__setitem__",
        "__set__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__idiv__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
    ),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def signature(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> Any:
    """Return the key of a call, and put its tensors into `tensors`, in order; None where it cannot
    be compared.
    """
    key: list[Any] = [func]
    known = _collect(args, key, tensors)
    if kwargs:
        key.append(tuple(kwargs))
        known &= _collect(kwargs.values(), key, tensors)
    return tuple(key) if known else None


def _collect(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> bool:
    known = True
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            layout = layout_of(value)
            key += (
                value.shape if layout is None else layout,
                value.requires_grad,
                type(value),
                value.dtype,
            )
        elif isinstance(value, list | tuple):
            key += (type(value), len(value))
            known &= _collect(value, key, tensors)
        elif isinstance(value, slice):
            bounds = value.start, value.stop, value.step
            known &= not any(isinstance(bound, Tensor) for bound in bounds)
            key += (slice, *bounds)
        else:
            known &= getattr(value, "__hash__", None) is not None
            key += (type(value), value)  # 1 is not True
    return known


def known_of(tensor: Tensor, whole: Layout) -> Known:
    """Return where an argument is; `whole` is the layout of what has none, but for its shape."""
    layout = layout_of(tensor) or whole._replace(shape=tuple(tensor.shape))
    return Known(
        layout, tensor.requires_grad, isinstance(tensor, nn.Parameter), tensor.dtype == torch.bool
    )


def call_of(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Sequence[Known],
    *,
    of: type = Tensor,
) -> Call:
    """Return the call with operands for its tensors, which are instances of `of` and of which
    `known` tells.
    """
    operands = tuple(Operand(index, each.layout.shape) for index, each in enumerate(known))
    new_args, new_kwargs = replaced((args, tuple(kwargs.values())), operands, of=of)
    placements = (
        placement for each in known for placement in (*each.layout.placements, each.layout.batch)
    )
    parts = {1, *(placement.parts for placement in placements if isinstance(placement, Shard))}
    masks = frozenset(index for index, each in enumerate(known) if each.is_mask)
    return Call(
        func,
        new_args,
        dict(zip(kwargs, new_kwargs, strict=True)),
        operands,
        tuple(sorted(parts)),
        masks,
    )


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], *, without: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these tensors in place of theirs, in order; None for the one at
    place `without`.
    """
    given: list[Tensor | None] = [*tensors]
    if without is not None:
        given[without] = None
    if any(isinstance(arg, list | tuple) for arg in args) or kwargs:
        args, values = replaced((args, tuple(kwargs.values())), given, of=Tensor)
        return args, dict(zip(kwargs, values, strict=True))
    rest = iter(given)
    return tuple([next(rest) if isinstance(arg, Tensor) else arg for arg in args]), kwargs


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first tensor."""
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.startswith("__")) or name in _CHANGES
    return changes or kwargs.get("inplace") is True
