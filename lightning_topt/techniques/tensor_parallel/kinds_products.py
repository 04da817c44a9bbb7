"""Products: linear layers, matrix products, embeddings.

column      x whole, weight by outputs        result by outputs   Shoeybi et al., arXiv 1909.08053,
                                                                  section 3
row         x by inputs, weight by inputs     result Partial      the same
tokens      x by any other dim, weight whole  result by that dim
vocabulary  ids whole, weight by rows         result Partial      the same (embedding)
"""

from __future__ import annotations

from collections.abc import Iterator

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
)
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import broadcast
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL


def _linear(call: Call, ranks: int) -> Iterator[Row]:
    x, weight, bias = (
        call.get(index, name) for index, name in enumerate(("input", "weight", "bias"))
    )
    if len(weight.shape) == 2:
        yield from _affine(call, ranks, x, weight, bias, outputs_dim=0)


def _addmm(call: Call, ranks: int) -> Iterator[Row]:
    bias, x, weight = (
        call.get(index, name) for index, name in enumerate(("input", "mat1", "mat2"))
    )
    if not call.kwargs.get("alpha", 1) == call.kwargs.get("beta", 1) == 1 or len(bias.shape) != 1:
        return
    yield from _affine(call, ranks, x, weight, bias, outputs_dim=1)


def _affine(
    call: Call, ranks: int, x: Operand, weight: Operand, bias: Operand | None, *, outputs_dim: int
) -> Iterator[Row]:
    last, inputs_dim = len(x.shape) - 1, 1 - outputs_dim
    for parts in call.parts:
        if divides(weight.shape[outputs_dim], ranks, parts):
            placed: dict[Operand, Placement] = {weight: Shard(outputs_dim, parts)}
            yield call.row(
                placed if bias is None else {**placed, bias: Shard(0, parts)}, Shard(last, parts)
            )
        if divides(weight.shape[inputs_dim], ranks, parts):
            yield call.row(
                {x: Shard(last, parts), weight: Shard(inputs_dim, parts)}, PARTIAL, added=bias
            )
        for dim in range(last):
            if divides(x.shape[dim], ranks, parts):
                yield call.row({x: Shard(dim, parts)}, Shard(dim, parts))


def _run_addmm(placed: Placed) -> Tensor:
    bias, x, weight = (
        placed.get(index, name) for index, name in enumerate(("input", "mat1", "mat2"))
    )
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _matmul(call: Call, ranks: int) -> Iterator[Row]:
    """Dims: (batch..., row, inner) times (batch..., inner, column)."""
    left, right = call.operands
    if len(left.shape) < 2 or len(right.shape) < 2:
        return
    batch = broadcast([Operand(0, operand.shape[:-2]) for operand in call.operands])
    ndim = len(batch) + 2
    dims = [[*range(ndim - len(operand.shape), ndim)] for operand in call.operands]
    for dim, size in enumerate(batch):
        for parts in call.parts if divides(size, ranks) else ():
            placed: dict[Operand, Placement] = {
                operand: Shard(dim - own[0], parts)
                for operand, own in zip(call.operands, dims, strict=True)
                if dim in own and operand.shape[dim - own[0]] == size
            }
            if divides(size, ranks, parts):
                yield call.row(placed, Shard(dim, parts))
    rows, inner, columns = len(left.shape) - 2, len(left.shape) - 1, len(right.shape) - 1
    for parts in call.parts:
        if divides(left.shape[rows], ranks, parts):
            yield call.row({left: Shard(rows, parts)}, Shard(ndim - 2, parts))
        if divides(right.shape[columns], ranks, parts):
            yield call.row({right: Shard(columns, parts)}, Shard(ndim - 1, parts))
        if divides(left.shape[inner], ranks, parts):
            yield call.row({left: Shard(inner, parts), right: Shard(columns - 1, parts)}, PARTIAL)


def _baddbmm(call: Call, ranks: int) -> Iterator[Row]:
    """Dims: (batch, row, inner) times (batch, inner, column), added to what may be broadcast."""
    added, left, right = (
        call.get(index, name) for index, name in enumerate(("input", "batch1", "batch2"))
    )
    sizes = (left.shape[0], left.shape[1], right.shape[2])
    for dim, size in enumerate(sizes):
        own = dim - 3 + len(added.shape)
        for parts in call.parts:
            placed: dict[Operand, Placement] = {}
            if own >= 0 and added.shape[own] == size:
                placed[added] = Shard(own, parts)
            placed |= {
                operand: Shard(dim, parts)
                for operand, other in ((left, 2), (right, 1))
                if dim != other
            }
            if divides(size, ranks, parts):
                yield call.row(placed, Shard(dim, parts))


def _grouped(call: Call, ranks: int) -> Iterator[Row]:
    """Tokens sorted by expert (token, inner) times matrices of experts (expert, inner, column)."""
    tokens, weight = call.operands[:2]
    if (len(tokens.shape), len(weight.shape)) != (2, 3) or len(call.operands) != 3:
        return
    for parts in call.parts:
        if divides(weight.shape[2], ranks, parts):
            yield call.row({weight: Shard(2, parts)}, Shard(1, parts))
        if divides(weight.shape[1], ranks, parts):
            yield call.row({tokens: Shard(1, parts), weight: Shard(1, parts)}, PARTIAL)
    if divides(weight.shape[0], ranks):
        yield call.row({weight: Shard(0)}, PARTIAL)


def _run_grouped(placed: Placed) -> Tensor:
    """A rank treats the tokens of its experts; `offs` say where those of an expert end."""
    tokens, weight, *rest = placed.args
    ends: Tensor = rest[0] if rest else placed.kwargs["offs"]
    first, count = placed.place_along(1, 0)
    if count == placed.inputs[1].shape[0]:
        result: Tensor = placed.call.func(*placed.args, **placed.kwargs)
        return result
    start, end = int(ends[first - 1]) if first else 0, int(ends[first + count - 1])
    own = placed.call.func(tokens[start:end], weight, offs=ends[first : first + count] - start)
    return F.pad(own, (0, 0, start, tokens.shape[0] - end))


def _outer(call: Call, ranks: int) -> Iterator[Row]:
    for dim, operand in enumerate(call.operands):
        for parts in call.parts:
            if divides(operand.shape[0], ranks, parts):
                yield call.row({operand: Shard(0, parts)}, Shard(dim, parts))


def _einsum(call: Call, ranks: int) -> Iterator[Row]:
    """Every letter that all its arguments can be split along; one that is summed away leaves
    summands.
    """
    equation = call.args[0]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
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


def _embedding(call: Call, ranks: int) -> Iterator[Row]:
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    if (
        call.get(3, "max_norm") is not None
        or call.get(5, "scale_grad_by_freq")
        or call.get(6, "sparse")
    ):
        return
    if divides(weight.shape[1], ranks):
        yield call.row({weight: Shard(1)}, Shard(len(ids.shape)))
    if divides(weight.shape[0], ranks):
        yield call.row({weight: Shard(0)}, PARTIAL)
    for dim, size in enumerate(ids.shape):
        if divides(size, ranks):
            yield call.row({ids: Shard(dim)}, Shard(dim))


def _run_embedding(placed: Placed) -> Tensor:
    """Ids of other ranks' rows give zeros."""
    ids, weight, padding = (
        placed.get(0, "input"),
        placed.get(1, "weight"),
        placed.get(2, "padding_idx"),
    )
    if padding is not None and padding < 0:
        padding += placed.inputs[1].shape[0]
    if placed.ranks_along(1, 0) == 1:
        return F.embedding(ids, weight, padding)
    first, length = placed.place_along(1, 0)
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
    (
        *(torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm),
        Tensor.__matmul__,
    ),
)
register(Kind("baddbmm", _baddbmm), named("baddbmm", torch, Tensor))
register(
    Kind("grouped product", _grouped, _run_grouped),
    (torch._grouped_mm, getattr(F, "grouped_mm", None)),
)
register(Kind("outer", _outer), named("outer ger", torch, Tensor))
register(EINSUM, (torch.einsum, torch.functional.einsum))
register(EMBEDDING, (F.embedding, torch.embedding))
