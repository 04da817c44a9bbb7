"""Parameters, buffers and states whose elements are not in row-major order of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import ParallelPlan, uniform_plan
from tests.launch import run_on_pool

CPU, STEPS, BATCH = torch.device("cpu"), 4, 8


class Conv(nn.Module):
    """Rows that do not divide by 2, a 1x1 kernel, a depthwise one, one of 3-D, vectors.

    A frozen parameter and a buffer are transposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.GELU(), nn.Conv2d(5, 6, 1)
            )
            for _ in range(2)
        )
        self.deep = nn.Conv2d(6, 6, 3, groups=6)
        self.volume = nn.Conv3d(1, 3, 3)
        self.frozen = nn.Parameter(torch.randn(9, 9).t(), requires_grad=False)
        self.register_buffer("table", torch.randn(9, 9).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x @ self.frozen + self.table)
        for block in self.blocks:
            x = x + block(x)
        x = self.volume(self.deep(x).unsqueeze(1))
        return x.square().mean((1, 2, 3, 4))


CONV_BLOCKS = ["blocks.0", "blocks.1"]


def conv() -> Conv:
    torch.manual_seed(0)
    model = Conv()
    for parameter in model.parameters():
        if parameter.dim() > 3:
            is_volume = parameter.dim() == 5
            parameter.data = parameter.data.clone(
                memory_format=torch.channels_last_3d if is_volume else torch.channels_last
            )
    return model


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(STEPS, BATCH, 3, 9, 9, generator=generator)
    order = (0, 1, 3, 4, 2)
    return found.permute(order).contiguous().permute(0, 1, 4, 2, 3)


def conv_losses(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CONV_PLANS = {
    f"zero{level}": uniform_plan(level, data_parallel_size=2, blocks=CONV_BLOCKS)
    for level in range(4)
}


def switch(rank: int, plan: ParallelPlan, further: ParallelPlan) -> tuple[Any, ...]:
    """Train by a fused optimizer: plainly, under `plan`, and from its state under `further`."""
    module, batches = conv(), images()
    own = [batch.chunk(2)[rank] for batch in batches]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    losses, state = conv_losses(module, optimizer, batches[:1]), None
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.mul_(1 - rank)  # what rank 0 has counts
    for each, part in ((plan, own[1:2]), (further, [*own[2:], own[0]])):
        engine = Engine(each, module, device=CPU)
        model = engine.apply()
        engine.attach_optimizers([optimizer])
        assert module.table.stride() == (1, 9)
        if state is not None:
            engine.load(state)
        mean = torch.tensor(conv_losses(model, optimizer, part))
        dist.all_reduce(mean)
        losses += (mean / 2).tolist()
        found = [engine.state_dict()]
        dist.broadcast_object_list(found, 0)
        # a full state is contiguous, as files have it
        state = tree_map(
            lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, found[0]
        )
        engine.release()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return losses, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("one", "other"), [("zero3", "zero0"), ("zero1", "zero2")])
def test_states_of_fused_optimizers_follow_the_strides_of_their_parameters(
    one: str, other: str
) -> None:
    twin, batches = conv(), images()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    expected = conv_losses(twin, optimizer, [*batches, batches[0]])
    for losses, values in run_on_pool(switch, 2, CONV_PLANS[one], CONV_PLANS[other]):
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, value in twin.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-3, atol=1e-4)
