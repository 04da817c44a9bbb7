"""A model under DDP whose gradients are reduce-scattered as soon as they can be, for tests of the
fused step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.reduce_scatter import ReduceScatterExchange, ScatteredGradients


class Net(nn.Module):
    """Several buckets; a frozen, an unused, a transposed and a scalar parameter; weights read
    without calling their module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        # Reads the weights of its out_proj by itself. No bias: the key's has gradient 0 but for
        # rounding, which AdamW blows up.
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(24, 70), nn.Linear(70, 24)
        self.turned = nn.Parameter(torch.randn(24, 24).t() * 0.1)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.frozen, self.unused = nn.Linear(24, 24), nn.Linear(24, 9)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0] * self.scale
        hidden = hidden + self.down(torch.tanh(self.up(self.frozen(hidden)))) @ self.turned
        return nn.functional.linear(hidden, self.embed.weight)  # tied, read without a call


def loss_of(model: nn.Module, *, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(40, (4, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))


def wrap(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(
        Net(),
        **{"bucket_cap_mb": 0.01, "find_unused_parameters": True, "gradient_as_bucket_view": True}
        | options,
    )


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Fused:
    """A DDP module whose step becomes parallel as soon as its buckets are final."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *optimizers: Optimizer,
        node: bool = False,
        timeout_seconds: float = 60,
    ) -> None:
        self.ddp, self.optimizers = ddp, optimizers
        self.node = NodeRows(dist.group.WORLD, timeout_seconds=timeout_seconds) if node else None
        self.exchange = ReduceScatterExchange(ddp, timeout_seconds=timeout_seconds, node=self.node)
        self.gradients = ScatteredGradients(self.exchange, optimizers=optimizers)
        self.begun = False

    def before_step(self) -> None:
        if self.exchange.ready and not self.begun:
            self.begun = True
            for optimizer in self.optimizers:
                install_parallel_step(
                    optimizer, pieces=self.exchange.pieces_of(optimizer), node=self.node
                )
            self.exchange.begin(self.optimizers)


def backward(ddp: DistributedDataParallel, *, rank: int, step: int) -> None:
    """Every third step accumulates two batches."""
    if step % 3 == 2:
        with ddp.no_sync():
            (loss_of(ddp, rank=rank, step=1000 + step) / 2).backward()
    loss_of(ddp, rank=rank, step=step).backward()
