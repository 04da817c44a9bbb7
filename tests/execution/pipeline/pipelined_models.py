"""Modules that a pipeline cuts: tied weights, writes in place, operators between blocks.

U-Net, T5 and ResNet are in benchmarks/pipelines/equality.py.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Base(L.LightningModule):
    """A batch is (rows, width), or whatever `batch` returns; `blocks` are where cuts may be."""

    width = 8
    blocks: tuple[str, ...] = ()

    def batch(self, size: int) -> Any:
        return torch.randn(size, self.width)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layers(Base):
    """nn.Sequential with in-place activations and views as layers of their own, dropout between."""

    blocks = ("net.0", "net.3", "net.5", "net.8")

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(8, 8) for _ in range(4)]
        self.net = nn.Sequential(
            linear[0], nn.Dropout(0.3, inplace=True), nn.Unflatten(1, (2, 4)),
            nn.Flatten(), nn.ReLU(inplace=True),
            linear[1], nn.BatchNorm1d(8), nn.Hardtanh(inplace=True),
            linear[2], nn.Identity(), linear[3],
        )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class Tied(Base):
    """Tied embeddings by a function, a root's table, masks, a scale; draws between blocks."""

    blocks = ("embed", "layers.0", "layers.1", "norm")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.positions, self.scale = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)

    def batch(self, size: int) -> Any:
        return {"tokens": torch.randint(0, 16, (size, 6)), "lengths": torch.randint(3, 7, (size,))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        padding = torch.arange(6)[None] >= batch["lengths"][:, None]
        x = self.embed(batch["tokens"]) + F.dropout(self.positions, 0.2, self.training)
        first = x
        for layer in self.layers:
            x = F.dropout(layer(x, src_key_padding_mask=padding), 0.1, self.training) * self.scale
            x += 0.1 * first
        logits = F.linear(self.norm(x), self.embed.weight)
        loss = F.cross_entropy(logits.transpose(1, 2), batch["tokens"])
        return loss + 0.01 * self.positions.square().sum()


class Pair(nn.Module):
    """Returns a dictionary of tensors, a mask, integers and plain values; one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        left, right = self.left(x), self.right(x).tanh()
        both = torch.stack([left, right]).unbind(0)
        return {
            "parts": [*both, left], "same": left, "mask": left > 0, "order": left.argsort(-1),
            "name": "pair", "frozen": x.detach(),
        }  # fmt: skip


class Mixed(Base):
    """Dictionaries over cuts, integers, booleans, no gradients, a module called three times."""

    blocks = ("first", "second", "third", "head")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (
            Pair(),
            Pair(),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.often = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one = self.first(self.often(batch))
        assert one["name"] == "pair"
        x = torch.where(one["mask"], one["parts"][0], one["same"] * 2)
        two = self.second(self.often(x))
        x = two["parts"][1] + two["parts"][2].gather(-1, one["order"]) + two["frozen"]
        x = self.often(self.third(x)) + one["parts"][1] * two["mask"]
        unused = self.third.weight.sum() * 0
        return self.head(x).square().mean() + unused


MODELS = (Layers, Tied, Mixed)
