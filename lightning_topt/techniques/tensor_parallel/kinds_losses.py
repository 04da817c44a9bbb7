"""Losses that compare elements: any dim may be split; a mean or a sum over it is left in
summands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Partial
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, Placed, Row, register
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import elementwise_rows
from lightning_topt.techniques.tensor_parallel.layout import PARTIAL

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


def _reduction(call: Call) -> int | None:
    reduction: int | None = call.get(_AT[call.func], "reduction")
    return reduction


def _loss_rows(call: Call, ranks: int) -> Iterator[Row]:
    if _reduction(call) is None:
        return
    for row in elementwise_rows(call, ranks):
        yield row if _reduction(call) == _NONE else row._replace(outputs=(PARTIAL,))


def _run_loss(placed: Placed) -> Tensor:
    """The mean of the local elements, as a summand of the mean of all."""
    loss: Tensor = placed.call.func(*placed.args, **placed.kwargs)
    if _reduction(placed.call) != _MEAN:
        return loss
    for placement, size in zip(placed.outputs[0], placed.axes.sizes, strict=True):
        loss = loss / size if isinstance(placement, Partial) else loss
    return loss


ELEMENT_LOSS = Kind("loss of elements", _loss_rows, _run_loss)
register(ELEMENT_LOSS, _AT)
