"""Local steps: ranks train alone, and send how far they went once in many steps.

Three methods for `local_sgd.OuterSteps`, which says what an outer step is. With delta = parameters
that all agreed on - this rank's, after `every` local steps,

    LocalSteps      DiLoCo, arXiv 2311.08105: mean = mean of delta, whole, by one all-reduce

    SparseLoCo      arXiv 2508.15706, algorithm 1: the largest entries of every chunk, in few bits
                        residual = residual_decay * residual + delta
                        sent = the largest of each chunk;  residual = residual - sent
                    The residual that fades takes the place of the outer momentum: what one step
                    does not send pushes in the same direction later.

    QuantizedSteps  everything in few bits, which does not grow with the number of ranks
                        residual = residual + delta
                        sent = residual in `bits`;  residual = residual - sent
                    Rank r makes part r of the mean of what all ranks sent, in `bits`, and adds W
                    times the error of that rounding to its residual. A sum of W numbers of b bits
                    is no number of b bits, so parts are exchanged all to all, added, rounded again
                    and gathered: 2 (W - 1) / W times the bytes of one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    PACK_BYTES_PER_ENTRY,
    VALUE_DTYPES,
    LocalMethod,
    Work,
)
from lightning_topt.communication.local_sgd import MeanOverRanks, OuterGradient, Wait
from lightning_topt.communication.selection.chunk_top_k import (
    Chunks,
    take_chunk_top_k,
    warm_up_chunks,
)
from lightning_topt.communication.wire import (
    GROUP,
    LevelFormat,
    LevelMessage,
    check_bits,
    warm_up_levels,
    warm_up_wire,
)

# Elements of a part: on a CPU 8 MB, in the last cache until what rounding took is put back;
# elsewhere, what int32 counts.
PART, DEVICE_PART = 1 << 21, 1 << 28
BLOCK = 1 << 16  # elements of the outer gradient at a time, in the second-level cache

# ---- DiLoCo


@dataclass(frozen=True, kw_only=True)
class LocalSteps(LocalMethod):
    """Ranks train alone, then take an outer step together, with all that they have done.

    ``value_dtype``: of the values sent: "float32", "bfloat16" or "float16".
    """

    name: ClassVar[str] = "local_steps"
    value_dtype: str = "float32"

    @override
    def check(self) -> None:
        super().check()
        check_choice(self.value_dtype, name="value_dtype", allowed=VALUE_DTYPES)

    @property
    @override
    def words(self) -> str:
        return f"outer steps every {self.every} steps"

    @override
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        return DenseMean(value_dtype=getattr(torch, self.value_dtype), group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # anchor - parameters (12 n), divided (8 n), rounded; the mean is added to each target
        size, targets = getattr(torch, self.value_dtype).itemsize, 1 + bool(self.outer_momentum)
        rounded = (4 + size) * numel if size < 4 else 0
        return Work(
            (20 + 12 * targets) * numel + rounded,
            ENCODE_CALLS,
            (("world", "all_reduce", float(size * numel)),),
            buffer_bytes=(4 + (size if size < 4 else 0)) * numel,
        )


class DenseMean(MeanOverRanks):
    """One all-reduce in `value_dtype`; what rounding takes away is lost."""

    def __init__(self, *, value_dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(group=group)
        self.value_dtype = value_dtype

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> Iterator[Tensor]:
        """Yield the mean of all of it."""
        message = gradient.whole().div_(self.world_size).to(self.value_dtype)
        self.count_ring(message.nbytes, passes=2)
        wait(dist.all_reduce(message, group=self.group, async_op=True))
        yield message


# ---- SparseLoCo


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
        return ChunkMean(self, numel, device=device, group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # anchor - parameters, in the cache (8 n); the residual is read and written (8 n); the mean
        # of a part is zeroed, divided and added to each target, in the cache
        k = Chunks.of_density(numel, chunk=self.chunk, density=self.density).k
        nbytes = LevelMessage(numel, k, self.bits).nbytes
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
        self.forms = [LevelMessage(part.numel, part.k, method.bits) for part in self.parts]
        self.residual = torch.zeros(numel, device=device)
        if device.type == "cpu":
            warm_up_chunks()
            warm_up_levels(method.bits)
            warm_up_wire()

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> Iterator[Tensor]:
        """Yield the mean of what was selected, part after part."""
        # select; each part travels while the next is selected
        gathers = []
        blocks, residuals = gradient.blocks(self.size), torch.split(self.residual, self.size)
        parts = zip(blocks, residuals, self.parts, self.forms, strict=True)
        for block, residual, chunks, form in parts:
            chosen = take_chunk_top_k(block, residual, chunks, decay=self.decay)
            # (bytes,) of this rank, (ranks, bytes) of all
            message = torch.empty(form.nbytes, dtype=torch.uint8, device=residual.device)
            form.pack(chosen.values, chosen.indices, out=message)
            messages = message.new_empty((self.world_size, message.numel()))
            self.count_ring(messages.nbytes, passes=1)
            work = ring_all_gather(messages, message, group=self.group)
            gathers.append((form, messages, work))
            # while they are under way: what rounding took goes back
            residual.index_add_(0, chosen.indices, chosen.values - form.values(message))
        for _, _, work in gathers:
            wait(work)
        # add up in the order of ranks
        total = self.residual.new_empty(min(self.size, self.residual.numel()))
        for form, messages, _ in gathers:
            part = total[: form.numel].zero_()
            for message in messages:
                _, values, indices = form.unpack(message, known_finite=True)
                part.index_add_(0, indices, values)
            yield part.div_(self.world_size)


# ---- quantized steps


@dataclass(frozen=True, kw_only=True)
class QuantizedSteps(LocalMethod):
    """Ranks train alone for a few steps; an outer step adds the mean of how far they went.

    ``bits`` of each number on both ways: 1, 2, 4 or 8 (`wire`); what rounding takes away is sent
    later.
    """

    name: ClassVar[str] = "quantized_steps"
    every: int = 8
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    hierarchical: bool | None = None
    bits: int = 4

    @override
    def check(self) -> None:
        super().check()
        check_bits(self.bits)

    @property
    @override
    def words(self) -> str:
        return f"outer steps every {self.every} steps in {self.bits} bits"

    @override
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        return QuantizedMean(numel, bits=self.bits, device=device, group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        # added to the residual (16 n), encoded (4 n) and decoded there (12 n); the parts of all
        # ranks are decoded and added up (12 n), their sums encoded (16 n / ranks), and decoded
        size = -(-numel // (ranks * GROUP)) * GROUP
        sent = float(ranks * LevelFormat(size, self.bits, GROUP).nbytes)
        targets = 1 + bool(self.outer_momentum)
        return Work(
            (44 + 16 / ranks + 12 * targets) * numel,
            2 * (ENCODE_CALLS + DECODE_CALLS * ranks),
            (("world", "all_to_all", ranks * sent), ("world", "all_gather", sent)),
            kept_bytes=4 * numel,
            buffer_bytes=2 * sent + 8 * size,
        )


class QuantizedMean(MeanOverRanks):
    """The mean in few bits, by an all-to-all and an all-gather of equal parts.

    The last part may be shorter, or empty.
    """

    residual: Tensor

    def __init__(
        self, numel: int, *, bits: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(group=group)
        # a part of full groups for each rank
        self.size = -(-numel // (self.world_size * GROUP)) * GROUP
        starts = [rank * self.size for rank in range(self.world_size)]
        sizes = [min(max(numel - start, 0), self.size) for start in starts]
        self.forms = tuple(LevelFormat(size, bits, GROUP) for size in sizes)
        self.residual = torch.zeros(numel, device=device)
        if device.type == "cpu":
            warm_up_levels(bits)

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> Iterator[Tensor]:
        """Yield the mean, added up in the order of ranks, part after part."""
        # add the outer gradient to the residual, block by block in the cache
        blocks = zip(gradient.blocks(BLOCK), torch.split(self.residual, BLOCK), strict=True)
        for block, pending in blocks:
            pending.add_(block)
        # one message (bytes,) for the part of each rank; what it leaves out stays in the residual
        shape = (self.world_size, self.forms[0].nbytes)
        messages = self.residual.new_zeros(shape, dtype=torch.uint8)
        parts = torch.split(self.residual, self.size)
        for message, form, part in zip(messages, self.forms, parts, strict=False):
            form.encode(part, out=message)
            part.sub_(form.decode(message))
        # every rank receives its part of all, adds them up, and gives the sum to all
        received = torch.empty_like(messages)
        self.count_ring(messages.nbytes, passes=2)
        flat = received.view(-1), messages.view(-1)
        wait(dist.all_to_all_single(*flat, group=self.group, async_op=True))
        wait(ring_all_gather(messages, self._sum(received), group=self.group))
        for message, form in zip(messages, self.forms, strict=True):
            yield form.decode(message)

    def _sum(self, received: Tensor) -> Tensor:
        # The message of this rank's part of the mean; what rounding it takes away goes to the
        # residual.
        rank = dist.get_rank(self.group)
        form, part = self.forms[rank], self.residual[rank * self.size : (rank + 1) * self.size]
        total, message = torch.zeros_like(part), torch.zeros_like(received[0])
        for one in received:
            total.add_(form.decode(one))
        form.encode(total.div_(self.world_size), out=message)
        part.add_(total.sub_(form.decode(message)), alpha=self.world_size)
        return message
