"""A bucket is exchanged in parts, so that the share that may be lost holds for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_topt.communication.bounded_loss import Outcome
from lightning_topt.communication.bucket import BucketLayout


class LossyPart(NamedTuple):
    """Elements `start` to `stop` of a shard, exchanged by themselves; nothing of the ranges
    `exact`, from `start`, is lost.
    """

    start: int
    stop: int
    exact: list[tuple[int, int]]


def lossy_parts(layout: BucketLayout, *, start: int, stop: int, least: float) -> list[LossyPart]:
    """Return the parts of elements `start` to `stop` of a bucket, counted from `start`.

    There is one for each parameter of at least `least` elements that is not exempt, with what lies
    between it and the next, which is not lost. So what is lost of a parameter never exceeds the
    tolerance; the smaller ones cannot lose a datagram without exceeding it.
    """
    parts: list[LossyPart] = []
    has_lossy = True  # so that the first range begins a part
    for part, exempt in zip(layout.slices, layout.exempt, strict=True):
        low, high = max(part.start, start) - start, min(part.stop, stop) - start
        if low >= high:
            continue
        lossy = not exempt and part.stop - part.start >= least
        if not parts or (lossy and has_lossy):
            parts.append(LossyPart(low, high, []))
            has_lossy = False
        last = parts[-1]
        parts[-1] = last._replace(stop=high)
        has_lossy = has_lossy or lossy
        if not lossy:
            last.exact.append((low - last.start, high - last.start))
    return parts


def joined(outcomes: Sequence[Outcome], parts: Sequence[LossyPart]) -> Outcome:
    """Return the outcomes of consecutive parts as one."""
    ranges = [outcome.ranges + part.start for outcome, part in zip(outcomes, parts, strict=True)]
    values = [outcome.values for outcome in outcomes]
    return Outcome(
        np.concatenate(ranges), np.concatenate(values), sum(outcome.numel for outcome in outcomes)
    )
