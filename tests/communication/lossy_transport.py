"""A transport that loses what a seed says: an all-reduce of what it does not lose."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_topt.communication.bounded_loss.delivery import Handle, Outcome

BLOCK = 16  # elements that are lost together


class LossyTransport:
    """Loses blocks of 16 elements by `tolerance`, none of `exact`; others in each start."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.bytes_sent, self.starts = group, 0, 0
        self.options = SimpleNamespace(values=BLOCK)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def start(
        self,
        bucket: int,
        values: Any,
        *,
        out: Any,
        tolerance: float,
        exact: Sequence[tuple[int, int]],
        scale: float,
    ) -> Handle:
        generator = np.random.default_rng([self.rank, self.starts, bucket])
        self.starts += 1
        lost = np.repeat(generator.random(-(-len(values) // BLOCK)) < tolerance, BLOCK)[
            : len(values)
        ]
        for start, stop in exact:
            lost[start:stop] = False
        total = torch.from_numpy(np.where(lost, np.float32(0), values))
        dist.all_reduce(total, group=self.group)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(np.int8), [0]]))).reshape(
            -1, 2
        )
        outcome = Outcome(edges.astype(np.int64), values[lost].copy(), len(values))
        out[:] = total.mul_(scale).numpy()
        self.bytes_sent += 4 * len(values)
        handle = Handle(bucket, values, out, tolerance, scale, 0, outcome=outcome)
        handle.done.set()
        return handle

    def statistics(self, *, reset: bool) -> Any:
        return SimpleNamespace()

    def close(self) -> None:
        pass
