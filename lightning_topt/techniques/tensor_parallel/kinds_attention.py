"""Attention over split heads, and the loss over a split vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, Operand, Placed, Row, divides, register
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL, REPLICATE


def _attention_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Queries, keys and values (..., head, step, channel): all dims before the steps may be split. Heads may be grouped."""
    query, key, value = (call.get(index, name) for index, name in enumerate(("query", "key", "value")))
    mask = call.get(3, "attn_mask")
    for dim in range(len(query.shape) - 2):
        sizes = {operand.shape[dim] for operand in (query, key, value)}
        grouped = dim == len(query.shape) - 3 and call.kwargs.get("enable_gqa", False)
        if not all(divides(size, ranks) for size in sizes) or (len(sizes) > 1 and not grouped):
            continue
        placed: dict[Operand, Placement] = dict.fromkeys((query, key, value), Shard(dim))
        if isinstance(mask, Operand):
            own = dim - (len(query.shape) - len(mask.shape))
            if own >= 0 and mask.shape[own] == query.shape[dim]:
                placed[mask] = Shard(own)
        yield call.row(placed, Shard(dim))


def _run_attention(placed: Placed) -> Tensor:
    """With dropout, step by step: each rank drops what one process would drop of its heads."""
    dropout = placed.get(4, "dropout_p", 0.0)
    if not dropout:
        result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
        return result
    query, key, value = (placed.get(index, name) for index, name in enumerate(("query", "key", "value")))
    mask, causal, scale = placed.get(3, "attn_mask"), placed.get(5, "is_causal", False), placed.kwargs.get("scale")
    if placed.kwargs.get("enable_gqa", False):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch._safe_softmax(scores, -1)  # zeros where everything is masked, as in the fused kernels
    whole = (*placed.inputs[0].shape[:-1], key.shape[-2])
    noise = F.dropout(torch.ones(whole, dtype=weights.dtype, device=weights.device), dropout)
    mixed: Tensor = (weights * placed.cut_like(noise, 0)) @ value
    return mixed


def _loss_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Logits (sample, class) by class or by sample; plain class indices only."""
    logits, target = call.get(0, "input"), call.get(1, "target")
    plain = call.get(2, "weight") is None and not call.get(7, "label_smoothing", 0.0)
    if not plain or call.get(3, "size_average") is not None or call.get(5, "reduce") is not None:
        return
    if len(logits.shape) != 2 or len(target.shape) != 1:
        return
    if divides(logits.shape[1], ranks):
        yield call.row({logits: Shard(1)}, REPLICATE)
    if divides(logits.shape[0], ranks):
        each = call.get(6, "reduction", "mean") == "none"
        yield call.row({logits: Shard(0), target: Shard(0)}, Shard(0) if each else PARTIAL)


def _run_loss(placed: Placed) -> Tensor:
    """The logits stay where they are: three sums over ranks of one number per sample (Shoeybi et al., section 3)."""
    target, ignored = placed.get(1, "target"), placed.get(4, "ignore_index", -100)
    reduction = placed.get(6, "reduction", "mean")
    if placed.ranks_along(0, 1) == 1:
        losses = F.cross_entropy(placed.get(0, "input"), target, ignore_index=ignored, reduction="none")
    else:
        losses = _losses_by_class(placed, target) * (target != ignored)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = (target != ignored).sum()
    for axis, placement in enumerate(placed.inputs[0].placements):
        if placement == Shard(0):
            count = moves.all_reduce(count, placed.axes, axis)
    mean: Tensor = losses.sum() / count
    return mean


def _losses_by_class(placed: Placed, target: Tensor) -> Tensor:
    logits: Tensor = placed.get(0, "input")
    axes = placed.axes
    cut = [axis for axis, placement in enumerate(placed.inputs[0].placements) if placement == Shard(1)]
    first, length = placed.place_along(0, 1)
    highest = logits.detach().amax(1)
    for axis in cut:
        axes.note("all_reduce", axis, highest)
        if (group := axes.groups[axis]) is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest.unsqueeze(1)
    own = (target >= first) & (target < first + length)
    at_target = shifted.gather(1, torch.where(own, target - first, 0).unsqueeze(1)).squeeze(1) * own
    total = shifted.exp().sum(1)
    for axis in cut:
        total, at_target = moves.reduce(total, axes, axis), moves.reduce(at_target, axes, axis)
    return total.log() - at_target


ATTENTION = Kind("attention", _attention_rows, _run_attention)
LOSS = Kind("cross entropy", _loss_rows, _run_loss)
register(ATTENTION, (F.scaled_dot_product_attention,))
register(LOSS, (F.cross_entropy,))
