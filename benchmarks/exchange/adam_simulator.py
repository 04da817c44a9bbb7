"""Train many replicas of a byte-level GPT in one process: the ranks of several runs.

Replica g of G has its own parameters, row g of P (G, n), and its own batch. One batched pass gives
all gradients (G, n). The ranks of a run are neighbours; runs differ in seed or learning rate. Ranks
are thus simulated exactly (each has the gradient of its own samples) on one core, without a
network. The model, its first weights, data and learning rate schedule are those of `ByteGPT`.

A `Method` brings the ranks of V runs of R ranks together, with gradients (V, R, n); compressors are
those of the package. A method of steps updates parameters (V, n) that all ranks share. A method of
local steps changes parameters (V, R, n) now and then. `Method.bytes` counts what one rank of a run
sends in rings, headers included. For `benchmarks.exchange.adam_compression`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes.demo import Tiles
from examples.recipes.power_sgd import orthonormal
from lightning_topt.basics.jit import compiled
from lightning_topt.communication.methods.local_steps import Chunks
from lightning_topt.communication.selection import Selection
from lightning_topt.communication.wire import LevelFormat, SparseMessage
from lightning_topt.demo import VOCABULARY, ByteGPT, StdlibBytesDataModule

PAD = 1024  # elements: the largest tile
GROUP = 128  # values with levels of their own


def take_chunk_top_k(added: Tensor, residual: Tensor, chunks: Chunks, *, decay: float) -> Selection:
    """Do ``residual = decay * residual + added``, and take the largest of every chunk out."""
    return Selection(*chunks.take(residual, added, decay=decay))


def message_bytes(numel: int, k: int, value_bytes: int) -> int:
    """Return the bytes of a message of `k` of `numel` values."""
    return SparseMessage(numel, k).nbytes + (value_bytes - 4) * k


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
    """Return the mean loss (G,) in nats per byte of replicas (G, padded) on their batches.

    Batches `tokens` are (G, B, S+1), int64.
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
    """AdamW on rows (K, n), each with its own learning rate.

    Betas are 0.9 and 0.95, the decay of matrices is 0.1, as in `ByteGPT`.
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


# ---- methods that exchange a mean gradient -------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """`runs` of `ranks` each of a model, with learning `rates` (runs,), for `steps`."""

    model: Model
    ranks: int
    rates: tuple[float, ...]
    steps: int

    @property
    def runs(self) -> int:
        return len(self.rates)


class Method(ABC):
    """One way of training; `parameters` (V, n), or (V, R, n) where `local`."""

    local: ClassVar[bool] = False

    def __init__(self, setting: Setting, start: Tensor) -> None:
        self.setting, self.ranks, self.numel = setting, setting.ranks, setting.model.numel
        self.bytes = 0.0
        copies = setting.ranks if self.local else 1
        self.parameters = start.unsqueeze(1).repeat(1, copies, 1)
        rates = torch.tensor(setting.rates).repeat_interleave(copies)
        self.adam = AdamW(self.rows, rates, decayed=setting.model.matrix_numel)

    @property
    def rows(self) -> Tensor:
        """Parameters as rows."""
        return self.parameters.view(-1, self.parameters.shape[-1])

    def replicas(self) -> Tensor:
        """Parameters (V * R, n) of every rank."""
        if self.local:
            return self.rows
        return self.parameters.expand(-1, self.ranks, -1).reshape(-1, self.parameters.shape[-1])

    def consensus(self) -> Tensor:
        """Parameters (V, n) that are validated."""
        return self.parameters.mean(1)

    @abstractmethod
    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        """Take one step with gradients (V, R, n) and `share` of the learning rate."""

    def ring(self, nbytes: float, *, passes: int) -> None:
        """Count a ring of `nbytes` in all: a gather or reduce-scatter (1), an all-reduce (2)."""
        self.bytes += passes * (self.ranks - 1) / self.ranks * nbytes

    @property
    def traffic(self) -> float:
        """Bytes so far as a share of float32 all-reduces in every step."""
        dense = 2 * (self.ranks - 1) / self.ranks * 4 * self.numel * max(1, self.adam.steps)
        return self.bytes / dense if self.ranks > 1 else 1.0


class Mean(Method):
    """A mean gradient, then AdamW; `mean` is what is exchanged."""

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        self.adam.step(self.rows, self.mean(gradient, step).contiguous(), share=share)

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        """(V, R, n) -> (V, n); dense here."""
        self.ring(4 * self.numel, passes=2)
        return gradient.mean(1)


class Half(Mean):
    """bfloat16, rounded before and after the sum."""

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        self.ring(2 * self.numel, passes=2)
        return (gradient / self.ranks).bfloat16().float().sum(1).bfloat16().float()


class TopK(Mean):
    """The largest entries of gradient and residual; `chunk` None: of all."""

    def __init__(
        self, setting: Setting, start: Tensor, *, density: float, chunk: int | None = None,
        warmup: float = 0.0, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(setting, start)
        padded = setting.model.padded
        self.density, self.chunk, self.warmup, self.dtype = (
            density,
            chunk or padded,
            warmup * setting.steps,
            dtype,
        )
        self.residual = torch.zeros(setting.runs, setting.ranks, padded)

    def density_at(self, step: int) -> float:
        """From 0.25 down to `density` during a warm-up."""
        done = min(1.0, step / self.warmup) if self.warmup else 1.0
        return float(self.density * (0.25 / self.density) ** (1 - done))

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        return self.sparse(gradient, self.residual, density=self.density_at(step), decay=1.0).mean(
            1
        )

    def arrive(self, values: Tensor) -> Tensor:
        """Return what arrives of the values of one rank; count their bytes."""
        nbytes = message_bytes(self.numel, values.numel(), self.dtype.itemsize)
        self.ring(nbytes, passes=1)
        return values.to(self.dtype).float()

    def sparse(self, added: Tensor, residual: Tensor, *, density: float, decay: float) -> Tensor:
        """Return what each rank sends of ``decay * residual + added``, (V, R, n); count bytes."""
        chunks = Chunks.of_density(added.numel(), chunk=self.chunk, density=density)
        chosen = take_chunk_top_k(added.reshape(-1), residual.view(-1), chunks, decay=decay)
        k = min(self.numel, chunks.k // (self.setting.runs * self.ranks))
        values = torch.cat([self.arrive(values) for values in chosen.values.split(k)])
        residual.view(-1).index_add_(0, chosen.indices, chosen.values - values)
        sent = torch.zeros(added.numel())
        sent[chosen.indices.long()] = values
        return sent.view(added.shape)


class FewBitsTopK(TopK):
    """The largest entries, each in `bits`; what rounding takes away stays in the residual.

    `density` is that of all ranks together, so that traffic hardly depends on their number.
    """

    def __init__(self, setting: Setting, start: Tensor, *, density: float, bits: int) -> None:
        super().__init__(setting, start, density=density / setting.ranks)
        self.bits = bits

    def arrive(self, values: Tensor) -> Tensor:
        self.ring(SparseMessage(self.numel, values.numel(), self.bits).nbytes, passes=1)
        return LevelFormat(values.numel(), self.bits).round(values)


class MetricTopK(TopK):
    """Top-k in the optimizer's metric.

    Gradients are divided by the root of the ranks' own mean squares before selection and error
    feedback; momentum comes after the exchange. The squares (bfloat16) are averaged every `refresh`
    steps.
    """

    def __init__(
        self, setting: Setting, start: Tensor, *, refresh: int = 128, **options: float
    ) -> None:
        super().__init__(setting, start, **options)  # type: ignore[arg-type]
        self.refresh = refresh
        self.squares, self.scale = (
            torch.zeros_like(self.residual),
            torch.ones(setting.runs, 1, setting.model.padded),
        )

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        self.squares.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        if step < 16 or step % self.refresh == 0:
            self.ring(2 * self.numel, passes=2)
            mean = self.squares.mean(1, keepdim=True).bfloat16().float() / (1 - 0.95 ** (step + 1))
            self.scale = 1 / (mean.sqrt() + 1e-8)
            self.scale[:, :, self.numel :] = 0
        sent = self.sparse(
            gradient * self.scale, self.residual, density=self.density_at(step), decay=1.0
        ).mean(1)
        adam = self.adam
        adam.steps += 1
        adam.first.mul_(0.9).add_(sent, alpha=0.1)
        rates = (adam.rates * share).unsqueeze(1)
        self.rows[:, : adam.decayed].mul_(1 - 0.1 * rates)
        self.rows.sub_(rates * adam.first / (1 - 0.9**adam.steps))


class Sign(Mean):
    """One bit per entry and a scale per parameter, with error feedback."""

    def __init__(self, setting: Setting, start: Tensor) -> None:
        super().__init__(setting, start)
        self.residual = torch.zeros(setting.runs, setting.ranks, setting.model.padded)
        sizes = [shape.numel() for shape in setting.model.layout.values()]
        self.sizes = torch.tensor([*sizes, setting.model.padded - self.numel])

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        pending = self.residual.add_(gradient)
        parts = torch.split(pending.abs(), self.sizes.tolist(), dim=2)
        scales = torch.stack([part.mean(2) if part.numel() else part.sum(2) for part in parts], 2)
        sent = torch.where(pending < 0, -1.0, 1.0) * scales.repeat_interleave(self.sizes, dim=2)
        pending.sub_(sent)
        self.ring(self.ranks * (self.numel / 8 + 4 * len(self.sizes)), passes=1)
        return sent.mean(1)


class PowerSGD(Mean):
    """Factors of matrices with error feedback, vectors whole."""

    def __init__(self, setting: Setting, start: Tensor, *, rank: int = 1) -> None:
        super().__init__(setting, start)
        self.residual = torch.zeros(setting.runs, setting.ranks, setting.model.padded)
        matrices = {name: shape for name, shape in setting.model.layout.items() if len(shape) > 1}
        self.factors = {
            name: torch.randn(setting.runs, 1, shape[1], rank) for name, shape in matrices.items()
        }

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        pending = self.residual.add_(gradient)
        result, place = torch.zeros_like(gradient[:, 0]), 0
        for name, shape in self.setting.model.layout.items():
            part = slice(place, place + shape.numel())
            place = part.stop
            if name not in self.factors:
                result[:, part] = pending[:, :, part].mean(1)
                pending[:, :, part] = 0
                self.ring(4 * shape.numel(), passes=2)
                continue
            matrices = pending[:, :, part].view(*pending.shape[:2], *shape)
            p = orthonormal((matrices @ orthonormal(self.factors[name])).mean(1))
            q = (matrices.transpose(2, 3) @ p.unsqueeze(1)).mean(1)
            self.factors[name] = q.unsqueeze(1)
            product = p @ q.transpose(1, 2)
            matrices.sub_(product.unsqueeze(1))
            result[:, part] = product.reshape(result.shape[0], -1)
            self.ring(4 * (p.shape[1] + q.shape[1]) * p.shape[2], passes=2)
        return result


def rounded(values: Tensor, *, bits: int) -> Tensor:
    """Return `values` as they arrive when `bits` of each are sent (levels of `LevelFormat`)."""
    return LevelFormat(values.numel(), bits, GROUP).round(values.reshape(-1)).view(values.shape)


class RotatingBits(Mean):
    """Gradients in few bits; every step sends another 1 / `parts` of them.

    A part is added up since it was sent last; AdamW sees zeros meanwhile. Error feedback works on
    both ways, as in `FewBits`.
    """

    def __init__(self, setting: Setting, start: Tensor, *, parts: int, bits: int) -> None:
        super().__init__(setting, start)
        self.parts, self.bits = parts, bits
        self.residual = torch.zeros(setting.runs, setting.ranks, setting.model.padded)

    def mean(self, gradient: Tensor, step: int) -> Tensor:
        self.residual.add_(gradient)
        blocks = self.residual.view(*self.residual.shape[:2], -1, GROUP)[
            :, :, step % self.parts :: self.parts
        ]
        pending = blocks.reshape(*blocks.shape[:2], -1)
        sent = rounded(pending, bits=self.bits)
        mean = sent.mean(1)
        result = rounded(mean, bits=self.bits)
        pending = pending - sent
        size = -(-mean.shape[1] // self.ranks)
        for rank in range(self.ranks):
            own = slice(rank * size, (rank + 1) * size)
            pending[:, rank, own].add_((mean - result)[:, own], alpha=self.ranks)
        blocks.copy_(pending.view(blocks.shape))
        self.ring(LevelFormat(self.numel, self.bits, GROUP).nbytes / self.parts, passes=2)
        whole = torch.zeros_like(gradient[:, 0])
        whole.view(whole.shape[0], -1, GROUP)[:, step % self.parts :: self.parts] = result.view(
            whole.shape[0], -1, GROUP
        )
        return whole


# ---- methods whose ranks take steps of AdamW on their own and average their parameters at times --


class LocalSteps(Method):
    """AdamW on each rank; `exchange` averages the ranks every `every` steps and at the end."""

    local = True

    def __init__(
        self,
        setting: Setting,
        start: Tensor,
        *,
        every: int,
        outer_rate: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__(setting, start)
        self.every, self.outer_rate, self.outer_momentum = every, outer_rate, outer_momentum
        self.anchor, self.momentum = start.clone(), torch.zeros_like(start)

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        self.adam.step(self.rows, gradient.view(self.rows.shape), share=share)
        last = step + 1 == self.setting.steps
        if (step + 1) % self.every == 0 or last:
            mean = self.exchange(self.anchor.unsqueeze(1) - self.parameters)
            self.momentum.mul_(self.outer_momentum).add_(mean)
            self.anchor.sub_(self.outer_rate * (mean + self.outer_momentum * self.momentum))
            self.parameters.copy_(self.anchor.unsqueeze(1))

    def consensus(self) -> Tensor:
        """What all ranks last agreed on."""
        return self.anchor

    def exchange(self, delta: Tensor) -> Tensor:
        """(V, R, n) -> (V, n): the mean, dense here."""
        self.ring(4 * self.numel, passes=2)
        return delta.mean(1)


class SparseLoCo(LocalSteps):
    """The largest entries of each chunk, in 2 bits, of a residual that decays."""

    def __init__(
        self, setting: Setting, start: Tensor, *, every: int, density: float, decay: float = 0.95,
        bits: int = 2, chunk: int = 1024, outer_rate: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(setting, start, every=every, outer_rate=outer_rate)
        self.density, self.decay, self.bits, self.chunk = density, decay, bits, chunk
        self.residual = torch.zeros_like(self.parameters)

    def exchange(self, delta: Tensor) -> Tensor:
        chunks = Chunks.of_density(delta.numel(), chunk=self.chunk, density=self.density)
        chosen = take_chunk_top_k(
            delta.reshape(-1), self.residual.view(-1), chunks, decay=self.decay
        )
        k = min(self.numel, chunks.k // (self.setting.runs * self.ranks))
        group = max(64, chunks.per_chunk)
        values = LevelFormat(chosen.values.numel(), self.bits, group=group).round(chosen.values)
        self.residual.view(-1).index_add_(0, chosen.indices, chosen.values - values)
        indices = message_bytes(self.numel, k, 0)
        self.ring(self.ranks * (indices + LevelFormat(k, self.bits, group=group).nbytes), passes=1)
        sent = torch.zeros(delta.numel())
        sent[chosen.indices.long()] = values
        return sent.view(delta.shape).mean(1)


class FewBits(LocalSteps):
    """All parameters in few bits, with error feedback on both ways.

    Each rank's part of the mean is rounded by the rank that adds it up, which keeps the error.
    """

    def __init__(
        self,
        setting: Setting,
        start: Tensor,
        *,
        every: int,
        bits: int,
        decay: float = 1.0,
        outer_rate: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__(
            setting, start, every=every, outer_rate=outer_rate, outer_momentum=outer_momentum
        )
        self.bits, self.decay = bits, decay
        self.residual = torch.zeros_like(self.parameters)

    def exchange(self, delta: Tensor) -> Tensor:
        self.residual.mul_(self.decay).add_(delta)
        sent = rounded(self.residual, bits=self.bits)
        self.residual.sub_(sent)
        mean = sent.mean(1)
        result = rounded(mean, bits=self.bits)
        size = mean.shape[1] // self.ranks
        for rank in range(self.ranks):
            own = slice(rank * size, (rank + 1) * size)
            self.residual[:, rank, own].add_((mean - result)[:, own], alpha=self.ranks)
        self.ring(LevelFormat(self.numel, self.bits, GROUP).nbytes, passes=2)
        return result


class RotatingMean(LocalSteps):
    """In every step another 1 / `parts` of the parameters becomes the mean of the ranks.

    There is no residual and no selection, and every step has the same traffic.
    """

    def __init__(
        self, setting: Setting, start: Tensor, *, parts: int, value_bytes: int = 2
    ) -> None:
        super().__init__(setting, start, every=setting.steps)
        self.parts, self.value_bytes = parts, value_bytes

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        self.adam.step(self.rows, gradient.view(self.rows.shape), share=share)
        last = step + 1 == self.setting.steps
        part = slice(0, None) if last else slice(step % self.parts, None, self.parts)
        went = self.parameters[:, :, part] - self.anchor[:, None, part]
        if self.value_bytes == 2 and not last:
            went = went.bfloat16().float()
        self.anchor[:, part] += went.mean(1)
        self.parameters[:, :, part] = self.anchor[:, None, part]
        self.ring(
            (4 if last else self.value_bytes) * (self.numel if last else self.numel / self.parts),
            passes=2,
        )

    def consensus(self) -> Tensor:
        return self.parameters.mean(1)


# ---- DeMo: ranks keep their momentum, except for what they send of it ----------------------------


class DeMo(Method):
    """Momentum of each rank in the cosine basis; its largest coefficients are sent.

    What is sent is taken out of the momentum, and the sign of the ranks' sum is applied. `density`
    is that of all ranks together, so that traffic is the same for any number of them. `applied`:
    "sign" (times the learning rate, the paper's), "adam" (AdamW of the signs), "sum" (AdamW of the
    sum itself).
    """

    def __init__(
        self, setting: Setting, start: Tensor, *, density: float, decay: float = 0.999,
        tile: int = 32, applied: str = "sign", bits: int = 16, cosine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(setting, start)
        self.density, self.decay, self.applied, self.bits = (
            density / setting.ranks,
            decay,
            applied,
            bits,
        )
        self.momentum = torch.zeros(setting.runs, setting.ranks, setting.model.padded)
        places = [0]
        for shape in setting.model.layout.values():
            places.append(places[-1] + shape.numel())
        shapes = setting.model.layout.values()
        self.tiles = [
            (slice(a, b), Tiles.of_shape(s, limit=tile))
            for (a, b), s in zip(pairwise(places), shapes, strict=True)
        ]
        self.tiles = self.tiles if cosine else []
        self.chunk = tile * tile

    def transform(self, x: Tensor, *, back: bool = False) -> Tensor:
        """To the cosine basis and back, parameter by parameter."""
        result = x.clone()
        for part, tiles in self.tiles:
            values = x[..., part]
            result[..., part] = tiles.decode(values.contiguous()) if back else tiles.encode(values)
        return result

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        added = self.transform(gradient)
        chunks = Chunks.of_density(added.numel(), chunk=self.chunk, density=self.density)
        chosen = take_chunk_top_k(added.view(-1), self.momentum.view(-1), chunks, decay=self.decay)
        values = chosen.values.bfloat16().float()
        k = min(self.numel, chunks.k // (self.setting.runs * self.ranks))
        nbytes = message_bytes(self.numel, k, 2)
        if self.bits < 16:
            levels = LevelFormat(chosen.values.numel(), self.bits, group=max(64, chunks.per_chunk))
            values = levels.round(chosen.values)
            nbytes += LevelFormat(k, self.bits, group=levels.group).nbytes - 2 * k
        self.momentum.view(-1).index_add_(0, chosen.indices, chosen.values - values)
        self.ring(self.ranks * nbytes, passes=1)
        sent = torch.zeros(added.numel())
        sent[chosen.indices.long()] = values
        update = self.transform(sent.view(added.shape).sum(1), back=True)
        update[:, self.numel :] = 0
        if self.applied != "sign":
            self.adam.step(
                self.rows, update.sign() if self.applied == "adam" else update, share=share
            )
            return
        self.adam.steps += 1
        rates = (self.adam.rates * share).unsqueeze(1)
        self.rows[:, : self.adam.decayed].mul_(1 - 0.1 * rates)
        self.rows.sub_(rates * update.sign())
