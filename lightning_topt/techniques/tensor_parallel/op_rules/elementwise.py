"""Functions that treat elements one by one, with broadcasting; and random numbers.

Any dim that all arguments have may be split.

Random numbers are those of one process. All ranks draw those of the full tensor, and each keeps its
slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Kind,
    OpCall,
    Operand,
    Placed,
    Row,
    named,
    register,
)


def elementwise_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    """Yield the split of each dim; arguments that are broadcast along it stay replicated."""
    if call.func is torch.where and len(call.args) + len(call.kwargs) == 1:
        return  # indices of what is not zero
    # dims counted from the end match; those of size 1, or missing, are broadcast
    shape = broadcast(call.operands)
    for dim, size in enumerate(shape):
        for parts in call.parts_of(size, ranks):
            placed: dict[Operand, Placement] = {}
            for operand in call.operands:
                own = dim - (len(shape) - len(operand.shape))
                if own >= 0 and operand.shape[own] == size:
                    placed[operand] = Shard(own, parts)
            yield call.row(placed, Shard(dim, parts))


def broadcast(operands: Sequence[Operand]) -> torch.Size:
    """Return the broadcast shape of `operands`."""
    shape: torch.Size = torch.broadcast_shapes(*(operand.shape for operand in operands))
    return shape


def _like_rows(call: OpCall, ranks: int) -> Iterator[Row]:
    # Yield rows of a conversion; another tensor gives the type only, wherever it is
    x, *others = call.operands
    for row in elementwise_rows(replace(call, operands=(x,)), ranks):
        kept = row.inputs[0]
        yield call.row({x: kept}, kept)
        for other in others:
            for dim, size in enumerate(other.shape):
                for parts in call.parts_of(size, ranks):
                    yield call.row({x: kept, other: Shard(dim, parts)}, kept)


_UNARY = (
    "abs absolute acos acosh asin asinh atan atanh ceil clamp clamp_max clamp_min clip clone "
    "contiguous cos cosh deg2rad detach digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 "
    "isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative "
    "positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt "
    "square tan tanh trunc bitwise_not selu celu hardshrink softshrink alias"
)
_SEVERAL = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copysign div divide eq "
    "float_power floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose "
    "le less less_equal lerp logaddexp logaddexp2 logical_and logical_or logical_xor lt "
    "masked_fill maximum minimum mul multiply ne nextafter not_equal pow remainder rsub sub "
    "subtract true_divide where xlogy copysign prelu"
)
_CONVERSIONS = (
    "bfloat16 bool cfloat char cpu cuda double float half int long short type zero_ fill_ copy_"
)
_LIKE = "empty_like full_like ones_like zeros_like"
_FUNCTIONAL = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu "
    "relu6 selu sigmoid silu softplus softshrink softsign tanh tanhshrink threshold"
)
_DUNDER = (
    "__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __iadd__ __iand__ __idiv__ "
    "__imul__ __invert__ __ior__ __isub__ __itruediv__ __le__ __lt__ __mod__ __mul__ __ne__ "
    "__neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rmod__ __rmul__ "
    "__ror__ __rpow__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__ __ipow__"
)

ELEMENTWISE = Kind("elementwise", elementwise_rows)
register(Kind("conversion", _like_rows), named("to type_as", Tensor))
register(Kind("broadcast", elementwise_rows), (torch.broadcast_tensors,))
register(ELEMENTWISE, named(_UNARY, torch, Tensor))
register(ELEMENTWISE, named(_SEVERAL, torch, Tensor))
register(
    ELEMENTWISE,
    named(" ".join(f"{name}_" for name in f"{_UNARY} {_SEVERAL}".split()), torch, Tensor),
)
register(ELEMENTWISE, named(_CONVERSIONS, Tensor))
register(ELEMENTWISE, named(_LIKE, torch))
register(ELEMENTWISE, named(_FUNCTIONAL, F, torch._C._nn))
register(ELEMENTWISE, named(_DUNDER, Tensor))
register(
    ELEMENTWISE,
    (Tensor.data.__get__, torch._C._nn.gelu, torch.special.expit),  # type: ignore[attr-defined]
)


# ---- random numbers ------------------------------------------------------------------------------


def empty_as(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor of this shape with the memory order of `x`'s dims.

    Numbers are drawn in that order.
    """
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def _dropout(placed: Placed) -> Tensor:
    # What dropout makes of the local tensor
    x: Tensor = placed.get(0, "input")
    p = placed.get(1, "p", 0.5)
    if not placed.get(2, "training", placed.get(2, "train", True)) or p == 0:
        return x
    whole = F.dropout(empty_as(x, placed.inputs[0].shape).fill_(1), p)
    # saved for backward, where a view would keep the full tensor
    kept = placed.cut_like(whole, 0).clone()
    return x.mul_(kept) if placed.get(3, "inplace", False) else x * kept


def _drawn(placed: Placed) -> Tensor:
    # This rank's slice of as many numbers as the full tensor has
    x: Tensor = placed.get(0, "input")
    kwargs = {name: value for name, value in placed.kwargs.items() if name != "input"}
    whole = placed.call.func(empty_as(x, placed.inputs[0].shape), *placed.args[1:], **kwargs)
    own = placed.cut_like(whole, 0)
    if placed.call.func.__name__.endswith("_"):
        return x.copy_(own)
    return own.contiguous().requires_grad_(bool(kwargs.get("requires_grad", False)))


DROPOUT = Kind("dropout", elementwise_rows, _dropout)
RANDOM = Kind("random numbers", elementwise_rows, _drawn)
register(DROPOUT, (F.dropout, torch.dropout))
register(RANDOM, named("rand_like randn_like", torch))
register(RANDOM, named("normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_", Tensor))
