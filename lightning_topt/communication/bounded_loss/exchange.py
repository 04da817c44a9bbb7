"""Sums over ranks by datagrams, of which a stated share may get lost."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.datagram import (
    DEFAULT_DATAGRAM_BYTES,
    FEWEST_DATAGRAM_BYTES,
    HEADER_BYTES,
    MOST_DATAGRAM_BYTES,
)
from lightning_topt.communication.bounded_loss.delivery import Handle, Outcome
from lightning_topt.communication.bounded_loss.endpoint import (
    Address,
    Endpoint,
    SideChannels,
    connect_side_channels,
)
from lightning_topt.communication.bounded_loss.exchange_parts import Exact, check_start
from lightning_topt.communication.bounded_loss.exchange_thread import ExchangeThread
from lightning_topt.communication.bounded_loss.kernels_loaded import load_kernels
from lightning_topt.communication.bounded_loss.loss_statistics import (
    BoundedLossStatistics,
    snapshot,
    take_statistics,
)
from lightning_topt.communication.bounded_loss.packed_halves import pack_halves
from lightning_topt.communication.bounded_loss.rate_rule import MOST_RATE
from lightning_topt.communication.bounded_loss.raw_memory import SUPPORTED, Array
from lightning_topt.communication.bounded_loss.tables import Tables, make_tables

FIRST_SLOTS = 32


@dataclass(frozen=True)
class WireOptions:
    """`WireOptions` say how datagrams travel; alike on all ranks.

    `datagram_bytes` with the header, without those of UDP and IP; buckets travel in parts of
    `part_bytes`; `rate`: bytes per second that may leave this rank, None: found; `mark`: set DSCP
    and ECN; `by_size`: blocks of large entries get the lower drop precedence; `offload`: let the
    kernel cut what is sent (UDP_SEGMENT); `bits` of a value that travels: 32, or 16 (bfloat16; sums
    are made in float32, and rounded to 16 bits again on their way back).
    """

    datagram_bytes: int = DEFAULT_DATAGRAM_BYTES
    part_bytes: int = 4 << 20
    rate: float | None = None
    mark: bool = True
    by_size: bool = True
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


class BoundedLossExchange:
    """Sums buckets of float32 over `len(addresses)` ranks. Making one is collective: all ranks
    connect to each other.

    `addresses` are the endpoints' by rank, `key` the session's (64 random bits, the same on all
    ranks, secret). A rank that is not heard of for `timeout_seconds` while something waits for it
    ends the exchange with `PeerSilentError`. Takes over `endpoint`. Raises ConnectionFailedError.
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
        self._refused = 0
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
        channels = connect_side_channels(
            rank,
            endpoint=endpoint,
            addresses=addresses,
            key=key,
            datagram_bytes=HEADER_BYTES + 4 * self.options.elements,
            timeout_seconds=timeout_seconds,
        )
        endpoint.listener.close()
        self._refused = channels.refused
        wake = os.eventfd(0, os.EFD_NONBLOCK)
        t = _filled_tables(
            rank,
            addresses,
            key,
            endpoint=endpoint,
            channels=channels,
            wake=wake,
            options=self.options,
        )
        self._thread = ExchangeThread(
            t,
            timeout_seconds=timeout_seconds,
            part_segments=self.options.part_segments(self.world_size),
            by_size=self.options.by_size and self.options.mark,
        )
        self._since = snapshot(t)
        self._close = weakref.finalize(self, _close, self._thread, endpoint, channels, wake)

    @property
    def bytes_sent(self) -> int:
        """Bytes of datagrams and control messages that left this rank, retransmissions included."""
        return 0 if self._thread is None else int(self._thread.t.counters[tables.SENT_BYTES])

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
        """Begin to sum `values` (n,) over ranks, times `scale`, into `out` (n,), None: in place;
        all ranks do, with the same n.

        At most the share `tolerance` of each rank's contribution to each shard is left out, nothing
        of the ranges `exact`. With `rescale` an element's sum is multiplied by ranks / ranks that
        arrived. `priority` 3 goes first, 0 last. One step of a bucket at a time; `values` stays as
        it is until `wait`. Raises ValueError for what cannot be exchanged, and what ended the
        exchange.
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
        """Return the words that are sent, and room for those of the sums; kept for the bucket's
        next step.
        """
        if bucket not in self._packed:
            words = -(-len(values) // 2)
            self._packed[bucket] = np.empty(words, np.float32), np.empty(words, np.float32)
        pack_halves(values, self._packed[bucket][0].view(np.uint32))
        return self._packed[bucket]

    def statistics(self, *, reset: bool = True) -> BoundedLossStatistics | None:
        """Return what was counted since the last reset; None for a single rank."""
        if self._thread is None:
            return None
        found = take_statistics(self._thread.t, self._since, rank=self.rank, refused=self._refused)
        if reset:
            self._since = snapshot(self._thread.t)
        return found

    def close(self) -> None:
        """End the thread and close the sockets, after what others still need of this rank; may be
        called again.
        """
        if self._thread is not None:
            self._close()


def _close(thread: ExchangeThread, endpoint: Endpoint, channels: SideChannels, wake: int) -> None:
    thread.close()
    channels.close()
    endpoint.close()
    os.close(wake)


def _filled_tables(
    rank: int,
    addresses: Sequence[Address],
    key: int,
    *,
    endpoint: Endpoint,
    channels: SideChannels,
    wake: int,
    options: WireOptions,
) -> Tables:
    world_size = len(addresses)
    t = make_tables(
        world_size=world_size, slots=FIRST_SLOTS, segments=options.part_segments(world_size)
    )
    values = {
        tables.RANK: rank,
        tables.WORLD: world_size,
        tables.KEY: key,
        tables.UDP: endpoint.datagrams.fileno(),
        tables.WAKE: wake,
        tables.ELEMENTS: options.elements,
        tables.DATAGRAM: HEADER_BYTES + 4 * options.elements,
        tables.OFFLOAD: options.offload and endpoint.segments,
        tables.WRITABLE: 1,
        tables.MARKING: options.mark,
        tables.HALVES: options.bits == 16,
    }
    for column, value in values.items():
        t.config[column] = value
    t.peers[:, tables.STREAM] = -1
    if options.rate is not None:
        t.link[MOST_RATE] = options.rate
    for peer, (host, port, _) in enumerate(addresses):
        t.sources[peer, :8] = np.frombuffer(socket_address(host, port), np.uint8)
        if peer != rank:
            t.peers[peer, tables.STREAM] = channels.sockets[peer].fileno()
            share = channels.budgets[peer] // (world_size - 1) // int(t.config[tables.DATAGRAM])
            t.peers[peer, tables.MOST_IN_FLIGHT] = share
    return t


def socket_address(host: str, port: int) -> bytes:
    """Return the first 8 bytes of a struct sockaddr_in."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
