"""Optimizers that have stepped before a plan begins: their states go on in shards and at owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_topt.execution.attached_optimizer import refuse_state_dict
from lightning_topt.execution.engine import Engine
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import preset_plan
from lightning_topt.plan.plan_values import PRESETS
from tests.launch import run_on_pool

RANKS = 2


class Coded(Optimizer):
    """Momentum in codes of 8 bits, in the shape of a parameter, and one scale; kept by parameter.

    `wide`: in float64 instead, also of narrower parameters.
    """

    def __init__(self, parameters: Any, *, wide: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.wide = wide

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, gradient = self.state[p], p.grad.double()
                if state:
                    gradient += 0.9 * state["codes"].double() * state["scale"]
                state["scale"] = gradient.abs().max() / 127
                codes = gradient / state["scale"]
                state["codes"] = codes if self.wide else codes.round().to(torch.int8)
                p.sub_((group["lr"] * gradient).to(p.dtype))


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).square().mean()
    return loss


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def train(rank: int, preset: str | None, wide: bool) -> Any:
    """One plain step and two under the plan, or three plain ones; all ranks have equal samples."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    batch, optimizer = torch.randn(4, 6), Coded(module.parameters(), wide=wide)
    engine = None
    for number in range(3):
        if number == 1 and preset is not None:
            plan = preset_plan(PRESETS[preset], mesh=data_mesh(RANKS), blocks=["0", "1"])
            engine = Engine(plan, module, device=torch.device("cpu"))
            engine.apply()
            engine.attach_optimizers([optimizer])
        if engine is None:
            loss_of(module, batch).backward()
        else:
            engine.run_step([batch], loss_of)
        optimizer.step()
        optimizer.zero_grad()
    found = [whole(p) for p in module.parameters()]
    state = optimizer.state_dict() if engine is None else engine.optimizer_state(optimizer)
    if engine is not None:
        engine.close()
    return found, state["state"] if rank == 0 else None


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_states_keep_their_dtype(preset: str, wide: bool) -> None:
    expected, states = train(0, None, wide)
    results = run_on_pool(train, RANKS, preset, wide)
    for found, _ in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for index, state in states.items():
        kept = results[0][1][index]
        assert kept["codes"].dtype == (torch.float64 if wide else torch.int8)
        torch.testing.assert_close(
            kept["codes"], state["codes"], rtol=1e-5, atol=1e-3 if wide else 1.0
        )


def test_a_full_state_ends_a_refusal() -> None:
    """Also two: a plan with stages refuses once for its shared step, and once for its stages."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = optimizer.state_dict()
    refuse_state_dict(optimizer)
    refuse_state_dict(optimizer)
    for refused in (optimizer.state_dict, optimizer.step):
        with pytest.raises(RuntimeError, match="spread over ranks"):
            refused()
    optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.state_dict() == state
