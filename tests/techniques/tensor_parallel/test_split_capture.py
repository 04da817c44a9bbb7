"""The captured step of one rank is that of a model which was split by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.graph import capture as step_run
from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import shown_collective
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.graph.op_graph import Kernel, OpGraph
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.models import GPT
from tests.techniques.tensor_parallel.traced import Step

WIDTH, HEADS, TIME = 32, 4, 8
MESH = Mesh((Axis("data", 1), Axis("tensor", 2)))
MEGATRON = {
    "tokens.weight": (Shard(0),),
    "qkv.weight": (Shard(0, parts=3),),
    "qkv.bias": (Shard(0, parts=3),),
    "project.weight": (Shard(1),),
    "up.weight": (Shard(0),),
    "up.bias": (Shard(0),),
    "down.weight": (Shard(1),),
    "head.weight": (Shard(0),),
}
BLOCK = {name: p for name, p in MEGATRON.items() if name not in ("tokens.weight", "head.weight")}


def tokens(samples: int = 4) -> tuple[Tensor, Tensor]:
    return (torch.zeros(samples, TIME, dtype=torch.long),) * 2


def split_graph(
    module: nn.Module, batch: Any, splits: dict[str, tuple[Placement, ...]], **options: Any
) -> tuple[OpGraph, OpGraph]:
    """The whole graph, and that of rank 0 with parameters whose names end so split."""
    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of, **options)
    names = [name for name, _ in module.named_parameters()]
    placements = {name: p for name in names for end, p in splits.items() if name.endswith(end)}
    axes = TensorAxes.of_mesh(MESH, rank=0)
    return graph, SplitModel(module, batch, graph, trace).capture_split(placements, axes)


class HandBlock(nn.Module):
    """tests.models.GPTBlock as one of two ranks runs it, written for it."""

    def __init__(self) -> None:
        super().__init__()
        self.axes = (TensorAxes.of_mesh(MESH, rank=0),)
        half = WIDTH // 2
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * half), nn.Linear(half, WIDTH)
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 4 * half),
            nn.GELU(),
            nn.Linear(4 * half, WIDTH),
        )
        self.drop = nn.Dropout(0.0)

    def row(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return moves.reduce(F.linear(x, linear.weight), self.axes[0], 0) + linear.bias

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = HEADS // 2
        q, k, v = (
            t.view(batch, time, heads, width // HEADS).transpose(1, 2)
            for t in self.qkv(moves.enter(self.norm1(x), self.axes[0], 0)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(
            self.row(self.project, y.transpose(1, 2).reshape(batch, time, width // 2))
        )
        hidden = self.act(self.up(moves.enter(self.norm2(x), self.axes[0], 0)))
        return x + self.drop(self.row(self.down, hidden))


def kernels(graph: OpGraph, block: str) -> list[Counter[str]]:
    """Name, arguments and amounts of all kernels of a block, forward and backward."""
    found = []
    for direction in ("forward", "backward"):
        calls = [
            kernel for op in graph.ops if op.block == block for kernel in getattr(op, direction)
        ]
        found.append(
            Counter({f"{k.name} {k.arguments} {k.flops} {k.bytes} {k.allocated}": 0 for k in calls})
            + Counter(
                [
                    f"{k.name} {k.arguments} {k.flops} {k.bytes} {k.allocated}"
                    for k in calls
                    for _ in range(k.count)
                ]
            )
        )
    return found


def test_a_rank_runs_the_kernels_of_a_model_split_by_hand_in_its_memory() -> None:
    module = GPT(layers=2, width=WIDTH, heads=HEADS)
    _, local = split_graph(module, tokens(), BLOCK)
    by_hand = GPT(layers=0, width=WIDTH, heads=HEADS)
    by_hand.blocks.extend(HandBlock() for _ in range(2))
    expected = capture(by_hand, tokens())
    for name in ("blocks.0", "blocks.1"):
        assert kernels(local, name) == kernels(expected, name)
        found = [[s for s in graph.timeline if s.block == name] for graph in (local, expected)]
        assert found[0] == found[1]
    shapes = {p.name: p.shape for p in expected.parameters}
    assert {p.name: p.shape for p in local.parameters} == shapes


def collectives(graph: OpGraph, block: str, direction: str) -> list[tuple[str, Kernel]]:
    found = []
    for op in graph.ops:
        for kernel in getattr(op, direction) if op.block == block else ():
            if (shown := shown_collective(kernel)) is not None:
                found += [(shown[0], kernel)] * kernel.count
    return found


def test_a_layer_moves_what_megatrons_does() -> None:
    """8 (P - 1) / P elements per token and hidden unit, by every rank (Xu & You, arXiv 2104.05343,
    table 1).
    """
    _, local = split_graph(GPT(layers=3, width=WIDTH, heads=HEADS), tokens(), MEGATRON)
    for index in range(3):
        moved = 0.0
        for direction in ("forward", "backward"):
            calls = collectives(local, f"blocks.{index}", direction)
            assert [op for op, _ in calls] == ["all_reduce"] * 2
            moved += sum(2 * (2 - 1) / 2 * kernel.bytes.at(5) / 4 for _, kernel in calls)
        assert moved == 8 * (2 - 1) / 2 * (5 * TIME) * WIDTH


def test_calls_left_out_are_those_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph() -> OpGraph:
        return split_graph(GPT(layers=6, width=WIDTH, heads=HEADS), tokens(), MEGATRON)[1]

    short = graph()
    monkeypatch.setattr(step_run, "repeated_layers", lambda *args, **kwargs: ())
    assert graph() == short


@pytest.mark.parametrize("batch_scaling", [True, False])
def test_names_blocks_and_fingerprint_are_those_of_the_whole_model(batch_scaling: bool) -> None:
    module = GPT(width=WIDTH, heads=HEADS, tied=True)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    splits = {name: p for name, p in MEGATRON.items() if name != "head.weight"}
    whole, local = split_graph(module, tokens(), splits, batch_scaling=batch_scaling)
    assert local.fingerprint == whole.fingerprint
    assert local.blocks == whole.blocks
    assert local.unused == whole.unused
    assert [(p.name, p.aliases) for p in local.parameters] == [
        (p.name, p.aliases) for p in whole.parameters
    ]
    assert [m.repeatable for m in local.step.modules] == [m.repeatable for m in whole.step.modules]
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not vars(parameter)


class Beside(nn.Module):
    """Code of a user that torch functions are hidden in."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2


def test_a_tensor_that_was_lost_sight_of_is_an_error_that_names_the_module() -> None:
    module = Step(nn.Sequential(nn.Linear(8, 8), Beside(), nn.Tanh()))
    with pytest.raises(
        ValueError, match=r"module 'inner.1' returns tensors of the shapes \[\(8, 4\)\]"
    ):
        split_graph(module, torch.zeros(4, 8), {"0.weight": (Shard(0),), "0.bias": (Shard(0),)})
