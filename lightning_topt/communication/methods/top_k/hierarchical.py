"""HiTopKComm (arXiv 2010.10458, section 3.2): sum inside the node, then only the largest entries
between nodes.

(1) dense reduce-scatter in the node: each local rank has the sum of its shard; (2) error feedback
and selection on the shard; (3) all-gather among the ranks with the same local rank, all local ranks
at once; (4) sum in node order; (5) all-gather in the node: of the received messages where they are
smaller than the shards, else of the summed shards.
"""

from __future__ import annotations

from collections.abc import Generator

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
from lightning_topt.communication.exchange_context import ExchangeContext, make_node_exchange
from lightning_topt.communication.methods.top_k.feedback import FeedbackExchange, Form, ScatterMean
from lightning_topt.communication.methods.top_k.top_k_options import TopKOptions
from lightning_topt.communication.node.node_exchange import Waitable, shard_bounds
from lightning_topt.communication.residual import BucketResidual
from lightning_topt.communication.topology import Topology

Steps = Generator[Waitable, None, None]


def shares_sums(message_bytes: int, *, bucket_bytes: int, topology: Topology) -> bool:
    """Return whether stage 5 gathers the summed shards: they are smaller than the messages of all
    ranks.
    """
    return topology.world_size * message_bytes > bucket_bytes


class HierarchicalExchange(FeedbackExchange):
    """Top-k with error feedback on each rank's shard of its node's mean gradient."""

    def __init__(self, options: TopKOptions, context: ExchangeContext) -> None:
        super().__init__(options, context)
        self.node = make_node_exchange(context)

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` in three stages: in the node, between nodes, in the node."""
        topology = self.topology
        start, stop = self.bounds(bucket)[topology.local_rank]
        entry = self.store.open(bucket, start=start, stop=stop)
        exempt = self.start_exempt(bucket)
        pending = self.node.reduce_scatter(bucket.buffer)
        yield together(pending, exempt)
        shard, scale = pending.result(), 1 / (bucket.loss_scale * topology.ranks_per_node)
        if self.is_dense(bucket):
            return (yield from self._send_all(bucket, entry, exempt, shard, scale))
        forms = self.forms(bucket)
        # Equal sizes for all local ranks, although their shards may differ by an element.
        nbytes = max(form.nbytes for form in forms)
        message = torch.zeros(nbytes, dtype=torch.uint8, device=shard.device)
        self.select_into(message, shard, entry=entry, form=forms[topology.local_rank], scale=scale)
        rows = torch.empty((topology.num_nodes, nbytes), dtype=torch.uint8, device=shard.device)
        self.count_across(topology.ranks_per_node * rows.nbytes, passes=1)
        yield ring_all_gather(rows, message, group=self.groups.across)
        if shares_sums(nbytes, bucket_bytes=bucket.buffer.nbytes, topology=topology):
            yield from self._share_sums(bucket, entry, rows, forms[topology.local_rank])
        else:
            yield from self._share_messages(bucket, rows, forms)
        return self.finish(bucket, entry=entry, exempt=exempt)

    def _share_messages(self, bucket: Bucket, rows: Tensor, forms: list[Form]) -> Steps:
        """Stage 5, sparse: every rank decodes the messages (nodes, bytes) of all local ranks, in
        node order.
        """
        gathered = self.node.all_gather(rows.view(-1))
        yield gathered
        received = gathered.result().view(len(forms), *rows.shape)
        if received[:, :, 0].any():
            raise NonFiniteGradient(own=not is_finite(bucket.buffer))
        total = ScatterMean(bucket.buffer, scale=bucket.loss_scale / self.topology.num_nodes)
        for messages, form, (start, _) in zip(received, forms, self.bounds(bucket), strict=True):
            for message in messages:
                total.add(message, form=form, start=start)
        total.write()

    def _share_sums(self, bucket: Bucket, entry: BucketResidual, rows: Tensor, form: Form) -> Steps:
        """Stage 5, dense: every rank decodes the messages (nodes, bytes) of its own shard; NaN
        where one is not finite.
        """
        own_finite = is_finite(bucket.buffer)
        own = bucket.buffer[entry.start : entry.stop]
        total = ScatterMean(own, scale=bucket.loss_scale / self.topology.num_nodes)
        for message in rows:
            total.add(message, form=form)
        total.write()
        if rows[:, 0].any():
            own.fill_(torch.nan)
        yield self.node.gather_shards(bucket.buffer)
        if not is_finite(bucket.buffer):
            raise NonFiniteGradient(own=not own_finite)

    def _send_all(
        self,
        bucket: Bucket,
        entry: BucketResidual,
        exempt: ExemptMean | None,
        shard: Tensor,
        scale: float,
    ) -> Stages:
        own_finite = is_finite(bucket.buffer)
        own = bucket.buffer[entry.start : entry.stop]
        own.copy_(shard)
        if is_finite(shard):  # otherwise the sum itself tells the others
            own.copy_(entry.everything(shard, scale=scale))
            own.mul_(bucket.loss_scale / self.topology.num_nodes)
        self.count_across(bucket.buffer.nbytes, passes=2)
        work = dist.all_reduce(own, group=self.groups.across, async_op=True)
        assert work is not None
        yield work
        yield self.node.gather_shards(bucket.buffer)
        if not is_finite(bucket.buffer):
            raise NonFiniteGradient(own=not own_finite)
        return self.finish(bucket, entry=entry, exempt=exempt)

    def bounds(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Return the shards of the bucket."""
        return shard_bounds(bucket.buffer.numel(), local_size=self.topology.ranks_per_node)

    def forms(self, bucket: Bucket) -> list[Form]:
        """Return the message of every local rank."""
        return [
            self.message_format(bucket, start=start, stop=stop)
            for start, stop in self.bounds(bucket)
        ]

    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """Gather the whole residual from the ranks of the node; nothing else is in flight."""
        numel = sum(entry.layout.numels)
        whole = torch.zeros(numel, device=flat.device)
        whole[entry.start : entry.stop] = flat
        self.node.gather_shards(whole).wait()
        return whole

    def sparse_seconds(self, bucket: Bucket) -> float:
        """Return the seconds of a ring of messages between nodes, whose link all local ranks
        share.
        """
        assert self.options.link is not None
        hops = self.topology.num_nodes - 1
        nbytes = self.topology.ranks_per_node * max(form.nbytes for form in self.forms(bucket))
        return hops * (self.options.link.latency_seconds + nbytes / self.options.link.bandwidth)

    def dense_seconds(self, bucket: Bucket) -> float:
        """Return the seconds of a ring all-reduce between nodes of all shards at once."""
        assert self.options.link is not None
        hops, share = (
            2 * (self.topology.num_nodes - 1),
            bucket.buffer.nbytes / self.topology.num_nodes,
        )
        return hops * (self.options.link.latency_seconds + share / self.options.link.bandwidth)

    def close(self) -> None:
        """Release shared memory."""
        self.node.close()
