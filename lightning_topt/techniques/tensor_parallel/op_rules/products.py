"""Products: linear layers, matrix products, embeddings, convolutions.

    column      x replicated, weight by outputs       result by outputs  Shoeybi et al., arXiv
                                                                         1909.08053, section 3
    row         x by inputs, weight by inputs         result Partial     the same
    tokens      x by any other dim, weight replicated result by that dim
    vocabulary  ids replicated, weight by rows        result Partial     the same (embedding)

In convolutions, outputs and inputs are channels. The bias is added to the sum of a row split.
Groups may be split as well, with x, weight and bias. Space is read along and never split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL, REPLICATE, local_shard
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
    register,
)


def _linear(call: OpCall, ranks: int) -> Iterator[Row]:
    x, weight, bias = call.first("input", "weight", "bias")
    if len(weight.shape) == 2:
        yield from _affine(call, ranks, x, weight, bias, outputs_dim=0)


def _addmm(call: OpCall, ranks: int) -> Iterator[Row]:
    bias, x, weight = call.first("input", "mat1", "mat2")
    # only what is a linear layer: a bias that is a vector, unscaled
    if call.kwargs.get("alpha", 1) == call.kwargs.get("beta", 1) == 1 and len(bias.shape) == 1:
        yield from _affine(call, ranks, x, weight, bias, outputs_dim=1)


def _affine(
    call: OpCall, ranks: int, x: Operand, weight: Operand, bias: Operand | None, *, outputs_dim: int
) -> Iterator[Row]:
    # Yield rows of ``x @ weight + bias``; `outputs_dim` is the weight's
    last, inputs_dim = len(x.shape) - 1, 1 - outputs_dim
    # column, row and tokens, with every number of parts
    for parts in call.parts:
        if divides(weight.shape[outputs_dim], ranks, parts):
            placed = {weight: Shard(outputs_dim, parts), bias: Shard(0, parts)}
            yield call.row(placed, Shard(last, parts))
        if divides(weight.shape[inputs_dim], ranks, parts):
            yield call.row(
                {x: Shard(last, parts), weight: Shard(inputs_dim, parts)}, PARTIAL, added=bias
            )
        for dim in range(last):
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _run_addmm(placed: Placed) -> Tensor:
    bias, x, weight = placed.first("input", "mat1", "mat2")
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _matmul(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of (batch..., row, inner) times (batch..., inner, column)
    left, right = call.operands
    if len(left.shape) < 2 or len(right.shape) < 2:
        return
    batch = broadcast([Operand(0, operand.shape[:-2]) for operand in call.operands])
    ndim = len(batch) + 2
    dims = [[*range(ndim - len(operand.shape), ndim)] for operand in call.operands]
    # batch dims, which may be broadcast
    for dim, size in enumerate(batch):
        for parts in call.parts_of(size, ranks):
            placed: dict[Operand, Placement] = {
                operand: Shard(dim - own[0], parts)
                for operand, own in zip(call.operands, dims, strict=True)
                if dim in own and operand.shape[dim - own[0]] == size
            }
            yield call.row(placed, Shard(dim, parts))
    # matrix dims; the inner one is summed
    rows, inner, columns = len(left.shape) - 2, len(left.shape) - 1, len(right.shape) - 1
    for parts in call.parts:
        if divides(left.shape[rows], ranks, parts):
            yield call.row({left: Shard(rows, parts)}, Shard(ndim - 2, parts))
        if divides(right.shape[columns], ranks, parts):
            yield call.row({right: Shard(columns, parts)}, Shard(ndim - 1, parts))
        if divides(left.shape[inner], ranks, parts):
            yield call.row({left: Shard(inner, parts), right: Shard(columns - 1, parts)}, PARTIAL)


def _grouped(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of tokens sorted by expert (token, inner) times (expert, inner, column)
    tokens, weight = call.operands[:2]
    if (len(tokens.shape), len(weight.shape)) != (2, 3) or len(call.operands) != 3:
        return
    # columns, the inner dim, or experts: tokens of those of other ranks give zeros
    for parts in call.parts:
        if divides(weight.shape[2], ranks, parts):
            yield call.row({weight: Shard(2, parts)}, Shard(1, parts))
        if divides(weight.shape[1], ranks, parts):
            yield call.row({tokens: Shard(1, parts), weight: Shard(1, parts)}, PARTIAL)
    if divides(weight.shape[0], ranks):
        yield call.row({weight: Shard(0)}, PARTIAL)


def _run_grouped(placed: Placed) -> Any:
    # Treat the tokens of this rank's experts; `offs` say where those of an expert end
    tokens, weight, *rest = placed.args
    ends: Tensor = rest[0] if rest else placed.kwargs["offs"]
    first, count = placed.place_along(1, 0)
    if count == placed.inputs[1].shape[0]:
        return placed.called()
    # tokens are sorted: those of the own experts are one range, and the others stay zero
    start, end = int(ends[first - 1]) if first else 0, int(ends[first + count - 1])
    own = placed.call.func(tokens[start:end], weight, offs=ends[first : first + count] - start)
    return F.pad(own, (0, 0, start, tokens.shape[0] - end))


def _einsum(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows for every letter that all its arguments can be split along.
    # One that is summed away leaves a Partial result.
    equation = call.args[0]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    # a letter twice in one term is a diagonal, which no slice has
    for letter in dict.fromkeys("".join(terms)):
        if any(term.count(letter) > 1 for term in terms):
            continue
        placed: dict[Operand, Placement] = {
            operand: Shard(term.index(letter))
            for operand, term in zip(call.operands, terms, strict=True)
            if letter in term
        }
        if all(
            divides(operand.shape[p.dim], ranks)
            for operand, p in placed.items()
            if isinstance(p, Shard)
        ):
            yield call.row(placed, Shard(output.index(letter)) if letter in output else PARTIAL)


def _embedding(call: OpCall, ranks: int) -> Iterator[Row]:
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    if (
        call.get(3, "max_norm") is not None
        or call.get(5, "scale_grad_by_freq")
        or call.get(6, "sparse")
    ):
        return
    # by features, by rows of the vocabulary, by ids
    if divides(weight.shape[1], ranks):
        yield call.row({weight: Shard(1)}, Shard(len(ids.shape)))
    if divides(weight.shape[0], ranks):
        yield call.row({weight: Shard(0)}, PARTIAL)
    for dim, size in enumerate(ids.shape):
        if divides(size, ranks):
            yield call.row({ids: Shard(dim)}, Shard(dim))


def _run_embedding(placed: Placed) -> Tensor:
    # Look ids up in this rank's rows; those of other ranks give zeros
    ids = placed.get(0, "input")
    weight = placed.get(1, "weight")
    padding = placed.get(2, "padding_idx")
    if padding is not None and padding < 0:
        padding += placed.inputs[1].shape[0]
    if placed.ranks_along(1, 0) == 1:
        return F.embedding(ids, weight, padding)
    first, length = placed.place_along(1, 0)
    # ids of other ranks look row 0 up, and are masked
    own = (ids >= first) & (ids < first + length)
    local = torch.where(own, ids - first, 0)
    kept = padding - first if padding is not None and first <= padding < first + length else None
    rows: Tensor = F.embedding(local, weight, kept) * own.unsqueeze(-1)
    return rows


LINEAR = Kind("linear", _linear, sums_rest=True)
ADDMM = Kind("addmm", _addmm, _run_addmm, sums_rest=True)
MATMUL = Kind("matmul", _matmul, sums_rest=True)
EINSUM = Kind("einsum", _einsum, sums_rest=True)
EMBEDDING = Kind("embedding", _embedding, _run_embedding, sums_rest=True)
register(LINEAR, (F.linear, torch._C._nn.linear))
register(ADDMM, (torch.addmm,))
register(
    MATMUL,
    (*(torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm), Tensor.__matmul__),
)
register(
    Kind("grouped product", _grouped, _run_grouped),
    (torch._grouped_mm, getattr(F, "grouped_mm", None)),
)
register(EINSUM, (torch.einsum, torch.functional.einsum))
register(EMBEDDING, (F.embedding, torch.embedding))

# ---- convolutions, pooling, padding --------------------------------------------------------------


def _convolution_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of groups, output channels, input channels and samples
    x, weight, bias = call.first("input", "weight", "bias")
    space = len(weight.shape) - 2
    channels, groups = len(x.shape) - space - 1, call.get(6, "groups", 1)
    # groups: each has its own channels
    if groups > 1:
        if divides(groups, ranks):
            placed = {x: Shard(channels), weight: Shard(0), bias: Shard(0)}
            yield call.row(placed, Shard(channels))
    else:
        outputs, inputs = (1, 0) if "transpose" in call.func.__name__ else (0, 1)
        for parts in call.parts:
            if divides(weight.shape[outputs], ranks, parts):
                placed = {weight: Shard(outputs, parts), bias: Shard(0, parts)}
                yield call.row(placed, Shard(channels, parts))
            if divides(weight.shape[inputs], ranks, parts):
                placed = {x: Shard(channels, parts), weight: Shard(inputs, parts)}
                yield call.row(placed, PARTIAL, added=bias, along=-space - 1)
    if channels == 1 and divides(x.shape[0], ranks):
        yield call.row({x: Shard(0)}, Shard(0))


def _run_convolution(placed: Placed) -> Any:
    groups = placed.get(6, "groups", 1)
    if groups == 1:
        return placed.called()
    # each rank has its own groups
    own = groups // placed.ranks_along(placed.call.get(1, "weight").place, 0)
    if len(placed.args) > 6:
        return placed.call.func(*placed.args[:6], own, *placed.args[7:], **placed.kwargs)
    return placed.call.func(*placed.args, **{**placed.kwargs, "groups": own})


def _pooling_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of all but the last dims; as many as the name says are read along
    space = next(int(letter) for letter in call.func.__name__ if letter.isdigit())
    yield from dim_rows(call, ranks, range(len(call.operands[0].shape) - space))


def _padding_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of dims without padding
    ndim, pad = len(call.operands[0].shape), (*call.get(1, "pad"),)
    is_constant = call.get(2, "mode", "constant") == "constant"
    free = []
    for dim in range(ndim):
        place = 2 * (ndim - 1 - dim)  # `pad` begins with the last dim
        if place >= len(pad) or (pad[place] == pad[place + 1] == 0 and is_constant):
            free.append(dim)
    yield from dim_rows(call, ranks, free)


def _batch_norm_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of channels, with their weights; of samples and space without batch statistics.
    # Running statistics are replicated.
    x, weight, bias = call.get(0, "input"), call.get(3, "weight"), call.get(4, "bias")
    counts = call.get(5, "training", False)
    # by channels; elsewhere only without statistics over the batch
    if divides(x.shape[1], ranks):
        yield call.row({x: Shard(1), weight: Shard(0), bias: Shard(0)}, Shard(1))
    for dim, size in enumerate(x.shape):
        if dim != 1 and not counts and divides(size, ranks):
            yield call.row({x: Shard(dim)}, Shard(dim))


def _run_batch_norm(placed: Placed) -> Tensor:
    # Normalize this rank's channels, and keep running statistics of all channels on every rank.
    # So a checkpoint has them.
    x, *statistics = placed.first("input", "running_mean", "running_var")
    weight, bias, training = (
        placed.get(3, "weight"),
        placed.get(4, "bias"),
        placed.get(5, "training", False),
    )
    momentum, eps = placed.get(6, "momentum", 0.1), placed.get(7, "eps", 1e-5)
    # each rank normalizes with, and updates, the statistics of its channels
    own: list[Any] = [
        each if each is None else placed.cut_like_dim(each, 0, 1).clone() for each in statistics
    ]
    result = F.batch_norm(x, own[0], own[1], weight, bias, training, momentum, eps)
    if training and own[0] is not None:
        whole = placed.gathered(torch.stack(own), placed.axes_along(0, 1), Shard(1))
        for each, new in zip(statistics, whole, strict=True):
            each.copy_(new)
    return result


CONVOLUTION = Kind("convolution", _convolution_rows, _run_convolution)
POOLING = Kind("pooling", _pooling_rows)
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
register(PADDING, (F.pad, _NN.pad, torch.constant_pad_nd))
register(BATCH_NORM, (F.batch_norm,))


# ---- attention -----------------------------------------------------------------------------------

# Two ways to run that the fused kernels lack: causal attention of some of the queries, and dropout
# that is equal however heads are split.


def _attention_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield splits of queries, keys and values (..., head, step, channel).
    # All dims before the steps may be split, and the steps of queries. Heads may be grouped.
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
    for parts in call.parts_of(query.shape[steps], ranks):
        placed = {query: Shard(steps, parts)}
        if (
            isinstance(mask, Operand)
            and len(mask.shape) > 1
            and mask.shape[-2] == query.shape[steps]
        ):
            placed[mask] = Shard(len(mask.shape) - 2, parts)
        yield call.row(placed, Shard(steps, parts))


def _run_attention(placed: Placed) -> Any:
    # Attend; with dropout from the equations.
    # Each rank then drops what one process would drop of its heads.
    steps = len(placed.inputs[0].shape) - 2
    has_all = placed.ranks_along(0, steps) == 1
    # without dropout the fused kernels run; a causal mask of some queries is made for each run
    if not placed.get(4, "dropout_p", 0.0):
        if has_all or not placed.get(5, "is_causal", False):
            return placed.called()
        return _causal_by_run(placed, steps)
    return _with_dropout(placed)


def _causal_by_run(placed: Placed, steps: int) -> Tensor:
    # Attend each run of neighbouring queries of this rank to the keys up to its last one.
    # Keys after it are not read.
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
    # Return the runs of neighbouring queries of this rank.
    # For each: where it is among the own queries, its first step, its length.
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
