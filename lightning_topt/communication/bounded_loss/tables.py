"""The tables that compiled code and the thread share: everything the exchange knows, as arrays.

Dimensions: slots (parts of tensors, each bound to its tensor for good), peers (ranks), ways
(`OUT_C` ... `IN_R`), words of 64 segments. Only the thread of the exchange touches them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_topt.communication.bounded_loss.path_measures import PATH_COLUMNS, reset_path
from lightning_topt.communication.bounded_loss.rate_rule import LINK_COLUMNS, reset_link
from lightning_topt.communication.bounded_loss.raw_memory import Array

# Ways of one slot and peer: my contribution to its shard, its contribution to mine, my sum to it,
# its sum to me.
OUT_C, IN_C, OUT_R, IN_R = range(4)

# config
(
    RANK,
    WORLD,
    KEY,
    UDP,
    WAKE,
    DATAGRAM,
    ELEMENTS,
    OFFLOAD,
    USED_SLOTS,
    EVENTS,
    RETURN_NS,
    NEXT_TIMER,
    LAST_PEER,
) = range(13)
WRITABLE, MARKING, WORDS, PART_WORDS, PART_BLOCKS, PROBES_NS, RECENT_SLOT = range(13, 20)
SUMS = 20  # parts being summed
REACHED, REACHED_NS = 21, 22  # data of all ranks that came so far, and when the last did
LINK_PACE_NS = 23  # when the next batch may leave, whoever it is for
HALVES = 24  # elements are words of two bfloat16
CONFIG_COLUMNS = 25

# peers
(
    NEXT_SEQUENCE,
    HIGHEST_SEEN,
    COUNT_SEEN,
    MARKS_SEEN,
    UNREPORTED,
    REPORTED_NS,
    STAMP_SEEN,
    ARRIVED_NS,
    HEARD_NS,
) = range(9)
STREAM, CLOSED, STREAM_FILLED, PENDING_BYTES, PACE_NS, REPORT_HIGHEST, SYNC_NS, SYNC_TRIES = range(
    9, 17
)
FAILED_RANK, LEFT, MOST_IN_FLIGHT = range(17, 20)
# whether it has more for this rank, by its last datagram; how many ranks have data for it
HAS_DATA, SENDERS = 20, 21
PEER_COLUMNS = 22

# slots
(
    ACTIVE,
    TENSOR,
    STEP,
    NUMEL,
    SEGMENTS,
    PRIORITY,
    VALUES,
    OUT,
    SUM,
    RESCALE,
    WAITING_C,
    MISSING_R,
    UNSTOPPED_C,
) = range(13)
UNSTOPPED_R, DONE, PROGRESS_NS, STARTED_NS, WANTED, BY_SIZE, SUMMING, SUMMED = range(13, 21)
SLOT_COLUMNS = 21

# flows: state and, per way
STATE, FIRST, COUNT, RECEIVED, ALLOWED, NEXT, SERIAL, PROBE_NS, TRIES, OPENED, EXACT, TO_SEND = (
    range(12)
)
FLOW_COLUMNS = 12
# states of ways out: 0 nothing to send yet; of ways in: 0 not open
IDLE, WAIT_OPEN, SENDING, PROBING, STOPPED = 0, 1, 2, 3, 4
RECEIVING, CLOSED_WAY = 1, 2

# counters
(
    SENT_DATAGRAMS, SENT_BYTES, RESENT_DATAGRAMS, RECEIVED_DATAGRAMS, REJECTED, LATE, DUPLICATES,
    LOST_ELEMENTS, CONTROL_SENT, PROBES_REPEATED, MARKED_DATAGRAMS, STREAM_FRAMES, SEND_CALLS,
    RECEIVE_CALLS, STALLED_NS, BLOCKED, WRONG_KEY, WRONG_SIZE, WRONG_PLACE, WRONG_SOURCE,
    CONTRIBUTED_ELEMENTS, TRUNCATED, REFUSED_DATAGRAMS,
) = range(23)  # fmt: skip
COUNTER_COLUMNS = 23

NEVER = 1 << 62  # nanoseconds
RECEIVE_AT_ONCE, RECEIVE_BYTES, CONTROL_BYTES = 16, 1 << 16, 128
SEND_AT_ONCE = 44  # 1472-byte segments in one datagram of at most 65507 bytes
STREAM_BYTES = 1 << 16
LARGE_BLOCK = 16  # segments that share a drop precedence


class Tables(NamedTuple):
    """All arrays; int64 unless said otherwise."""

    config: Array  # (CONFIG_COLUMNS,)
    counters: Array  # (COUNTER_COLUMNS,)
    peers: Array  # (ranks, PEER_COLUMNS)
    link: Array  # (LINK_COLUMNS,) float64: the rate at which datagrams leave
    paths: Array  # (ranks, PATH_COLUMNS) float64
    sources: Array  # (ranks, 16) uint8: struct sockaddr_in
    slots: Array  # (slots, SLOT_COLUMNS)
    scales: Array  # (slots,) float64
    flows: Array  # (slots, ranks, 4, FLOW_COLUMNS)
    # (slots, ranks, 4, words) uint64: segments delivered, counted from the first of the shard
    bits: Array
    exact: Array  # (slots, words of a part) uint64: segments that may not be lost
    large: Array  # (slots, blocks of a part) uint8: large entries
    inboxes: Array  # (slots, ranks): address of the memory for a rank's contribution
    receive: Array  # (RECEIVE_AT_ONCE, 8): struct mmsghdr
    receive_parts: Array  # (RECEIVE_AT_ONCE, 2): struct iovec
    receive_memory: Array  # (RECEIVE_AT_ONCE, RECEIVE_BYTES) uint8
    receive_names: Array  # (RECEIVE_AT_ONCE, 16) uint8
    receive_control: Array  # (RECEIVE_AT_ONCE, CONTROL_BYTES) uint8
    send: Array  # (SEND_AT_ONCE, 8): struct mmsghdr
    send_parts: Array  # (2 * SEND_AT_ONCE, 2): struct iovec
    send_headers: Array  # (SEND_AT_ONCE, 5)
    send_control: Array  # (64,) uint8: two control messages
    message: Array  # (MOST_DATAGRAM_BYTES + 8,) uint8: a control message after its length
    streams: Array  # (ranks, STREAM_BYTES) uint8: what came over the side channel
    pending: Array  # (ranks, STREAM_BYTES) uint8: what could not be sent over it at once
    files: Array  # (ranks + 2,): struct pollfd
    work: Array  # (16,): for system calls
    root: Array  # where the tables above are, for compiled code

    @property
    def address(self) -> int:
        """The address of `root`, which stays the same."""
        return int(self.root.ctypes.data)


ROOT = {name: index for index, name in enumerate(name for name in Tables._fields if name != "root")}


def make_tables(*, world_size: int, slots: int, segments: int) -> Tables:
    """Return tables for that many ranks, parts, and segments of a part at most, all zeros but for
    the kernel's structures.
    """

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    def memory(*shape: int) -> Array:
        return np.zeros(shape, np.uint8)

    link, paths = np.zeros(LINK_COLUMNS), np.zeros((world_size, PATH_COLUMNS))
    reset_link(link)
    for row in paths:
        reset_path(row)
    tables = Tables(
        config=zeros(CONFIG_COLUMNS),
        counters=zeros(COUNTER_COLUMNS),
        peers=zeros(world_size, PEER_COLUMNS),
        link=link,
        paths=paths,
        sources=memory(world_size, 16),
        **_slot_tables(world_size=world_size, slots=slots, segments=segments),
        receive=zeros(RECEIVE_AT_ONCE, 8),
        receive_parts=zeros(RECEIVE_AT_ONCE, 2),
        receive_memory=memory(RECEIVE_AT_ONCE, RECEIVE_BYTES),
        receive_names=memory(RECEIVE_AT_ONCE, 16),
        receive_control=memory(RECEIVE_AT_ONCE, CONTROL_BYTES),
        send=zeros(SEND_AT_ONCE, 8),
        send_parts=zeros(2 * SEND_AT_ONCE, 2),
        send_headers=zeros(SEND_AT_ONCE, 5),
        send_control=memory(64),
        message=memory(RECEIVE_BYTES),
        streams=memory(world_size, STREAM_BYTES),
        pending=memory(world_size, STREAM_BYTES),
        files=zeros(world_size + 2),
        work=zeros(16),
        root=zeros(len(ROOT)),
    )
    tables.peers[:, HIGHEST_SEEN] = tables.peers[:, REPORT_HIGHEST] = -1
    for index in range(RECEIVE_AT_ONCE):
        tables.receive_parts[index] = tables.receive_memory[index].ctypes.data, RECEIVE_BYTES
    _note_addresses(tables)
    return tables


def _note_addresses(tables: Tables) -> None:
    for name, index in ROOT.items():
        tables.root[index] = getattr(tables, name).ctypes.data
    columns = {
        WORLD: len(tables.peers),
        WORDS: tables.bits.shape[-1],
        PART_WORDS: tables.exact.shape[1],
    }
    for column, value in {**columns, PART_BLOCKS: tables.large.shape[1]}.items():
        tables.config[column] = value


def _slot_tables(*, world_size: int, slots: int, segments: int) -> dict[str, Array]:
    words = (most_shard_segments(segments, world_size) + 63) // 64
    return {
        "slots": np.zeros((slots, SLOT_COLUMNS), np.int64),
        "scales": np.zeros(slots),
        "flows": np.zeros((slots, world_size, 4, FLOW_COLUMNS), np.int64),
        "bits": np.zeros((slots, world_size, 4, words), np.uint64),
        "exact": np.zeros((slots, (segments + 63) // 64), np.uint64),
        "large": np.zeros((slots, segments // LARGE_BLOCK + 1), np.uint8),
        "inboxes": np.zeros((slots, world_size), np.int64),
    }


def with_more_slots(tables: Tables, slots: int) -> Tables:
    """Return tables with `slots` of them, the old ones kept."""
    more = {}
    for name in ("slots", "scales", "flows", "bits", "exact", "large", "inboxes"):
        old = getattr(tables, name)
        more[name] = np.zeros((slots, *old.shape[1:]), old.dtype)
        more[name][: len(old)] = old
    grown = tables._replace(**more)
    _note_addresses(grown)
    return grown


def shard_bounds(segments: int, shard: int, world_size: int) -> tuple[int, int]:
    """Return the first and the last-but-one segment of a shard."""
    return segments * shard // world_size, segments * (shard + 1) // world_size


def most_shard_segments(segments: int, world_size: int) -> int:
    """Return the segments of the longest shard."""
    return -(-segments // world_size)
