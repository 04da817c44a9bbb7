"""Moves of weights by kernels, and in pieces, against those of whole tensors."""

from __future__ import annotations

import pytest
import torch

from lightning_topt.weight_prediction import weights
from lightning_topt.weight_prediction.weights import (
    AdamStep,
    Moments,
    SGDMove,
    keep_and_move,
    move_by_torch,
)

SHAPES = ((1023,), (64, 33), (), (3, 1025), (0,))
MOVES = [
    SGDMove(1.0, -0.3),
    SGDMove(0.9, -0.3),
    (AdamStep(1.0, 1.0, 0.0, 0.02, 0.3, 1e-8),),
    (AdamStep(0.99, 0.9, 0.0, 0.02, 0.3, 1e-8), AdamStep(0.98, 0.8, 0.0, 0.01, 0.4, 1e-3)),
    (AdamStep(1.0, 0.9, 0.05, 0.02, 0.3, 1e-8),) * 3,
]


def moments(move, dtype=torch.float32) -> Moments:
    generator = torch.Generator().manual_seed(0)

    def rows(*, are_squares: bool = False):
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        return [each.square() for each in made] if are_squares else made

    return Moments(
        0, 3, rows(), rows(), [] if isinstance(move, SGDMove) else rows(are_squares=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("move", MOVES, ids=str)
@pytest.mark.parametrize("cache_bytes", [1 << 19, 1000])
def test_pieces_move_as_whole_tensors_do(monkeypatch, cache_bytes, move, dtype):
    """Of small tensors several to a piece, of large ones several pieces; strided ones whole."""
    monkeypatch.setattr(weights, "CACHE_BYTES", cache_bytes)
    given, expected = moments(move, dtype), moments(move, dtype)
    given.parameters[1] = given.parameters[1].t().contiguous().t()
    copies = [torch.full_like(p, float("nan")) for p in given.parameters]
    keep_and_move(given, copies, move)
    for copy, before in zip(copies, expected.parameters, strict=True):
        assert torch.equal(copy, before)
    for mine, theirs in zip(
        given.first + given.second, expected.first + expected.second, strict=True
    ):
        assert torch.equal(mine, theirs)
    move_by_torch(expected, move)
    # vectors begin elsewhere: the last bit of a root or quotient may differ
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(given.parameters, expected.parameters, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_kernels_move_as_torch_does(monkeypatch, move):
    monkeypatch.setattr(weights, "KERNEL_BYTES", 0)
    monkeypatch.setattr(weights, "move_by_torch", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    given, expected = moments(move), moments(move)
    copies = [torch.full_like(p, float("nan")) for p in given.parameters]
    keep_and_move(given, copies, move)
    for copy, before in zip(copies, expected.parameters, strict=True):
        assert torch.equal(copy, before)
    for mine, theirs in zip(
        given.first + given.second, expected.first + expected.second, strict=True
    ):
        assert torch.equal(mine, theirs)
    move_by_torch(expected, move)
    # The order of a few roundings per step differs.
    torch.testing.assert_close(
        given.parameters,
        expected.parameters,
        rtol=16 * torch.finfo(torch.float32).eps,
        atol=16 * torch.finfo(torch.float32).eps,
    )


@pytest.mark.parametrize("reason", ["few", "threads", "dtype", "strides"])
def test_what_kernels_cannot_do_is_moved_by_torch(monkeypatch, reason):
    monkeypatch.setattr(weights, "KERNEL_BYTES", 1 << 30 if reason == "few" else 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64 if reason == "threads" else 1)
    monkeypatch.setattr("lightning_topt.weight_prediction.move_kernels.keep_and_move", None)
    move = MOVES[2]
    given, expected = (
        moments(move, torch.bfloat16 if reason == "dtype" else torch.float32) for _ in range(2)
    )
    if reason == "strides":
        given.parameters[1] = given.parameters[1].t().contiguous().t()
    copies = [torch.empty_like(p) for p in given.parameters]
    keep_and_move(given, copies, move)
    torch.testing.assert_close(copies, expected.parameters, rtol=0, atol=0)
    move_by_torch(expected, move)
    torch.testing.assert_close(given.parameters, expected.parameters, rtol=0, atol=0)
