"""Gradients that are not finite, skipped steps, loss scales, rounding: nothing is lost silently."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication import TopK
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from tests.communication.exchange_ranks import (
    assert_equal_on_all_ranks,
    loss_of,
    make_model,
    train,
    wrap,
)
from tests.launch import run_on_pool

SHAPES = [(2, 1), (2, 2)]


def residuals(exchange: CompressedExchange) -> dict[str, Tensor]:
    return exchange.exchange.state_dict()["residual"]


def poisoned_loss(model: nn.Module, rank: int, step: int, value: float) -> Tensor:
    """The gradient of the last layer is `value` on rank 1."""
    loss = loss_of(model, rank, step)
    return loss if rank != 1 else loss + value * model.module[-1].weight.sum()


def raises_for_all(rank: int, shape: tuple[int, int], step: int, value: float) -> str:
    ddp, exchange = wrap(TopK(density=0.05), topology=Topology(*shape, rank))
    list(train(ddp, rank=rank, steps=range(step)))
    with pytest.raises(FloatingPointError) as caught:
        poisoned_loss(ddp, rank, step, value).backward()
    assert exchange.error is None
    exchange.close()
    return str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("step", "value"), [(0, torch.nan), (2, torch.nan), (2, torch.inf)])
def test_nonfinite_raises_everywhere(shape, step, value):
    for message in run_on_pool(raises_for_all, shape[0] * shape[1], shape, step, value):
        assert message.startswith("the gradient on rank 1 has NaN or infinities in a bucket of")
        assert "6.bias" in message


def skips(rank: int, shape: tuple[int, int], exempt_is_bad: bool) -> None:
    method = TopK(density=0.05)
    ddp, exchange = wrap(method, topology=Topology(*shape, rank), settings={"nonfinite": "skip"})
    list(train(ddp, rank=rank, steps=range(3)))
    before = residuals(exchange)
    ddp.zero_grad()
    loss = loss_of(ddp, rank, 3) if exempt_is_bad else poisoned_loss(ddp, rank, 3, torch.inf)
    if exempt_is_bad and rank == 1:
        loss = loss + ddp.module[-1].bias.sum() * torch.nan
    loss.backward()
    is_bad = {name: p.grad.isnan().any().item() for name, p in ddp.module.named_parameters()}
    assert is_bad["6.weight"] and not is_bad["0.weight"]
    after = residuals(exchange)
    # The finite buckets' gradient is held back whole; nothing not finite got in.
    plain = make_model()
    plain.load_state_dict(ddp.module.state_dict())
    loss_of(plain, rank, 3).backward()
    own = plain[0].weight.grad.view(-1)
    node = own.clone()
    if shape[1] > 1:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        dist.all_reduce(node, group=group)
        node /= 2
    torch.testing.assert_close(after["0.weight"], before["0.weight"] + node, rtol=1e-5, atol=1e-7)
    assert all(torch.isfinite(value).all() for value in after.values())
    gradients = list(train(ddp, rank=rank, steps=range(4, 6)))
    assert all(torch.isfinite(g).all() for gradient in gradients for g in gradient.values())
    assert_equal_on_all_ranks(ddp)
    exchange.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exempt_is_bad", [False, True])
def test_nonfinite_skips(shape, exempt_is_bad):
    run_on_pool(skips, shape[0] * shape[1], shape, exempt_is_bad)
