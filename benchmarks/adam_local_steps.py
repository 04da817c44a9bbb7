"""Methods of `adam_compression.py` whose ranks take steps of AdamW on their own and bring their
parameters together at times.

Sizes and bytes are as in `adam_methods`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adam_methods import Method, Setting, rounded
from lightning_topt.communication.selection.chunk_top_k import Chunks, take_chunk_top_k
from lightning_topt.communication.wire import LevelFormat, MessageFormat


class LocalSteps(Method):
    """AdamW on each rank; `exchange` brings the ranks together every `every` steps and at the
    end.
    """

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
        indices = MessageFormat(self.numel, k, torch.bfloat16).nbytes - 2 * k
        self.ring(self.ranks * (indices + LevelFormat(k, self.bits, group=group).nbytes), passes=1)
        sent = torch.zeros(delta.numel())
        sent[chosen.indices.long()] = values
        return sent.view(delta.shape).mean(1)


class FewBits(LocalSteps):
    """Everything, in few bits, with error feedback on both ways: each rank's part of the mean is
    rounded by the rank that adds it up, which keeps what that takes away.
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
        self.ring(LevelFormat(self.numel, self.bits).nbytes, passes=2)
        return result


class RotatingMean(LocalSteps):
    """In every step another 1 / `parts` of the parameters becomes the mean of the ranks': no
    residual, no selection, and the same traffic in every step.
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
