"""Shared by the optimizer benchmarks: models that compute nothing, and optimizers for them.

The models have the parameters of language models, but forward and backward cost next to nothing. A
step is then the exchange of gradients and the update, which is what these benchmarks time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_topt.communication.node.rows import NodeRows, node_rows
from lightning_topt.optim.adaptive_step import (
    PLAIN_STEPS,
    TRIAL_STEPS,
    WARMUP_STEPS,
    AdaptiveStep,
    Sharing,
)
from lightning_topt.optim.update_rule import update_rule

try:
    import pytorch_optimizer
except ModuleNotFoundError:
    pytorch_optimizer = None


Shapes = list[dict[str, tuple[int, ...]]]  # of the parameters, block by block


def gpt_shapes(width: int, depth: int, vocabulary: int) -> Shapes:
    """The embedding, then `depth` blocks of attention and perceptron."""
    block = {
        "norm1": (width,),
        "qkv": (3 * width, width),
        "out": (width, width),
        "norm2": (width,),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    return [
        {"embedding": (vocabulary, width)},
        *(dict(block) for _ in range(depth)),
        {"norm": (width,)},
    ]


def square_shapes(width: int, number: int) -> Shapes:
    """Blocks of four square matrices."""
    return [{f"square{i}": (width, width) for i in range(4)} for _ in range(number // 4)]


def count(shapes: Shapes) -> int:
    """Parameters in all."""
    return sum(torch.Size(shape).numel() for block in shapes for shape in block.values())


class _Given(torch.autograd.Function):
    """Passes `x` on; backward gives every parameter a slice of `noise` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, *parameters: Tensor) -> Tensor:
        ctx.noise, ctx.shapes = noise, [parameter.shape for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None, *(ctx.noise[: shape.numel()].view(shape) for shape in ctx.shapes)


class Block(nn.Module):
    """Parameters that get their gradients together."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], noise: Tensor, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.noise = noise
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=generator).mul_(0.02))
            )

    def forward(self, x: Tensor) -> Tensor:
        return _Given.apply(x, self.noise, *self.parameters(recurse=False))


class Model(nn.Module):
    """Blocks in a row; the loss is a number whose gradients are those of this `rank`.

    They are the same in every step.
    """

    def __init__(self, shapes: Shapes, *, rank: int) -> None:
        super().__init__()
        largest = max(torch.Size(shape).numel() for block in shapes for shape in block.values())
        noise = _noise(largest, rank)
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(Block(block, noise, generator) for block in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@cache
def _noise(numel: int, rank: int) -> Tensor:
    """The same memory for all models of a rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1 + rank)).mul_(0.01)


@dataclass(frozen=True)
class Part:
    """One optimizer of a run: its class, its options, and the parameters that it takes.

    `takes` decides by name and number of dims.
    """

    optimizer_class: Callable[..., Optimizer]
    options: dict[str, Any]
    takes: Callable[[str, int], bool] = lambda name, dims: True

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Its parameters of `model`."""
        return [p for name, p in model.named_parameters() if self.takes(name, p.dim())]

    def make(self, model: nn.Module) -> Optimizer:
        """The optimizer as a user makes it."""
        return self.optimizer_class(self.parameters(model), **self.options)


def hidden_matrix(name: str, dims: int) -> bool:
    """What Muon is for."""
    return dims == 2 and "embedding" not in name


def parts(name: str) -> Sequence[Part]:
    """Return the optimizers that `name` stands for.

    Raises ValueError where a package or torch version lacks one.
    """
    simple: dict[str, Part] = {
        "SGD": Part(SGD, {"lr": 1e-3, "momentum": 0.9}),
        "AdamW, fused": Part(AdamW, {"lr": 1e-4, "fused": True}),
        "AdamW, foreach": Part(AdamW, {"lr": 1e-4, "foreach": True}),
        "AdamW": Part(AdamW, {"lr": 1e-4}),
        "Adafactor": Part(Adafactor, {"lr": 1e-3}),
    }
    if name in simple:
        return [simple[name]]
    if name == "Muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"torch {torch.__version__} has no Muon")
        rest = Part(
            AdamW, {"lr": 1e-4, "fused": True}, lambda name, dims: not hidden_matrix(name, dims)
        )
        return [Part(torch.optim.Muon, {"lr": 1e-3}, hidden_matrix), rest]
    if name in ("Shampoo", "SOAP"):
        if pytorch_optimizer is None:
            raise ValueError(f'{name} needs pytorch-optimizer: pip install -e ".[optimizers]"')
        return [Part(getattr(pytorch_optimizer, name), {"lr": 1e-4})]
    raise ValueError(f"{name!r} is not an optimizer of this benchmark")


# ---- this package's ways to share an optimizer step, put together as the Lightning callback does -

# then an adaptive step has decided
SETTLING_STEPS = WARMUP_STEPS + PLAIN_STEPS + TRIAL_STEPS + 1


@cache
def rows(num_nodes: int) -> NodeRows | None:
    """The memory of the node, for all optimizers of a process."""
    assert dist.group.WORLD is not None
    return node_rows(
        dist.group.WORLD, device=torch.device("cpu"), num_nodes=num_nodes, timeout_seconds=300
    )


class Adaptive:
    """`AdaptiveStep` of one optimizer: `always` shared, or where it pays."""

    def __init__(self, optimizer: Optimizer, *, always: bool, num_nodes: int = 1) -> None:
        reduced = frozenset(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        self.said: list[str] = []
        group = dist.group.WORLD
        assert group is not None
        sharing = Sharing(group, reduced, always=always, node=partial(rows, num_nodes))
        self.step = AdaptiveStep(
            optimizer, rule=update_rule(optimizer), sharing=sharing, say=self.said.append
        )
        self.step.start()

    @property
    def pays(self) -> bool:
        """The decision."""
        return self.step.decision is not None and self.step.decision.shared
