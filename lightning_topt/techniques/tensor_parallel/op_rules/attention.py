"""Scaled dot-product attention over split heads, samples or queries.

A module of its own: it has two ways to run that the fused kernels lack, causal attention of some of
the queries, and dropout that is equal however heads are split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, local_shard
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Kind,
    OpCall,
    Operand,
    Placed,
    Row,
    divides,
    register,
)


def _attention_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    """Yield splits of queries, keys and values (..., head, step, channel).

    All dims before the steps may be split, and the steps of queries. Heads may be grouped.
    """
    query, key, value = call.first("query", "key", "value")
    mask = call.get(3, "attn_mask")
    # samples and heads: all three are cut alike, and a mask that has them too
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
    # queries: keys and values are replicated
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
    """Attend; with dropout from the equations.

    Each rank then drops what one process would drop of its heads.
    """
    steps = len(placed.inputs[0].shape) - 2
    has_all = placed.ranks_along(0, steps) == 1
    # without dropout the fused kernels run; a causal mask of some queries is made for each run
    if not placed.get(4, "dropout_p", 0.0):
        if has_all or not placed.get(5, "is_causal", False):
            result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
            return result
        return _causal_by_run(placed, steps)
    return _with_dropout(placed)


def _causal_by_run(placed: Placed, steps: int) -> Tensor:
    """Attend each run of neighbouring queries of this rank to the keys up to its last one.

    Keys after it are not read.
    """
    query, key, value = placed.first("query", "key", "value")
    kwargs = {
        name: placed.kwargs[name] for name in ("scale", "enable_gqa") if name in placed.kwargs
    }
    # (place among own queries, first step, length) of every run, once per signature
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
    """Return the runs of neighbouring queries of this rank.

    For each: where it is among the own queries, its first step, its length.
    """
    # steps of the own queries, in order: cut as `own_slice` cuts the tensor
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


def _with_dropout(placed: Placed) -> Tensor:
    # Attend from the equations, with dropout of the full weights (..., head, query, key)
    query, key, value = placed.first("query", "key", "value")
    mask, scale = placed.get(3, "attn_mask"), placed.kwargs.get("scale")
    dropout = placed.get(4, "dropout_p", 0.0)
    if placed.kwargs.get("enable_gqa", False):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    # masked scores (..., query, key): of the own queries
    if placed.get(5, "is_causal", False):
        steps = len(placed.inputs[0].shape) - 2
        mask = torch.ones(
            placed.inputs[0].shape[steps], key.shape[-2], dtype=torch.bool, device=scores.device
        ).tril()
        mask = placed.cut_like_dim(mask, 0, steps, along=0)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    # weights (..., query, key), zeros where everything is masked, as in the fused kernels
    weights = torch._safe_softmax(scores, -1)
    whole = (*placed.inputs[0].shape[:-1], key.shape[-2])
    noise = F.dropout(torch.ones(whole, dtype=weights.dtype, device=weights.device), dropout)
    mixed: Tensor = (weights * placed.cut_like(noise, 0)) @ value
    return mixed


ATTENTION = Kind("attention", _attention_rows, _run_attention)
register(ATTENTION, (F.scaled_dot_product_attention,))
