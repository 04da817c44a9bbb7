"""Buckets cut into parts: each has a slot of the tables and memory of its own, kept from its first
step to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.datagram import MOST_BUCKETS, MOST_PARTS
from lightning_topt.communication.bounded_loss.delivery import Handle
from lightning_topt.communication.bounded_loss.raw_memory import Array
from lightning_topt.communication.bounded_loss.shard_sum import undelivered_segments
from lightning_topt.communication.bounded_loss.tables import Tables, shard_bounds

Exact = tuple[tuple[int, int], ...]


@dataclass
class Part:
    """Elements `start` to `stop` of a bucket, in slot `slot`."""

    slot: int
    start: int
    stop: int
    total: Array  # this rank's shard of the sum
    inbox: Array  # (other ranks, elements of the shard): their contributions
    step: int = 0


@dataclass
class BucketParts:
    """All parts of a bucket; `staging` takes results where they go over the contributions."""

    numel: int
    exact: Exact
    parts: list[Part]
    staging: Array | None = None


def check_start(
    bucket: int,
    values: Array,
    out: Array | None,
    *,
    tolerance: float,
    exact: Sequence[tuple[int, int]],
    priority: int,
) -> None:
    """Raise ValueError for what cannot be exchanged."""
    for name, array in (("values", values), ("out", out)):
        if array is not None and (
            array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous
        ):
            raise ValueError(
                f"{name} is a contiguous array of float32 with one dimension; got {array.dtype} "
                f"{array.shape}"
            )
    if out is not None and (out.shape != values.shape or not out.flags.writeable):
        raise ValueError(f"out takes {len(values)} elements and can be written; got {out.shape}")
    if not 0 <= bucket < MOST_BUCKETS:
        raise ValueError(f"bucket is a number from 0 to {MOST_BUCKETS - 1}; got {bucket}")
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"tolerance is the share that may be lost, from 0 to less than 1; got {tolerance}"
        )
    if not 0 <= priority <= 3:
        raise ValueError(f"priority is 0 (last) to 3 (first); got {priority}")
    for start, stop in exact:
        if not 0 <= start <= stop <= len(values):
            raise ValueError(
                f"exact has ranges of the {len(values)} elements of a bucket; got ({start}, {stop})"
            )


def make_parts(
    t: Tables, bucket: int, numel: int, exact: Exact, *, first_slot: int, part_segments: int
) -> BucketParts:
    """Cut a bucket into parts in slots from `first_slot`, which the tables have. Raises ValueError
    where it is too long.
    """
    each, world, rank = (
        int(t.config[column]) for column in (tables.ELEMENTS, tables.WORLD, tables.RANK)
    )
    size = part_segments * each
    starts = range(0, numel, size)
    if len(starts) > MOST_PARTS:
        raise ValueError(
            f"a bucket has at most {MOST_PARTS * size} elements; got {numel}: cut it into several"
        )
    parts = []
    for index, start in enumerate(starts):
        slot, length = first_slot + index, min(size, numel - start)
        segments = -(-length // each)
        low, high = shard_bounds(segments, rank, world)
        shard = max(0, min(high * each, length) - low * each)
        part = Part(
            slot,
            start,
            start + length,
            np.empty(shard, np.float32),
            np.empty((world, shard), np.float32),
        )
        row = t.slots[slot]
        row[tables.TENSOR], row[tables.NUMEL], row[tables.SEGMENTS] = (
            bucket * MOST_PARTS + index,
            length,
            segments,
        )
        row[tables.SUM] = part.total.ctypes.data
        for peer in range(world):
            t.inboxes[slot, peer] = part.inbox[peer].ctypes.data
        t.exact[slot] = _exact_words(
            exact, start=start, each=each, segments=segments, words=t.exact.shape[1]
        )
        parts.append(part)
    return BucketParts(numel, exact, parts)


def _exact_words(exact: Exact, *, start: int, each: int, segments: int, words: int) -> Array:
    """Bits of the segments of a part that any of the ranges touches."""
    flags = np.zeros(words * 64, np.uint8)
    for low, high in exact:
        if high > low and high > start:
            first, last = max(low - start, 0) // each, (high - start - 1) // each
            flags[first : min(last + 1, segments)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint64)


def fill_slot(t: Tables, part: Part, handle: Handle, *, by_size: bool) -> None:
    """Set the row of a part for its next step."""
    row = t.slots[part.slot]
    part.step += 1
    row[tables.STEP] = part.step
    row[tables.VALUES] = handle.sent.ctypes.data + 4 * part.start
    row[tables.OUT] = handle.taken.ctypes.data + 4 * part.start
    row[tables.PRIORITY], row[tables.RESCALE] = handle.priority, handle.rescale
    row[tables.BY_SIZE] = by_size
    t.scales[part.slot] = handle.scale


def undelivered_ranges(t: Tables, part: Part, work: Array) -> list[tuple[int, int]]:
    """Return the ranges of the bucket's elements that no sum of this part has."""
    each = int(t.config[tables.ELEMENTS])
    found = undelivered_segments(t.address, part.slot, work)
    return [
        (part.start + int(segment) * each, min(part.start + (int(segment) + 1) * each, part.stop))
        for segment in work[:found]
    ]
