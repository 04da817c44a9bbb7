"""Ways to bring simulated ranks together, for `adam_compression.py`; the compressors are those of
the package.

V runs of R ranks; gradients (V, R, n). A method of steps updates parameters (V, n) that all ranks
share; a method of local steps changes parameters (V, R, n) now and then. `bytes` counts what a rank
of one run sends, headers included, in rings.

Here are the methods that exchange a mean gradient; `adam_local_steps` and `decoupled_momentum` have
the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.adam_simulator import AdamW, Model
from lightning_topt.communication.methods.power_sgd import orthonormal
from lightning_topt.communication.selection.chunk_top_k import Chunks, take_chunk_top_k
from lightning_topt.communication.wire import GROUP, LevelFormat, LevelMessage, MessageFormat


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

    def message(self, k: int) -> MessageFormat | LevelMessage:
        """The message of one rank."""
        return MessageFormat(self.numel, k, self.dtype)

    def sparse(self, added: Tensor, residual: Tensor, *, density: float, decay: float) -> Tensor:
        """What each rank sends of ``decay * residual + added``, (V, R, n); the bytes are
        counted.
        """
        chunks = Chunks.of_density(added.numel(), chunk=self.chunk, density=density)
        chosen = take_chunk_top_k(added.reshape(-1), residual.view(-1), chunks, decay=decay)
        form = self.message(min(self.numel, chunks.k // (self.setting.runs * self.ranks)))
        self.ring(self.ranks * form.nbytes, passes=1)
        values = torch.cat([form.round(values).float() for values in chosen.values.split(form.k)])
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

    def message(self, k: int) -> LevelMessage:
        return LevelMessage(self.numel, (k,), self.bits)


class MetricTopK(TopK):
    """Top-k in the optimizer's metric: gradients are divided by the root of the ranks' own mean
    squares before selection and error feedback, momentum comes after the exchange. The squares
    (bfloat16) are averaged every `refresh` steps.
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
    """Return `values` as they arrive when `bits` of each are sent, by the levels of
    `LevelFormat`.
    """
    return LevelFormat(values.numel(), bits).round(values.reshape(-1)).view(values.shape)


class RotatingBits(Mean):
    """Gradients in few bits, of which every step sends another 1 / `parts`, added up since it was
    sent last; AdamW sees zeros meanwhile. Error feedback on both ways, as in `FewBits`.
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
        self.ring(LevelFormat(self.numel, self.bits).nbytes / self.parts, passes=2)
        whole = torch.zeros_like(gradient[:, 0])
        whole.view(whole.shape[0], -1, GROUP)[:, step % self.parts :: self.parts] = result.view(
            whole.shape[0], -1, GROUP
        )
        return whole
