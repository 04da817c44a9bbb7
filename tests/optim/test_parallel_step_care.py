"""What the parallel step refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.pieces import Piece
from tests.launch import run_ranks
from tests.optim.parallel_cases import OPTIMIZERS, Net, make_net, parameters_of, row_pieces


class Unhooked(Optimizer):
    """A wrapper as some are written: it does not initialise its base class."""

    def __init__(self, net: Net) -> None:
        self.param_groups = torch.optim.SGD(net.parameters(), lr=0.1).param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def refusals(rank: int) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(list(net.parameters())[1:])
    parameters = parameters_of(optimizer)
    with pytest.raises(ValueError, match=r"rank 0 has parameter 0.*rank 1 has"):
        different = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2 + rank))])
        install_parallel_step(different, pieces=[])
    with pytest.raises(ValueError, match=r"rank 0 has Piece\(index=0.*rank 1 has"):
        install_parallel_step(optimizer, pieces=[Piece(0, 0, parameters[0].shape[0], rank)])
    with pytest.raises(ValueError, match="have no owner"):
        install_parallel_step(optimizer, pieces=[Piece(0, 0, 1, 0)])
    with warnings.catch_warnings(), pytest.raises(ValueError, match="twice"):
        warnings.simplefilter("ignore")
        install_parallel_step(torch.optim.SGD([parameters[0], parameters[0]]), pieces=[])
    install_parallel_step(optimizer, pieces=row_pieces(parameters, 2))
    with pytest.raises(ValueError, match="shards its state already"):
        install_parallel_step(optimizer, pieces=[])
    with pytest.raises(ValueError, match=r"Optimizer.__init__"):
        install_parallel_step(Unhooked(net), pieces=[])
    table = torch.nn.Embedding(8, 3, sparse=True)
    sparse = torch.optim.SGD(table.parameters(), lr=0.1)
    install_parallel_step(sparse, pieces=row_pieces(parameters_of(sparse), 2))
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        sparse.step()
    assert sparse.param_groups[0]["params"][0] is table.weight  # groups are whole again
    coupled = OPTIMIZERS["WholeNorm"][0](make_net())
    install_parallel_step(coupled, pieces=row_pieces(parameters_of(coupled), 2))
    for p in parameters_of(coupled):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"declare the rule \"parameters\""):
        coupled.step()
    scattered = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 4).t())])
    with pytest.raises(ValueError, match="scattered in memory"):
        install_parallel_step(scattered, pieces=[Piece(0, 0, 2, 0), Piece(0, 2, 4, 1)])


def test_bad_input_is_refused() -> None:
    run_ranks(refusals, 2)
