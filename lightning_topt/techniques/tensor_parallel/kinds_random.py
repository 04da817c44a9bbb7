"""Random numbers are those of one process: all ranks draw those of the whole tensor, and each keeps
its slice.

Those of ranks that bring a batch each are in `member_draws`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Shard
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, Placed, Row, named, register
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import elementwise_rows
from lightning_topt.techniques.tensor_parallel.member_draws import noise_for


def empty_as(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor of this shape whose dims lie in memory as those of `x`: numbers are
    drawn in that order.
    """
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def _dropout(placed: Placed) -> Tensor:
    x: Tensor = placed.get(0, "input")
    p = placed.get(1, "p", 0.5)
    if not placed.get(2, "training", placed.get(2, "train", True)) or p == 0:
        return x

    def cut(noise: Tensor) -> Tensor:
        # saved for backward, and a view would hold all of it
        return placed.cut_like(noise, 0).clone()

    kept = noise_for(
        placed,
        placed.inputs[0].shape,
        lambda shape: F.dropout(empty_as(x, shape).fill_(1), p),
        cut=cut,
    )
    return x.mul_(kept) if placed.get(3, "inplace", False) else x * kept


def _channel_rows(call: Call, ranks: int) -> Iterator[Row]:
    """Samples, channels and space: (sample, channel, ...)."""
    if len(call.operands[0].shape) > 2:
        yield from elementwise_rows(call, ranks)


def _channel_dropout(placed: Placed) -> Tensor:
    """One number for every channel of every sample."""
    x: Tensor = placed.args[0]
    p, training = placed.args[1:3]
    if not training or p == 0:
        return x
    layout = placed.inputs[0]

    def cut(noise: Tensor) -> Tensor:
        for axis, placement in enumerate(layout.placements):
            if isinstance(placement, Shard) and placement.dim < 2:
                noise = placed.cut_along(noise, [axis], placement)
        return noise

    whole = (*layout.shape[:2], *(1 for _ in layout.shape[2:]))
    noise = noise_for(
        placed, whole, lambda shape: torch.feature_dropout(x.new_ones(shape), p, True), cut=cut
    )
    return x.mul_(noise) if placed.call.func.__name__.endswith("_") else x * noise


def _drawn(placed: Placed) -> Tensor:
    """As many numbers as the whole tensor has."""
    x: Tensor = placed.args[0] if placed.args else placed.kwargs["input"]
    kwargs = {name: value for name, value in placed.kwargs.items() if name != "input"}

    def make(shape: tuple[int, ...]) -> Tensor:
        drawn: Tensor = placed.call.func(empty_as(x, shape), *placed.args[1:], **kwargs)
        return drawn

    own = noise_for(
        placed, placed.inputs[0].shape, make, cut=lambda whole: placed.cut_like(whole, 0)
    )
    if placed.call.func.__name__.endswith("_"):
        return x.copy_(own)
    return own.contiguous().requires_grad_(bool(kwargs.get("requires_grad", False)))


DROPOUT = Kind("dropout", elementwise_rows, _dropout, draws=True)
CHANNEL_DROPOUT = Kind("dropout of channels", _channel_rows, _channel_dropout, draws=True)
RANDOM = Kind("random numbers", elementwise_rows, _drawn, draws=True)
_VF: Any = torch._VF
register(DROPOUT, (F.dropout, torch.dropout))
register(
    CHANNEL_DROPOUT,
    {torch.feature_dropout, torch.feature_dropout_, _VF.feature_dropout, _VF.feature_dropout_},
)
register(RANDOM, named("rand_like randn_like", torch))
register(RANDOM, named("normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_", Tensor))
