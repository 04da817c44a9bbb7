"""A few local steps, of which everything travels in a few bits: no selection, no indices, bytes that do not grow with ranks.

    delta = parameters that all agreed on - this rank's, after `every` local steps
    residual = residual + delta;  sent = residual in `bits`;  residual = residual - sent
    part r of the mean of what all ranks sent, in `bits`, is made by rank r, which adds W times the error to its residual
    parameters = parameters - outer_learning_rate * that

A sum of W numbers of b bits is no number of b bits, so there is no all-reduce of them: parts are exchanged all to all, added,
rounded again and gathered, 2 (W - 1) / W times the bytes of one message. Both roundings are fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.levels import GROUP, LevelFormat, check_bits, warm_up_levels
from lightning_topt.communication.local_method import LocalMethod
from lightning_topt.communication.outer_gradient import OuterGradient
from lightning_topt.communication.outer_step import MeanOverRanks, OuterMean, Wait, WholeMean


class QuantizedMean(MeanOverRanks):
    """The mean in few bits, by an all-to-all and an all-gather of equal parts; the last part may be shorter, or empty."""

    residual: Tensor

    def __init__(self, numel: int, *, bits: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        super().__init__(group=group)
        self.rank = dist.get_rank(group)
        self.numel, self.part = numel, -(-numel // (self.world_size * GROUP)) * GROUP
        self.form = LevelFormat(self.part, bits, GROUP)
        self.residual = torch.zeros(numel, device=device)
        if device.type == "cpu":
            warm_up_levels(bits)

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean, added up in rank order."""
        pending = self.residual.new_zeros(self.world_size * self.part)
        torch.add(self.residual, gradient.whole(), out=pending[: self.numel])
        messages = torch.empty((self.world_size, self.form.nbytes), dtype=torch.uint8, device=pending.device)
        for message, part in zip(messages, torch.split(pending, self.part), strict=True):
            self.form.encode(part, out=message)
            part.sub_(self.form.decode(message))
        received = torch.empty_like(messages)
        self.count_ring(messages.nbytes, passes=2)
        wait(dist.all_to_all_single(received.view(-1), messages.view(-1), group=self.group, async_op=True))
        total = pending.new_zeros(self.part)
        for message in received:
            total.add_(self.form.decode(message))
        total.div_(self.world_size)
        own = torch.empty_like(messages[0])
        self.form.encode(total, out=own)
        error = total.sub_(self.form.decode(own)).mul_(self.world_size)
        pending[self.rank * self.part : (self.rank + 1) * self.part].add_(error)
        self.residual.copy_(pending[: self.numel])
        wait(ring_all_gather(messages, own, group=self.group))
        for message, part in zip(messages, torch.split(pending, self.part), strict=True):
            part.copy_(self.form.decode(message))
        return WholeMean(pending[: self.numel])


@dataclass(frozen=True, kw_only=True)
class QuantizedSteps(LocalMethod):
    """Ranks train alone for a few steps; an outer step adds the mean of how far they went.

    ``bits`` of each number on both ways: 1, 2, 4 or 8 (`levels`); what rounding takes away is sent later.
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
    def make_mean(self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None) -> MeanOverRanks:
        return QuantizedMean(numel, bits=self.bits, device=device, group=group)
