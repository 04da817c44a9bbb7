"""Functions that treat elements one by one, with broadcasting: any dim that all of them have may be
split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import (
    Call,
    Kind,
    Operand,
    Row,
    divides,
    named,
    register,
)


def elementwise_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Yield the split of each dim; arguments that are broadcast along it stay whole."""
    if call.func is torch.where and len(call.args) + len(call.kwargs) == 1:
        return  # indices of what is not zero
    shape = broadcast(call.operands)
    for dim, size in enumerate(shape):
        for parts in call.parts if divides(size, ranks) else ():
            placed: dict[Operand, Placement] = {}
            for operand in call.operands:
                own = dim - (len(shape) - len(operand.shape))
                if own >= 0 and operand.shape[own] == size:
                    placed[operand] = Shard(own, parts)
            if divides(size, ranks, parts):
                yield call.row(placed, Shard(dim, parts))


def broadcast(operands: Sequence[Operand]) -> torch.Size:
    """Return the shape that all have together."""
    shape: torch.Size = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]
    return shape


def _like_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Another tensor gives the type only, so wherever it is."""
    x, *others = call.operands
    for row in elementwise_rows(replace(call, operands=(x,)), ranks):
        kept = row.inputs[0]
        yield call.row({x: kept}, kept)
        for other in others:
            for dim, size in enumerate(other.shape):
                for parts in call.parts if divides(size, ranks) else ():
                    if divides(size, ranks, parts):
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
register(ELEMENTWISE, (Tensor.data.__get__, torch._C._nn.gelu, torch.special.expit))  # type: ignore[attr-defined]
