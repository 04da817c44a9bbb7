"""Functions that change shapes only: reshapes of heads, transposes, copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import (
    Call,
    Kind,
    Placed,
    Row,
    divides,
    named,
    positive,
    register,
)


def sizes_of(call: Call) -> tuple[int, ...]:
    """Return the sizes given to a function as a sequence or as several numbers."""
    sizes = call.args[1:]
    if not sizes:
        sizes = next(
            call.kwargs[name]
            for name in ("size", "shape", "sizes", "repeats")
            if name in call.kwargs
        )
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    return tuple(sizes)


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the dims of `old` and `new` shape in runs that hold the same elements, smallest runs
    first.
    """
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, second = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = math.prod(old[d] for d in first), math.prod(new[d] for d in second)
        i, j = i + len(first), j + len(second)
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
                first.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                second.append(j - 1)
        found.append((first, second))
    return found


def _new_shape(call: Call) -> tuple[int, ...]:
    """Return the whole shape that the call makes."""
    shape = call.operands[0].shape
    name = call.func.__name__
    if name in ("view", "reshape"):
        sizes = sizes_of(call)
        known = math.prod(size for size in sizes if size != -1)
        return tuple(math.prod(shape) // known if size == -1 else size for size in sizes)
    if name in ("view_as", "reshape_as"):
        return call.operands[1].shape
    if name == "flatten":
        first, last = (
            positive(call.get(i, n, d), len(shape))
            for i, n, d in ((1, "start_dim", 0), (2, "end_dim", -1))
        )
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    if name == "unflatten":
        dim, sizes = positive(call.get(1, "dim"), len(shape)), call.get(2, "sizes")
        known = math.prod(size for size in sizes if size != -1)
        return (
            *shape[:dim],
            *(shape[dim] // known if size == -1 else size for size in sizes),
            *shape[dim + 1 :],
        )
    return (math.prod(shape),)  # ravel


def _reshape_rows(call: Call, ranks: int) -> Iterator[Row]:
    """A dim that is split goes on in the dim of the new shape in which its pieces are as coarse."""
    x = call.operands[0]
    if len(call.args) > 1 and isinstance(call.args[1], torch.dtype):
        return
    new = _new_shape(call)
    if 0 in x.shape:
        return
    for old_dims, new_dims in groups(x.shape, new):
        for dim in old_dims:
            for parts in call.parts if divides(x.shape[dim], ranks) else ():
                if not divides(x.shape[dim], ranks, parts):
                    continue
                target = _goes_on(x.shape, old_dims, dim, parts, new, new_dims, ranks)
                if target is not None:
                    yield call.row({x: Shard(dim, parts)}, target)


def carried(shard: Shard, old: Sequence[int], new: Sequence[int], ranks: int) -> Shard | None:
    """Return how a tensor is cut that is reshaped from `old` to `new` and was cut as `shard`; None
    where that is no slice.
    """
    for old_dims, new_dims in groups(old, new):
        if shard.dim in old_dims:
            return _goes_on(old, old_dims, shard.dim, shard.parts, new, new_dims, ranks)
    return None


def _goes_on(
    old: Sequence[int],
    old_dims: Sequence[int],
    dim: int,
    parts: int,
    new: Sequence[int],
    new_dims: Sequence[int],
    ranks: int,
) -> Shard | None:
    coarse = parts * math.prod(
        old[d] for d in old_dims if d < dim
    )  # of the run: how many parts, each cut for the ranks
    found, before = None, 1
    for target in new_dims:
        if (
            coarse % before == 0
            and new[target] > 1
            and divides(new[target], ranks, coarse // before)
        ):
            found = Shard(target, coarse // before)
        before *= new[target]
    return found


def _run_reshape(placed: Placed) -> Tensor:
    if (shape := placed.memo.get("shape")) is None:
        shape = placed.memo["shape"] = placed.local_shape(_new_shape(placed.call))
    x: Tensor = placed.args[0] if placed.args else placed.kwargs["input"]
    return x.view(shape) if placed.call.func.__name__.startswith("view") else x.reshape(shape)


def _order(call: Call) -> tuple[int, ...]:
    """Return which dim of the argument each dim of the result is."""
    ndim = len(call.operands[0].shape)
    labels = torch.empty_strided((1,) * ndim, tuple(range(ndim)), device="meta")
    args = (labels, *call.args[1:]) if call.args else ()
    kwargs = {key: labels if key == "input" else value for key, value in call.kwargs.items()}
    result = call.func(*args, **kwargs)
    return tuple(result.stride())


def _permute_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, order = call.operands[0], _order(call)
    for target, dim in enumerate(order):
        for parts in call.parts:
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(target, parts))


def _gone(call: Call) -> set[int]:
    """The dims that a squeeze removes."""
    shape = call.operands[0].shape
    dims = call.get(1, "dim", [*range(len(shape))])
    given = {positive(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)}
    return {d for d in given if shape[d] == 1}


def _squeeze_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.operands[0]
    if call.func.__name__.startswith("squeeze"):
        gone = _gone(call)
        places = {
            d: d - sum(each < d for each in gone) for d in range(len(x.shape)) if d not in gone
        }
    else:
        new = positive(call.get(1, "dim"), len(x.shape) + 1)
        places = {d: d + (d >= new) for d in range(len(x.shape))}
    for dim, target in places.items():
        for parts in call.parts:
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(target, parts))


def _run_squeeze(placed: Placed) -> Tensor:
    """A dim may have the size 1 on one rank only."""
    if not placed.call.func.__name__.startswith("squeeze"):
        result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
        return result
    x: Tensor = placed.args[0] if placed.args else placed.kwargs["input"]
    return x.squeeze(tuple(_gone(placed.call)))


def _expanded(call: Call) -> tuple[int, ...]:
    shape = call.operands[0].shape
    if call.func.__name__ == "expand_as":
        return call.operands[1].shape
    sizes = sizes_of(call)
    new = len(sizes) - len(shape)
    return tuple(shape[d - new] if size == -1 else size for d, size in enumerate(sizes))


def _expand_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, shape = call.operands[0], _expanded(call)
    new = len(shape) - len(x.shape)
    for dim, size in enumerate(x.shape):
        if size == shape[dim + new] and divides(size, ranks):
            placed: dict[Any, Placement] = {x: Shard(dim)}
            yield call.row(placed, Shard(dim + new))


def _run_expand(placed: Placed) -> Tensor:
    x: Tensor = placed.args[0]
    return x.expand(placed.local_shape(_expanded(placed.call)))


def _repeat_interleave_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, repeats, dim = call.operands[0], call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return
    for d, size in enumerate(x.shape):
        if divides(size, ranks):
            yield call.row({x: Shard(d)}, Shard(d))


def _repeat_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Each copy of a split dim is a part of the result."""
    x = call.operands[0]
    sizes = sizes_of(call)
    new = len(sizes) - len(x.shape)
    if call.func.__name__ == "tile" and new < 0:
        sizes, new = (*(1 for _ in range(-new)), *sizes), 0
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            copies = sizes[new + dim]
            if copies > 0 and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(new + dim, parts * copies))


def _moved_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Dims that are rolled or turned round are whole."""
    x, dims = call.operands[0], call.get(2, "dims")
    if call.func.__name__ == "flip":
        dims = call.kwargs["dims"] if "dims" in call.kwargs else call.args[1:]
        dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if dims is None or (isinstance(dims, tuple | list) and not dims):
        return
    moved = {positive(dim, len(x.shape)) for dim in ([dims] if isinstance(dims, int) else dims)}
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            if dim not in moved and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _window_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.operands[0]
    along = positive(call.get(1, "dimension"), len(x.shape))
    for dim, size in enumerate(x.shape):
        if dim != along and divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


def _triangle_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.operands[0]
    for dim, size in enumerate(x.shape[:-2]):
        if divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


RESHAPE = Kind("reshape", _reshape_rows, _run_reshape)
PERMUTE = Kind("permute", _permute_rows)
SQUEEZE = Kind("squeeze", _squeeze_rows, _run_squeeze)
EXPAND = Kind("expand", _expand_rows, _run_expand)
register(RESHAPE, named("view reshape flatten unflatten ravel view_as reshape_as", torch, Tensor))
register(
    PERMUTE, named("transpose permute t swapaxes swapdims movedim moveaxis adjoint", torch, Tensor)
)
register(PERMUTE, (Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]
register(SQUEEZE, named("squeeze unsqueeze", torch, Tensor))
register(EXPAND, named("expand expand_as broadcast_to", torch, Tensor))
register(
    Kind("repeat_interleave", _repeat_interleave_rows), named("repeat_interleave", torch, Tensor)
)
register(Kind("repeat", _repeat_rows), named("repeat tile", torch, Tensor))
register(Kind("roll", _moved_rows), named("roll flip", torch, Tensor))
register(Kind("window", _window_rows), (Tensor.unfold,))
register(Kind("triangle", _triangle_rows), named("tril triu", torch, Tensor))
