"""Layer norm and RMS norm: the other dims may be split, and the features: then their statistics are
sums over ranks.

Forward two sums of one number per row (RMS norm: one), backward one of two (one); Ba et al., arXiv
1607.06450.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import (
    Call,
    Kind,
    Operand,
    Placed,
    Row,
    divides,
    register,
)
from lightning_topt.techniques.tensor_parallel.moves import all_reduce
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes


def _norm_rows(call: Call, ranks: int) -> Iterator[Row]:
    x, shape = call.operands[0], call.get(1, "normalized_shape")
    for dim, size in enumerate(x.shape[: len(x.shape) - len(shape)]):
        for parts in call.parts:
            if divides(size, ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))
    last = len(x.shape) - 1
    for parts in call.parts if len(shape) == 1 else ():
        if divides(x.shape[last], ranks, parts):
            placed: dict[Operand, Placement] = dict.fromkeys(call.operands[1:], Shard(0, parts))
            yield call.row({x: Shard(last, parts), **placed}, Shard(last, parts))


def _run_norm(placed: Placed) -> Tensor:
    last = len(placed.inputs[0].shape) - 1
    if placed.ranks_along(0, last) == 1:
        result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
        return result
    is_centered = placed.call.func.__name__ == "layer_norm"
    x, weight = placed.get(0, "input"), placed.get(2, "weight")
    bias = placed.get(3, "bias") if is_centered else None
    eps = placed.get(4, "eps", 1e-5) if is_centered else placed.get(3, "eps")
    along = placed.inputs[0].placements
    cut = tuple(
        axis for axis, each in enumerate(along) if isinstance(each, Shard) and each.dim == last
    )
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y: Tensor = _Normalized.apply(x, placed.axes, cut, eps, is_centered)  # type: ignore[no-untyped-call]
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


class _Normalized(Function):
    """Rows with mean 0 (where `is_centered`) and variance 1, of which each rank of the axes `cut`
    has a slice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axes: TensorAxes, cut: Sequence[int], eps: float, is_centered: bool
    ) -> Tensor:
        ctx.count = x.shape[-1]
        for axis in cut:
            ctx.count *= axes.sizes[axis]
        wide = x.float() if x.dtype.itemsize < 4 else x
        mean = _summed(wide.sum(-1, keepdim=True), axes, cut) / ctx.count if is_centered else None
        wide = wide if mean is None else wide - mean
        scale = torch.rsqrt(
            _summed(wide.square().sum(-1, keepdim=True), axes, cut) / ctx.count + eps
        )
        ctx.axes, ctx.cut, ctx.is_centered = axes, cut, is_centered
        ctx.save_for_backward(x, *(() if mean is None else (mean,)), scale)
        return wide * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *rest, scale = ctx.saved_tensors
        normalized = (x - rest[0] if rest else x) * scale
        sums = [
            (gradient * normalized).sum(-1, keepdim=True),
            *([gradient.sum(-1, keepdim=True)] if rest else []),
        ]
        along, *mean = _summed(torch.stack(sums), ctx.axes, ctx.cut) / ctx.count
        result = gradient - normalized * along
        result = (result - mean[0] if mean else result) * scale
        return result.to(x.dtype), None, None, None, None


def _summed(tensor: Tensor, axes: TensorAxes, cut: Sequence[int]) -> Tensor:
    for axis in cut:
        tensor = all_reduce(tensor, axes, axis)
    return tensor


NORM = Kind("norm", _norm_rows, _run_norm)
register(NORM, (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm))
