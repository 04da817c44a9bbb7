"""Every way of running a plan against one process without any of it: losses, gradients' effect,
parameters, states.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, uniform_plan
from tests.launch import run_on_pool

WORLD, STEPS, BATCH = 2, 5, 8
CPU = torch.device("cpu")


class Net(nn.Module):
    """Embedding tied to the head, three equal blocks with uneven sizes (7 does not divide by 2), a
    loose parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(
            self.head(x * self.scale).flatten(0, 1), tokens.roll(1, 1).flatten()
        )


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
MIXED_REPLICATED = ParallelPlan.of_blocks(
    mesh=WORLD,
    blocks=(
        BlockPlan("blocks.0", OpConfig.zero(1, recompute=True)),
        BlockPlan("blocks.1", OpConfig.zero(0)),
        BlockPlan("blocks.2", OpConfig.zero(1)),
        BlockPlan("", OpConfig.zero(0)),
    ),
)
MIXED_SHARDED = ParallelPlan.of_blocks(
    mesh=WORLD,
    blocks=(
        BlockPlan("blocks.0", OpConfig.zero(3)),
        BlockPlan("blocks.1", OpConfig.zero(2, recompute=True)),
        BlockPlan("blocks.2", OpConfig.zero(3, recompute=True)),
        BlockPlan("", OpConfig.zero(2)),
    ),
)
PLANS = {
    f"zero{stage}{'-recompute' * recompute}": uniform_plan(
        stage, data_parallel_size=WORLD, blocks=BLOCKS, recompute=BLOCKS if recompute else ()
    )
    for stage in range(4)
    for recompute in (False, True)
} | {"mixed-replicated": MIXED_REPLICATED, "mixed-sharded": MIXED_SHARDED}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def data() -> Tensor:
    return torch.randint(0, 11, (STEPS, BATCH, 5), generator=torch.Generator().manual_seed(3))


@functools.cache
def one_process(optimizer_name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = []
    for batch in data():
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), optimizer.state_dict()


def train(rank: int, plan: ParallelPlan, optimizer_name: str) -> tuple[Any, ...]:
    torch.manual_seed(rank)  # rank 0's weights must win, as under DDP
    module = Net()
    names = list(dict(module.named_parameters()))
    originals = dict(module.named_parameters())
    engine = Engine(plan, module, device=CPU)
    model = engine.apply()
    optimizer = OPTIMIZERS[optimizer_name](module.parameters())
    engine.attach_optimizers([optimizer])
    losses = []
    for batch in data():
        loss = model(batch.chunk(WORLD)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    module_state, optimizer_state = engine.module_state(), engine.optimizer_state(optimizer)
    held = sum(
        (t.to_local() if hasattr(t, "to_local") else t).numel()
        for values in optimizer.state.values()
        for t in values.values()
        if isinstance(t, Tensor) and t.dim()
    )
    engine.release()
    assert list(dict(module.named_parameters())) == names
    assert all(p is originals[n] for n, p in module.named_parameters())
    assert type(module) is Net and type(module.blocks[0]) is nn.Sequential
    module(data()[0]).backward()  # a plain module again: runs without any peer
    return (
        losses,
        module_state,
        optimizer_state,
        {k: v.clone() for k, v in module.state_dict().items()},
        held,
    )


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    # Two ranks add the same float32 terms in another order; 5 steps amplify the last bits a little.
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@functools.cache
def trained(name: str, optimizer_name: str) -> list[tuple[Any, ...]]:
    return run_on_pool(train, WORLD, PLANS[name], optimizer_name)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_process(name: str, optimizer_name: str) -> None:
    losses, state, optimizer_state = one_process(optimizer_name)
    ranks = trained(name, optimizer_name)
    for rank_losses, _, _, released, _ in ranks:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert_close(released, state)
    _, whole, whole_optimizer, _, _ = ranks[0]
    assert_close(whole, state)
    assert whole_optimizer["state"].keys() == optimizer_state["state"].keys()
    for index, values in optimizer_state["state"].items():
        assert_close(whole_optimizer["state"][index], values)


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
    assert "3 ranks" in ranks and "this run has 2" in ranks
    assert "layers.0" in model
    assert "lies inside" in nested
    assert "cannot be recomputed" in rest
    for container in containers:
        assert "'blocks' of the plan is a ModuleList" in container and "blocks.0" in container
