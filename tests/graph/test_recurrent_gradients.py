"""Fake results of the gradients of cuDNN's recurrent layers, for which torch has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_topt.graph.module_copy import ShapeMode


def gradients(
    mask: list[bool], *, with_cells: bool, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """Call the operator on fake tensors of an LSTM with one layer (with cells) or a GRU."""
    steps, samples, inputs, units = 7, 3, 5, 4
    gates = 4 if with_cells else 3
    with ShapeMode(allow_non_fake_inputs=True):

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        weights = [new(gates * units, inputs), new(gates * units, units)]
        weights += [new(gates * units), new(gates * units)]
        state, output = new(1, samples, units), new(steps, samples, units)
        return torch.ops.aten._cudnn_rnn_backward(
            *(new(samples, steps, inputs).transpose(0, 1), weights, 4, new(999), state),
            *(state if with_cells else None, output, output, None, None),
            *(2 if with_cells else 3, units, 0, 1, False, 0.0, True, False, [], None),
            *(torch.empty(0, dtype=torch.uint8, device="cuda"), mask),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_what_they_are_of(dtype: torch.dtype) -> None:
    x, hidden, cells, weights = gradients([True] * 4, with_cells=True, dtype=dtype)
    assert x.shape == (7, 3, 5) and x.is_contiguous()
    assert hidden.shape == cells.shape == (1, 3, 4)
    assert [tuple(weight.shape) for weight in weights] == [(16, 5), (16, 4), (16,), (16,)]
    assert {(t.dtype, t.device.type) for t in (x, hidden, cells, *weights)} == {(dtype, "cuda")}


def test_only_gradients_of_weights_can_be_left_out() -> None:
    x, hidden, cells, weights = gradients([False, True, True, False], with_cells=False)
    assert cells is None and weights == []
    assert x.shape == (7, 3, 5) and hidden.shape == (1, 3, 4)
