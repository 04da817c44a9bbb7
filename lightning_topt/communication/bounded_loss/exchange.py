"""Sums over ranks by datagrams, of which a stated share may get lost.

Each rank owns a shard of every bucket. Contributions go to the owners with bounded loss, owners add
them up in rank order, and the sums return complete. So all ranks hold the same bits, and each
learns which of its elements no sum has:

    exchange = connect_over_store(store, rank=rank, world_size=world_size)
    handle = exchange.start(bucket, residual, out=mean, tolerance=0.01, scale=1 / world_size)
    outcome = handle.wait()             # the mean is in `mean`
    outcome.keep_only(residual)         # what was not delivered waits for the next step

Who does what. `BoundedLossExchange.start` checks its arguments and hands the bucket to the one
thread of the exchange. That thread alone touches the socket and the tables. It lets the compiled
loop work, and comes back to Python to open parts, hand out what is done, and find ranks that are
gone. From here down, the files are:

    delivery           handles, parts of buckets, and the thread
    engine_loop        receive, act, send, sleep
    part_progress      the life of a part: the protocol, sums, bits
    sending            data: shares of the link, pace, batches, probes
    messages           the wire format, and control messages
    rate_rule          the window: how fast datagrams leave
    tables             all state, as records that Python and compiled code share
    raw_memory         addresses, records, calls of the C library

Why it is compiled. A link of 10 Gb/s carries 850,000 datagrams per second: a microsecond for each
is a few dozen bytecodes of Python. Batches leave every 120 us, while the training's Python may hold
the GIL for milliseconds. The loop runs without the GIL and calls sendmsg, recvmmsg and ppoll.

How memory is laid out. All state is in `tables.Tables`: records of named fields and arrays,
allocated before they are needed and never moved while the loop runs. Compiled code gets one
pointer, the `Root` with the address of each table. Python sees the same memory as NumPy arrays. A
bucket's elements are not copied before they leave: datagrams are read from the caller's memory, and
sums arrive in it. Contributions of others go to memory of the exchange (`delivery.Part.inbox`).
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from lightning_topt.communication.bounded_loss.delivery import (
    Exact,
    ExchangeThread,
    Handle,
    Outcome,
    check_start,
)
from lightning_topt.communication.bounded_loss.engine_loop import run_loop
from lightning_topt.communication.bounded_loss.messages import (
    DEFAULT_DATAGRAM_BYTES,
    FEWEST_DATAGRAM_BYTES,
    HEADER_BYTES,
    MOST_DATAGRAM_BYTES,
    SOL_UDP,
    SYNC,
    UDP_GRO,
    UDP_SEGMENT,
    pack_halves,
    send_control,
    unpack_halves,
)
from lightning_topt.communication.bounded_loss.part_progress import open_part, undelivered_segments
from lightning_topt.communication.bounded_loss.rate_rule import pacing_rate
from lightning_topt.communication.bounded_loss.raw_memory import SUPPORTED, Array
from lightning_topt.communication.bounded_loss.tables import Counters, Tables, make_tables

FIRST_SLOTS = 32
# bytes that are asked for; the kernel gives what its limits allow
RECEIVE_BUFFER, SEND_BUFFER = 4 << 20, 1 << 19
# of Linux: options of sockets, and of ioctl
_BUFFER_FORCE = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}  # the same beyond the limits, for root
_TIMESTAMP, _MTU, _RECEIVE_ERRORS = 35, 14, 11
_GET_ADDRESS = 0x8915  # an interface's IPv4 address
_HEADERS = 28  # bytes of IPv4 and UDP
Address = tuple[str, int, int]  # host, port, bytes of data that its receive buffer takes


@dataclass(frozen=True)
class WireOptions:
    """How datagrams travel; alike on all ranks.

    Args:
        datagram_bytes: with the header, without those of UDP and IP.
        part_bytes: buckets travel in parts of this size.
        rate: bytes per second that may leave this rank; None: found.
        offload: let the kernel cut what is sent (UDP_SEGMENT).
        bits: of a value that travels: 32, or 16 (bfloat16). Sums are made in float32, and rounded
            to 16 bits again on their way back.
    """

    datagram_bytes: int = DEFAULT_DATAGRAM_BYTES
    part_bytes: int = 4 << 20
    rate: float | None = None
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

    `lost_share` is of the elements of this rank's contributions, `path_loss` of datagrams: what
    receivers did not see, retransmissions and results included. `bytes_per_second` is the present
    rate of all that leaves, `round_trip_seconds` the mean now. `stalled_seconds` was waited for
    answers to probes that were late. `rejected` datagrams were wrong (key, size, place, source).
    """

    lost_share: float
    path_loss: float
    datagrams_sent: int
    datagrams_resent: int
    bytes_sent: int
    bytes_per_second: float
    round_trip_seconds: float
    stalled_seconds: float
    rejected: int


class BoundedLossExchange:
    """Sums buckets of float32 over `len(addresses)` ranks.

    It takes over `endpoint`. All ranks make such an exchange, in any order.

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
        t = _filled_tables(rank, addresses, key, endpoint=endpoint, wake=wake, options=self.options)
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

    def start(
        self,
        bucket: int,
        values: Array,
        *,
        out: Array,
        tolerance: float = 0.01,
        exact: Sequence[tuple[int, int]] = (),
        scale: float = 1.0,
        priority: int = 0,
    ) -> Handle:
        """Begin to sum `values` over ranks; all ranks do, with the same n.

        One step of a bucket at a time; `values` stays as it is until `wait`.

        Args:
            bucket: its number. In each step it has the same length and exact ranges.
            values: (n,) float32, this rank's contribution.
            out: (n,) float32 for the sum, in other memory.
            tolerance: share of each rank's contribution to each shard that may be left out.
            exact: ranges of elements of which nothing is left out.
            scale: what the sum is multiplied by.
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
        handle = Handle(bucket, values, out, float(tolerance), float(scale), priority)
        if self._thread is None or not len(values):
            np.multiply(values, np.float32(scale), out=out)
            handle.outcome = Outcome(
                np.empty((0, 2), np.int64), np.empty(0, np.float32), len(values)
            )
            handle.done.set()
            return handle
        if self.options.bits == 16:
            handle.packed = self._pack(bucket, values)
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
            datagrams_sent=since["sent_datagrams"],
            datagrams_resent=since["resent_datagrams"],
            bytes_sent=since["sent_bytes"],
            bytes_per_second=float(pacing_rate(t.link, int(t.config.datagram_bytes))),
            round_trip_seconds=float(np.mean([path.trip for path in others])),
            stalled_seconds=since["stalled_ns"] * 1e-9,
            rejected=since["rejected"],
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
    send_control(t.root, 1, SYNC, 0, 0, 0, 0, 8)
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
    config.halves, config.writable = options.bits == 16, 1
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


# ---- ranks that share a torch.distributed store


def connect_over_store(
    store: Any,
    *,
    rank: int,
    world_size: int,
    host: str | None = None,
    timeout_seconds: float = 60.0,
    rate: float | None = None,
    bits: int = 32,
) -> BoundedLossExchange:
    """Connect to the other ranks; all of them call this.

    Addresses, the size of datagrams and the session's key go over the store. Who reads that can
    forge datagrams, as who reaches the store can disturb any job of torch.distributed.

    Args:
        store: of torch.distributed, shared by the ranks. Its keys are unused, as those of a new
            PrefixStore are.
        rank: this rank.
        world_size: how many there are.
        host: IPv4 address that sockets bind to. None: that of the interface that
            GLOO_SOCKET_IFNAME names, else the one that MASTER_ADDR is reached from, else loopback.
        timeout_seconds: for ranks to come, and later to answer.
        rate: bytes per second at most that leave this rank.
        bits: of a value on its way, 32 or 16.

    Raises:
        DistStoreError: a rank did not come in time.
    """
    if world_size == 1:
        return BoundedLossExchange(rank, [("127.0.0.1", 0, 0)], 0, endpoint=None)

    def gathered(name: str, value: object) -> list[Any]:  # by rank
        store.set(f"{name}/{rank}", json.dumps(value))
        keys = [f"{name}/{peer}" for peer in range(world_size)]
        store.wait(keys, timedelta(seconds=timeout_seconds))
        return [json.loads(store.get(key)) for key in keys]

    endpoint = open_endpoint(host or _own_host(os.environ))
    try:
        offers = gathered("address", [*endpoint.address, secrets.randbits(64) - (1 << 63)])
        addresses: list[Address] = [(host, port, budget) for host, port, budget, _ in offers]
        others = [address for peer, address in enumerate(addresses) if peer != rank]
        sizes = gathered("datagram", endpoint.largest_datagram(others))
        return BoundedLossExchange(
            rank,
            addresses,
            offers[0][-1],
            endpoint=endpoint,
            timeout_seconds=timeout_seconds,
            options=WireOptions(min(DEFAULT_DATAGRAM_BYTES, *sizes), rate=rate, bits=bits),
        )
    except BaseException:
        endpoint.close()
        raise


# ---- the socket of one rank


@dataclass
class Endpoint:
    """A socket bound to `host`; give `address` to the other ranks.

    The kernel cuts what is sent where it `segments` (UDP_SEGMENT).
    """

    host: str
    datagrams: socket.socket
    segments: bool

    @property
    def address(self) -> Address:
        """Host, port, and bytes of data that may lie in the receive buffer."""
        # The kernel counts some 2.3 kB for a datagram of 1.5 kB.
        budget = self.datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        return self.host, self.datagrams.getsockname()[1], budget

    def largest_datagram(self, addresses: Sequence[Address]) -> int:
        """Return the bytes that a datagram to any of these addresses may have without being cut."""
        sizes = []
        for host, port, _ in addresses:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((self.host, 0))
                probe.connect((host, port))
                sizes.append(probe.getsockopt(socket.IPPROTO_IP, _MTU) - _HEADERS)
        return min(sizes)

    def close(self) -> None:
        """Close the socket."""
        self.datagrams.close()


def open_endpoint(host: str) -> Endpoint:
    """Open the socket of one rank at the IPv4 address `host`.

    Raises:
        ValueError: this machine does not have it, or does not run Linux.
    """
    if sys.platform != "linux":
        raise ValueError("the bounded-loss exchange needs Linux: choose another gradient exchange")
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        datagrams.bind((host, 0))
    except OSError as error:
        datagrams.close()
        raise ValueError(
            f"no socket can be bound to {host!r} ({error}): give the IPv4 address that the other "
            "ranks reach this one at"
        ) from None
    datagrams.setblocking(False)
    for option, size in ((socket.SO_RCVBUF, RECEIVE_BUFFER), (socket.SO_SNDBUF, SEND_BUFFER)):
        if not _try(datagrams, socket.SOL_SOCKET, _BUFFER_FORCE[option], size):
            datagrams.setsockopt(socket.SOL_SOCKET, option, size)
    _try(datagrams, socket.SOL_SOCKET, _TIMESTAMP, 1)
    # sendmsg fails when a queue of this host drops what is sent, and ICMP says who is gone
    _try(datagrams, socket.IPPROTO_IP, _RECEIVE_ERRORS, 1)
    _try(datagrams, SOL_UDP, UDP_GRO, 1)  # several datagrams may come in one piece
    return Endpoint(host, datagrams, segments=_try(datagrams, SOL_UDP, UDP_SEGMENT, 0))


def _try(of: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        of.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def _own_host(environment: Mapping[str, str]) -> str:
    """Return the IPv4 address that other ranks reach this one at.

    Raises:
        ValueError: the interface has no address, or MASTER_ADDR cannot be reached.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = environment.get("MASTER_ADDR", "")
    if not name and not master:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if name:
                interface = struct.pack("256s", name.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, interface)[20:24])
            probe.connect((master, 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError as error:
            what = (
                f"the interface {name!r} has no IPv4 address" if name else f"no way to {master!r}"
            )
            raise ValueError(f"{what} ({error}): set GLOO_SOCKET_IFNAME or MASTER_ADDR") from None
