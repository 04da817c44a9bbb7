"""Hierarchical training gives the same bits whichever way the ranks of a node exchange."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from lightning_topt.communication import GradientMethod, TopK
from lightning_topt.communication.methods import top_k
from lightning_topt.communication.node.node_exchange import (
    CollectiveNodeExchange,
    NodeExchange,
    SharedMemoryNodeExchange,
)
from lightning_topt.communication.topology import Topology
from tests.communication.exchange_ranks import assert_equal_on_all_ranks, train, wrap
from tests.launch import run_ranks


def parameters_after(rank: int, form: str, options: GradientMethod) -> torch.Tensor:
    """Four steps on two nodes of two ranks; all parameters."""
    if form == "collectives":
        os.posix_fallocate = no_room
    made: list[NodeExchange] = []
    original = top_k.make_node_exchange

    def recording(*arguments, **keywords):
        made.append(original(*arguments, **keywords))
        return made[-1]

    top_k.make_node_exchange = recording
    ddp, exchange = wrap(options, topology=Topology(2, 2, rank))
    list(train(ddp, rank=rank, steps=range(4)))
    assert_equal_on_all_ranks(ddp)
    exchange.close()
    (node,) = made
    assert isinstance(
        node, CollectiveNodeExchange if form == "collectives" else SharedMemoryNodeExchange
    )
    return torch.cat([parameter.detach().view(-1) for parameter in ddp.parameters()])


def no_room(descriptor: int, start: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("density", [0.02, 0.5], ids=["messages shared", "sums shared"])
def test_same_bits_by_memory_and_collectives(density: float) -> None:
    options = TopK(density=density)
    memory, collectives = (
        run_ranks(parameters_after, 4, form, options) for form in ("memory", "collectives")
    )
    assert all(torch.equal(a, b) for a, b in zip(memory, collectives, strict=True))
