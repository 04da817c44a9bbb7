"""Functions that change shapes: reshapes, transposes, joins, splits; and indexing.

A dim that is split stays so where its slices remain slices of one dim of the result. With parts, a
shard has one slice of each of several equal parts of a dim. That is how queries, keys and values
stay split in one joint dim: (3, heads) flattened is a dim of three parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.op_rules.elementwise import broadcast
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Kind,
    OpCall,
    Operand,
    Placed,
    Row,
    dim_rows,
    divides,
    named,
    positive,
    register,
    replaced,
)


def sizes_of(call: OpCall) -> tuple[int, ...]:
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
    """Return the dims of `old` and `new` shape in the smallest runs that hold the same elements."""
    # grow the run on the side that has fewer elements, until both have as many
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


def _new_shape(call: OpCall) -> tuple[int, ...]:
    # The full shape that a reshape makes
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


def _reshape_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits that go on in the dim of the new shape in which pieces are as coarse
    x = call.operands[0]
    if len(call.args) > 1 and isinstance(call.args[1], torch.dtype):
        return
    new = _new_shape(call)
    if 0 in x.shape:
        return
    for old_dims, new_dims in groups(x.shape, new):
        for dim in old_dims:
            for parts in call.parts_of(x.shape[dim], ranks):
                target = _goes_on(x.shape, old_dims, dim, parts, new, new_dims, ranks)
                if target is not None:
                    yield call.row({x: Shard(dim, parts)}, target)


def carried(shard: Shard, old: Sequence[int], new: Sequence[int], ranks: int) -> Shard | None:
    """Return how a tensor is cut after a reshape from `old` to `new`, if it was cut as `shard`.

    None if that is no slice.
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
    # The shard of a new dim that holds the same elements as one of `dim`; None without
    # into how many parts the run is divided, each of which is cut for the ranks
    coarse = parts * math.prod(old[d] for d in old_dims if d < dim)
    # the dim after `before` elements of the run: the last that can be cut there
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
    x: Tensor = placed.get(0, "input")
    return x.view(shape) if placed.call.func.__name__.startswith("view") else x.reshape(shape)


def _order(call: OpCall) -> tuple[int, ...]:
    # Which dim of the argument each dim of the result is
    ndim = len(call.operands[0].shape)
    # a tensor of size 1 whose strides number the dims: the result shows where they went
    labels = torch.empty_strided((1,) * ndim, tuple(range(ndim)), device="meta")
    args = (labels, *call.args[1:]) if call.args else ()
    kwargs = {key: labels if key == "input" else value for key, value in call.kwargs.items()}
    result = call.func(*args, **kwargs)
    return tuple(result.stride())


def _permute_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    yield from dim_rows(call, ranks, {dim: place for place, dim in enumerate(_order(call))})


def _gone(call: OpCall) -> set[int]:
    # The dims that a squeeze removes
    shape = call.operands[0].shape
    dims = call.get(1, "dim", [*range(len(shape))])
    given = {positive(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)}
    return {d for d in given if shape[d] == 1}


def _squeeze_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    ndim = len(call.operands[0].shape)
    if call.func.__name__.startswith("squeeze"):
        gone = _gone(call)
        stay = [dim for dim in range(ndim) if dim not in gone]
        places = dict(zip(stay, range(len(stay)), strict=True))
    else:
        new = positive(call.get(1, "dim"), ndim + 1)
        places = {dim: dim + (dim >= new) for dim in range(ndim)}
    yield from dim_rows(call, ranks, places)


def _run_squeeze(placed: Placed) -> Any:
    # Squeeze the dims of the full tensor: others may have size 1 on this rank only
    if not placed.call.func.__name__.startswith("squeeze"):
        return placed.called()
    return placed.get(0, "input").squeeze(tuple(_gone(placed.call)))


def _expanded(call: OpCall) -> tuple[int, ...]:
    shape = call.operands[0].shape
    if call.func.__name__ == "expand_as":
        return call.operands[1].shape
    sizes = sizes_of(call)
    new = len(sizes) - len(shape)
    return tuple(shape[d - new] if size == -1 else size for d, size in enumerate(sizes))


def _expand_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    x, shape = call.operands[0], _expanded(call)
    new = len(shape) - len(x.shape)
    places = {dim: dim + new for dim, size in enumerate(x.shape) if size == shape[dim + new]}
    yield from dim_rows(call, ranks, places)


def _run_expand(placed: Placed) -> Tensor:
    x: Tensor = placed.args[0]
    return x.expand(placed.local_shape(_expanded(placed.call)))


def _repeat_interleave_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    x, repeats, dim = call.operands[0], call.get(1, "repeats"), call.get(2, "dim")
    if isinstance(repeats, int) and dim is not None:
        yield from dim_rows(call, ranks, range(len(x.shape)))


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


# ---- joins and splits ----------------------------------------------------------------------------


def _cat_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of a concatenation.
    # Tensors of equal size, joined along their split dim, are parts of the result.
    # (0,) may stand for any empty tensor
    joined = [operand for operand in call.operands if operand.shape != (0,)]
    if not joined or any(len(operand.shape) != len(joined[0].shape) for operand in joined):
        return
    along = positive(call.get(1, "dim", 0), len(joined[0].shape))
    for dim in range(len(joined[0].shape)):
        sizes = {operand.shape[dim] for operand in joined}
        for parts in call.parts_of(min(sizes), ranks) if len(sizes) == 1 else ():
            copies = len(joined) if dim == along else 1
            yield call.row(dict.fromkeys(joined, Shard(dim, parts)), Shard(dim, parts * copies))


def _stack_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    ndim = len(call.operands[0].shape)
    new = positive(call.get(1, "dim", 0), ndim + 1)
    places = {dim: dim + (dim >= new) for dim in range(ndim)}
    yield from dim_rows(call, ranks, places, alike=call.operands)


def _lengths(call: OpCall) -> tuple[int, list[int]]:
    # The dim, and the sizes of the pieces
    shape, name = call.operands[0].shape, call.func.__name__
    dim = positive(call.get(2, "dim", 0), len(shape))
    # one size for all pieces, or a list of sizes
    given, size = call.args[1] if len(call.args) > 1 else None, shape[dim]
    if name == "chunk":
        given = -(-size // (call.kwargs["chunks"] if given is None else given))
    elif given is None:
        given = next(
            call.kwargs[key]
            for key in ("split_size", "split_size_or_sections", "split_sizes")
            if key in call.kwargs
        )
    if isinstance(given, int):
        return dim, [min(given, size - start) for start in range(0, size, given)]
    return dim, [*given]


def _split_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits; pieces of full parts of the dim stay split
    x = call.operands[0]
    along, lengths = _lengths(call)
    yield from dim_rows(call, ranks, [dim for dim in range(len(x.shape)) if dim != along])
    size = x.shape[along]
    for parts in call.parts_of(size, ranks):
        if not any(each % (size // parts) for each in lengths):
            results = (Shard(along, each * parts // size) for each in lengths)
            yield call.row({x: Shard(along, parts)}, *results)


def _run_split(placed: Placed) -> Any:
    along, lengths = _lengths(placed.call)
    ranks = placed.ranks_along(0, along)
    return placed.get(0, "input").split([length // ranks for length in lengths], along)


def _select_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of the dims that are not indexed; an unbind takes all indices
    ndim = len(call.operands[0].shape)
    along = positive(call.get(1, "dim", 0), ndim)
    is_kept = call.func.__name__ in ("narrow", "index_select")
    places = {dim: dim - (dim > along and not is_kept) for dim in range(ndim) if dim != along}
    yield from dim_rows(call, ranks, places)


SPLIT = Kind("split", _split_rows, _run_split)
register(Kind("cat", _cat_rows), named("cat concat concatenate", torch))
register(Kind("stack", _stack_rows), (torch.stack,))
register(SPLIT, named("split chunk split_with_sizes", torch, Tensor))
register(SPLIT, (torch.functional.split,))
register(Kind("unbind", _select_rows), named("unbind", torch, Tensor))
register(
    Kind("iteration", _select_rows, lambda placed: placed.args[0].unbind(0)), (Tensor.__iter__,)
)

# ---- x[index] ------------------------------------------------------------------------------------


def _items(index: object, ndim: int) -> list[Any] | None:
    # Return one item per dim of the indexed tensor (None for new dims), without the ellipsis.
    # None for anything but slices, numbers, new dims and operands.
    # the ellipsis stands for all dims that are not indexed
    items = [*index] if type(index) is tuple else [index]
    simple = (slice, int, Operand, type(None), type(...))
    if any(not isinstance(item, simple) or isinstance(item, bool) for item in items):
        return None
    missing = [slice(None)] * (ndim - sum(item is not None and item is not ... for item in items))
    at = next((place for place, item in enumerate(items) if item is ...), None)
    return [*items, *missing] if at is None else [*items[:at], *missing, *items[at + 1 :]]


def _kept_dims(items: Sequence[object], shape: Sequence[int]) -> dict[int, int]:
    # Return the dims that are taken in full, and which dims of the result they are.
    # Numbers are taken before tensors.
    tensors = [item for item in items if isinstance(item, Operand)]
    wide = len(broadcast(tensors)) if tensors else 0
    rest = [item for item in items if not isinstance(item, int)]
    places = [place for place, item in enumerate(rest) if isinstance(item, Operand)]
    # indices side by side: their dims stay in place, else they come first
    together = bool(places) and places[-1] - places[0] + 1 == len(places)
    # dim: of the indexed tensor, target: of the result
    kept, dim, target, seen = {}, 0, 0 if together else wide, False
    for item in items:
        if isinstance(item, Operand) and together and not seen:
            target, seen = target + wide, True
        if isinstance(item, slice) and item.indices(shape[dim]) == (0, shape[dim], 1):
            kept[dim] = target
        target += item is None or isinstance(item, slice)
        dim += item is not None
    return kept


def _getitem_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of dims that are taken in full; indices are replicated
    x, items = call.operands[0], _items(call.args[1], len(call.operands[0].shape))
    if items is None or any(operand.place in call.masks for operand in call.operands[1:]):
        return  # the shape of what a mask picks is not known
    yield from dim_rows(call, ranks, _kept_dims(items, x.shape))


def _setitem_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of dims that are written in full, with the new value cut alike
    x, index, value = call.operands[0], call.args[1], call.args[2]
    items = _items(index, len(x.shape))
    indices = [operand for operand in call.operands[1:] if operand is not value]
    if items is None or any(operand.place in call.masks for operand in indices):
        return
    ndim = sum(item is None or isinstance(item, slice) for item in items)
    ndim += len(broadcast(indices)) if indices else 0
    for dim, target in _kept_dims(items, x.shape).items():
        for parts in call.parts_of(x.shape[dim], ranks):
            placed: dict[Operand, Placement] = {x: Shard(dim, parts)}
            if isinstance(value, Operand):
                own = target - ndim + len(value.shape)
                if own >= 0 and value.shape[own] == x.shape[dim]:
                    placed[value] = Shard(own, parts)
            yield call.row(placed, Shard(dim, parts))


def _run_item(placed: Placed) -> Any:
    # Index the local tensor; a slice of all of a dim is all of its local dim too
    x, index, *value = placed.args
    shape = placed.inputs[0].shape
    # 0:size of a split dim would go beyond the local tensor
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


def _gather_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits where indices, and what is written, are as large as the tensor in the dim
    x = call.operands[0]
    name = call.func.__name__
    given = call.get(2, "dim") if name == "take_along_dim" else call.get(1, "dim")
    if given is None or any(len(operand.shape) != len(x.shape) for operand in call.operands):
        return
    along = positive(given, len(x.shape))
    dims = [
        dim
        for dim, size in enumerate(x.shape)
        if dim != along and all(operand.shape[dim] == size for operand in call.operands)
    ]
    yield from dim_rows(call, ranks, dims, alike=call.operands)


def _index_add_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits; indices are a vector, and what is written has the dims of the tensor
    x, added = call.operands[0], call.get(3, "source")
    source = [added] if isinstance(added, Operand) else []
    along = positive(call.get(1, "dim"), len(x.shape))
    if any(len(each.shape) != len(x.shape) for each in source):
        return
    others = [dim for dim in range(len(x.shape)) if dim != along]
    yield from dim_rows(call, ranks, others, alike=source)


def _one_hot_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    if call.get(1, "num_classes", -1) != -1:  # else it depends on the largest of all
        yield from dim_rows(call, ranks, range(len(call.operands[0].shape)))


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
