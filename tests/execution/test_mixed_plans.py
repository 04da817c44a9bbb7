"""ZeRO levels mixed block by block on 2 x 2 ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor

from lightning_topt.communication import TopK
from lightning_topt.execution.engine import Engine
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from tests.launch import run_on_pool

WORLD, STEPS, BATCH, MICROBATCHES = 4, 2, 16, 2
CPU = torch.device("cpu")
MESHES = {"flat": data_mesh(WORLD), "hybrid": hybrid_mesh(2, 2)}
# What runs the blocks a, b, c, d, e and the rest; "+" recomputes.
LAYOUTS = {
    "all of them": ("hybrid", "hybrid", "zero3", "hybrid_zero2+", "zero3+", "zero1", "ddp"),
    "loose parameters hybrid": ("hybrid", "ddp", "zero1+", "zero2", "hybrid+", "ddp", "hybrid"),
    "one axis": ("flat", "ddp", "zero1", "zero2+", "zero3", "zero3+", "zero1"),
    "gradients exchanged by a hook": ("hybrid", "hybrid", "ddp", "zero1", "zero3+", "ddp", "ddp"),
    "loose parameters sharded": ("flat", "zero1", "ddp", "zero1", "ddp+", "ddp", "zero2"),
}
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: [torch.optim.AdamW(p, lr=1e-2, fused=True)],
    "foreach SGD and RMSprop": lambda p: [
        torch.optim.SGD(p[::2], lr=0.1, momentum=0.9, foreach=True),
        torch.optim.RMSprop(p[1::2], lr=1e-2, foreach=True),
    ],
    "Adafactor": lambda p: [torch.optim.Adafactor(p, lr=1e-2)],
}
# Several optimizers beside a hook; with blocks on both axes: test_sharded_checkpoint.py.
HOOK = "gradients exchanged by a hook"
CASES = [(layout, "fused AdamW") for layout in LAYOUTS if layout != HOOK]
# Updates of whole parameters, whose shards have owners.
CASES += [(HOOK, "foreach SGD and RMSprop"), ("all of them", "Adafactor")]


class Net(nn.Module):
    """Five blocks that no number of ranks divides; tied, frozen; a buffer that rank 0 knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        for name in "abcde":
            self.add_module(
                name, nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7), nn.LayerNorm(7))
            )
        self.scale, self.shift = (
            nn.Parameter(torch.ones(7)),
            nn.Parameter(torch.zeros(3, 7), requires_grad=False),
        )
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.offset
        for name in "abcde":
            x = x + self.get_submodule(name)(x)
        return nn.functional.cross_entropy(
            self.head(x * self.scale + self.shift[0]), tokens.roll(1)
        )


def plan_of(layout: str) -> ParallelPlan:
    mesh_name, *presets = LAYOUTS[layout]
    mesh = MESHES[mesh_name]
    blocks = [
        BlockPlan(
            name,
            OpConfig(PRESETS[preset.rstrip("+")].storage(mesh), recompute=preset.endswith("+")),
        )
        for name, preset in zip([*"abcde", ""], presets, strict=True)
    ]
    exchange = TopK(density=1.0, hierarchical=False) if layout == HOOK else None
    return ParallelPlan.of_blocks(blocks, mesh=mesh, gradient_exchange=exchange)


def data() -> Tensor:
    return torch.randint(0, 11, (STEPS, BATCH), generator=torch.Generator().manual_seed(3))


def shares(batch: Tensor, rank: int) -> list[Tensor]:
    """The microbatches of a rank."""
    return list(batch.chunk(WORLD)[rank].chunk(MICROBATCHES))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def step(
    module: nn.Module, optimizers: list[Any], clip_norm: Any, clip_value: Any
) -> tuple[dict[str, Tensor], float]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    norm = float(clip_norm(parameters, 0.5))
    clip_value(parameters, 0.05)
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.requires_grad}
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return gradients, norm


def one_process(optimizer_name: str) -> Any:
    torch.manual_seed(0)
    module = Net()
    optimizers = OPTIMIZERS[optimizer_name](list(module.parameters()))
    record = []
    for batch in data():
        parts = [part for rank in range(WORLD) for part in shares(batch, rank)]
        losses = torch.stack([module(part) for part in parts])
        losses.mean().backward()
        clip = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
        record.append((losses.mean().item(), *step(module, optimizers, *clip)))
    return record, module.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


def train(rank: int, layout: str, optimizer_name: str) -> Any:
    torch.manual_seed(rank)  # rank 0's weights must win, as under DDP
    module = Net()
    originals, groups = dict(module.named_parameters()), len(_world.pg_map)
    engine = Engine(plan_of(layout), module, device=CPU)
    engine.apply()
    optimizers = OPTIMIZERS[optimizer_name](list(module.parameters()))
    engine.attach_optimizers(optimizers)
    record = []
    for batch in data():
        module.offset.fill_(float(rank))  # as statistics that each rank has of its own batches
        losses = engine.run_step(shares(batch, rank), loss_of)
        dist.all_reduce(mean := losses.mean())
        record.append(
            (mean.item() / WORLD, *step(module, optimizers, engine.clip_norm, engine.clip_value))
        )
    state = engine.state_dict()
    if engine.exchange is not None:
        whole_ones = {
            n
            for n in originals
            if n.startswith(("b.", "c.", "e.")) or "." not in n or n == "embed.weight"
        }
        assert rank or set(state["exchange"]["ranks"][0]["residual"]) == whole_ones - {"shift"}
    engine.release()
    assert (
        all(p is originals[n] for n, p in module.named_parameters())
        and module.head.weight is module.embed.weight
    )
    assert type(module) is Net and not any(m._forward_hooks for m in module.modules())
    module(data()[0]).backward()  # a plain module again: runs without any peer
    after = [engine.optimizer_state(optimizer) for optimizer in optimizers]
    engine.close()
    assert len(_world.pg_map) == groups, "groups that are left"
    return (
        record,
        state,
        {name: value.clone() for name, value in module.state_dict().items()},
        after,
    )


def every_layout(rank: int) -> Any:
    return {case: train(rank, *case) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_on_pool(every_layout, WORLD)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layout", "optimizer_name"), CASES)
def test_mixed_plan_equals_one_process(ranks: Any, layout: str, optimizer_name: str) -> None:
    expected, parameters, optimizer_states = one_process(optimizer_name)
    for of_rank in ranks:
        record, _, released, _ = of_rank[layout, optimizer_name]
        for (loss, gradients, norm), (loss_1, gradients_1, norm_1) in zip(
            record, expected, strict=True
        ):
            assert loss == pytest.approx(loss_1, rel=1e-5) and norm == pytest.approx(
                norm_1, rel=1e-5
            )
            assert_close(gradients, gradients_1)
        assert_close(released, dict(parameters))
    _, state, _, after = ranks[0][layout, optimizer_name]
    assert_close(state["module"], dict(parameters))
    for of_optimizer in (state["optimizers"], after):
        for actual, wanted in zip(of_optimizer, optimizer_states, strict=True):
            assert actual["param_groups"] == wanted["param_groups"]
            assert_close(actual["state"], wanted["state"])
