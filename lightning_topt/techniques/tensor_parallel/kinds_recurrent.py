"""Cells of recurrent layers: hidden units may be split, with the gates of each (weights in 4, 3 or
1 parts); or samples.

The product needs the whole hidden state, the rest of a cell only its own units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    register,
)

_GATES = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}


def _cell_rows(call: Call, ranks: int) -> Iterator[Row]:
    name = call.func.__name__
    states = 2 if name == "lstm_cell" else 1
    x, hidden, weights = (
        call.operands[0],
        call.operands[1 : 1 + states],
        call.operands[1 + states :],
    )
    last, parts = len(x.shape) - 1, _GATES[name]
    if divides(hidden[0].shape[-1], ranks):
        placed: dict[Operand, Placement] = dict.fromkeys(weights, Shard(0, parts))
        placed |= dict.fromkeys(hidden[1:], Shard(last))
        yield call.row(placed, *(Shard(last) for _ in hidden))
    if last == 1 and divides(x.shape[0], ranks):
        yield call.row(dict.fromkeys((x, *hidden), Shard(0)), *(Shard(0) for _ in hidden))


def _run_cell(placed: Placed) -> Any:
    name = placed.call.func.__name__
    x, state, w_input, w_hidden, *biases = placed.args
    b_input, b_hidden = biases or (None, None)
    hidden = state[0] if isinstance(state, tuple | list) else state
    entering, recurrent = F.linear(x, w_input, b_input), F.linear(hidden, w_hidden, b_hidden)
    if name == "lstm_cell":
        keep_in, forget, new, out = (entering + recurrent).chunk(4, -1)
        cell = forget.sigmoid() * state[1] + keep_in.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if name != "gru_cell":
        return (
            torch.tanh(entering + recurrent)
            if name == "rnn_tanh_cell"
            else torch.relu(entering + recurrent)
        )
    weight = placed.call.args[2].place
    cut = [
        axis
        for axis, placement in enumerate(placed.inputs[weight].placements)
        if placement == Shard(0, 3)
    ]
    own: Tensor = placed.cut_along(hidden, cut, Shard(hidden.ndim - 1))
    (reset_in, update_in, new_in), (reset, update, new) = (
        entering.chunk(3, -1),
        recurrent.chunk(3, -1),
    )
    candidate = torch.tanh(new_in + (reset_in + reset).sigmoid() * new)
    kept = (update_in + update).sigmoid()
    return candidate + kept * (own - candidate)


CELL = Kind("recurrent cell", _cell_rows, _run_cell)
register(CELL, (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell))
