"""Many replicas of a byte-level GPT trained in one process: ranks of a run, and runs with other
seeds or learning rates.

Replica g of G has its own parameters, row g of P (G, n), and its own batch; one batched pass gives
all gradients (G, n). Ranks of one run are neighbours. Numbers of ranks are thus simulated exactly
(each rank has its own gradient of its own samples), on one core, without a network. The model, its
first weights, data and learning rate schedule are those of `ByteGPT`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.basics.jit import compiled
from lightning_topt.cli.tasks.byte_lm import VOCABULARY, ByteGPT, StdlibBytesDataModule

PAD = 1024  # elements: the largest tile


@dataclass(frozen=True)
class Model:
    """Sizes of the GPT."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    seq_len: int = 32

    def module(self, seed: int) -> ByteGPT:
        pl.seed_everything(seed, workers=True, verbose=False)
        return ByteGPT(self.layers, self.hidden, self.heads, self.seq_len)

    @cached_property
    def layout(self) -> dict[str, torch.Size]:
        """Parameter name -> shape, matrices first."""
        shapes = {name: p.shape for name, p in self.module(0).named_parameters()}
        return dict(sorted(shapes.items(), key=lambda item: len(item[1]) < 2))

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.layout.values())

    @property
    def matrix_numel(self) -> int:
        """Elements that are decayed."""
        return sum(shape.numel() for shape in self.layout.values() if len(shape) > 1)

    @property
    def padded(self) -> int:
        """Columns of P; those beyond `numel` stay zero."""
        return -(-self.numel // PAD) * PAD

    def initial(self, seed: int) -> Tensor:
        """First weights (padded,)."""
        parameters = dict(self.module(seed).named_parameters())
        flat = torch.cat([parameters[name].detach().reshape(-1) for name in self.layout])
        return F.pad(flat, (0, self.padded - self.numel))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> (G, *shape), views of (G, padded)."""
        sizes = [shape.numel() for shape in self.layout.values()]
        parts = torch.split(flat, [*sizes, self.padded - self.numel], dim=1)
        return {
            name: part.view(-1, *shape)
            for (name, shape), part in zip(self.layout.items(), parts[:-1], strict=True)
        }


def batched_losses(model: Model, flat: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss (G,) in nats per byte of replicas (G, padded) on their batches (G, B, S+1),
    int64.
    """
    p, (replicas, batch, _) = model.named(flat), tokens.shape
    length, hidden = model.seq_len, model.hidden

    def linear(name: str, x: Tensor) -> Tensor:
        weight = p[f"{name}.weight"].transpose(1, 2)
        bias = p.get(f"{name}.bias")
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)

    def norm(name: str, x: Tensor) -> Tensor:
        plain = F.layer_norm(x, (hidden,))
        return torch.addcmul(
            p[f"{name}.bias"].unsqueeze(1), plain, p[f"{name}.weight"].unsqueeze(1)
        )

    offset = (torch.arange(replicas) * VOCABULARY).view(-1, 1, 1)
    x = F.embedding(tokens[:, :, :-1] + offset, p["embedding.weight"].reshape(-1, hidden))
    x = (x + p["positions.weight"].unsqueeze(1)).view(replicas, -1, hidden)  # (G, B*S, H)
    for layer in range(model.layers):
        block = f"blocks.{layer}"
        heads = linear(f"{block}.query_key_value", norm(f"{block}.attention_norm", x))
        heads = heads.view(replicas * batch, length, 3, model.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(
            f"{block}.attention_out", mixed.transpose(1, 2).reshape(replicas, -1, hidden)
        )
        inner = F.gelu(linear(f"{block}.mlp_in", norm(f"{block}.mlp_norm", x)))
        x = x + linear(f"{block}.mlp_out", inner)
    logits = linear("head", norm("norm", x))
    losses = F.cross_entropy(
        logits.view(-1, VOCABULARY), tokens[:, :, 1:].reshape(-1), reduction="none"
    )
    return losses.view(replicas, -1).mean(1)


def gradients(model: Model, flat: Tensor, tokens: Tensor) -> Tensor:
    """Gradients (G, padded) of the loss of each replica."""
    leaf = flat.detach().requires_grad_()
    (found,) = torch.autograd.grad(batched_losses(model, leaf, tokens).sum(), leaf)
    return found


def rate(step: int, steps: int, *, warmup: int = 100) -> float:
    """Share of the learning rate: a linear warm-up, then a cosine to a tenth, as `ByteGPT`'s."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@dataclass(frozen=True)
class Text:
    """Training and validation bytes as windows (windows, S+1), int64."""

    train: Tensor
    validation: Tensor

    @classmethod
    def read(cls, model: Model, *, validation: int = 512) -> Text:
        data = StdlibBytesDataModule(model.seq_len, 1)
        data.setup()
        windows = []
        for part in (data.train_data, data.val_data):
            count = len(part)
            starts = torch.arange(count) * model.seq_len
            windows.append(part.data[starts.unsqueeze(1) + torch.arange(model.seq_len + 1)].long())
        every = max(1, windows[1].shape[0] // validation)
        return cls(windows[0], windows[1][::every][:validation])

    def batch(self, generators: list[np.random.Generator], *, ranks: int, size: int) -> Tensor:
        """Windows (runs * ranks, size, S+1) drawn at random, by one generator per run."""
        drawn = np.stack(
            [generator.integers(self.train.shape[0], size=ranks * size) for generator in generators]
        )
        return self.train[torch.from_numpy(drawn)].view(len(generators) * ranks, size, -1)


@torch.no_grad()
def bits_per_byte(model: Model, flat: Tensor, text: Text) -> list[float]:
    """Validation loss of every replica (G, padded)."""
    totals = torch.zeros(flat.shape[0])
    parts = text.validation.split(128)
    for part in parts:
        totals += batched_losses(model, flat, part.expand(flat.shape[0], -1, -1)) * part.shape[0]
    return [value / len(text.validation) / math.log(2) for value in totals.tolist()]


class AdamW:
    """AdamW on rows (K, n), each with its own learning rate; betas 0.9, 0.95, decay 0.1 of
    matrices, as `ByteGPT`'s.
    """

    def __init__(
        self, rows: Tensor, rates: Tensor, *, decayed: int, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self.rates, self.decayed, self.betas = rates, decayed, betas
        self.first, self.second = torch.zeros_like(rows), torch.zeros_like(rows)
        self.steps = 0

    def step(self, rows: Tensor, gradient: Tensor, *, share: float) -> None:
        """One step of `rows` in place; `share` of the learning rates."""
        self.steps += 1
        b1, b2 = self.betas
        arguments = [
            tensor.numpy()
            for tensor in (rows, gradient, self.first, self.second, self.rates * share)
        ]
        corrections = np.float32(1 - b1**self.steps), np.float32(1 - b2**self.steps)
        _adamw(*arguments, np.float32(b1), np.float32(b2), *corrections, self.decayed)


def _adamw_rows(
    rows: Any,
    gradient: Any,
    first: Any,
    second: Any,
    rates: Any,
    b1: Any,
    b2: Any,
    c1: Any,
    c2: Any,
    decayed: int,
) -> None:
    one, eps, decay = np.float32(1), np.float32(1e-8), np.float32(0.1)
    for k in range(rows.shape[0]):
        rate = rates[k]
        for i in range(rows.shape[1]):
            g = gradient[k, i]
            m = b1 * first[k, i] + (one - b1) * g
            v = b2 * second[k, i] + (one - b2) * g * g
            first[k, i], second[k, i] = m, v
            kept = one - rate * decay if i < decayed else one
            rows[k, i] = rows[k, i] * kept - rate * (m / c1) / (np.sqrt(v / c2) + eps)


_adamw = compiled(_adamw_rows, error_model="numpy")
