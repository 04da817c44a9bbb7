"""Tensors without elements: operators on them give the shapes of the real ones, also from memory,
and draw what those draw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_topt.execution.pipeline.stage_pass import StandIns
from lightning_topt.graph.step_flow import LeafSpec

WEIGHT = torch.randn(6, requires_grad=True)
OPERATORS: list[Any] = [
    lambda x: x + x,
    lambda x: x * WEIGHT,
    lambda x: x * 2,
    lambda x: x * 2.5,
    lambda x: x.long() * 2,
    lambda x: x.long() * 2.5,
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.cat([x, x], 0),
    lambda x: x.transpose(0, 1) + 1,
    lambda x: x.sum(),
    lambda x: x.sum(1, keepdim=True),
    lambda x: x.to(torch.bfloat16).exp(),
    lambda x: F.pad(x, (1, 2)),
    lambda x: (x > 0) & (x < 1),
    lambda x: x.view(3, 8).softmax(-1),
]


def absent(mode: StandIns, like: Tensor) -> Tensor:
    return mode.absent(
        LeafSpec(tuple(like.shape), tuple(like.stride()), like.dtype, like.requires_grad)
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_shapes_from_memory_are_those_of_real_tensors(operator):
    mode, real = StandIns(torch.device("cpu")), torch.randn(4, 6)
    wanted = operator(real)
    for other in OPERATORS:  # whatever is remembered by then
        other(absent(mode, real))
    for _ in range(2):
        got = operator(absent(mode, real))
        assert isinstance(got, FakeTensor)
        assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert got.requires_grad == wanted.requires_grad


def test_results_do_not_share_memory():
    mode = StandIns(torch.device("cpu"))
    x = absent(mode, torch.randn(4))
    first, second = x + 1, x + 1
    first.unsqueeze_(0)
    assert second.shape == (4,)
    assert first.add_(second) is first
    assert (x + 1).shape == (4,)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.3),
        torch.rand_like,
        lambda x: x.normal_(),
        lambda x: torch.bernoulli(x.clamp(0, 1)),
    ],
)
def test_random_numbers_are_drawn_as_of_real_tensors(draw):
    mode, real = StandIns(torch.device("cpu")), torch.randn(40, 6)
    states = []
    for tensor in (real, absent(mode, real)):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        draw(tensor)
        states.append(torch.get_rng_state())
        assert not torch.equal(before, states[-1])
    assert torch.equal(*states)


def test_values_of_absent_tensors_cannot_be_read():
    with pytest.raises(RuntimeError):
        bool(absent(StandIns(torch.device("cpu")), torch.zeros(())))
