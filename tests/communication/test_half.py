"""16-bit gradients."""

from __future__ import annotations

import pytest
import torch

from lightning_topt.communication import FP16, read_method
from tests.communication.buckets import (
    NonFiniteGradient,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.launch import run_on_pool

WORLD_SIZE = 3


def _means(rank, method, dtype, scale):
    exchange = make_exchange(read_method(method), rank, WORLD_SIZE)
    gradients = {
        name: gradient * scale for name, gradient in gradients_of(rank, 1, dtype=dtype).items()
    }
    means = exchange_step(exchange, gradients, step=1)
    return means, exchange.bytes_sent


def test_terms_may_exceed_float16_where_the_mean_does_not():
    assert max(g.abs().max() for g in gradients_of(0, 1).values()) * 3e4 > 65504
    for means, _ in run_on_pool(_means, WORLD_SIZE, "fp16", torch.float32, 3e4):
        assert all(torch.isfinite(mean).all() for mean in means.values())


def _overflow(rank):
    exchange = make_exchange(FP16(), rank, 2)
    gradients = gradients_of(rank, 1)
    if rank == 1:
        gradients["first"][0, 0] = 3e5
    with pytest.raises(NonFiniteGradient) as caught:
        exchange_step(exchange, gradients, step=1)
    return caught.value.own


def test_gradient_beyond_float16_is_found_on_all_ranks_and_named():
    assert run_on_pool(_overflow, 2) == [False, True]
