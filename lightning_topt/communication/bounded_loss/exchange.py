"""Sums over ranks by datagrams, of which a stated share may get lost.

Each rank owns a shard of every bucket. Contributions go to the owners with bounded loss, owners add
them up in rank order, and the sums return complete. So all ranks hold the same bits, and each
learns which of its elements no sum has:

    handle = exchange.start(bucket, residual, out=mean, tolerance=0.01, scale=1 / world_size)
    outcome = handle.wait()             # the mean is in `mean`
    outcome.keep_only(residual)         # what was not delivered waits for the next step

Who does what. `BoundedLossExchange.start` checks its arguments and hands the bucket to the one
thread of the exchange (`ExchangeThread`). That thread alone touches sockets and tables. It lets the
compiled loop work, and comes back to Python to open parts, hand out what is done, and find ranks
that are gone. From the loop down, the files are:

    engine_loop        receive, act, send, sleep
    part_progress      the life of a part, and the protocol: who sends what when
    sending            data: shares of the link, pace, batches, probes
    control_messages   all other messages
    rate_rule          the window: how fast datagrams leave
    shard_sum          sums and bits
    datagram           the wire format
    tables             all state, as records that Python and compiled code share
    raw_memory         addresses, records, calls of the C library

Why it is compiled. A link of 10 Gb/s carries 850,000 datagrams per second: a microsecond for each
is a few dozen bytecodes of Python. Batches leave every 120 us, while the training's Python may hold
the GIL for milliseconds. The loop runs without the GIL and calls sendmsg, recvmmsg and ppoll.

How memory is laid out. All state is in `tables.Tables`: records of named fields and arrays,
allocated before they are needed and never moved while the loop runs. Compiled code gets one
pointer, the `Root` with the address of each table. Python sees the same memory as NumPy arrays. A
bucket's elements are not copied before they leave: datagrams are read from the caller's memory, and
sums arrive in it. Contributions of others go to memory of the exchange (`delivery.Part.inbox`), and
so do sums that would overwrite what is still being sent (`delivery.Handle.staging`).
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.communication.bounded_loss.control_messages import BODY, send_control
from lightning_topt.communication.bounded_loss.datagram import (
    DEFAULT_DATAGRAM_BYTES,
    FAILED,
    FEWEST_DATAGRAM_BYTES,
    HEADER_BYTES,
    LEAVE,
    MOST_DATAGRAM_BYTES,
    MOST_PARTS,
    PING,
    pack_halves,
    unpack_halves,
)
from lightning_topt.communication.bounded_loss.delivery import (
    BucketParts,
    Exact,
    Handle,
    Outcome,
    Part,
    PeerSilentError,
    check_start,
    fill_slot,
    make_parts,
    undelivered_ranges,
)
from lightning_topt.communication.bounded_loss.endpoint import Address, Endpoint
from lightning_topt.communication.bounded_loss.engine_loop import run_loop, sleep_precisely
from lightning_topt.communication.bounded_loss.part_progress import open_part
from lightning_topt.communication.bounded_loss.rate_rule import (
    DEFAULT_TARGET,
    TARGET_SHARE,
    pacing_rate,
)
from lightning_topt.communication.bounded_loss.raw_memory import SUPPORTED, Array
from lightning_topt.communication.bounded_loss.shard_sum import undelivered_segments
from lightning_topt.communication.bounded_loss.tables import (
    IN_CONTRIBUTION,
    IN_RESULT,
    OUT_CONTRIBUTION,
    OUT_RESULT,
    RECEIVING,
    STOPPED,
    WAIT_OPEN,
    Counters,
    Tables,
    make_tables,
    with_more_slots,
)

FIRST_SLOTS = 32
CHECKS = 16  # for ranks that are gone, in the time limit
LEAVE_SECONDS = 5.0  # that others may still need results after `close`
REPEATS = 3  # of a message that nobody asks for again


@dataclass(frozen=True)
class WireOptions:
    """How datagrams travel; alike on all ranks.

    Args:
        datagram_bytes: with the header, without those of UDP and IP.
        part_bytes: buckets travel in parts of this size.
        rate: bytes per second that may leave this rank; None: found.
        mark: set DSCP and ECN.
        offload: let the kernel cut what is sent (UDP_SEGMENT).
        bits: of a value that travels: 32, or 16 (bfloat16). Sums are made in float32, and rounded
            to 16 bits again on their way back.
    """

    datagram_bytes: int = DEFAULT_DATAGRAM_BYTES
    part_bytes: int = 4 << 20
    rate: float | None = None
    mark: bool = True
    offload: bool = True
    bits: int = 32

    def __post_init__(self) -> None:
        if not FEWEST_DATAGRAM_BYTES <= self.datagram_bytes <= MOST_DATAGRAM_BYTES:
            raise ValueError(
                f"datagram_bytes lies between {FEWEST_DATAGRAM_BYTES} and {MOST_DATAGRAM_BYTES}; "
                f"got {self.datagram_bytes}"
            )
        if self.part_bytes < self.datagram_bytes:
            raise ValueError(f"part_bytes is at least one datagram; got {self.part_bytes}")
        if self.bits not in (16, 32):
            raise ValueError(f"bits of a value are 16 or 32; got {self.bits}")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"rate is in bytes per second, above 0; got {self.rate}")

    @property
    def elements(self) -> int:
        """Elements of a segment, of 32 bits each."""
        return (self.datagram_bytes - HEADER_BYTES) // 4

    @property
    def values(self) -> int:
        """Values of a segment."""
        return self.elements * 32 // self.bits

    def part_segments(self, world_size: int) -> int:
        """Segments of a part: as `part_bytes` says, but a shard's bitmap fits into one datagram."""
        wanted = self.part_bytes // (4 * self.elements)
        return max(1, min(wanted, world_size * 64 * (4 * self.elements // 8 - 1)))


@dataclass(frozen=True)
class BoundedLossStatistics:
    """Counts since the last reset, for logs.

    `lost_share` is of the elements of this rank's contributions; `path_loss`, `marked_share` are of
    datagrams. `path_loss` counts what receivers did not see, retransmissions and results included.
    `bytes_per_second` is the present rate of all that leaves, `round_trip_seconds` the mean now.
    `stalled_seconds` was waited for answers to probes that were late. `rejected` datagrams were
    wrong (key, size, place, source), `late` ones came after their part was closed.
    """

    lost_share: float
    path_loss: float
    marked_share: float
    datagrams_sent: int
    datagrams_resent: int
    bytes_sent: int
    bytes_per_second: float
    round_trip_seconds: float
    stalled_seconds: float
    probes_repeated: int
    rejected: int
    late: int
    duplicates: int


class BoundedLossExchange:
    """Sums buckets of float32 over `len(addresses)` ranks.

    It takes over `endpoint`. All ranks make theirs, in any order.

    Args:
        rank: this rank.
        addresses: those of the endpoints, by rank.
        key: the session's: 64 random bits, the same on all ranks, secret.
        endpoint: this rank's socket; None for a single rank.
        timeout_seconds: a rank that is not heard of for so long, while something waits for it, ends
            the exchange with `PeerSilentError`.
        options: how datagrams travel.

    Raises:
        ValueError: this machine cannot do it.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[Address],
        key: int,
        *,
        endpoint: Endpoint | None,
        timeout_seconds: float = 60.0,
        options: WireOptions | None = None,
    ) -> None:
        self.rank, self.world_size, self.options = rank, len(addresses), options or WireOptions()
        self._thread: ExchangeThread | None = None
        self._known: dict[int, tuple[int, Exact]] = {}  # elements and exact ranges of each bucket
        self._packed: dict[int, tuple[Array, Array]] = {}
        if self.world_size == 1:
            return
        if not SUPPORTED or endpoint is None:
            raise ValueError(
                "the bounded-loss exchange needs Linux on a 64 bit little-endian machine, and an "
                "endpoint"
            )
        load_kernels()
        wake = os.eventfd(0, os.EFD_NONBLOCK)
        t = _filled_tables(
            rank,
            addresses,
            key,
            endpoint=endpoint,
            wake=wake,
            options=self.options,
        )
        self._thread = ExchangeThread(
            t,
            timeout_seconds=timeout_seconds,
            part_segments=self.options.part_segments(self.world_size),
        )
        self._since = _snapshot(t)
        self._close = weakref.finalize(self, _close, self._thread, endpoint, wake)

    @property
    def bytes_sent(self) -> int:
        """Bytes of datagrams and control messages that left this rank, retransmissions included."""
        return 0 if self._thread is None else int(self._thread.t.counters.sent_bytes)

    @property
    def error(self) -> Exception | None:
        """The error that ended the exchange, None while it works."""
        return None if self._thread is None else self._thread.error

    def start(
        self,
        bucket: int,
        values: Array,
        *,
        out: Array | None = None,
        tolerance: float = 0.01,
        exact: Sequence[tuple[int, int]] = (),
        scale: float = 1.0,
        rescale: bool = False,
        priority: int = 0,
    ) -> Handle:
        """Begin to sum `values` over ranks; all ranks do, with the same n.

        One step of a bucket at a time; `values` stays as it is until `wait`.

        Args:
            bucket: its number. In each step it has the same length and exact ranges.
            values: (n,) float32, this rank's contribution.
            out: (n,) float32 for the sum; None: in place.
            tolerance: share of each rank's contribution to each shard that may be left out.
            exact: ranges of elements of which nothing is left out.
            scale: what the sum is multiplied by.
            rescale: multiply an element's sum by ranks / ranks that arrived.
            priority: 3 goes first, 0 last.

        Raises:
            ValueError: these arguments cannot be exchanged, or the exchange is closed.
            PeerSilentError: or whatever else ended the exchange.
        """
        check_start(bucket, values, out, tolerance=tolerance, exact=exact, priority=priority)
        words = 32 // self.options.bits  # values of each element that travels
        ranges = tuple((int(low) // words, -(-int(high) // words)) for low, high in exact)
        if self._known.setdefault(bucket, (len(values), ranges)) != (len(values), ranges):
            raise ValueError(
                f"bucket {bucket} has {self._known[bucket][0]} elements and its exact ranges in "
                "every step"
            )
        in_place = out is None or np.may_share_memory(out, values)
        target = values if out is None else out
        handle = Handle(
            bucket, values, target, None, float(tolerance), float(scale), bool(rescale), priority
        )
        if self._thread is None or not len(values):
            np.multiply(values, np.float32(scale), out=target)
            handle.outcome = Outcome(
                np.empty((0, 2), np.int64), np.empty(0, np.float32), len(values)
            )
            handle.done.set()
            return handle
        if self.options.bits == 16:
            handle.packed = self._pack(bucket, values)
        elif in_place:
            handle.staging = np.empty(0, np.float32)  # the thread has one for the bucket
        self._thread.start(handle, ranges)
        return handle

    def _pack(self, bucket: int, values: Array) -> tuple[Array, Array]:
        # The words that are sent, and room for the sums'; kept for the next step
        if bucket not in self._packed:
            words = -(-len(values) // 2)
            self._packed[bucket] = np.empty(words, np.float32), np.empty(words, np.float32)
        pack_halves(values, self._packed[bucket][0].view(np.uint32))
        return self._packed[bucket]

    def statistics(self, *, reset: bool = True) -> BoundedLossStatistics | None:
        """Return what was counted since the last reset; None for a single rank."""
        if self._thread is None:
            return None
        t = self._thread.t
        now = _snapshot(t)
        since = {name: count - self._since[name] for name, count in now.items()}
        if reset:
            self._since = now
        others = [path for peer, path in enumerate(t.paths) if peer != self.rank]
        return BoundedLossStatistics(
            lost_share=since["lost_elements"] / max(since["contributed_elements"], 1),
            path_loss=since["missing"] / max(since["sent_datagrams"], 1),
            marked_share=since["marked_datagrams"] / max(since["received_datagrams"], 1),
            datagrams_sent=since["sent_datagrams"],
            datagrams_resent=since["resent_datagrams"],
            bytes_sent=since["sent_bytes"],
            bytes_per_second=float(pacing_rate(t.link, int(t.config.datagram_bytes))),
            round_trip_seconds=float(np.mean([path.trip for path in others])),
            stalled_seconds=since["stalled_ns"] * 1e-9,
            probes_repeated=since["probes_repeated"],
            rejected=since["rejected"],
            late=since["late"],
            duplicates=since["duplicates"],
        )

    def close(self) -> None:
        """End the thread and close the sockets, after what others still need of this rank.

        May be called again.
        """
        if self._thread is not None:
            self._close()


def _close(thread: ExchangeThread, endpoint: Endpoint, wake: int) -> None:
    thread.close()
    endpoint.close()
    os.close(wake)


def _snapshot(t: Tables) -> dict[str, int]:
    # All counters, and as "missing" the datagrams that receivers reported missing
    counts = {name: int(getattr(t.counters, name)) for name in Counters.__annotations__}
    return {**counts, "missing": int(t.paths["lost"].sum())}


@functools.cache
def load_kernels() -> None:
    """Compile what the thread calls, or read it from the cache on disk, once in a process.

    The first step must not wait half a minute for it, nor other ranks for this one.
    """
    t = make_tables(world_size=2, slots=1, segments=1)
    t.config.udp_socket = t.config.wake_file = -1
    t.config.segment_elements, t.config.datagram_bytes = 1, 44
    run_loop(t.root, 0)  # the time to return is over
    open_part(t.root, 0, 0.0, 0)
    send_control(t.root, 1, PING, 0, 0, 0, 0, 0)
    undelivered_segments(t.root, 0, np.zeros(1, np.int64))
    pacing_rate(t.link, 44)
    pack_halves(np.zeros(2, np.float32), np.zeros(1, np.uint32))
    unpack_halves(np.zeros(1, np.uint32), np.zeros(2, np.float32))


def _filled_tables(
    rank: int,
    addresses: Sequence[Address],
    key: int,
    *,
    endpoint: Endpoint,
    wake: int,
    options: WireOptions,
) -> Tables:
    world_size = len(addresses)
    segments = options.part_segments(world_size)
    t = make_tables(world_size=world_size, slots=FIRST_SLOTS, segments=segments)
    config = t.config
    config.rank, config.key = rank, key
    config.udp_socket, config.wake_file = endpoint.datagrams.fileno(), wake
    config.segment_elements = options.elements
    config.datagram_bytes = HEADER_BYTES + 4 * options.elements
    config.offload = options.offload and endpoint.segments
    config.marking, config.halves, config.writable = options.mark, options.bits == 16, 1
    if options.rate is not None:
        t.link.most_rate = options.rate
    for peer, (host, port, budget) in enumerate(addresses):
        # the first 8 bytes of a struct sockaddr_in
        family = struct.pack("=H", socket.AF_INET)
        address = family + struct.pack("!H", port) + socket.inet_aton(host)
        t.sources[peer, :8] = np.frombuffer(address, np.uint8)
        if peer != rank:
            share = budget // (world_size - 1) // int(config.datagram_bytes)
            t.peers[peer].most_in_flight = share
    return t


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
        self._say(LEAVE, 0)

    def _say(self, kind: int, body: int) -> None:
        # Nobody asks for it again: several times, since some are lost.
        for _ in range(REPEATS):
            for peer in self._others:
                send_control(self.t.root, peer, kind, 0, 0, 0, 0, body)

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
            if handle.staging is not None:
                if known.staging is None:
                    known.staging = np.empty(known.numel, np.float32)
                handle.staging = known.staging
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
            self.t,
            handle.bucket,
            numel,
            exact,
            first_slot=first,
            part_segments=self.part_segments,
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
        # Ping ranks that are silent; raise PeerSilentError once that takes too long
        t, waits = self.t, bool(self._active or self._waiting)
        if not waits and not t.slots["active"].any():
            return
        now = time.monotonic_ns()
        limit = now - self.timeout_seconds / CHECKS * 1e9
        heard, closed = t.peers["heard_ns"], t.peers["closed"]
        for peer in self._others:
            if heard[peer] < limit and not closed[peer]:
                send_control(t.root, peer, PING, 0, 0, 0, 0, 0)
        if waits:
            find_lost(t, now, self.timeout_seconds)

    def _fail(self, error: Exception) -> None:
        # End all that waits with `error`, and say to the others which rank it was
        with self._lock:
            self.error = error
            handles = {id(handle): handle for _, handle in (*self._active.values(), *self._waiting)}
            handles.update({id(handle): handle for handle, _ in self._commands})
            self._active.clear()
            self._waiting.clear()
            self._commands.clear()
        for rank in error.ranks[:1] if isinstance(error, PeerSilentError) else ():
            self.t.message[BODY : BODY + 8].view(np.int64)[0] = rank
            self._say(FAILED, 8)
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
            fate = "left the exchange" if t.peers[peer].left else "is gone: its process has ended"
            raise PeerSilentError(f"rank {peer} {fate}", (peer,))
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
