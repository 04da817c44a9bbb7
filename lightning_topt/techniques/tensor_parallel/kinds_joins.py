"""Functions that cut tensors into several, and join several to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Shard
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


def _cat_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Tensors joined along the dim they are split along are parts of the result, where they are
    equally large.
    """
    # which may stand for any empty tensor
    joined = [operand for operand in call.operands if operand.shape != (0,)]
    if not joined or any(len(operand.shape) != len(joined[0].shape) for operand in joined):
        return
    along = positive(call.get(1, "dim", 0), len(joined[0].shape))
    for dim in range(len(joined[0].shape)):
        sizes = {operand.shape[dim] for operand in joined}
        for parts in call.parts if len(sizes) == 1 else ():
            if divides(min(sizes), ranks, parts):
                copies = len(joined) if dim == along else 1
                yield call.row(dict.fromkeys(joined, Shard(dim, parts)), Shard(dim, parts * copies))


def _stack_rows(call: Call, ranks: int) -> Iterator[Row]:
    shape = call.operands[0].shape
    new = positive(call.get(1, "dim", 0), len(shape) + 1)
    for dim, size in enumerate(shape):
        for parts in call.parts:
            if divides(size, ranks, parts):
                yield call.row(
                    dict.fromkeys(call.operands, Shard(dim, parts)),
                    Shard(dim + (dim >= new), parts),
                )


def _lengths(call: Call) -> tuple[int, list[int]]:
    """Return the dim, and the sizes of the pieces."""
    shape, name = call.operands[0].shape, call.func.__name__
    dim = positive(call.get(2, "dim", 0), len(shape))
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


def _split_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Pieces of whole parts of the dim stay split."""
    x = call.operands[0]
    along, lengths = _lengths(call)
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            if dim != along and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, *(Shard(dim, parts) for _ in lengths))
            elif (
                dim == along
                and divides(size, ranks, parts)
                and not any(each % (size // parts) for each in lengths)
            ):
                yield call.row(
                    {x: Shard(dim, parts)}, *(Shard(dim, each * parts // size) for each in lengths)
                )


def _run_split(placed: Placed) -> Any:
    along, lengths = _lengths(placed.call)
    x: Tensor = placed.args[0] if placed.args else placed.kwargs["input"]
    ranks = placed.ranks_along(0, along)
    return x.split([length // ranks for length in lengths], along)  # type: ignore[no-untyped-call]


def _unbind_rows(call: Call, ranks: int) -> Iterator[Row]:
    x = call.operands[0]
    along = positive(call.get(1, "dim", 0), len(x.shape))
    for dim, size in enumerate(x.shape):
        if dim != along and divides(size, ranks):
            yield call.row(
                {x: Shard(dim)}, *(Shard(dim - (dim > along)) for _ in range(x.shape[along]))
            )


SPLIT = Kind("split", _split_rows, _run_split)
register(Kind("cat", _cat_rows), named("cat concat concatenate", torch))
register(Kind("stack", _stack_rows), (torch.stack,))
register(SPLIT, named("split chunk split_with_sizes", torch, Tensor))
register(SPLIT, (torch.functional.split,))
register(Kind("unbind", _unbind_rows), named("unbind", torch, Tensor))
register(
    Kind("iteration", _unbind_rows, lambda placed: placed.args[0].unbind(0)), (Tensor.__iter__,)
)
