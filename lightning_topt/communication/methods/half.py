"""BF16 and FP16: whole gradients in 16 bits, on every backend (torch's bf16 hook refuses gloo).

bytes moved on the device     collectives          function
(4 s + 8) n                   all_reduce(2 n)      HalfMethod.work
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

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
    CompressedMethod,
    Work,
)
from lightning_topt.communication.topology import Topology


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
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        # Divided before it is cast, so that the sum of all ranks overflows only where their mean
        # does; in place, because a division into another dtype takes a buffer for all of it.
        half = bucket.buffer.div_(self.topology.world_size).to(self.method.dtype)
        own_finite = finite_flag(half)
        self.count_ring(half.nbytes, passes=2)
        work = dist.all_reduce(half, group=self.groups.world[0], async_op=True)
        assert work is not None
        yield work
        bucket.check_finite(half, own=own_finite)
        bucket.buffer.copy_(half)
        return bucket.buffer
