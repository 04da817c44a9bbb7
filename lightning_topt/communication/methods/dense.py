"""Dense: the whole gradient, by one all-reduce per bucket or by way of the nodes.

The first is what DDP itself does, and what the other methods are compared with. By nodes, each
rank's shard is summed in its node, then between nodes, then gathered in the node:

    bytes moved on the device     collectives, one after another              function
    2 s n + 36 n / l              node reduce_scatter(s n),                   Dense.work
                                  across all_reduce(s n / l),
                                  node all_gather(s n)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from typing_extensions import Self, override

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    ExchangeContext,
    Stages,
    finite_flag,
)
from lightning_topt.communication.exchange_method import (
    ENCODE_CALLS,
    BucketGradients,
    ByNodes,
    Work,
)
from lightning_topt.communication.node.node_exchange import make_node_exchange, shard_bounds
from lightning_topt.communication.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Dense(ByNodes):
    """The whole gradient, unchanged: what DDP itself sends.

    ``hierarchical``: summed inside each node first.
    """

    name: ClassVar[str] = "dense"
    is_exact: ClassVar[bool] = True

    @property
    @override
    def words(self) -> str:
        return "whole, summed in each node first" if self.hierarchical else "whole"

    @override
    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        by_nodes = self.sums_in_nodes(context.topology)
        return DenseByNodes(context) if by_nodes else DenseExchange(context)

    @property
    @override
    def steps_under_adam(self) -> int:
        return 0  # all of a gradient arrives

    @override
    def is_dense_step(self, step: int) -> bool:
        return True

    @override
    def choices(self, topology: Topology) -> tuple[Self, ...]:
        """Return it by nodes: without, it is what DDP does by itself, no choice of its own."""
        return tuple(choice for choice in super().choices(topology) if choice.hierarchical)

    @override
    def check_in_plan(self) -> None:
        super().check_in_plan()
        if not self.hierarchical:
            raise ValueError(
                "method 'dense' needs hierarchical: true; without it leave gradient_exchange out"
            )

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        size, local = gradients.nbytes, topology.ranks_per_node
        shard = 4 * gradients.numel / local
        collectives = (
            ("node", "reduce_scatter", size),
            ("across", "all_reduce", size / local),
            ("node", "all_gather", size),
        )
        return Work(2 * size + 9 * shard, ENCODE_CALLS, collectives, buffer_bytes=2 * shard)


class DenseExchange(BucketExchange):
    """DDP's own mean, in the exchange's thread."""

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-reduce."""
        return self.dense_stages(bucket)


class DenseByNodes(BucketExchange):
    """The same mean by way of the nodes."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self.node = make_node_exchange(context)

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` in three stages: in the node, between nodes, in the node."""
        # stage 0: this rank's shard, summed over the node
        own_finite = finite_flag(bucket.buffer)
        pending = self.node.reduce_scatter(bucket.buffer)
        yield pending
        bounds = shard_bounds(bucket.buffer.numel(), local_size=self.topology.ranks_per_node)
        own = bucket.buffer[slice(*bounds[self.topology.local_rank])]
        # Divided in float32, so that 16 bits overflow only where the mean does.
        own.copy_(torch.div(pending.result(), self.topology.world_size))
        # stage 1: the shard's mean over the nodes, all local ranks at once
        self.count_across(bucket.buffer.nbytes, passes=2)
        work = dist.all_reduce(own, group=self.groups.across, async_op=True)
        assert work is not None
        yield work
        # stage 2: the other shards of the node
        yield self.node.gather_shards(bucket.buffer)
        bucket.check_finite(bucket.buffer, own=own_finite)
        return bucket.buffer

    def close(self) -> None:
        """Release shared memory."""
        self.node.close()
