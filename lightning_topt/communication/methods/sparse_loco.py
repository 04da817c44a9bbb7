"""SparseLoCo: local steps, of which the largest entries of every chunk travel in 2 bits.

arXiv 2508.15706, algorithm 1:

    delta = parameters that all agreed on - this rank's, after `every` local steps
    residual = residual_decay * residual + delta
    sent = the largest of each chunk, in `bits`;  residual = residual - sent
    parameters = parameters - outer_learning_rate * mean of what all ranks sent

The residual that fades takes the place of the outer momentum: what one step does not send pushes in
the same direction later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.communication.exchange_method import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    PACK_BYTES_PER_ENTRY,
    LocalMethod,
    Work,
)
from lightning_topt.communication.local_sgd import (
    EntriesMean,
    MeanOverRanks,
    OuterGradient,
    OuterMean,
    Wait,
)
from lightning_topt.communication.selection.chunk_top_k import (
    Chunks,
    take_chunk_top_k,
    warm_up_chunks,
)
from lightning_topt.communication.wire import LevelMessage, check_bits, warm_up_levels, warm_up_wire

# Elements of a part: on a CPU 8 MB, in the last cache until what rounding took is put back;
# elsewhere, what int32 counts.
PART, DEVICE_PART = 1 << 21, 1 << 28


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalMethod):
    """Ranks train alone; an outer step adds the mean of the largest entries of how far they went.

    - ``density``: the share of each chunk's entries that is sent;
    - ``bits``: of each value: 1, 2, 4 or 8 (`wire`); what rounding takes away stays in the
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
        chunks = Chunks.of_density(numel, chunk=self.chunk, density=self.density)
        return ChunkMean(
            chunks, bits=self.bits, decay=self.residual_decay, device=device, group=group
        )

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # anchor - parameters, in the cache (8 n); the residual is read and written (8 n)
        k = Chunks.of_density(numel, chunk=self.chunk, density=self.density).k
        nbytes = LevelMessage(numel, k, self.bits).nbytes
        targets = 1 + bool(self.outer_momentum)
        packed = PACK_BYTES_PER_ENTRY + DECODE_BYTES_PER_ENTRY * ranks * targets
        return Work(
            16 * numel + packed * k,
            ENCODE_CALLS + DECODE_CALLS * ranks,
            (("world", "all_gather", float(ranks * nbytes)),),
            kept_bytes=4 * numel,
            buffer_bytes=4 * min(numel, PART) + (1 + ranks) * nbytes,
        )


class ChunkMean(MeanOverRanks):
    """The largest entries of each chunk of the ranks' residuals.

    They travel by all-gathers of levels, codes and indices, one for each part, while the next part
    is selected.
    """

    residual: Tensor

    def __init__(
        self,
        chunks: Chunks,
        *,
        bits: int,
        decay: float,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(group=group)
        self.decay = decay
        most = PART if device.type == "cpu" else DEVICE_PART
        self.size = max(1, most // chunks.chunk) * chunks.chunk  # full chunks
        starts = range(0, chunks.numel, self.size)
        sizes = [min(self.size, chunks.numel - start) for start in starts]
        self.parts = [Chunks(size, chunks.chunk, chunks.per_chunk) for size in sizes]
        self.forms = [LevelMessage(part.numel, part.k, bits) for part in self.parts]
        self.residual = torch.zeros(chunks.numel, device=device)
        if device.type == "cpu":
            warm_up_chunks()
            warm_up_levels(bits)
            warm_up_wire()

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean of what was selected."""
        # select part after part; each travels while the next is selected
        gathers = []
        blocks, residuals = gradient.blocks(self.size), torch.split(self.residual, self.size)
        parts = zip(blocks, residuals, self.parts, self.forms, strict=True)
        for block, residual, chunks, form in parts:
            chosen = take_chunk_top_k(block, residual, chunks, decay=self.decay)
            gathers.append(self.send_entries(chosen, form, residual=residual))
        for _, work in gathers:
            wait(work)
        received = zip(self.forms, gathers, strict=True)
        return EntriesMean(
            [
                (form.numel, messages, partial(form.unpack, known_finite=True))
                for form, (messages, _) in received
            ]
        )
