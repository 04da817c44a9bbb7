"""Functions that read along some dims: sums, softmax, group norm. The others may be split; a sum
may be left in summands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
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
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import elementwise_rows
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL

_PLACES = {
    "std": (1, 3),
    "var": (1, 3),
    "std_mean": (1, 3),
    "var_mean": (1, 3),
    "linalg_vector_norm": (2, 3),
    "argmax": (1, 2),
}


def _dims(call: Call) -> set[int]:
    """The dims that are reduced."""
    ndim = len(call.operands[0].shape)
    given = call.get(_PLACES.get(call.func.__name__, (1, 2))[0], "dim", call.kwargs.get("axis"))
    if given is None or isinstance(given, torch.dtype | bool):
        return {*range(ndim)}
    dims = [given] if isinstance(given, int) else given
    return {positive(dim, ndim) for dim in dims} or {*range(ndim)}


def _kept_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, reduced = call.operands[0], _dims(call)
    kept = bool(call.get(_PLACES.get(call.func.__name__, (1, 2))[1], "keepdim", False))
    for dim, size in enumerate(x.shape):
        if dim not in reduced:
            target = dim if kept else dim - sum(each < dim for each in reduced)
            for parts in call.parts:
                if divides(size, ranks, parts):
                    yield call.row({x: Shard(dim, parts)}, Shard(target, parts))


def _sum_rows(call: Call, ranks: int) -> Iterator[Row]:
    yield from _kept_rows(call, ranks)
    x = call.operands[0]
    for dim in _dims(call):
        for parts in call.parts:
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, PARTIAL)


def _run_mean(placed: Placed) -> Tensor:
    """The mean of the local elements, as a summand of the mean of all."""
    cut = 1
    for dim in _dims(placed.call):
        cut *= placed.ranks_along(0, dim)
    mean: Tensor = placed.call.func(*placed.args, **placed.kwargs)
    return mean / cut if cut > 1 else mean


_SECOND = {"topk", "kthvalue"}  # their dim is the third argument


def _along_rows(call: Call, ranks: int) -> Iterator[Row]:
    """One dim is read, and all dims stay."""
    x = call.operands[0]
    along = call.get(2 if call.func.__name__ in _SECOND else 1, "dim", call.kwargs.get("axis"))
    if along is None:  # what a softmax takes then (torch.nn.functional), and a sort
        along = (0 if len(x.shape) in (0, 1, 3) else 1) if "soft" in call.func.__name__ else -1
    along = positive(along, len(x.shape))
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            if dim != along and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _extremum_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Values and indices along one dim; without one, the largest of all or the larger of two."""
    if len(call.operands) == 2:
        yield from elementwise_rows(call, ranks)
    elif isinstance(call.get(1, "dim", call.kwargs.get("axis")), int):
        yield from _kept_rows(call, ranks)


def _similarity_rows(call: Call, ranks: int) -> Iterator[Row]:
    along = call.get(2, "dim", 1)
    ndim = max(len(operand.shape) for operand in call.operands)
    along = positive(along, ndim)
    for row in elementwise_rows(call, ranks):
        out = row.outputs[0]
        if isinstance(out, Shard) and out.dim != along:
            yield row._replace(outputs=(Shard(out.dim - (out.dim > along), out.parts),))


def _gated_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Two halves along one dim: each must be cut."""
    x = call.operands[0]
    along = positive(call.get(1, "dim", -1), len(x.shape))
    for dim, size in enumerate(x.shape):
        for parts in call.parts:
            if dim != along and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))
            elif dim == along and parts % 2 == 0 and divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts // 2))


def _group_norm_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, count = call.operands[0], call.get(1, "num_groups")
    if divides(x.shape[0], ranks):
        yield call.row({x: Shard(0)}, Shard(0))
    if divides(count, ranks):
        placed: dict[Any, Placement] = {operand: Shard(0) for operand in call.operands[1:]}
        yield call.row({x: Shard(1), **placed}, Shard(1))


def _run_group_norm(placed: Placed) -> Tensor:
    count = placed.call.get(1, "num_groups") // placed.ranks_along(0, 1)
    weight, bias, eps = placed.get(2, "weight"), placed.get(3, "bias"), placed.get(4, "eps", 1e-5)
    return F.group_norm(placed.get(0, "input"), count, weight, bias, eps)


SUM = Kind("sum", _sum_rows)
MEAN = Kind("mean", _sum_rows, _run_mean)
KEPT = Kind("reduction", _kept_rows)
ALONG = Kind("softmax", _along_rows)
EXTREMUM = Kind("extremum", _extremum_rows)
GROUP_NORM = Kind("group norm", _group_norm_rows, _run_group_norm)
register(SUM, named("sum", torch, Tensor))
register(MEAN, named("mean", torch, Tensor))
register(
    KEPT,
    named(
        "amax amin prod logsumexp any all argmax argmin std var std_mean var_mean", torch, Tensor
    ),
)
register(KEPT, (torch.linalg.vector_norm,))
register(ALONG, named("softmax log_softmax softmin", torch, Tensor, F))
register(
    ALONG,
    named(
        "cumsum cumprod cumsum_ cumprod_ cummax cummin logcumsumexp sort argsort topk",
        torch,
        Tensor,
    ),
)
register(EXTREMUM, named("max min median nanmedian mode", torch, Tensor))
register(Kind("similarity", _similarity_rows), (torch.cosine_similarity,))
register(Kind("gated", _gated_rows), (F.glu, torch._C._nn.glu))
register(GROUP_NORM, (F.group_norm,))
