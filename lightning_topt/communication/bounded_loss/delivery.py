"""One bucket on its way: the handle that a caller waits for, its parts, and the exchange's thread.

A bucket is cut into parts of a few MB, so that one part's sums return while the next one's
contributions leave. Each part has a slot of the tables and memory of its own, from the bucket's
first step to the end of the exchange. In each step the thread fills the slots, lets the compiled
loop work, and reads from them which of the contribution's elements no sum has.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_topt.communication.bounded_loss.engine_loop import run_loop, sleep_precisely
from lightning_topt.communication.bounded_loss.messages import (
    BODY,
    LEAVE,
    MOST_BUCKETS,
    MOST_PARTS,
    SYNC,
    send_control,
    unpack_halves,
)
from lightning_topt.communication.bounded_loss.part_progress import open_part, undelivered_segments
from lightning_topt.communication.bounded_loss.rate_rule import DEFAULT_TARGET, TARGET_SHARE
from lightning_topt.communication.bounded_loss.raw_memory import Array
from lightning_topt.communication.bounded_loss.tables import (
    IN_CONTRIBUTION,
    IN_RESULT,
    OUT_CONTRIBUTION,
    OUT_RESULT,
    RECEIVING,
    STOPPED,
    WAIT_OPEN,
    Tables,
    shard_bounds,
    with_more_slots,
)

CHECKS = 16  # for ranks that are gone, in the time limit
LEAVE_SECONDS = 5.0  # that others may still need results after `close`
REPEATS = 3  # of a message that nobody asks for again
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

    `values` and `out` are the caller's memory. With 16 bits, `packed` has the words that are sent
    and room for the words of the sums.
    """

    bucket: int
    values: Array
    out: Array
    tolerance: float
    scale: float
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
        return self.out if self.packed is None else self.packed[1]

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
    out: Array,
    *,
    tolerance: float,
    exact: Sequence[tuple[int, int]],
    priority: int,
) -> None:
    """Raise ValueError for what cannot be exchanged."""
    for name, array in (("values", values), ("out", out)):
        if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is a contiguous array of float32 with one dimension; got {array.dtype} "
                f"{array.shape}"
            )
    if (
        out.shape != values.shape
        or not out.flags.writeable
        or (len(out) and np.may_share_memory(out, values))
    ):
        raise ValueError(
            f"out takes {len(values)} elements, can be written and is not `values`; got {out.shape}"
        )
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
    """All parts of a bucket."""

    numel: int
    exact: Exact
    parts: list[Part]


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


# ---- the thread


class ExchangeThread:
    """The one thread of an exchange, which owns the tables.

    `start` and `close` are for other threads; everything else runs in this one.
    """

    def __init__(self, t: Tables, *, timeout_seconds: float, part_segments: int) -> None:
        self.t, self.timeout_seconds, self.part_segments = t, timeout_seconds, part_segments
        self._wake_file, rank = int(t.config.wake_file), int(t.config.rank)
        self._others = [peer for peer in range(len(t.peers)) if peer != rank]
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._commands: deque[tuple[Handle, Exact]] = deque()
        self._buckets: dict[int, BucketParts] = {}
        self._waiting: deque[tuple[Part, Handle]] = deque()  # until nobody needs the step before
        self._active: dict[int, tuple[Part, Handle]] = {}  # by slot
        self._closing: float | None = None  # seconds, when to leave at the latest
        self._more_to_open = False
        self._work = np.empty(part_segments + 1, np.int64)
        self._thread = threading.Thread(target=self._run, name="bounded-loss-exchange", daemon=True)
        self._thread.start()

    def start(self, handle: Handle, exact: Exact) -> None:
        """Begin a bucket's next step. Raises what ended the exchange."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closing is not None:
                raise ValueError("the exchange is closed: make another one")
            self._commands.append((handle, exact))
        self._wake()

    def close(self) -> None:
        """End the thread, once the others have what they need of this rank; within seconds."""
        with self._lock:
            if self._closing is None:
                self._closing = time.monotonic() + min(LEAVE_SECONDS, self.timeout_seconds)
        if self._thread.is_alive():
            self._wake()
            if self._thread is not threading.current_thread():
                self._thread.join(LEAVE_SECONDS + 5)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_file, 1)

    # from here on in the thread

    def _run(self) -> None:
        sleep_precisely()
        try:
            while not self._may_leave():
                pause = self.timeout_seconds / CHECKS if self._closing is None else 0.05
                pause = 0.0 if self._more_to_open else pause
                if run_loop(self.t.root, time.monotonic_ns() + int(pause * 1e9)):
                    os.eventfd_read(self._wake_file)
                self._take_commands()
                self._hand_out()
                self._open_waiting()
                self._look_for_lost()
        except Exception as error:
            self._fail(error)
        # Leave, and say which rank was lost. Nobody asks for that again: several times.
        lost = next(iter(getattr(self.error, "ranks", ())), -1)
        for _ in range(REPEATS):
            for peer in self._others:
                self._say(peer, LEAVE, lost)

    def _say(self, peer: int, kind: int, word: int) -> None:
        self.t.message[BODY : BODY + 8].view(np.int64)[0] = word
        send_control(self.t.root, peer, kind, 0, 0, 0, 0, 8)

    def _may_leave(self) -> bool:
        if self._closing is None:
            return False
        idle = not (self._commands or self._waiting or self.t.slots["active"].any())
        return idle or time.monotonic() > self._closing

    def _take_commands(self) -> None:
        while self._commands:
            handle, exact = self._commands.popleft()
            known = self._buckets.get(handle.bucket)
            if known is None:
                known = self._buckets[handle.bucket] = self._make(handle, exact)
            assert (known.numel, known.exact) == (len(handle.sent), exact)
            handle.parts_left = len(known.parts)
            self._waiting.extend((part, handle) for part in known.parts)
            if handle.tolerance > 0:
                self.t.link.target = handle.tolerance * TARGET_SHARE
            else:
                self.t.link.target = max(float(self.t.link.target), DEFAULT_TARGET)

    def _make(self, handle: Handle, exact: Exact) -> BucketParts:
        # Cut a bucket into parts at its first step, in more slots if there are too few
        first, numel = int(self.t.config.used_slots), len(handle.sent)
        needed = first + -(-numel // (int(self.t.config.segment_elements) * self.part_segments))
        if needed > len(self.t.slots):
            self.t = with_more_slots(self.t, max(needed, 2 * len(self.t.slots)))
        made = make_parts(
            self.t, handle.bucket, numel, exact, first_slot=first, part_segments=self.part_segments
        )
        self.t.config.used_slots = needed
        return made

    def _open_waiting(self) -> None:
        """Open a part whose last step nobody needs any more.

        Only one: the loop comes back for the next, so that data need not wait.
        """
        self._more_to_open = False
        active, wanted = self.t.slots["active"], self.t.slots["wanted"]
        for _ in range(len(self._waiting)):
            part, handle = self._waiting.popleft()
            if active[part.slot]:
                wanted[part.slot] = 1
                self._waiting.append((part, handle))
                continue
            fill_slot(self.t, part, handle)
            self._active[part.slot] = part, handle
            open_part(self.t.root, part.slot, handle.tolerance, time.monotonic_ns())
            self._more_to_open = bool(self._waiting)
            return

    def _hand_out(self) -> None:
        # Let go of who waits for buckets that are done
        done = self.t.slots["done"]
        for slot in [slot for slot in self._active if done[slot]]:
            part, handle = self._active.pop(slot)
            handle.lost.extend(undelivered_ranges(self.t, part, self._work))
            handle.parts_left -= 1
            if handle.parts_left == 0:
                handle.finished = time.perf_counter()
                handle.done.set()

    def _look_for_lost(self) -> None:
        # Ask ranks that are silent for a report; raise PeerSilentError once that takes too long
        t, waits = self.t, bool(self._active or self._waiting)
        if not waits and not t.slots["active"].any():
            return
        now = time.monotonic_ns()
        limit = now - self.timeout_seconds / CHECKS * 1e9
        heard, closed = t.peers["heard_ns"], t.peers["closed"]
        for peer in self._others:
            if heard[peer] < limit and not closed[peer]:
                self._say(peer, SYNC, int(t.peers[peer].next_sequence))
        if waits:
            find_lost(t, now, self.timeout_seconds)

    def _fail(self, error: Exception) -> None:
        # End all that waits with `error`
        with self._lock:
            self.error = error
            handles = {id(handle): handle for _, handle in (*self._active.values(), *self._waiting)}
            handles.update({id(handle): handle for handle, _ in self._commands})
            self._active.clear()
            self._waiting.clear()
            self._commands.clear()
        for handle in handles.values():
            handle.error = error
            handle.done.set()


# ---- who is gone, frozen or late


def find_lost(t: Tables, now: int, timeout_seconds: float) -> None:
    """Raise PeerSilentError if a part waits in vain: for a rank that is gone, silent or stuck."""
    active = np.flatnonzero(t.slots["active"]).tolist()
    # what another rank reports
    for peer, code in enumerate(t.peers["failed_rank"].tolist()):
        if code > 0:
            raise PeerSilentError(
                f"rank {code - 1} did not answer, as rank {peer} reports", (code - 1,)
            )
        if code < 0:
            bucket = int(t.slots[-1 - code].part) // MOST_PARTS
            raise PeerSilentError(
                f"bucket {bucket} has another size on rank {peer}: start the same on all ranks",
                (peer,),
            )
    # ended
    for peer in np.flatnonzero(t.peers["closed"]).tolist():
        if any(_owes(t, slot, peer) for slot in active):
            raise PeerSilentError(f"rank {peer} left the exchange, or its process ended", (peer,))
    # silent
    limit = now - int(timeout_seconds * 1e9)
    progress = t.slots["progress_ns"]
    stuck = [slot for slot in active if progress[slot] < limit]
    if not stuck:
        return
    late = [peer for peer in range(len(t.peers)) if any(_owes(t, slot, peer) for slot in stuck)]
    silent = tuple(peer for peer in late if t.peers[peer].heard_ns < limit)
    if silent:
        raise PeerSilentError(
            f"{_named(silent)} did not answer for {timeout_seconds:g} s: stopped, or unreachable "
            "from here, as where a firewall blocks UDP",
            silent,
        )
    # all answer
    bucket, part = divmod(int(t.slots[stuck[0]].part), MOST_PARTS)
    ranks, reason = _reason(t, stuck[0], tuple(late))
    raise PeerSilentError(
        f"bucket {bucket} (part {part}) did not go on for {timeout_seconds:g} s although all ranks "
        f"answer: {reason}",
        ranks,
    )


def _owes(t: Tables, slot: int, peer: int) -> bool:
    # Whether the part waits for something from `peer`
    if peer == t.config.rank:
        return False
    states = t.flows["state"][slot, peer]
    return any(states[way] == RECEIVING for way in (IN_CONTRIBUTION, IN_RESULT)) or any(
        states[way] != STOPPED for way in (OUT_CONTRIBUTION, OUT_RESULT)
    )


def _reason(t: Tables, slot: int, late: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    # Find which ranks that answer a part waits for, and for what
    flows = t.flows[slot]
    unstarted = tuple(peer for peer in late if flows[peer, OUT_CONTRIBUTION].state == WAIT_OPEN)
    if unstarted:
        return (
            unstarted,
            f"{_named(unstarted)} has not started it; if it is slow, raise the time limit",
        )
    if all(flows[peer, IN_CONTRIBUTION].received == 0 for peer in late):
        return late, f"no data of {_named(late)} arrives; the network may drop large datagrams"
    return late, f"it waits for {_named(late)}; if the network is slow, raise the time limit"


def _named(ranks: tuple[int, ...]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
