"""Optimizers of whole parameters over shards: the parallel step against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.techniques.optimizer_sharding import share_step
from tests.launch import run_ranks

Make = Callable[[Any], Optimizer]
STEPS = 4
# Rows that do not divide evenly, fewer rows than ranks, and (not for Muon) a vector and a kernel.
MATRICES = [(7, 5), (6, 12), (3, 4), (8, 8), (1, 6)]
OTHERS = [(9,), (5, 3, 2, 2)]
OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.05, weight_decay=0.3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def values(name: str, number: int) -> list[Tensor]:
    """Parameters (0), or gradients of a step."""
    generator = torch.Generator().manual_seed(number)
    shapes = MATRICES if name == "Muon" else [*MATRICES, *OTHERS]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(
    name: str, steps: range, place: Callable[[int, Tensor], Tensor], state: Any = None
) -> tuple[list[nn.Parameter], Optimizer, ParallelStep | None]:
    """Steps of two groups with a schedule; one parameter has no gradient in the second step."""
    start = values(name, 0) if state is None else state[0]
    parameters = [nn.Parameter(place(i, p.clone())) for i, p in enumerate(start)]
    optimizer = OPTIMIZERS[name](
        [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
    )
    step = None
    if any(isinstance(p, DTensor) for p in parameters):
        plain = {p for p in parameters if not isinstance(p, DTensor)}
        step = share_step(optimizer, plain, ranks=dist.get_world_size(), group=None)
        assert step is not None
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    for number in steps:
        for index, (p, gradient) in enumerate(
            zip(parameters, values(name, number + 1), strict=True)
        ):
            p.grad = None if (number, index) == (1, 2) else place(index, gradient)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    return parameters, optimizer, step


def on_shards(rank: int, name: str, mesh_shape: tuple[int, ...], state: Any = None) -> Any:
    """What comes of it on each rank, the full state on rank 0, and what a rank keeps."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]

    def place(index: int, value: Tensor) -> Tensor:
        # the second parameter is replicated, as at ZeRO level 1
        return value if index == 1 else distribute_tensor(value, mesh, placements)

    parameters, optimizer, step = train(
        name, range(STEPS) if state is None else range(2, STEPS), place, state
    )
    assert step is not None
    assert all(isinstance(p, DTensor) for i, p in enumerate(parameters) if i != 1)
    step.consolidate_state_dict()
    found = [whole(p).detach() for p in parameters]
    full = optimizer.state_dict() if rank == 0 else None
    owned = [piece.index for piece in step.own_states()]
    kept = sum(key.numel() for key in step.own.keys.values() if key not in set(parameters))
    return found, full, owned, kept


def check(results: list[Any], name: str, alone: tuple[Any, ...]) -> None:
    parameters, optimizer, _ = alone
    for found, _, _, kept in results:
        # float32 sums in one order on all ranks: the update is sent, and added, which rounds once
        # more than one process does
        torch.testing.assert_close(found, [p.detach() for p in parameters], rtol=1e-5, atol=1e-6)
        assert kept == 0
        torch.testing.assert_close(found, results[0][0], rtol=0, atol=0)
    torch.testing.assert_close(
        results[0][1]["state"], optimizer.state_dict()["state"], rtol=1e-5, atol=1e-6
    )
    # every state is on one rank
    owned = sorted(index for _, _, indices, _ in results for index in indices)
    assert owned == list(range(len(parameters)))
    assert all(indices for _, _, indices, _ in results)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_on_one_process(name: str) -> None:
    alone = train(name, range(STEPS), lambda _, value: value)
    check(run_ranks(on_shards, 2, name, (2,)), name, alone)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_replicas_of_shards(name: str) -> None:
    alone = train(name, range(STEPS), lambda _, value: value)
    check(run_ranks(on_shards, 4, name, (2, 2)), name, alone)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_goes_on_with_another_number_of_ranks(name: str) -> None:
    before, optimizer, _ = train(name, range(2), lambda _, value: value)
    state = [p.detach() for p in before], optimizer.state_dict()
    alone = train(name, range(2, STEPS), lambda _, value: value, state)
    check(run_ranks(on_shards, 3, name, (3,), state), name, alone)
