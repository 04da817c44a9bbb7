"""Convolutions, pooling and padding: channels and samples may be split, what is read along space is
whole.

column   x whole, weight (and bias) by output channels     result by channels
row      x by channels, weight by input channels           result Partial, the bias added to the sum
groups   x, weight and bias by groups                      result by channels
samples  x by the batch dim, weight whole                  result by the batch dim
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
    Operand,
    Placed,
    Row,
    divides,
    named,
    register,
    with_argument,
)
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL


def _convolution_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, weight, bias = (
        call.get(index, name) for index, name in enumerate(("input", "weight", "bias"))
    )
    space = len(weight.shape) - 2
    channels, groups = len(x.shape) - space - 1, call.get(6, "groups", 1)
    if groups > 1:
        placed: dict[Operand, Placement] = (
            {weight: Shard(0)} if bias is None else {weight: Shard(0), bias: Shard(0)}
        )
        if divides(groups, ranks):
            yield call.row({x: Shard(channels), **placed}, Shard(channels))
    else:
        outputs, inputs = (1, 0) if "transpose" in call.func.__name__ else (0, 1)
        for parts in call.parts:
            if divides(weight.shape[outputs], ranks, parts):
                placed = {weight: Shard(outputs, parts)}
                yield call.row(
                    placed if bias is None else {**placed, bias: Shard(0, parts)},
                    Shard(channels, parts),
                )
            if divides(weight.shape[inputs], ranks, parts):
                placed = {x: Shard(channels, parts), weight: Shard(inputs, parts)}
                yield call.row(placed, PARTIAL, added=bias, along=-space - 1)
    if channels == 1 and divides(x.shape[0], ranks):
        yield call.row({x: Shard(0)}, Shard(0))


def _run_convolution(placed: Placed) -> Tensor:
    groups = placed.get(6, "groups", 1)
    weight = placed.call.get(1, "weight").place
    args, kwargs = placed.args, placed.kwargs
    if groups > 1:
        args, kwargs = with_argument(placed, 6, "groups", groups // placed.ranks_along(weight, 0))
    result: Tensor = placed.call.func(*args, **kwargs)
    return result


def _pooling_rows(call: Call, ranks: int) -> Iterator[Row]:
    """The last dims, as many as the name says, are read along."""
    x = call.operands[0]
    space = next(int(letter) for letter in call.func.__name__ if letter.isdigit())
    for dim, size in enumerate(x.shape[: len(x.shape) - space]):
        for parts in call.parts:
            if divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _resize_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Samples and channels; all other dims are space."""
    x = call.operands[0]
    for dim, size in enumerate(x.shape[:2]):
        if divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


def _padding_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, pad = call.operands[0], call.get(1, "pad")
    wide = (*pad,)
    for dim, size in enumerate(x.shape):
        back = 2 * (len(x.shape) - 1 - dim)
        untouched = back >= len(wide) or (wide[back] == wide[back + 1] == 0 and _is_constant(call))
        for parts in call.parts if untouched else ():
            if divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _is_constant(call: Call) -> bool:
    return bool(call.get(2, "mode", "constant") == "constant")


def _batch_norm_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Channels, with their weights; samples and space where nothing is counted over them. Running
    statistics are whole.
    """
    x, weight, bias = call.get(0, "input"), call.get(3, "weight"), call.get(4, "bias")
    counts = _counts(call)
    if divides(x.shape[1], ranks):
        placed: dict[Operand, Placement] = {
            each: Shard(0) for each in (weight, bias) if each is not None
        }
        yield call.row({x: Shard(1), **placed}, Shard(1))
    for dim, size in enumerate(x.shape):
        alone = dim == 0 and call.func is F.instance_norm and call.get(1, "running_mean") is None
        if dim != 1 and (alone or not counts) and divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


def _counts(call: Call) -> bool:
    """Whether statistics are those of this batch."""
    counts: bool = (
        call.get(5, "use_input_stats", True)
        if call.func is F.instance_norm
        else call.get(5, "training", False)
    )
    return counts


def _run_batch_norm(placed: Placed) -> Tensor:
    """Each rank counts its channels; the statistics of all are the same on every rank, as a
    checkpoint has them.
    """
    from_all: list[Tensor] = [
        each
        for each in (placed.get(1, "running_mean"), placed.get(2, "running_var"))
        if each is not None
    ]
    cut = [
        axis for axis, placement in enumerate(placed.inputs[0].placements) if placement == Shard(1)
    ]
    own = [placed.cut_along(each, cut, Shard(0)).clone() for each in from_all]
    args, kwargs = placed.args, placed.kwargs
    if own:
        args, kwargs = with_argument(placed, 1, "running_mean", own[0])
        args, kwargs = with_argument(placed, 2, "running_var", own[1], args=args, kwargs=kwargs)
    result: Tensor = placed.call.func(*args, **kwargs)
    if own and _counts(placed.call):
        whole = placed.gathered(torch.stack(own), cut, Shard(1))
        for each, new in zip(from_all, whole, strict=True):
            each.copy_(new)
    return result


CONVOLUTION = Kind("convolution", _convolution_rows, _run_convolution)
POOLING = Kind("pooling", _pooling_rows)
RESIZE = Kind("resize", _resize_rows)
PADDING = Kind("padding", _padding_rows)
BATCH_NORM = Kind("batch norm", _batch_norm_rows, _run_batch_norm)
_NN: Any = torch._C._nn
register(
    CONVOLUTION,
    named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", torch),
)
_POOLS = " ".join(
    f"{name}{dims}d{end}"
    for dims in (1, 2, 3)
    for name, end in (
        *(("max_pool", ""), ("max_pool", "_with_indices"), ("avg_pool", "")),
        *(
            ("adaptive_avg_pool", ""),
            ("adaptive_max_pool", ""),
            ("adaptive_max_pool", "_with_indices"),
        ),
    )
)
register(POOLING, named(_POOLS, torch, F, _NN))
register(RESIZE, (F.interpolate, F.unfold))
register(PADDING, (F.pad, _NN.pad, torch.constant_pad_nd))
register(BATCH_NORM, (F.batch_norm, F.instance_norm))
