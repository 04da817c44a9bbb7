"""QuantizedSteps: a few local steps, of which everything travels in a few bits.

No selection, no indices, bytes that do not grow with the number of ranks.

    delta = parameters that all agreed on - this rank's, after `every` local steps
    residual = residual + delta;  sent = residual in `bits`;  residual = residual - sent
    rank r makes part r of the mean of what all ranks sent, in `bits`, and adds W times the error
    of that rounding to its residual
    parameters = parameters - outer_learning_rate * that mean

A sum of W numbers of b bits is no number of b bits, so there is no all-reduce of them: parts are
exchanged all to all, added, rounded again and gathered, 2 (W - 1) / W times the bytes of one
message. Both roundings are fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import (
    DECODE_CALLS,
    ENCODE_CALLS,
    LocalMethod,
    Work,
)
from lightning_topt.communication.local_sgd import (
    MeanOverRanks,
    OuterGradient,
    OuterMean,
    Wait,
)
from lightning_topt.communication.wire import GROUP, LevelFormat, check_bits, warm_up_levels

BLOCK = 1 << 16  # elements of the outer gradient at a time, in the second-level cache


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
        self.size = -(-numel // (self.world_size * GROUP)) * GROUP
        starts = [rank * self.size for rank in range(self.world_size)]
        sizes = [min(max(numel - start, 0), self.size) for start in starts]
        self.forms = tuple(LevelFormat(size, bits, GROUP) for size in sizes)
        self.residual = torch.zeros(numel, device=device)
        if device.type == "cpu":
            warm_up_levels(bits)

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean, added up in rank order."""
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
        return PartsMean(messages, self.forms, self.size)

    def _sum(self, received: Tensor) -> Tensor:
        """Return the message of this rank's part of the mean.

        What rounding it takes away goes to the residual.
        """
        rank = dist.get_rank(self.group)
        form, part = self.forms[rank], self.residual[rank * self.size : (rank + 1) * self.size]
        total, message = torch.zeros_like(part), torch.zeros_like(received[0])
        for one in received:
            total.add_(form.decode(one))
        form.encode(total.div_(self.world_size), out=message)
        part.add_(total.sub_(form.decode(message)), alpha=self.world_size)
        return message


@dataclass(frozen=True)
class PartsMean:
    """A mean in consecutive parts of `size` elements: one of `messages` (ranks, bytes) for each."""

    messages: Tensor
    forms: tuple[LevelFormat, ...]
    size: int

    def add_to(self, *targets: tuple[Tensor, float]) -> None:
        """Add it to each target (n,), times the factor beside it."""
        split = [torch.split(target, self.size) for target, _ in targets]
        for message, form, *parts in zip(self.messages, self.forms, *split, strict=False):
            values = form.decode(message)
            for part, (_, factor) in zip(parts, targets, strict=True):
                part.add_(values, alpha=factor)
