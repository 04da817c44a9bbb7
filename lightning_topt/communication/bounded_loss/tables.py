"""Everything that an exchange knows, in memory that Python and compiled code share.

Only the thread of the exchange touches it: in Python between two calls of the loop, compiled within
them. There are no locks. Nothing is allocated while data travel.

How it is laid out: each kind of record is a class below (8 bytes a field, see `raw_memory`). A
table is an array of such records, of bits, or of the kernel's structures. A `Root` record has the
address of each table. Compiled code is given the root, one pointer, and reads

    t.flows                             the address of the table of flows
    flow_of(t, slot, peer, OUT_RESULT)  one record of it, by address arithmetic
    flow.received += 1                  one field, a load and a store

Python has the same tables as NumPy arrays in `Tables`: ``tables.flows[slot, peer, way].received``,
or faster, as a column, ``tables.flows["received"][slot, peer, way]``.

Dimensions of the tables:

    slot      a part of a bucket; bound to it from the bucket's first step to the end
    peer      a rank; this rank's own row is unused
    way       what flows between this rank and the peer about a slot, see `OUT_CONTRIBUTION`
    word      64 segments of a shard, a bit each: which were delivered

When there are more parts than slots, Python makes larger tables and writes their addresses to the
same root (`with_more_slots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_topt.communication.bounded_loss.rate_rule import (
    LINK,
    PATH,
    LinkState,
    Path,
    reset_link,
    reset_path,
)
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    bit_words,
    doubles,
    inner,
    integers,
    layout_of,
    load64,
    new_record,
    record_at,
)

# The ways of one slot and peer: this rank's contribution to the peer's shard, the peer's
# contribution to this rank's, this rank's sum to the peer, the peer's sum to this rank.
OUT_CONTRIBUTION, IN_CONTRIBUTION, OUT_RESULT, IN_RESULT = range(4)
# States of a flow that goes out. IDLE: nothing to send yet. WAIT_OPEN: the receiver has not opened
# the part. PROBING: all is sent, what arrived is asked for. STOPPED: the receiver has enough.
IDLE, WAIT_OPEN, SENDING, PROBING, STOPPED = range(5)
# States of a flow that comes in, beside IDLE.
RECEIVING, CLOSED = 1, 2

NEVER = 1 << 62  # nanoseconds
RECEIVE_AT_ONCE, RECEIVE_BYTES, ANCILLARY_BYTES = 16, 1 << 16, 128
SEND_AT_ONCE = 44  # 1472-byte segments in one datagram of at most 65507 bytes
MESSAGE_STRUCT, PIECE_STRUCT, ADDRESS_STRUCT = 64, 16, 16  # bytes: mmsghdr, iovec, sockaddr_in


# ---- records


class Config:
    """What the exchange was made with, and the state of the loop. Times are of CLOCK_MONOTONIC."""

    rank: int
    world_size: int
    key: int
    udp_socket: int
    wake_file: int  # an eventfd: other threads end the loop's sleep with it
    datagram_bytes: int  # of a full segment, with its header
    segment_elements: int
    halves: int  # elements are words of two bfloat16
    offload: int  # the kernel cuts what is sent
    shard_words: int  # dimensions of `bits` and `exact`
    part_words: int
    used_slots: int
    # the loop
    events: int  # since the loop began: parts done or free, ranks gone
    return_ns: int  # when the loop returns to Python at the latest
    timer_ns: int  # when the loop has something to do next
    probe_ns: int  # when the next probe may be due
    pace_ns: int  # when the next batch may leave, to any receiver
    writable: int  # the socket takes datagrams
    last_peer: int  # that data were sent to
    recent_slot: int  # that data came for
    parts_summing: int
    # data of all ranks that came so far, and when the last did (CLOCK_REALTIME)
    arrived: int
    arrived_ns: int


class Counters:
    """What happened since the exchange was made."""

    sent_datagrams: int
    sent_bytes: int
    resent_datagrams: int
    stalled_ns: int
    received_datagrams: int
    rejected: int  # cut off, or with a wrong key, size, place or source
    contributed_elements: int
    lost_elements: int


class PeerState:
    """Another rank: whether it is there, what came of it, what it reports."""

    closed: int  # it left, or nothing takes what is sent to its port
    failed_rank: int  # 1 + a rank that it says is gone; -1 - a slot that has another size there
    # data from it
    highest_seen: int  # sequence number
    seen: int
    unreported: int
    reported_ns: int
    stamp: int  # clock of its last datagram, 0 once it was sent back
    arrived_ns: int  # of that datagram, CLOCK_REALTIME
    has_data: int  # whether it has more for this rank, by its last datagram
    heard_ns: int  # of anything
    # data to it
    next_sequence: int
    reported_highest: int  # sequence number
    most_in_flight: int  # datagrams that its buffer holds
    senders: int  # how many ranks have data for it
    pace_ns: int  # when the next batch may leave
    sync_ns: int  # when a report is asked for
    sync_tries: int


class Slot:
    """A part of a bucket in its present step."""

    active: int  # from `open_part` until no rank needs anything of it
    part: int  # bucket << 12 | part of the bucket
    step: int
    numel: int
    segments: int
    priority: int
    values: int  # address of this rank's contribution
    out: int  # address of the part's sums
    shard_sum: int  # address of this rank's shard of the sums
    # until this rank has the sums
    open_contributions: int  # to this rank's shard
    summing: int
    summed: int  # segments
    missing_results: int  # shards of other ranks whose sums are not complete here
    unstopped_contributions: int  # of this rank, whose fate it does not know
    done: int  # all four are over
    # until it is free
    unstopped_results: int  # ranks that still need sums of this one
    wanted: int  # Python waits for the slot
    progress_ns: int


class Flow:
    """One way of a slot and peer. Segments are counted from the first of the shard."""

    state: int
    first: int  # segment of the part
    count: int  # segments
    # in
    received: int
    may_miss: int  # segments
    exact_missing: int  # segments that may not be lost and are not here
    # out
    next: int  # the segment from which on to search for what to send
    to_send: int
    serial: int  # number of probes: 0 until all was sent once
    probe_ns: int  # when it is repeated
    tries: int
    opened_step: int  # the last one that the receiver has opened


CONFIG, COUNTERS, PEER = layout_of(Config), layout_of(Counters), layout_of(PeerState)
SLOT, FLOW = layout_of(Slot), layout_of(Flow)


# ---- as Python sees them


class Tables(NamedTuple):
    """All tables as records and arrays; int64 unless said otherwise."""

    config: Config
    counters: Counters
    peers: Array  # (ranks,) Peer
    link: LinkState
    paths: Array  # (ranks,) Path
    sources: Array  # (ranks, 16) uint8: struct sockaddr_in
    slots: Array  # (slots,) Slot
    scales: Array  # (slots,) float64: what the sums are multiplied by
    flows: Array  # (slots, ranks, 4) Flow
    bits: Array  # (slots, ranks, 4, words) uint64: segments delivered
    exact: Array  # (slots, words of a part) uint64: segments that may not be lost
    inboxes: Array  # (slots, ranks): address of the memory for a rank's contribution
    receive: Array  # (RECEIVE_AT_ONCE, 8): struct mmsghdr
    receive_pieces: Array  # (RECEIVE_AT_ONCE, 2): struct iovec
    receive_memory: Array  # (RECEIVE_AT_ONCE, RECEIVE_BYTES) uint8
    receive_names: Array  # (RECEIVE_AT_ONCE, 16) uint8: struct sockaddr_in
    receive_ancillary: Array  # (RECEIVE_AT_ONCE, ANCILLARY_BYTES) uint8
    send: Array  # (SEND_AT_ONCE, 8): struct mmsghdr
    send_pieces: Array  # (2 * SEND_AT_ONCE, 2): struct iovec
    send_headers: Array  # (SEND_AT_ONCE, 5)
    send_ancillary: Array  # (24,) uint8: an ancillary message
    message: Array  # (RECEIVE_BYTES,) uint8: a control message
    files: Array  # (2,): struct pollfd
    work: Array  # (16,): for system calls
    root: Root  # for compiled code


class Root:
    """The address of each table, for compiled code: a field for each one of `Tables`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

    __annotations__ = {name: int for name in Tables._fields if name != "root"}


ROOT = layout_of(Root)


def make_tables(*, world_size: int, slots: int, segments: int) -> Tables:
    """Make tables for so many ranks and parts, of `segments` segments at most."""

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    def memory(*shape: int) -> Array:
        return np.zeros(shape, np.uint8)

    words = (most_shard_segments(segments, world_size) + 63) // 64
    tables = Tables(
        config=new_record(CONFIG),
        counters=new_record(COUNTERS),
        peers=np.zeros(world_size, PEER),
        link=new_record(LINK),
        paths=np.zeros(world_size, PATH),
        sources=memory(world_size, ADDRESS_STRUCT),
        slots=np.zeros(slots, SLOT),
        scales=np.zeros(slots),
        flows=np.zeros((slots, world_size, 4), FLOW),
        bits=np.zeros((slots, world_size, 4, words), np.uint64),
        exact=np.zeros((slots, (segments + 63) // 64), np.uint64),
        inboxes=zeros(slots, world_size),
        receive=zeros(RECEIVE_AT_ONCE, 8),
        receive_pieces=zeros(RECEIVE_AT_ONCE, 2),
        receive_memory=memory(RECEIVE_AT_ONCE, RECEIVE_BYTES),
        receive_names=memory(RECEIVE_AT_ONCE, ADDRESS_STRUCT),
        receive_ancillary=memory(RECEIVE_AT_ONCE, ANCILLARY_BYTES),
        send=zeros(SEND_AT_ONCE, 8),
        send_pieces=zeros(2 * SEND_AT_ONCE, 2),
        send_headers=zeros(SEND_AT_ONCE, 5),
        send_ancillary=memory(24),
        message=memory(RECEIVE_BYTES),
        files=zeros(2),
        work=zeros(16),
        root=new_record(ROOT),
    )
    reset_link(tables.link)
    for path in tables.paths:
        reset_path(path)
    tables.peers["highest_seen"] = tables.peers["reported_highest"] = -1
    for index in range(RECEIVE_AT_ONCE):
        tables.receive_pieces[index] = tables.receive_memory[index].ctypes.data, RECEIVE_BYTES
    tables.config.world_size = world_size
    tables.config.shard_words, tables.config.part_words = words, tables.exact.shape[1]
    _note_addresses(tables)
    return tables


def _note_addresses(tables: Tables) -> None:
    for name in Root.__annotations__:
        setattr(tables.root, name, np.asarray(getattr(tables, name)).ctypes.data)


def with_more_slots(tables: Tables, slots: int) -> Tables:
    """Return tables with so many slots, of which the first are the old ones; same root."""
    more: dict[str, Any] = {}
    for name in ("slots", "scales", "flows", "bits", "exact", "inboxes"):
        old = getattr(tables, name)
        more[name] = np.zeros((slots, *old.shape[1:]), old.dtype)
        more[name][: len(old)] = old
    grown = tables._replace(**more)
    _note_addresses(grown)
    return grown


def shard_bounds(segments: int, shard: int, world_size: int) -> tuple[int, int]:
    """Return the first segment of a shard and the one after its last."""
    return segments * shard // world_size, segments * (shard + 1) // world_size


def most_shard_segments(segments: int, world_size: int) -> int:
    """Return the segments of the longest shard."""
    return -(-segments // world_size)


# ---- as compiled code sees them

_config_at, _counters_at, _link_at = record_at(CONFIG), record_at(COUNTERS), record_at(LINK)
_peer_at, _path_at, _slot_at, _flow_at = map(record_at, (PEER, PATH, SLOT, FLOW))
_PEER_BYTES, _PATH_BYTES = PEER.itemsize, PATH.itemsize
_SLOT_BYTES, _FLOW_BYTES = SLOT.itemsize, FLOW.itemsize


@inner
def config_of(t: Root) -> Config:
    """Return the settings and the loop's state."""
    return _config_at(t.config)


@inner
def counters_of(t: Root) -> Counters:
    """Return the counters."""
    return _counters_at(t.counters)


@inner
def link_of(t: Root) -> LinkState:
    """Return this rank's link."""
    return _link_at(t.link)


@inner
def peer_of(t: Root, peer: int) -> PeerState:
    """Return what is known of a rank."""
    return _peer_at(t.peers + _PEER_BYTES * peer)


@inner
def path_of(t: Root, peer: int) -> Path:
    """Return the path to a rank."""
    return _path_at(t.paths + _PATH_BYTES * peer)


@inner
def slot_of(t: Root, slot: int) -> Slot:
    """Return a part."""
    return _slot_at(t.slots + _SLOT_BYTES * slot)


@inner
def flow_of(t: Root, slot: int, peer: int, way: int) -> Flow:
    """Return one way of a part."""
    return _flow_at(t.flows + _FLOW_BYTES * _flow_index(t, slot, peer, way))


@inner
def bits_of(t: Root, slot: int, peer: int, way: int) -> Array:
    """Return which segments of a flow were delivered: bits, uint64."""
    words = config_of(t).shard_words
    return bit_words(t.bits + 8 * words * _flow_index(t, slot, peer, way), words)


@inner
def _flow_index(t: Root, slot: int, peer: int, way: int) -> int:
    return (slot * config_of(t).world_size + peer) * 4 + way


@inner
def exact_bits(t: Root, slot: int) -> Array:
    """Return which segments of a part may not be lost: bits, uint64."""
    words = config_of(t).part_words
    return bit_words(t.exact + 8 * words * slot, words)


@inner
def inbox_address(t: Root, slot: int, peer: int) -> int:
    """Return where the contribution of a rank to this one's shard goes."""
    return load64(t.inboxes + 8 * (slot * config_of(t).world_size + peer))


@inner
def scale_of(t: Root, slot: int) -> float:
    """Return what the sums of a part are multiplied by."""
    return doubles(t.scales + 8 * slot, 1)[0]


@inner
def source_address(t: Root, peer: int) -> int:
    """Return where the struct sockaddr_in of a rank is."""
    return t.sources + ADDRESS_STRUCT * peer


@inner
def received_message(t: Root, index: int) -> Array:
    """Return one struct mmsghdr of what is received."""
    return integers(t.receive + MESSAGE_STRUCT * index, 8)


@inner
def sent_message(t: Root, index: int) -> Array:
    """Return one struct mmsghdr of what is sent."""
    return integers(t.send + MESSAGE_STRUCT * index, 8)


@inner
def sent_piece(t: Root, index: int) -> Array:
    """Return one struct iovec of what is sent."""
    return integers(t.send_pieces + PIECE_STRUCT * index, 2)
