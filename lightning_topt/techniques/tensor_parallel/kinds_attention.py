"""Attention over split heads or queries, and the loss over a split vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.kinds import (
    Call,
    Kind,
    Operand,
    Placed,
    Row,
    divides,
    register,
)
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL, REPLICATE, local_shard
from lightning_topt.techniques.tensor_parallel.member_draws import noise_for


def _attention_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Queries, keys and values (..., head, step, channel): all dims before the steps may be split,
    and the steps of queries. Heads may be grouped.
    """
    query, key, value = (
        call.get(index, name) for index, name in enumerate(("query", "key", "value"))
    )
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
    steps = len(query.shape) - 2
    for parts in call.parts:
        if divides(query.shape[steps], ranks, parts):
            placed = {query: Shard(steps, parts)}
            if (
                isinstance(mask, Operand)
                and len(mask.shape) > 1
                and mask.shape[-2] == query.shape[steps]
            ):
                placed[mask] = Shard(len(mask.shape) - 2, parts)
            yield call.row(placed, Shard(steps, parts))


def _run_attention(placed: Placed) -> Tensor:
    """With dropout, step by step: each rank drops what one process would drop of its heads."""
    steps = len(placed.inputs[0].shape) - 2
    has_all = placed.ranks_along(0, steps) == 1
    if not placed.get(4, "dropout_p", 0.0):
        if has_all or not placed.get(5, "is_causal", False):
            result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
            return result
        return _causal_by_run(placed, steps)
    query, key, value = (
        placed.get(index, name) for index, name in enumerate(("query", "key", "value"))
    )
    mask, causal, scale = (
        placed.get(3, "attn_mask"),
        placed.get(5, "is_causal", False),
        placed.kwargs.get("scale"),
    )
    return _with_dropout(placed, (query, key, value), mask, causal, scale)


def _causal_by_run(placed: Placed, steps: int) -> Tensor:
    """Each run of neighbouring queries of this rank with the keys up to its last one: keys after it
    are not read.
    """
    query, key, value = (
        placed.get(index, name) for index, name in enumerate(("query", "key", "value"))
    )
    kwargs = {
        name: placed.kwargs[name] for name in ("scale", "enable_gqa") if name in placed.kwargs
    }
    runs = []
    if (bounds := placed.memo.get("runs")) is None:
        bounds = placed.memo["runs"] = _runs(placed, steps)
    for place, start, length in bounds:
        stop = min(start + length, key.shape[-2])
        mask = torch.ones(length, stop, dtype=torch.bool, device=query.device).tril(start)
        own = query.narrow(steps, place, length)
        runs.append(placed.call.func(own, key[..., :stop, :], value[..., :stop, :], mask, **kwargs))
    return torch.cat(runs, -2) if len(runs) > 1 else runs[0]


def _runs(placed: Placed, steps: int) -> list[tuple[int, int, int]]:
    """The runs of neighbouring queries of this rank: where they are among its own, their first
    step, how many they are.
    """
    indices = np.arange(placed.inputs[0].shape[steps])
    now: list[Placement] = [REPLICATE] * len(placed.axes)
    for axis, placement in enumerate(placed.inputs[0].placements):
        if isinstance(placement, Shard) and placement.dim == steps:
            now[axis] = placement
            parts = local_shard(now, placed.axes.sizes, axis).parts
            indices = indices.reshape(parts, placed.axes.sizes[axis], -1)[
                :, placed.axes.coordinates[axis]
            ].ravel()
    firsts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    return [(a, int(indices[a]), b - a) for a, b in itertools.pairwise([*firsts, len(indices)])]


def _with_dropout(
    placed: Placed, given: tuple[Tensor, ...], mask: Tensor | None, causal: bool, scale: Any
) -> Tensor:
    query, key, value = given
    dropout = placed.get(4, "dropout_p", 0.0)
    if placed.kwargs.get("enable_gqa", False):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        steps = len(placed.inputs[0].shape) - 2
        mask = torch.ones(
            placed.inputs[0].shape[steps], key.shape[-2], dtype=torch.bool, device=scores.device
        ).tril()
        mask = placed.cut_like_dim(mask, 0, steps, along=0)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    # zeros where everything is masked, as in the fused kernels
    weights = torch._safe_softmax(scores, -1)
    whole = (*placed.inputs[0].shape[:-1], key.shape[-2])

    def make(shape: tuple[int, ...]) -> Tensor:
        return F.dropout(torch.ones(shape, dtype=weights.dtype, device=weights.device), dropout)

    noise = noise_for(placed, whole, make, cut=lambda noise: placed.cut_like(noise, 0))
    mixed: Tensor = (weights * noise) @ value
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
    each = call.get(6, "reduction", "mean") == "none"
    for parts in call.parts:
        if divides(logits.shape[0], ranks, parts):
            by_sample = Shard(0, parts)
            yield call.row({logits: by_sample, target: by_sample}, by_sample if each else PARTIAL)


def _run_loss(placed: Placed) -> Tensor:
    """The logits stay where they are: three sums over ranks of one number per sample (Shoeybi et
    al., section 3).
    """
    target, ignored = placed.get(1, "target"), placed.get(4, "ignore_index", -100)
    reduction = placed.get(6, "reduction", "mean")
    if placed.ranks_along(0, 1) == 1:
        losses = F.cross_entropy(
            placed.get(0, "input"), target, ignore_index=ignored, reduction="none"
        )
    else:
        losses = _losses_by_class(placed, target) * (target != ignored)
        logits = placed.get(0, "input")
        if not torch.is_autocast_enabled(logits.device.type):  # which makes a float32 loss
            losses = losses.to(logits.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = (target != ignored).sum()
    for axis, placement in enumerate(placed.inputs[0].placements):
        if isinstance(placement, Shard) and placement.dim == 0:
            count = moves.all_reduce(count, placed.axes, axis)
    mean: Tensor = losses.sum() / count
    return mean


def _losses_by_class(placed: Placed, target: Tensor) -> Tensor:
    logits: Tensor = placed.get(0, "input")
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    axes = placed.axes
    cut = [
        axis for axis, placement in enumerate(placed.inputs[0].placements) if placement == Shard(1)
    ]
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


ATTENTION = Kind("attention", _attention_rows, _run_attention, draws=True)
LOSS = Kind("cross entropy", _loss_rows, _run_loss)
register(ATTENTION, (F.scaled_dot_product_attention,))
register(LOSS, (F.cross_entropy,))
