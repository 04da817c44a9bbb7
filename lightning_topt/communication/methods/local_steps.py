"""Local steps: ranks train alone, and send how far they went once in many steps.

Two methods for `local_sgd.OuterSteps`, which says what an outer step is. With delta = parameters
that all agreed on - this rank's, after `every` local steps,

    LocalSteps   DiLoCo, arXiv 2311.08105: mean = mean of delta, all of it, by one all-reduce

    SparseLoCo   arXiv 2508.15706, algorithm 1: the largest entries of every chunk, in few bits
                     residual = residual_decay * residual + delta
                     sent = the largest of each chunk;  residual = residual - sent
                 Equal numbers from each chunk: every layer is sent at every outer step, however
                 small its gradient. The residual that fades takes the place of the outer momentum:
                 what one step does not send pushes in the same direction later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.communication import wire
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    PACK_BYTES_PER_ENTRY,
    LocalMethod,
    Work,
)
from lightning_topt.communication.local_sgd import MeanOverRanks, OuterGradient, Wait
from lightning_topt.communication.selection_kernels import take_chunks
from lightning_topt.communication.wire import SparseMessage, check_bits

# Elements of a part: on a CPU 8 MB, in the last cache until what rounding took is put back;
# elsewhere, what int32 counts.
PART, DEVICE_PART = 1 << 21, 1 << 28

# ---- DiLoCo


@dataclass(frozen=True, kw_only=True)
class LocalSteps(LocalMethod):
    """Ranks train alone, then take an outer step together, with all that they have done."""

    name: ClassVar[str] = "local_steps"

    @property
    @override
    def words(self) -> str:
        return f"outer steps every {self.every} steps"

    @override
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        return DenseMean(group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # anchor - parameters (12 n), divided (8 n); the mean is added to each target
        targets = 1 + bool(self.outer_momentum)
        return Work(
            (20 + 12 * targets) * numel,
            ENCODE_CALLS,
            (("world", "all_reduce", 4.0 * numel),),
            buffer_bytes=4 * numel,
        )


class DenseMean(MeanOverRanks):
    """One all-reduce."""

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> Iterator[Tensor]:
        """Yield the mean of all of it."""
        message = gradient.whole().div_(self.world_size)
        self.count_ring(message.nbytes, passes=2)
        wait(dist.all_reduce(message, group=self.group, async_op=True))
        yield message


# ---- SparseLoCo


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalMethod):
    """Ranks train alone; an outer step adds the mean of the largest entries of how far they went.

    - ``density``: the share of each chunk's entries that is sent;
    - ``bits``: of each value: 2, 4 or 8 (`wire`); what rounding takes away stays in the
      residual;
    - ``chunk``: elements, of parameters one after the other;
    - ``residual_decay``: what is left of the residual after an outer step.
    """

    name: ClassVar[str] = "sparse_loco"
    every: int = 15
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    hierarchical: bool | None = None
    density: float = 0.03
    bits: int = 2
    chunk: int = 4096
    residual_decay: float = 0.95

    @override
    def check(self) -> None:
        super().check()
        if not 0 < check_real(self.density, name="density") <= 1:
            raise ValueError(
                f"density is the fraction sent, above 0 and at most 1; got {self.density}"
            )
        check_bits(self.bits)
        check_whole(self.chunk, name="chunk (elements of which the share `density` is sent)")
        if not 0 <= check_real(self.residual_decay, name="residual_decay") <= 1:
            raise ValueError(f"residual_decay is from 0 to 1; got {self.residual_decay}")

    @property
    @override
    def words(self) -> str:
        return f"SparseLoCo every {self.every} steps, {100 * self.density:g} % in {self.bits} bits"

    @property
    @override
    def sent_share(self) -> float:
        return self.density

    @override
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        return ChunkMean(self, numel, device=device, group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # anchor - parameters, in the cache (8 n); the residual is read and written (8 n); the mean
        # of a part is zeroed, divided and added to each target, in the cache
        k = Chunks.of_density(numel, chunk=self.chunk, density=self.density).k
        nbytes = SparseMessage(numel, k, self.bits).nbytes
        targets = 1 + bool(self.outer_momentum)
        packed = PACK_BYTES_PER_ENTRY + DECODE_BYTES_PER_ENTRY * ranks
        return Work(
            (16 + 8 * targets) * numel + packed * k,
            ENCODE_CALLS + DECODE_CALLS * ranks,
            (("world", "all_gather", float(ranks * nbytes)),),
            kept_bytes=4 * numel,
            buffer_bytes=8 * min(numel, PART) + (1 + ranks) * nbytes,
        )


class ChunkMean(MeanOverRanks):
    """The largest entries of each chunk of the ranks' residuals.

    They travel by all-gathers of levels, codes and indices, one for each part, while the next part
    is selected.
    """

    residual: Tensor

    def __init__(
        self,
        method: SparseLoCo,
        numel: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(group=group)
        self.decay = method.residual_decay
        chunks = Chunks.of_density(numel, chunk=method.chunk, density=method.density)
        # full chunks to a part
        most = PART if device.type == "cpu" else DEVICE_PART
        self.size = max(1, most // chunks.chunk) * chunks.chunk
        sizes = [min(self.size, numel - start) for start in range(0, numel, self.size)]
        self.parts = [Chunks(size, chunks.chunk, chunks.per_chunk) for size in sizes]
        self.forms = [SparseMessage(part.numel, part.k, method.bits) for part in self.parts]
        self.residual = torch.zeros(numel, device=device)
        if device.type == "cpu":
            wire.warm_up(method.bits)
            Chunks(10, 4, 1).take(torch.zeros(10), torch.ones(10), decay=1.0)

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> Iterator[Tensor]:
        """Yield the mean of what was selected, part after part."""
        # select; each part travels while the next is selected
        gathers = []
        blocks, residuals = gradient.blocks(self.size), torch.split(self.residual, self.size)
        parts = zip(blocks, residuals, self.parts, self.forms, strict=True)
        for block, residual, chunks, form in parts:
            values, indices = chunks.take(residual, block, decay=self.decay)
            # (bytes,) of this rank, (ranks, bytes) of all
            message = torch.empty(form.nbytes, dtype=torch.uint8, device=residual.device)
            form.pack(values, indices, out=message)
            messages = message.new_empty((self.world_size, message.numel()))
            self.count_ring(messages.nbytes, passes=1)
            work = ring_all_gather(messages, message, group=self.group)
            gathers.append((form, messages, work))
            # while they are under way: what rounding took goes back
            residual.index_add_(0, indices, values - form.values(message))
        for _, _, work in gathers:
            wait(work)
        # add up in the order of ranks
        total = self.residual.new_empty(min(self.size, self.residual.numel()))
        for form, messages, _ in gathers:
            part = total[: form.numel].zero_()
            for message in messages:
                values, indices = form.unpack(message)
                part.index_add_(0, indices, values)
            yield part.div_(self.world_size)


@dataclass(frozen=True)
class Chunks:
    """Consecutive pieces of `chunk` elements of `numel`.

    Of each piece `per_chunk` entries are taken. A last piece that is shorter gives its share of
    them, rounded up.
    """

    numel: int
    chunk: int
    per_chunk: int

    @classmethod
    def of_density(cls, numel: int, *, chunk: int, density: float) -> Chunks:
        """Return chunks of which the share `density` is taken, at least one entry of each."""
        chunk = max(1, min(chunk, numel))
        return cls(numel, chunk, min(chunk, max(1, round(density * chunk))))

    @property
    def rest(self) -> int:
        """Elements of a last, shorter chunk; 0 where there is none."""
        return self.numel % self.chunk

    @property
    def of_rest(self) -> int:
        """Entries taken of the last, shorter chunk."""
        return -(-self.per_chunk * self.rest // self.chunk)

    @property
    def k(self) -> int:
        """Entries taken in all."""
        return self.numel // self.chunk * self.per_chunk + self.of_rest

    def take(self, residual: Tensor, added: Tensor, *, decay: float) -> tuple[Tensor, Tensor]:
        """Do ``residual = decay * residual + added``, and take the largest of each chunk out.

        Both are (numel,) float32. Returns values (k,) and indices (k,) int32, ascending.
        """
        if residual.device.type == "cpu":
            values, indices = np.empty(self.k, np.float32), np.empty(self.k, np.int32)
            kept = residual.numpy()
            take_chunks(
                kept, kept.view(np.int32), added.numpy(), np.float32(decay), self.chunk,
                self.per_chunk, indices, values,
            )  # fmt: skip
            return torch.from_numpy(values), torch.from_numpy(indices)
        return self.take_in_torch(residual, added, decay=decay)

    def take_in_torch(
        self, residual: Tensor, added: Tensor, *, decay: float
    ) -> tuple[Tensor, Tensor]:
        """Do what `take_chunks` does, on every device."""
        residual.mul_(decay).add_(added)
        full = self.numel - self.rest
        # full chunks (chunks, chunk), then the rest (1, rest)
        indices = torch.cat(
            [
                _largest(residual[:full].view(-1, self.chunk), self.per_chunk),
                _largest(residual[full:].view(1, -1), self.of_rest) + full,
            ]
        )
        taken = residual[indices]
        residual.index_fill_(0, indices, 0)
        return taken, indices.int()


def _largest(rows: Tensor, k: int) -> Tensor:
    # Flat indices (rows * k,), ascending, of the k largest magnitudes of each row
    columns = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    starts = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
    return (columns + starts).view(-1)
