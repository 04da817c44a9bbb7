"""Functions that read along some dims: sums, softmax, norms, losses. Other dims may be split.

    what           along the dims that are read
    sum, mean      split: a Partial result
    softmax, sort  replicated
    norms          features split: statistics are sums over ranks. Forward two sums of one number
                   per row (RMS norm: one), backward one of two (one)
    losses         of elements: a mean or a sum is a Partial result
    cross entropy  classes split: three sums of one number per sample

Sources: Ba et al., arXiv 1607.06450 (layer norm); Shoeybi et al., arXiv 1909.08053, section 3
(cross entropy over a split vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_topt.graph.op_config import Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL, REPLICATE, TensorAxes
from lightning_topt.techniques.tensor_parallel.moves import all_reduce
from lightning_topt.techniques.tensor_parallel.op_rules.elementwise import elementwise_rows
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
)

# where dim and keepdim stand among the arguments; elsewhere (1, 2)
_PLACES = {
    "std": (1, 3),
    "var": (1, 3),
    "std_mean": (1, 3),
    "var_mean": (1, 3),
    "linalg_vector_norm": (2, 3),
    "argmax": (1, 2),
}


def _dims(call: OpCall) -> set[int]:
    ndim = len(call.operands[0].shape)
    given = call.get(_PLACES.get(call.func.__name__, (1, 2))[0], "dim", call.kwargs.get("axis"))
    if given is None or isinstance(given, torch.dtype | bool):
        return {*range(ndim)}
    dims = [given] if isinstance(given, int) else given
    return {positive(dim, ndim) for dim in dims} or {*range(ndim)}


def _kept_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of the dims that are not reduced
    reduced, ndim = _dims(call), len(call.operands[0].shape)
    stay = [dim for dim in range(ndim) if dim not in reduced]
    keepdim = bool(call.get(_PLACES.get(call.func.__name__, (1, 2))[1], "keepdim", False))
    # without keepdim the reduced dims before a dim are gone in the result
    places = stay if keepdim else range(len(stay))
    yield from dim_rows(call, ranks, dict(zip(stay, places, strict=True)))


def _sum_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of all dims; one that is reduced leaves a Partial result
    yield from _kept_rows(call, ranks)
    x = call.operands[0]
    for dim in _dims(call):
        for parts in call.parts_of(x.shape[dim], ranks):
            yield call.row({x: Shard(dim, parts)}, PARTIAL)


def _run_mean(placed: Placed) -> Tensor:
    # The mean of the local elements, as a summand of the mean of all
    ranks = math.prod(placed.ranks_along(0, dim) for dim in _dims(placed.call))
    mean: Tensor = placed.called()
    return mean / ranks if ranks > 1 else mean


_SECOND = {"topk", "kthvalue"}  # their dim is the third argument


def _along_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of functions that read one dim and keep all
    ndim, name = len(call.operands[0].shape), call.func.__name__
    along = call.get(2 if name in _SECOND else 1, "dim", call.kwargs.get("axis"))
    if along is None:  # the defaults of softmax (torch.nn.functional) and of sort
        along = (0 if ndim in (0, 1, 3) else 1) if "soft" in name else -1
    along = positive(along, ndim)
    yield from dim_rows(call, ranks, [dim for dim in range(ndim) if dim != along])


def _extremum_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of an extremum along one dim, of all elements, or of two tensors
    if len(call.operands) == 2:
        yield from elementwise_rows(call, ranks)
    elif isinstance(call.get(1, "dim", call.kwargs.get("axis")), int):
        yield from _kept_rows(call, ranks)


def _gated_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of a gate: two halves along one dim, each of which must be cut
    x = call.operands[0]
    along = positive(call.get(1, "dim", -1), len(x.shape))
    yield from dim_rows(call, ranks, [dim for dim in range(len(x.shape)) if dim != along])
    for parts in call.parts_of(x.shape[along], ranks):
        if parts % 2 == 0:
            yield call.row({x: Shard(along, parts)}, Shard(along, parts // 2))


def _group_norm_rows(call: OpCall, ranks: int) -> Iterator[Row]:
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
register(Kind("gated", _gated_rows), (F.glu, torch._C._nn.glu))
register(GROUP_NORM, (F.group_norm,))


# ---- norms ---------------------------------------------------------------------------------------


def _norm_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of rows; and of features, with the weights
    x, shape = call.operands[0], call.get(1, "normalized_shape")
    yield from dim_rows(call, ranks, range(len(x.shape) - len(shape)))
    last = len(x.shape) - 1
    for parts in call.parts_of(x.shape[last], ranks) if len(shape) == 1 else ():
        placed: dict[Operand, Placement] = dict.fromkeys(call.operands[1:], Shard(0, parts))
        yield call.row({x: Shard(last, parts), **placed}, Shard(last, parts))


def _run_norm(placed: Placed) -> Any:
    # Normalize; features that are split need sums over ranks
    last = len(placed.inputs[0].shape) - 1
    if placed.ranks_along(0, last) == 1:
        return placed.called()
    is_centered = placed.call.func.__name__ == "layer_norm"
    x, weight = placed.get(0, "input"), placed.get(2, "weight")
    bias = placed.get(3, "bias") if is_centered else None
    eps = placed.get(4, "eps", 1e-5) if is_centered else placed.get(3, "eps")
    # features are split: statistics in float32 at least, over all slices
    cut = tuple(placed.axes_along(0, last))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y: Tensor = _Normalized.apply(  # type: ignore[no-untyped-call]
        x, placed.axes, cut, eps, is_centered
    )
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


class _Normalized(Function):
    # Rows with variance 1, of which each rank of the axes `cut` has a slice.
    # If `is_centered`, they have mean 0 too.

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

# ---- losses --------------------------------------------------------------------------------------

_NONE, _MEAN = 0, 1  # torch.nn._reduction.get_enum
_NN: Any = torch._C._nn
_AT = {  # where the reduction stands among the arguments
    _NN.mse_loss: 2,
    _NN.l1_loss: 2,
    _NN.smooth_l1_loss: 2,
    _NN.huber_loss: 2,
    _NN.soft_margin_loss: 2,
    _NN.binary_cross_entropy: 3,
    torch.kl_div: 2,
    torch.binary_cross_entropy_with_logits: 4,
}


def _loss_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield the split of each dim; a sum or a mean over it is Partial
    reduction = call.get(_AT[call.func], "reduction")
    for row in elementwise_rows(call, ranks) if reduction is not None else ():
        yield row if reduction == _NONE else row._replace(outputs=(PARTIAL,))


def _run_loss(placed: Placed) -> Tensor:
    # The mean of the local elements, as a summand of the mean of all
    loss: Tensor = placed.called()
    if placed.call.get(_AT[placed.call.func], "reduction") != _MEAN:
        return loss
    for placement, size in zip(placed.outputs[0], placed.axes.sizes, strict=True):
        loss = loss / size if isinstance(placement, Partial) else loss
    return loss


ELEMENT_LOSS = Kind("loss of elements", _loss_rows, _run_loss)
register(ELEMENT_LOSS, _AT)


def _cross_entropy_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of logits (sample, class) by class or by sample; plain class indices only
    logits, target = call.get(0, "input"), call.get(1, "target")
    plain = call.get(2, "weight") is None and not call.get(7, "label_smoothing", 0.0)
    if not plain or call.get(3, "size_average") is not None or call.get(5, "reduce") is not None:
        return
    if len(logits.shape) != 2 or len(target.shape) != 1:
        return
    if divides(logits.shape[1], ranks):
        yield call.row({logits: Shard(1)}, REPLICATE)
    each = call.get(6, "reduction", "mean") == "none"
    for parts in call.parts_of(logits.shape[0], ranks):
        by_sample = Shard(0, parts)
        yield call.row({logits: by_sample, target: by_sample}, by_sample if each else PARTIAL)


def _run_cross_entropy(placed: Placed) -> Tensor:
    # Return the loss; logits stay where they are.
    # Split by class: three sums over ranks of one number per sample (Shoeybi et al., section 3).
    target, ignored = placed.get(1, "target"), placed.get(4, "ignore_index", -100)
    reduction = placed.get(6, "reduction", "mean")
    if placed.ranks_along(0, 1) == 1:
        losses = F.cross_entropy(
            placed.get(0, "input"), target, ignore_index=ignored, reduction="none"
        )
    else:
        losses = _losses_by_class(placed, target) * (target != ignored)
        logits = placed.get(0, "input")
        if not torch.is_autocast_enabled(logits.device.type):  # autocast makes a float32 loss
            losses = losses.to(logits.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    # a mean over the samples of all ranks that are not ignored
    count = (target != ignored).sum()
    for axis in placed.axes_along(0, 0):
        count = moves.all_reduce(count, placed.axes, axis)
    mean: Tensor = losses.sum() / count
    return mean


def _losses_by_class(placed: Placed, target: Tensor) -> Tensor:
    # The loss of each sample (sample,) of logits whose classes are split
    logits: Tensor = placed.get(0, "input")
    # 1: the largest logit, so that exp does not overflow
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    axes = placed.axes
    cut = placed.axes_along(0, 1)
    first, length = placed.place_along(0, 1)
    highest = logits.detach().amax(1)
    for axis in cut:
        axes.note("all_reduce", axis, highest)
        if (group := axes.groups[axis]) is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # 2 and 3: the logit of the target, which one rank has, and the sum of all exp
    shifted = logits - highest.unsqueeze(1)
    own = (target >= first) & (target < first + length)
    at_target = shifted.gather(1, torch.where(own, target - first, 0).unsqueeze(1)).squeeze(1) * own
    total = shifted.exp().sum(1)
    for axis in cut:
        total, at_target = moves.reduce(total, axes, axis), moves.reduce(at_target, axes, axis)
    return total.log() - at_target


CROSS_ENTROPY = Kind("cross entropy", _cross_entropy_rows, _run_cross_entropy)
register(CROSS_ENTROPY, (F.cross_entropy,))
