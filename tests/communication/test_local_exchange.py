"""Local steps as an exchange of a plan: against `OuterSteps` in a plain loop, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_topt.communication import (
    LocalMethod,
    LocalSteps,
    OuterSteps,
    QuantizedSteps,
    SparseLoCo,
)
from lightning_topt.communication.local_exchange import LocalExchange
from tests.launch import run_on_pool

STEPS, RANKS = 7, 2
METHODS: list[LocalMethod] = [
    LocalSteps(every=3, hierarchical=False),
    LocalSteps(every=3, value_dtype="bfloat16", hierarchical=False),
    SparseLoCo(every=3, density=0.2, hierarchical=False),
    QuantizedSteps(every=3, hierarchical=False),
]


def model(rank: int) -> nn.Module:
    torch.manual_seed(rank)  # rank 0's values count
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, index: int) -> None:
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * index + rank))
    optimizer.zero_grad()
    module(batch).square().mean().backward()
    optimizer.step()


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def followed(rank: int, method: LocalMethod) -> Any:
    module = model(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    exchange = LocalExchange(method, module)
    exchange.follow(optimizer)
    for index in range(STEPS):
        step(module, optimizer, rank, index)
    exchange.leave()
    sent, final = exchange.statistics(), values(module)
    # nothing follows any more
    step(module, optimizer, rank, STEPS)
    assert exchange.outer.local_steps == STEPS
    exchange.close()
    return final, sent


def looped(rank: int, method: LocalMethod) -> Any:
    module = model(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    outer = OuterSteps(module.named_parameters(), method, buffers=module.named_buffers())
    for index in range(STEPS):
        step(module, optimizer, rank, index)
        outer.after_step()
    outer.synchronize()
    outer.close()
    return values(module)


def both(rank: int, method: LocalMethod) -> Any:
    return followed(rank, method), looped(rank, method)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.words)
def test_it_trains_as_a_plain_loop_does_and_sends_what_is_priced(method):
    results = run_on_pool(both, RANKS, method)
    (first, sent), _ = results[0]
    for (ours, _), twin in results:
        assert all(torch.equal(ours[name], value) for name, value in twin.items())
        assert all(torch.equal(ours[name], value) for name, value in first.items())
    # three outer steps: what is priced, beside the buffers of the norm
    module = model(0)
    work = method.work(sum(p.numel() for p in module.parameters()), RANKS)
    ring = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1 / RANKS}
    priced = sum(ring[op] * size * (RANKS - 1) / RANKS for _, op, size in work.collectives)
    floats = [b.nbytes for b in module.buffers() if b.is_floating_point()]
    others = [b.nbytes for b in module.buffers() if not b.is_floating_point()]
    buffers = (2 * sum(floats) + sum(others)) * (RANKS - 1) // RANKS
    assert sent.bytes_sent == pytest.approx(3 * (priced + buffers), abs=9)
    assert sent.steps == STEPS


def resumed(rank: int, method: LocalMethod) -> Any:
    """A run that goes on with a new exchange after step 5, and one that does not."""
    found = []
    for stops in (False, True):
        module = model(rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        exchange = LocalExchange(method, module)
        exchange.follow(optimizer)
        for index in range(STEPS):
            step(module, optimizer, rank, index)
            if index == 4:
                saved = [exchange.state_dict()]
                torch.distributed.broadcast_object_list(saved)
                if stops:
                    exchange.leave()
                    exchange.close()
                    exchange = LocalExchange(method, module)
                    exchange.load_state_dict(saved[0])
                    exchange.follow(optimizer)
        exchange.leave()
        exchange.close()
        found.append(values(module))
    return found


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.words)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(method):
    for whole, stopped in run_on_pool(resumed, RANKS, method):
        assert all(torch.equal(whole[name], value) for name, value in stopped.items())


def refused(rank: int) -> list[str]:
    module, messages = model(rank), []
    exchange = LocalExchange(METHODS[0], module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    exchange.follow(optimizers[0])
    with pytest.raises(ValueError, match="steps of one optimizer") as several:
        exchange.follow(optimizers[1])
    with pytest.raises(ValueError, match="of method='topk'") as other:
        exchange.load_state_dict({"method": "topk", "step": 1, "ranks": []})
    messages += [str(several.value), str(other.value)]
    exchange.leave()
    exchange.close()
    return messages


def test_what_cannot_be_followed_is_refused():
    assert all(len(messages) == 2 for messages in run_on_pool(refused, RANKS))
