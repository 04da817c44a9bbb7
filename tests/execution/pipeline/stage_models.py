"""Models that are awkward to cut, and how they are trained in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.plan.plan_values import PRESETS


class Plain(nn.Module):
    """Embedding, six blocks, a head; a position table that a functional operator reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        layers = [
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 8))
            for _ in range(6)
        ]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor, *, loss: bool = False) -> Tensor:
        logits = self.head(self.run_blocks(self.embed(tokens) + self.positions))
        return self.loss(logits, tokens) if loss else logits

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Tied(Plain):
    """The head is the embedding, by a shared parameter, and again by a functional operator."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        again = F.linear(logits.softmax(-1), self.embed.weight.T)
        return super().loss(logits, tokens) + again.square().mean()


class Chain(Plain):
    """Each block needs the one before it, and nothing else crosses: gradients keep their order."""

    def __init__(self, dropout: float = 0.0, *, normed: bool = False) -> None:
        super().__init__(dropout)
        for block in self.blocks:
            block.insert(0, nn.BatchNorm1d(5) if normed else nn.LayerNorm(8))
        self.blocks[0].append(nn.Linear(8, 8))  # blocks differ

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ChainTied(Chain):
    """The head is the embedding, and two blocks have one matrix: shared by the first and the last
    stage, and by two between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[4][1].weight = self.blocks[2][1].weight


class Skips(Plain):
    """What early blocks make is needed by late ones."""

    def run_blocks(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[:3]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[3:]:
            x = block(x + kept.pop())
        return x


class Normed(Plain):
    """Blocks with BatchNorm, whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.insert(1, nn.BatchNorm1d(5))


class Spare(Plain):
    """A module that is never called, and one that has no influence on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.probe = nn.Linear(8, 8), nn.Linear(8, 8)

    def run_blocks(self, x: Tensor) -> Tensor:
        self.probe(x)
        return super().run_blocks(x)


class Handing(nn.Sequential):
    """Returns beside its result what the first block made: in slices, where blocks are split along
    a tensor axis.

    The first has a parameter more, as T5's has, so that it is not like the others.
    """

    def forward(self, x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self[0](x)
        kept = hidden.tanh() * self.scale if kept is None else kept
        return self[3](self[1](hidden) * kept), kept


class Handed(Plain):
    """Blocks hand what the first one made to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing(*block) for block in self.blocks)
        self.blocks[0].scale = nn.Parameter(torch.ones(()))

    def run_blocks(self, x: Tensor) -> Tensor:
        kept = None
        for block in self.blocks:
            more, kept = block(x, kept)
            x = x + more
        return x


class Spectrum(nn.Sequential):
    """Returns complex numbers, which are marked as conjugates, and small integers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        real = super().forward(x.real) + x.imag
        return torch.complex(real, x.real).conj(), real.argmax(-1).to(torch.int16)


class Shortcut(Plain):
    """NCCL knows no dtype that blocks return. Evaluations end with what the first stage makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Spectrum(*block) for block in self.blocks)

    def run_blocks(self, x: Tensor) -> Tensor:
        first, places = x, _ = self.blocks[0](torch.complex(x, -x))
        for block in self.blocks[1:]:
            x, places = block(x + places.unsqueeze(-1) / 8)
        return x.real if self.training else (x + first).real


MODELS: dict[str, Callable[[], Plain]] = {
    "plain": Plain,
    "tied": Tied,
    "chain": Chain,
    "chain dropout": lambda: Chain(dropout=0.5),
    "chain tied": ChainTied,
    "chain normed": lambda: Chain(normed=True),
    "skips": Skips,
    "normed": Normed,
    "spare": Spare,
    "handed": Handed,
    "shortcut": Shortcut,
    "dropout": lambda: Plain(dropout=0.5),
}


def make(name: str, *, seed: int = 0) -> Plain:
    torch.manual_seed(seed)
    return MODELS[name]()


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens, loss=True)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens)


def tokens(steps: int, batch: int = 8, *, seed: int = 3) -> Tensor:
    return torch.randint(0, 11, (steps, batch, 5), generator=torch.Generator().manual_seed(seed))


def cut(stages: int) -> list[list[str]]:
    """The blocks in as many stages, as equal as they can be."""
    names = ["embed", *(f"blocks.{index}" for index in range(6)), "head"]
    bounds = [round(index * len(names) / stages) for index in range(stages + 1)]
    return [names[low:high] for low, high in itertools.pairwise(bounds)]


def plan_of(
    pipeline: int,
    schedule: str,
    *,
    data: int = 1,
    microbatches: int = 4,
    stages: int | None = None,
    storage: str = "ddp",
    recompute: bool = False,
    data_first: bool = False,
    tensor: int = 1,
    rows: bool = False,
) -> ParallelPlan:
    axes = [Axis("pipeline", pipeline), *([Axis("data", data)] if data > 1 else [])]
    axes = [
        *(reversed(axes) if data_first else axes),
        *([Axis("tensor", tensor)] if tensor > 1 else []),
    ]
    mesh = Mesh(tuple(axes))
    placed = PRESETS[storage].storage(mesh)
    whole = (Replicate(),) * (len(axes) - 1)
    slices = {"0.weight": Shard(0), "0.bias": Shard(0), "3.weight": Shard(1)} if tensor > 1 else {}
    split = tuple((name, (*whole, placement)) for name, placement in slices.items())
    # between products a rank has a part of the samples, as under sequence parallelism of steps
    part = (*whole, Shard(0))
    border: dict[str, Any] = {"inputs": (part,), "outputs": (part,)}

    def block(name: str) -> BlockPlan:
        is_block = name.startswith("blocks")
        config = OpConfig(placed, recompute and is_block, parameters=split if is_block else ())
        if rows:
            config = replace(config, sums=part, **border if is_block else {})
        return BlockPlan(name, config)

    named = [StagePlan(tuple(map(block, names))) for names in cut(stages or pipeline)]
    named[0] = StagePlan((*named[0].blocks, block("")))
    return ParallelPlan(mesh, tuple(named), schedule=schedule, num_microbatches=microbatches)
