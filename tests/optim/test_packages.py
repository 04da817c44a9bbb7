"""Shampoo, SOAP and others of pytorch-optimizer in the parallel step, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.optim.update_rule import UnsplittableOptimizer, update_rule
from tests.launch import run_on_pool

package: Any = pytest.importorskip("pytorch_optimizer")
pytestmark = pytest.mark.usefixtures("one_thread")
Maker = Callable[[list[nn.Parameter]], Optimizer]

STEPS = 6  # SOAP only makes its state in the first; roots and bases are renewed every second
# Square matrices have preconditioners of their own shape; one parameter never has a gradient.
SHAPES = [(24, 16), (16,), (16, 16), (20, 16), (6, 4, 3, 3), (16, 16), (5,)]
UNUSED = 6


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    matrices = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return package.Muon(groups, foreach=False)


MAKERS: dict[str, Maker] = {
    "Shampoo": lambda parameters: package.Shampoo(parameters, lr=0.05),
    "Shampoo, roots every second step": lambda parameters: package.Shampoo(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01, preconditioning_compute_steps=2
    ),
    "ScalableShampoo": lambda parameters: package.ScalableShampoo(
        parameters,
        lr=0.05,
        block_size=8,
        start_preconditioning_step=3,
        preconditioning_compute_steps=2,
        use_svd=True,
    ),
    "SOAP": lambda parameters: package.SOAP(parameters, lr=0.01, precondition_frequency=2),
    "Lamb": lambda parameters: package.Lamb(parameters, lr=0.01),
    "LARS": lambda parameters: package.LARS(parameters, lr=0.1),
    "AdaFactor": lambda parameters: package.AdaFactor(parameters, lr=0.01),
    "Muon": muon,
}


def make(name: str) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return parameters, MAKERS[name](parameters)


def train(
    parameters: list[nn.Parameter], optimizer: Optimizer, *, start: int = 0, steps: int = STEPS
) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if index == UNUSED else gradient
        optimizer.step()


def ordered(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole_pieces(optimizer: Optimizer, world_size: int) -> list[Piece]:
    return [Piece(i, 0, num_rows(p), i % world_size) for i, p in enumerate(ordered(optimizer))]


def install(optimizer: Optimizer) -> None:
    install_parallel_step(optimizer, pieces=whole_pieces(optimizer, dist.get_world_size()))


def assert_same(value: Any, expected: Any, where: str = "state") -> None:
    """Equal through containers, and through the package's own objects."""
    assert type(value) is type(expected), where
    if isinstance(expected, Tensor):
        assert value.dtype == expected.dtype and torch.equal(value, expected), where
    elif isinstance(expected, dict):
        assert list(value) == list(expected), where
        for key in expected:
            assert_same(value[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), where
        for number, (one, other) in enumerate(zip(value, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif type(expected).__module__.startswith("pytorch_optimizer"):
        assert_same(vars(value), vars(expected), f"{where}: {type(expected).__name__}")
    else:
        assert value == expected, where


def split_run(rank: int, name: str) -> tuple[list[Tensor], dict[str, Any], list[int]]:
    parameters, optimizer = make(name)
    install(optimizer)
    train(parameters, optimizer)
    kept = [index for index, p in enumerate(ordered(optimizer)) if optimizer.state.get(p)]
    optimizer.consolidate_state_dict()
    return [p.detach() for p in parameters], optimizer.state_dict() if rank == 0 else {}, kept


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_same_as_on_one_process(name: str, world_size: int) -> None:
    parameters, optimizer = make(name)
    before = [p.detach().clone() for p in parameters]
    train(parameters, optimizer)
    assert all(
        torch.equal(p, b) == (i == UNUSED)
        for i, (p, b) in enumerate(zip(parameters, before, strict=True))
    )
    expected = optimizer.state_dict()
    for rank, (values, whole, kept) in enumerate(run_on_pool(split_run, world_size, name)):
        for index, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
            assert torch.equal(value, parameter), f"parameter {index} on rank {rank}"
        assert all(index % world_size == rank for index in kept), "state of other ranks' parameters"
        if rank == 0:
            assert_same(whole, expected)
        else:
            assert whole == {}


@pytest.mark.parametrize(
    "make_coupled",
    [
        # scales by the norm of all gradients
        lambda parameters: package.Lamb(parameters, pre_norm=True),
        # one step size estimated from all parameters
        lambda parameters: package.Prodigy(parameters),
    ],
    ids=["Lamb, pre_norm", "Prodigy"],
)
def test_coupled_parameters_are_refused(make_coupled: Maker) -> None:
    with pytest.raises(UnsplittableOptimizer):
        update_rule(make_coupled([nn.Parameter(torch.randn(shape)) for shape in SHAPES]))
