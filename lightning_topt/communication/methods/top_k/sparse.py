"""Flat sparse all-gather: every rank sends its largest entries to every other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.bucket import (
    Bucket,
    ExemptMean,
    NonFiniteGradient,
    Stages,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.methods.top_k.feedback import FeedbackExchange, ScatterMean
from lightning_topt.communication.residual import BucketResidual


class SparseExchange(FeedbackExchange):
    """Top-k with error feedback on each rank, one all-gather of packed messages, decoded in rank
    order.
    """

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-gather, or by one all-reduce of everything pending; beside
        it one all-reduce of the exempt parameters.
        """
        entry = self.store.open(bucket, start=0, stop=bucket.buffer.numel())
        exempt = self.start_exempt(bucket)
        if self.is_dense(bucket):
            return (yield from self._send_all(bucket, entry, exempt))
        form = self.message_format(bucket, start=0, stop=bucket.buffer.numel())
        message = torch.empty(form.nbytes, dtype=torch.uint8, device=bucket.buffer.device)
        self.select_into(
            message, bucket.buffer, entry=entry, form=form, scale=1 / bucket.loss_scale
        )
        rows = torch.empty(
            (self.topology.world_size, form.nbytes), dtype=torch.uint8, device=message.device
        )
        self.count_ring(rows.nbytes, passes=1)
        work = ring_all_gather(rows, message, group=self.groups.world[0])
        # zeroed meanwhile
        total = ScatterMean(bucket.buffer, scale=bucket.loss_scale / self.topology.world_size)
        yield together(work, exempt)
        if rows[:, 0].any():
            raise NonFiniteGradient(own=bool(message[0]))
        for row in rows:
            total.add(row, form=form)
        total.write()
        return self.finish(bucket, entry=entry, exempt=exempt)

    def _send_all(self, bucket: Bucket, entry: BucketResidual, exempt: ExemptMean | None) -> Stages:
        own_finite = is_finite(bucket.buffer)
        if own_finite:  # otherwise the gradient itself tells the others
            bucket.buffer.copy_(entry.everything(bucket.buffer, scale=1 / bucket.loss_scale))
            bucket.buffer.mul_(bucket.loss_scale / self.topology.world_size)
        self.count_ring(bucket.buffer.nbytes, passes=2)
        yield together(
            dist.all_reduce(bucket.buffer, group=self.groups.world[0], async_op=True), exempt
        )
        if not is_finite(bucket.buffer):
            raise NonFiniteGradient(own=not own_finite)
        return self.finish(bucket, entry=entry, exempt=exempt)

    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """This rank has it all."""
        return flat

    def sparse_seconds(self, bucket: Bucket) -> float:
        """Return the seconds of a ring of messages."""
        assert self.options.link is not None
        form = self.message_format(bucket, start=0, stop=bucket.buffer.numel())
        hops = self.topology.world_size - 1
        return hops * (
            self.options.link.latency_seconds + form.nbytes / self.options.link.bandwidth
        )

    def dense_seconds(self, bucket: Bucket) -> float:
        """Return the seconds of a ring all-reduce."""
        assert self.options.link is not None
        hops, share = (
            2 * (self.topology.world_size - 1),
            bucket.buffer.nbytes / self.topology.world_size,
        )
        return hops * (self.options.link.latency_seconds + share / self.options.link.bandwidth)
