"""One bucket on its way: the handle that a caller waits for, its parts, and what was not delivered.

A bucket is cut into parts of a few MB, so that one part's sums return while the next one's
contributions leave. Each part has a slot of the tables and memory of its own, from the bucket's
first step to the end of the exchange. A step fills the slots (`fill_slot`), and reads from them
which of the contribution's elements no sum has (`undelivered_ranges`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_topt.communication.bounded_loss.datagram import (
    MOST_BUCKETS,
    MOST_PARTS,
    unpack_halves,
)
from lightning_topt.communication.bounded_loss.raw_memory import Array
from lightning_topt.communication.bounded_loss.shard_sum import undelivered_segments
from lightning_topt.communication.bounded_loss.tables import Tables, shard_bounds

Exact = tuple[tuple[int, int], ...]  # ranges of elements that may not be lost


class PeerSilentError(RuntimeError):
    """Other ranks, those in `ranks`, are gone or do not answer; the exchange is over."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class Outcome:
    """Elements of this rank's contribution that no sum has.

    Args:
        ranges: (k, 2) int64, first and end of each range, ascending.
        values: float32, those of all ranges one after the other.
        numel: elements of the contribution.
    """

    ranges: Array
    values: Array
    numel: int

    @property
    def lost_share(self) -> float:
        """The share of elements that no sum has."""
        return len(self.values) / max(self.numel, 1)

    def add_to(self, residual: Array) -> None:
        """Add what was not delivered to `residual` (numel,)."""
        taken = 0
        for start, stop in self.ranges:
            residual[start:stop] += self.values[taken : taken + stop - start]
            taken += stop - start

    def keep_only(self, contribution: Array) -> None:
        """Zero what was delivered of `contribution` (numel,), which becomes the residual."""
        done = 0
        for start, stop in self.ranges:
            contribution[done:start] = 0
            done = stop
        contribution[done:] = 0


@dataclass
class Handle:
    """One step of a bucket.

    `values` and `out` are the caller's memory. `staging` is the exchange's, for sums that go over
    the contributions; None where not needed. With 16 bits, `packed` has the words that are sent and
    room for those of the sums.
    """

    bucket: int
    values: Array
    out: Array
    staging: Array | None
    tolerance: float
    scale: float
    rescale: bool
    priority: int
    parts_left: int = 0
    error: Exception | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)  # ranges, in any order
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)
    finished: float = 0.0  # when the sums were there, of `time.perf_counter`
    packed: tuple[Array, Array] | None = None

    @property
    def sent(self) -> Array:
        """What leaves this rank, in elements of 32 bits."""
        return self.values if self.packed is None else self.packed[0]

    @property
    def taken(self) -> Array:
        """Where the sums arrive, in elements of 32 bits."""
        if self.packed is not None:
            return self.packed[1]
        return self.out if self.staging is None else self.staging

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.done.is_set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the sum is in `out`; return what was not delivered.

        Raises:
            PeerSilentError: a rank is gone or does not answer.
            TimeoutError: after `timeout` seconds.
        """
        if not self.done.wait(timeout):
            raise TimeoutError(f"bucket {self.bucket} is not exchanged after {timeout:g} s")
        if self.error is not None:
            raise self.error
        if self.outcome is None:
            ranges = _merged(self.lost)
            if self.packed is not None:
                ranges = np.minimum(2 * ranges, len(self.values))
            parts = [self.values[start:stop] for start, stop in ranges]
            values = np.concatenate(parts) if parts else np.empty(0, np.float32)
            self.outcome = Outcome(ranges, values, len(self.values))
            if self.packed is not None:
                unpack_halves(self.packed[1].view(np.uint32), self.out)
            elif self.staging is not None:
                self.out[:] = self.staging
        return self.outcome


def _merged(ranges: list[tuple[int, int]]) -> Array:
    # The ranges (k, 2) ascending, those that touch as one
    merged: list[list[int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return np.array(merged, np.int64).reshape(-1, 2)


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


# ---- parts, for the thread


@dataclass
class Part:
    """Elements `start` to `stop` of a bucket, in slot `slot`."""

    slot: int
    start: int
    stop: int
    shard_sum: Array  # this rank's shard of the sum
    inbox: Array  # (ranks, elements of the shard): their contributions
    step: int = 0


@dataclass
class BucketParts:
    """All parts of a bucket; `staging` takes results where they go over the contributions."""

    numel: int
    exact: Exact
    parts: list[Part]
    staging: Array | None = None


def make_parts(
    t: Tables, bucket: int, numel: int, exact: Exact, *, first_slot: int, part_segments: int
) -> BucketParts:
    """Cut a bucket into parts, in slots from `first_slot`, which the tables have.

    Raises:
        ValueError: it is too long.
    """
    each, world, rank = int(t.config.segment_elements), int(t.config.world_size), int(t.config.rank)
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
        total, inbox = np.empty(shard, np.float32), np.empty((world, shard), np.float32)
        row = t.slots[slot]
        row.part, row.numel, row.segments = bucket * MOST_PARTS + index, length, segments
        row.shard_sum = total.ctypes.data
        for peer in range(world):
            t.inboxes[slot, peer] = inbox[peer].ctypes.data
        # bits of the segments that any of the exact ranges touches
        flags = np.zeros(t.exact.shape[1] * 64, np.uint8)
        for begin, end in exact:
            if end > begin and end > start:
                first, last = max(begin - start, 0) // each, (end - start - 1) // each
                flags[first : min(last + 1, segments)] = 1
        t.exact[slot] = np.packbits(flags, bitorder="little").view(np.uint64)
        parts.append(Part(slot, start, start + length, total, inbox))
    return BucketParts(numel, exact, parts)


def fill_slot(t: Tables, part: Part, handle: Handle) -> None:
    """Set the slot of a part for its next step."""
    slots, slot = t.slots, part.slot
    part.step += 1
    slots["step"][slot] = part.step
    slots["values"][slot] = handle.sent.ctypes.data + 4 * part.start
    slots["out"][slot] = handle.taken.ctypes.data + 4 * part.start
    slots["priority"][slot] = handle.priority
    slots["rescale"][slot] = handle.rescale
    t.scales[slot] = handle.scale


def undelivered_ranges(t: Tables, part: Part, work: Array) -> list[tuple[int, int]]:
    """Return the ranges of the bucket's elements that no sum of this part has.

    `work` has room for the numbers of a part's segments, int64.
    """
    each = int(t.config.segment_elements)
    found = undelivered_segments(t.root, part.slot, work)
    return [
        (part.start + int(segment) * each, min(part.start + (int(segment) + 1) * each, part.stop))
        for segment in work[:found]
    ]
