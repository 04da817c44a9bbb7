"""The wire format, and control messages on their way out, compiled.

A datagram has 40 bytes of header, then elements of a segment or a control message's body.

    byte  0  kind; 1 flags; 2..3 rank of the sender; 4..7 step of the part
    byte  8  key of the session
    byte 16  part: bucket << 12 | part of the bucket; 20..23 segment, or serial number of a probe
    byte 24  bytes after the header; 26..27 zero; 28..31 sequence number of data, by receiver
    byte 32  clock of the sender, nanoseconds

Everything is little-endian. Segments have the same bounds on all ranks: number i begins at element
i times the elements of a segment. So datagrams are valid in any order. Nothing in a datagram is
used before `is_valid` and the receiver's own tables have checked it.

Control messages are lost at times, too: whoever waits for an answer asks again (`sending`), and it
does no harm if one comes twice. Their bodies, in words of 8 bytes:

    OPEN              elements of the part
    PROBE, SYNC       sequence number of the next data; SYNC is answered by a REPORT
    BITMAP, STOP      segments of the shard that arrived, a bit each; none for STOP of a result
    REPORT            7 numbers: see `send_report`
    LEAVE             the rank that does not answer, -1 for none

An element is a float32, or with 16 bits a word of two bfloat16. The low half is the first value.
Rounding is to nearest, ties to even, as torch's; NaN stays NaN.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.rate_rule import answer_seconds
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    Array,
    inner,
    load8,
    load16,
    load64,
    nanoseconds,
    send_message,
    store64,
)
from lightning_topt.communication.bounded_loss.tables import (
    Root,
    config_of,
    counters_of,
    path_of,
    peer_of,
    sent_message,
    sent_piece,
    source_address,
)

HEADER_BYTES = 40
DEFAULT_DATAGRAM_BYTES = 1472  # an Ethernet frame of 1500 bytes without headers of IPv4 and UDP
FEWEST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES = 128, 65000

CONTRIBUTION, RESULT = 1, 2  # data: of a rank to the owner of a shard; of the owner to all
OPEN, PROBE, BITMAP, STOP, REPORT, SYNC, LEAVE = 3, 4, 5, 6, 7, 8, 9
KINDS = 10
MORE = 1  # flag of data: the sender has more for this receiver

MOST_PARTS, MOST_BUCKETS = 1 << 12, 1 << 20
MASK32 = 0xFFFFFFFF

# of Linux: flags of send and recv, errno, levels and names of socket options
DONT_WAIT, NO_SIGNAL = 0x40, 0x4000
AGAIN, INTERRUPTED = 11, 4
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104

BODY = HEADER_BYTES  # in `Tables.message`
REPORT_BYTES = 56
# A sender that said it has more, and of which nothing came for so long, is not counted.
EXPIRE_NS = 10_000_000


# ---- headers


@inner
def write_header(
    address: int,
    kind: int,
    flags: int,
    rank: int,
    step: int,
    key: int,
    part: int,
    segment: int,
    size: int,
    sequence: int,
    clock: int,
) -> None:
    """Write a header at `address`; `segment` is the serial number in probes and their answers."""
    store64(address, kind | flags << 8 | rank << 16 | (step & MASK32) << 32)
    store64(address + 8, key)
    store64(address + 16, (part & MASK32) | (segment & MASK32) << 32)
    store64(address + 24, size | (sequence & MASK32) << 32)
    store64(address + 32, clock)


@inner
def is_valid(address: int, size: int, key: int, rank: int, world_size: int) -> bool:
    """Return whether `size` bytes are a complete datagram with the right key from another rank."""
    if size < HEADER_BYTES:
        return False
    kind, sender = load8(address), load16(address + 2)
    if load64(address + 8) != key or kind < CONTRIBUTION or kind >= KINDS:
        return False
    return sender != rank and sender < world_size and load16(address + 24) == size - HEADER_BYTES


@inner
def unwrapped(low: int, near: int) -> int:
    """Return the number with the low 32 bits `low` that is nearest to `near`."""
    difference = (low - near) & MASK32
    if difference >= 1 << 31:
        difference -= 1 << 32
    return near + difference


# ---- control messages


@compiled
def send_control(
    t: Root, peer: int, kind: int, flags: int, step: int, part: int, serial: int, body: int
) -> None:
    """Send a control message whose `body` bytes were written to ``t.message + BODY`` before.

    Args:
        t: the tables.
        peer: the receiver.
        kind: `OPEN` to `LEAVE`.
        flags: which data a message about a part means, `CONTRIBUTION` or `RESULT`.
        step: of the part; 0 for messages that are not about one.
        part: its number.
        serial: of a probe, and of the answer to it.
        body: bytes after the header.
    """
    config = config_of(t)
    clock = nanoseconds(CLOCK_REALTIME, t.work)
    size = HEADER_BYTES + body
    write_header(
        t.message, kind, flags, config.rank, step, config.key, part, serial, body, 0, clock
    )
    counters_of(t).sent_bytes += size
    piece = sent_piece(t, 0)
    piece[0], piece[1] = t.message, size
    write_message(sent_message(t, 0), source_address(t, peer), t.send_pieces, 1, 0)
    send_message(np.int32(config.udp_socket), t.send, np.int32(DONT_WAIT | NO_SIGNAL))


@inner
def answer_nanoseconds(t: Root, peer: int, tries: int) -> int:
    """Return how long to wait for an answer of `peer` after that many without one."""
    once = answer_seconds(path_of(t, peer))
    return int(min(once * 2.0 ** min(tries, 8), max(0.2, 2 * once)) * 1e9)


# ---- reports


@inner
def send_report(t: Root, peer: int, now: int) -> None:
    """Report to a sender what came of its datagrams; `engine_loop` reads that."""
    config, row, body = config_of(t), peer_of(t, peer), t.message + BODY
    clock = nanoseconds(CLOCK_REALTIME, t.work)
    store64(body, row.highest_seen)
    store64(body + 8, max(0, row.highest_seen + 1 - row.seen))  # missing
    # its clock back, and how long it lay here: a round trip without the time of a late thread
    store64(body + 16, row.stamp)
    store64(body + 24, clock - row.arrived_ns)
    # data of all ranks, and when the last came: the rate of this rank's link
    store64(body + 32, config.arrived)
    store64(body + 40, config.arrived_ns)
    senders = 0
    for other in range(config.world_size):
        sender = peer_of(t, other)
        senders += sender.has_data != 0 and clock - sender.arrived_ns < EXPIRE_NS
    store64(body + 48, senders)
    send_control(t, peer, REPORT, 0, 0, 0, 0, REPORT_BYTES)
    row.unreported, row.reported_ns, row.stamp = 0, now, 0


# ---- the structure of sendmsg


@inner
def write_message(row: Array, name: int, pieces: int, count: int, ancillary: int) -> None:
    """Fill a struct mmsghdr.

    Args:
        row: (8,) int64, the structure.
        name: address of the receiver's struct sockaddr_in.
        pieces: address of `count` struct iovec.
        count: pieces of memory.
        ancillary: address of the ancillary message that `write_segment_bytes` wrote, 0 for none.
    """
    row[0], row[1], row[2], row[3] = name, 16, pieces, count
    row[4], row[5], row[6], row[7] = ancillary, 24 if ancillary else 0, 0, 0


@inner
def write_segment_bytes(address: int, segment: int) -> None:
    """Write the ancillary message by which the kernel cuts what is sent into `segment` bytes."""
    store64(address, 18)
    store64(address + 8, SOL_UDP | UDP_SEGMENT << 32)
    store64(address + 16, segment)


# ---- values of 16 bits


@compiled
def pack_halves(values: Array, words: Array) -> None:
    """Round values to bfloat16, two in each word.

    Args:
        values: (n,) float32, contiguous.
        words: (ceil(n / 2),) uint32, written; the last upper half may be 0.
    """
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        words[i] = _rounded(np.int64(bits[2 * i])) >> 16 | _rounded(np.int64(bits[2 * i + 1]))
    if len(values) % 2:
        words[pairs] = _rounded(np.int64(bits[-1])) >> 16


@inner
def _rounded(bits: np.int64) -> np.int64:
    # Round the float32 with these `bits` to its upper 16 bits, which stay in their place
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN
        return (bits & 0xFFFF0000) | 0x00400000
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000


@compiled
def unpack_halves(words: Array, values: Array) -> None:
    """Write what `pack_halves` packed to `values` (n,) float32, contiguous."""
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        bits[2 * i] = np.uint32(words[i] << np.uint32(16))
        bits[2 * i + 1] = words[i] & np.uint32(0xFFFF0000)
    if len(values) % 2:
        bits[-1] = np.uint32(words[pairs] << np.uint32(16))
