"""Dense gradients in 16 bits, on every backend (torch's bf16 hook refuses gloo)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_topt.communication.bucket import Bucket, BucketExchange, NonFiniteGradient, Stages, is_finite

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfExchange(BucketExchange):
    """The mean by one all-reduce of bfloat16 or float16 values; the result has the gradient's own dtype.

    Stateless: what rounding takes away is lost (bfloat16 keeps 8 bits, float16 keeps 11 down to 6e-5 and 6e-8 at the least).
    float16 ends at 65504: a gradient beyond that, times the number of ranks, counts as not finite. Gradients keep their
    `loss_scale` on the way.
    """

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-reduce on ``groups.world[0]``."""
        if self.options.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        half = torch.empty_like(bucket.buffer, dtype=HALF_DTYPES[self.options.method])
        # Divided before it is cast, so that the sum of all ranks overflows only where their mean does.
        torch.div(bucket.buffer, float(self.topology.world_size), out=half)
        own_finite = is_finite(half)
        self.count_ring(half.nbytes, passes=2)
        work = dist.all_reduce(half, group=self.groups.world[0], async_op=True)
        assert work is not None
        yield work
        if not is_finite(half):
            raise NonFiniteGradient(not own_finite)
        bucket.buffer.copy_(half)
        return bucket.buffer
