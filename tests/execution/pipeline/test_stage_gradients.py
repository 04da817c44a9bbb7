"""Gradients of stages over data ranks, of parameters that are not used in every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.execution.pipeline.pipeline_run import GradientExchange
from tests.launch import run_on_pool

# The ranks on which parameter "late" gets a gradient, in each step; "used" gets one in all of them,
# "never" in none.
STEPS: tuple[tuple[int, ...], ...] = ((), (), (0,), (0, 1), (), (1,))


def gradients_of(rank: int) -> list[dict[str, Tensor | None]]:
    group = dist.group.WORLD
    assert group is not None
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("used", "late", "never")}
    parameters["frozen"] = nn.Parameter(torch.zeros(3), requires_grad=False)
    exchange = GradientExchange(parameters, group=group, parts=2)
    found = []
    for number, ranks in enumerate(STEPS):
        for parameter in parameters.values():
            parameter.grad = None
        parameters["used"].grad = torch.full((3,), float(rank + number))
        if rank in ranks:
            parameters["late"].grad = torch.full((3,), 4.0 * (rank + 1))
        exchange.start()
        exchange.wait()
        found.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        )
    return found


def test_a_parameter_may_get_its_first_gradient_late_and_again_none() -> None:
    for found in run_on_pool(gradients_of, 2):
        for number, (ranks, gradients) in enumerate(zip(STEPS, found, strict=True)):
            assert gradients["never"] is None and gradients["frozen"] is None
            assert torch.equal(gradients["used"], torch.full((3,), number + 0.5))
            expected = sum(4.0 * (rank + 1) for rank in ranks) / 2
            assert (gradients["late"] is None) == (not ranks)
            assert not ranks or torch.equal(gradients["late"], torch.full((3,), expected))
