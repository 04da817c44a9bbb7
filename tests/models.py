"""Small LightningModules that the tests share; see `batch_for`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_topt.graph.op_config import Placement, Shard


class GPTBlock(nn.Module):
    """Pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            t.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.project(y.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


# How Megatron-LM splits a GPTBlock over one axis (arXiv 1909.08053, section 3); what is not named
# is whole.
MEGATRON_BLOCK: dict[str, Placement] = {
    "qkv.weight": Shard(0, parts=3),
    "qkv.bias": Shard(0, parts=3),
    "project.weight": Shard(1),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


class GPT(L.LightningModule):
    """Decoder-only Transformer; a batch is ``(tokens, targets)``, both (batch, time)."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 16,
        heads: int = 2,
        vocab: int = 32,
        context: int = 8,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab, self.context = vocab, context
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank term beside it (LoRA), written by hand."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class TunedGPT(GPT):
    """A frozen GPT with adapters in later blocks; to the first ones no gradient comes."""

    def __init__(self, *, plain: int = 1, rank: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.requires_grad_(False)
        for block in self.blocks[plain:]:
            block.qkv, block.up = LowRank(block.qkv, rank), LowRank(block.up, rank)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ConvNet(L.LightningModule):
    """A chain of leaf modules for images (batch, 1, 8, 8) with labels; a torchmetrics accuracy."""

    def __init__(self, channels: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = (
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
        )
        self.pool, self.act = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.hidden, self.head = nn.Linear(2 * channels * 4, 32), nn.Linear(32, classes)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.norm1(self.conv1(x))))
        x = self.pool(self.act(self.norm2(self.conv2(x))))
        return self.head(self.act(self.hidden(x.flatten(1))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.accuracy(logits.detach(), labels)
        self.log("train_accuracy", self.accuracy)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class MLP(L.LightningModule):
    """Linear and ReLU in a Sequential; `training_step` takes a batch alone: (batch, widths[0])."""

    def __init__(self, widths: tuple[int, ...] = (16, 64, 32, 8)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.inputs, self.net = widths[0], nn.Sequential(*layers[:-1])

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Branching(L.LightningModule):
    """Python control flow: loops, branches on shapes and a flag, a module that is not called."""

    def __init__(self, width: int = 8, repeats: int = 3, deep: bool = True) -> None:
        super().__init__()
        self.width, self.repeats, self.deep = width, repeats, deep
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.unused = nn.Linear(width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for step in range(self.repeats):
            x = torch.tanh(x) if step % 2 else torch.relu(x) * 2
        if self.deep and x.shape[-1] > 1:
            x = self.second(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CalledTwice(L.LightningModule):
    """One Linear called twice, with dropout between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.shared, self.drop = width, nn.Linear(width, width), nn.Dropout(0.1)
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.shared(self.drop(self.shared(batch)))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DictBatch(L.LightningModule):
    """A batch is ``{"x": (batch, width), "y": (batch,), "name": str}``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.net = (
            width,
            nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 3)),
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log_dict({"loss": loss, "size": float(len(batch["y"]))})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch_for(module: L.LightningModule, batch_size: int = 4) -> Any:
    """A batch of `batch_size` samples on the CPU that fits `module`, equal for equal arguments."""
    generator = torch.Generator().manual_seed(batch_size)
    if isinstance(module, GPT):
        tokens = torch.randint(
            0, module.vocab, (batch_size, module.context + 1), generator=generator
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if isinstance(module, ConvNet):
        labels = torch.randint(0, 10, (batch_size,), generator=generator)
        return torch.randn(batch_size, 1, 8, 8, generator=generator), labels
    width = module.inputs if isinstance(module, MLP) else module.width
    x = torch.randn(batch_size, width, generator=generator)
    if isinstance(module, DictBatch):
        return {
            "x": x,
            "y": torch.randint(0, 3, (batch_size,), generator=generator),
            "name": "example",
        }
    return x


class Mixture(nn.Module):
    """A mixture of experts by torch's operators: tokens go to slots of one expert each, as in
    Shazeer et al., arXiv 1701.06538.

    Weights are (expert, in, out).
    """

    def __init__(self, how: str, *, width: int = 16, hidden: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.how, self.width, self.experts = how, width, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)
        self.bias = nn.Parameter(torch.zeros(experts, 1, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.width)
        value, chosen = self.router(flat).softmax(-1).max(-1)
        capacity, mask = len(flat) // 2, F.one_hot(chosen, self.experts).float()
        place = (mask.cumsum(0) - 1) * mask
        slot = F.one_hot(place.sum(-1).long().clamp(max=capacity - 1), capacity).float()
        # (token, expert, slot)
        dispatch = (mask * (place < capacity)).unsqueeze(-1) * slot.unsqueeze(1)
        combine = dispatch * value[:, None, None]
        if self.how == "einsum":
            inputs = torch.einsum("tec,td->ecd", dispatch, flat)
            hidden = F.gelu(torch.einsum("ecd,edf->ecf", inputs, self.up) + self.bias)
            return torch.einsum(
                "tec,ecd->td", combine, torch.einsum("ecf,efd->ecd", hidden, self.down)
            ).view_as(x)
        inputs = (dispatch.permute(1, 2, 0).reshape(-1, len(flat)) @ flat).view(
            self.experts, capacity, self.width
        )
        out = torch.bmm(F.gelu(torch.bmm(inputs, self.up) + self.bias), self.down)
        return (combine.flatten(1) @ out.reshape(-1, self.width)).view_as(x)
