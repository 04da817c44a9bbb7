"""Dense, BF16 and FP16: all of a gradient by one all-reduce per bucket, or by way of the nodes.

`Dense` is what DDP itself does, and what the other methods are compared with. By nodes, each rank's
shard is summed in its node, then between nodes, then gathered in the node. `BF16` and `FP16` send
16 bits of each number on every backend (torch's bf16 hook refuses gloo):

                bytes moved on the device     collectives, one after another     function
    by nodes    2 s n + 36 n / l              node reduce_scatter(s n),          Dense.work
                                              across all_reduce(s n / l),
                                              node all_gather(s n)
    16 bits     (4 s + 8) n                   all_reduce(2 n)                    HalfMethod.work
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
    together,
)
from lightning_topt.communication.exchange_method import (
    ENCODE_CALLS,
    BucketGradients,
    ByNodes,
    CompressedMethod,
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
        own.copy_(torch.div(pending.result(), self.world_size))
        # stage 1: the shard's mean over the nodes, all local ranks at once
        self.count_across(bucket.buffer.nbytes, passes=2)
        yield together(dist.all_reduce(own, group=self.groups.across, async_op=True))
        # stage 2: the other shards of the node
        yield self.node.gather_shards(bucket.buffer)
        bucket.check_finite(bucket.buffer, own=own_finite)
        return bucket.buffer

    def close(self) -> None:
        """Release shared memory."""
        self.node.close()


# ---- 16 bits


@dataclass(frozen=True, kw_only=True)
class HalfMethod(CompressedMethod):
    """The whole gradient in 16 bits."""

    dtype: ClassVar[torch.dtype]

    @property
    @override
    def words(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @override
    def make_exchange(self, context: ExchangeContext) -> HalfExchange:
        return HalfExchange(self, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        """Return the work of a 16-bit buffer.

        It is cast from what was divided, checked for infinities before and after, and copied back.
        """
        half = 2 * gradients.numel
        collectives = (("world", "all_reduce", half),)
        return Work(
            4 * gradients.nbytes + 4 * half, ENCODE_CALLS // 2, collectives, buffer_bytes=half
        )


@dataclass(frozen=True, kw_only=True)
class BF16(HalfMethod):
    """The whole gradient as bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @property
    @override
    def steps_under_adam(self) -> int:
        return 0  # within the spread of dense runs: benchmarks/results/adam_compression.md


@dataclass(frozen=True, kw_only=True)
class FP16(HalfMethod):
    """The whole gradient as float16: a finer mantissa and a smaller range than bfloat16."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


class HalfExchange(BucketExchange):
    """The mean by one all-reduce of bfloat16 or float16; the result has the gradient's own dtype.

    Stateless: what rounding takes away is lost (bfloat16 keeps 8 bits, float16 keeps 11 down to
    6e-5 and 6e-8 at the least). float16 ends at 65504: a gradient beyond that, times the number of
    ranks, counts as not finite. Gradients keep their `loss_scale` on the way.
    """

    def __init__(self, method: HalfMethod, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-reduce on ``groups.world[0]``."""
        if bucket.step < self.method.dense_steps:
            return (yield from self.dense_stages(bucket))
        # Divided before it is cast, so that the sum of all ranks overflows only where their mean
        # does; in place, because a division into another dtype takes a buffer for all of it.
        half = bucket.buffer.div_(self.world_size).to(self.method.dtype)
        own_finite = finite_flag(half)
        self.count_ring(half.nbytes, passes=2)
        yield together(dist.all_reduce(half, group=self.groups.world[0], async_op=True))
        bucket.check_finite(half, own=own_finite)
        bucket.buffer.copy_(half)
        return bucket.buffer
