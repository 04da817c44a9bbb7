"""Functions that pick elements by index along some dims: the other dims may be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import (
    Call,
    Kind,
    Operand,
    Placed,
    Row,
    divides,
    named,
    positive,
    register,
    replaced,
)
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import broadcast

# ---- x[index] ------------------------------------------------------------------------------------


def _items(index: Any, ndim: int) -> list[Any] | None:
    """Return one item per dim of the indexed tensor (and None for new dims), without the ellipsis;
    None for others than slices, numbers, new dims and operands.
    """
    items = [*index] if type(index) is tuple else [index]
    simple = (slice, int, Operand, type(None), type(...))
    if any(not isinstance(item, simple) or isinstance(item, bool) for item in items):
        return None
    missing = [slice(None)] * (ndim - sum(item is not None and item is not ... for item in items))
    at = next((place for place, item in enumerate(items) if item is ...), None)
    return [*items, *missing] if at is None else [*items[:at], *missing, *items[at + 1 :]]


def _kept_dims(items: Sequence[Any], shape: Sequence[int]) -> dict[int, int]:
    """Return the dims that are taken whole, and which dims of the result they are. Numbers are
    taken before tensors.
    """
    tensors = [item for item in items if isinstance(item, Operand)]
    wide = len(broadcast(tensors)) if tensors else 0
    rest = [item for item in items if not isinstance(item, int)]
    places = [place for place, item in enumerate(rest) if isinstance(item, Operand)]
    # else the dims of the indices come first
    together = bool(places) and places[-1] - places[0] + 1 == len(places)
    kept, dim, target, seen = {}, 0, 0 if together else wide, False
    for item in items:
        if isinstance(item, Operand) and together and not seen:
            target, seen = target + wide, True
        if isinstance(item, slice) and item.indices(shape[dim]) == (0, shape[dim], 1):
            kept[dim] = target
        target += item is None or isinstance(item, slice)
        dim += item is not None
    return kept


def _is_mask(call: Call, operand: Operand) -> bool:
    return operand.place in call.masks


def _getitem_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Dims that are taken whole stay split; indices are whole."""
    x, index = call.operands[0], call.args[1]
    items = _items(index, len(x.shape))
    if items is None or any(_is_mask(call, operand) for operand in call.operands[1:]):
        return
    for dim, target in _kept_dims(items, x.shape).items():
        for parts in call.parts:
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(target, parts))


def _setitem_rows(call: Call, ranks: int) -> Iterator[Row]:
    """The new value is split like the dims that are written whole."""
    x, index, value = call.operands[0], call.args[1], call.args[2]
    items = _items(index, len(x.shape))
    indices = [operand for operand in call.operands[1:] if operand is not value]
    if items is None or any(_is_mask(call, operand) for operand in indices):
        return
    ndim = sum(item is None or isinstance(item, slice) for item in items)
    ndim += len(broadcast(indices)) if indices else 0
    for dim, target in _kept_dims(items, x.shape).items():
        for parts in call.parts if divides(x.shape[dim], ranks) else ():
            placed: dict[Operand, Placement] = {x: Shard(dim, parts)}
            if isinstance(value, Operand):
                own = target - ndim + len(value.shape)
                if own >= 0 and value.shape[own] == x.shape[dim]:
                    placed[value] = Shard(own, parts)
            if divides(x.shape[dim], ranks, parts):
                yield call.row(placed, Shard(dim, parts))


def _run_item(placed: Placed) -> Any:
    """A slice from the start to the whole size is all of the local tensor too."""
    x, index, *value = placed.args
    shape = placed.inputs[0].shape
    items = _items(placed.call.args[1], len(shape))
    assert items is not None
    dim = 0
    for place, item in enumerate(items):
        if isinstance(item, slice) and item.indices(shape[dim]) == (0, shape[dim], 1):
            items[place] = slice(None)
        dim += item is not None
    given = [*index] if type(index) is tuple else [index]
    items = replaced(items, [item for item in given if isinstance(item, Tensor)], of=Operand)
    return placed.call.func(x, tuple(items), *value)


# ---- along one dim -------------------------------------------------------------------------------


def _select_rows(call: Call, ranks: int) -> Iterator[Row]:
    """One dim is indexed; the others may be split."""
    x = call.operands[0]
    along = positive(call.get(1, "dim"), len(x.shape))
    removed = call.func.__name__ == "select"
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            if dim != along and divides(size, ranks, parts):
                yield call.row(
                    {x: Shard(dim, parts)}, Shard(dim - (removed and dim > along), parts)
                )


def _gather_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Indices, and what is written, as large as the tensor in a dim are split like it."""
    x = call.operands[0]
    name = call.func.__name__
    given = call.get(2, "dim") if name == "take_along_dim" else call.get(1, "dim")
    if given is None or any(len(operand.shape) != len(x.shape) for operand in call.operands):
        return
    along = positive(given, len(x.shape))
    for dim, size in enumerate(x.shape):
        if (
            dim != along
            and all(operand.shape[dim] == size for operand in call.operands)
            and divides(size, ranks)
        ):
            yield call.row(dict.fromkeys(call.operands, Shard(dim)), Shard(dim))


def _index_add_rows(call: Call, ranks: int) -> Iterator[Row]:
    """The indices are a vector; what is written has the dims of the tensor."""
    x, added = call.operands[0], call.get(3, "source")
    source = [added] if isinstance(added, Operand) else []
    along = positive(call.get(1, "dim"), len(x.shape))
    if any(len(each.shape) != len(x.shape) for each in source):
        return
    for dim, size in enumerate(x.shape):
        if dim != along and divides(size, ranks):
            yield call.row(dict.fromkeys((x, *source), Shard(dim)), Shard(dim))


def _one_hot_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.operands[0]
    for dim, size in enumerate(x.shape):
        if call.get(1, "num_classes", -1) != -1 and divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


def _bucketize_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.get(0, "input")
    if isinstance(x, Operand):
        for dim, size in enumerate(x.shape):
            if divides(size, ranks):
                yield call.row({x: Shard(dim)}, Shard(dim))


def _both(names: str) -> str:
    return " ".join(f"{name} {name}_" for name in names.split())


_NN: Any = torch._C._nn
register(Kind("getitem", _getitem_rows, _run_item), (Tensor.__getitem__,))
register(Kind("setitem", _setitem_rows, _run_item), (Tensor.__setitem__,))
register(Kind("select", _select_rows), named("select narrow index_select", torch, Tensor))
register(
    Kind("gather", _gather_rows),
    named(f"gather take_along_dim {_both('scatter scatter_add scatter_reduce')}", torch, Tensor),
)
register(
    Kind("index add", _index_add_rows),
    named(_both("index_add index_copy index_fill"), torch, Tensor),
)
register(Kind("one hot", _one_hot_rows), (_NN.one_hot,))
register(Kind("bucketize", _bucketize_rows), (torch.bucketize,))
