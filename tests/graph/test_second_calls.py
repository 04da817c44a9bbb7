"""Which blocks may be recomputed: a second call with the same inputs must do what the first did."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.graph.capture import capture
from lightning_topt.techniques.recomputation import apply_recomputation
from tests.models import GPT, batch_for

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.setup()

    def setup(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.l(x).relu())


class Counter(Block):
    def setup(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x + self.l(x).relu() * (1 + 0.5 * self.n)


class FreshLoss(Block):
    """Stores something new in each call, as mixtures of experts do with their balancing loss."""

    aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.aux = y.square().mean()
        return x + y.relu() * torch.tensor(2.0)


class Net(L.LightningModule):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        aux = sum(block.aux for block in self.blocks if isinstance(block, FreshLoss))
        return self.head(batch).square().mean() + aux


def recomputable(module: Any, batch: Any, **kwargs: Any) -> dict[str, bool]:
    return {
        b.name: b.recomputable
        for b in capture(module, batch, **kwargs).blocks
        if b.name.startswith("blocks.")
    }


def test_transformers_with_dropout_and_autocast_are_recomputable() -> None:
    module = GPT(layers=3, dropout=0.1)
    for context in (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
    ):
        assert all(recomputable(module, batch_for(module), forward_context=context).values())
    assert all(recomputable(module.eval(), batch_for(module)).values())


# ---- as in Hugging Face's models -----------------------------------------------------------------


class Cache:
    """Keys and values of earlier calls by layer, as transformers' DynamicCache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if len(self.keys) <= layer:
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], dim=-2)
            self.values[layer] = torch.cat([self.values[layer], value], dim=-2)
        return self.keys[layer], self.values[layer]


class DecoderLayer(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        x = self.norm(hidden)
        q, k, v = (
            layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        cos, sin = kwargs["position_embeddings"]
        q, k = (t * cos + t.flip(-1) * sin for t in (q, k))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        hidden = hidden + self.o(y.transpose(1, 2).flatten(2))
        return (hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden)),)


class Llama(L.LightningModule):
    def __init__(self, use_cache: bool, mask: bool) -> None:
        super().__init__()
        self.use_cache, self.mask = use_cache, mask
        self.tokens, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList(DecoderLayer(layer) for layer in range(3))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        mask = None
        if self.mask:
            mask = (
                torch.full((tokens.shape[1],) * 2, float("-inf"))
                .triu(1)[None, None]
                .repeat(len(tokens), 1, 1, 1)
            )
            padding = batch["attention_mask"][:, None, None, :] == 0
            mask = mask.masked_fill(padding, torch.finfo(torch.float32).min)
        angles = torch.arange(tokens.shape[1]).unsqueeze(-1) / 10 ** torch.arange(8)
        positions, cache = (angles.cos(), angles.sin()), Cache() if self.use_cache else None
        hidden = self.tokens(tokens)
        for block in self.blocks:
            (hidden,) = block(
                hidden, attention_mask=mask, past_key_values=cache, position_embeddings=positions
            )
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def llama_batch() -> dict[str, Tensor]:
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": torch.arange(24).reshape(4, 6) % 20, "attention_mask": mask}


@pytest.mark.parametrize(
    "module",
    [
        Net(Block),
        Net(FreshLoss),
        Net(Counter),
        Llama(False, True),
        Llama(True, True),
        Llama(True, False),
    ],
)
def test_answers_agree_with_a_real_recomputation(module: Any) -> None:
    batch = X if isinstance(module, Net) else llama_batch()
    answer = all(recomputable(module, batch, batch_scaling=False).values())

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        module.zero_grad()
        losses = []
        for _ in range(2):  # what a recomputation leaves behind shows in the next step
            losses.append(module.training_step(batch, 0))
            losses[-1].backward()
        return [*losses, *(p.grad.clone() for p in module.parameters())]

    before = gradients()
    for block in module.blocks:
        if isinstance(block, Counter):
            block.n = 0
    names = [f"blocks.{index}" for index in range(3)]
    apply_recomputation(module, names, device=torch.device("cpu"))
    try:
        same = all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))
    except RuntimeError:  # torch's CheckpointError among them
        same = False
    assert same == answer
