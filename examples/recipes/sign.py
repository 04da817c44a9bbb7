"""Signs with error feedback: one bit per entry and a scale per parameter (arXiv 1901.09847).

Copy this file beside your program and hand its method to the strategy:

    from sign import Sign

    strategy = CompressedDDPStrategy(Sign())

Each rank sends, for every parameter,

    pending = gradient + residual;  sent = mean |pending| * sign(pending)
    residual = pending - sent

and all ranks take the mean of what was sent. Under Adam on transformers this ends worse than whole
gradients (docs/concepts/compression_quality.md). A plan cannot name this method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    ExchangeContext,
    Stages,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import FeedbackMethod
from lightning_topt.communication.wire import pack_bits, unpack_codes


@dataclass(frozen=True, kw_only=True)
class Sign(FeedbackMethod):
    """One bit per entry; `error_feedback`, `exempt` and `dense_steps` as of `TopK`."""

    name: ClassVar[str] = "sign"

    @property
    def words(self) -> str:
        return f"1 bit per entry{self.feedback_words}"

    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        return SignExchange(self, context)


class SignExchange(BucketExchange):
    """One all-gather of scales and bits for each bucket."""

    def __init__(self, method: Sign, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual: dict[str, Tensor] = {}  # parameter name -> (numel,)
        self.step = -1
        self.sent: list[tuple[Tensor, Tensor]] = []  # of `step`: residual, and what was sent of it

    def stages(self, bucket: Bucket) -> Stages:
        if bucket.step != self.step:
            self.step, self.sent = bucket.step, []
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        # exempt parameters go their own way, and leave zeros behind
        own_finite = is_finite(bucket.buffer)
        exempt = self.start_exempt(bucket)
        layout = bucket.layout
        parts = [
            (name, part)
            for name, part, is_exempt in zip(
                layout.names, layout.slices, layout.exempt, strict=True
            )
            if not is_exempt
        ]
        # scales (parameters,) float32, then all bits
        scales = torch.full((len(parts),), torch.nan, device=self.device)
        signs = torch.zeros(8 * -(-bucket.buffer.numel() // 8), dtype=torch.uint8).to(self.device)
        if own_finite:
            for index, (name, part) in enumerate(parts):
                pending = bucket.buffer[part].float() / bucket.loss_scale
                if name in self.residual:
                    pending.add_(self.residual[name])
                negative = pending < 0
                scales[index] = pending.abs().sum() / max(1, pending.numel())
                signs[part] = negative
                if self.method.error_feedback:
                    sent = torch.where(negative, -scales[index], scales[index])
                    self.residual[name] = pending.sub_(sent)
                    self.sent.append((self.residual[name], sent))
        own = torch.cat([scales.view(torch.uint8), pack_bits(signs)])
        rows = own.new_empty((self.topology.world_size, own.numel()))  # (ranks, bytes)
        self.count_ring(rows.nbytes, passes=1)
        yield together(ring_all_gather(rows, own, group=self.groups.world[0]), exempt)
        # the mean of what was sent, in the order of ranks
        everyone = rows[:, : scales.nbytes].contiguous().view(torch.float32)  # (ranks, parameters)
        if not is_finite(everyone):
            return bucket.not_finite(own_finite=own_finite)
        mean = torch.zeros(bucket.buffer.numel(), device=self.device)
        for row, of_rank in zip(rows, everyone, strict=True):
            negative = unpack_codes(row[scales.nbytes :], 1, mean.numel()).bool()
            for index, (_, part) in enumerate(parts):
                mean[part] += torch.where(negative[part], -of_rank[index], of_rank[index])
        bucket.buffer.copy_(mean.mul_(bucket.loss_scale / self.topology.world_size))
        if exempt is not None:
            exempt.finish()
        return bucket.buffer

    def put_back(self) -> None:
        for residual, sent in self.sent:
            residual.add_(sent)
        self.sent = []

    def residual_norm(self) -> float:
        return sum(float(each.norm()) ** 2 for each in self.residual.values()) ** 0.5

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"residual": {name: each.clone() for name, each in self.residual.items()}}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.sent = []
        self.residual = {
            name: each.to(self.device, torch.float32, copy=True)
            for name, each in state.get("residual", {}).items()
        }
