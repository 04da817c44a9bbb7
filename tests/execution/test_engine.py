"""Plans that do not belong to a run are refused.

Those that do: test_mixed_plans, test_tensor_plans, tests/plugins.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, uniform_plan
from tests.launch import run_on_pool

WORLD = 2
CPU = torch.device("cpu")


class Net(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7)) for _ in range(2))


def bad_plans(rank: int) -> list[str]:
    messages = []
    plans = [
        uniform_plan(0, data_parallel_size=3),
        uniform_plan(3, data_parallel_size=WORLD, blocks=["layers.0"]),
        uniform_plan(3, data_parallel_size=WORLD, blocks=["blocks.0", "blocks.0.0"]),
        ParallelPlan.of_blocks(
            mesh=WORLD, blocks=(BlockPlan("", OpConfig.zero(0, recompute=True)),)
        ),
        uniform_plan(0, data_parallel_size=WORLD, blocks=["blocks"], recompute=["blocks"]),
        uniform_plan(2, data_parallel_size=WORLD, blocks=["blocks"]),
    ]
    # to group parameters
    Engine(uniform_plan(1, data_parallel_size=WORLD, blocks=["blocks"]), Net(), device=CPU)
    for plan in plans:
        with pytest.raises(PlanError) as error:
            Engine(plan, Net(), device=CPU).apply()
        messages.append(str(error.value))
    return messages


def test_plan_for_another_run_is_refused() -> None:
    ranks, model, nested, rest, *containers = run_on_pool(bad_plans, WORLD)[0]
    assert "3 ranks" in ranks and "layers.0" in model
    assert "inside" in nested and "recomputed" in rest
    for container in containers:
        assert "ModuleList" in container and "blocks.0" in container
