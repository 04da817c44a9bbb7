"""Control messages on their way out, compiled.

They are datagrams, and lost at times: whoever waits for an answer asks again (`sending`). It does
no harm if one comes twice. A caller writes the body to ``t.message + BODY`` and then calls
`send_control`.

Also here: the report of what came from a sender, since it is one, and the structures of sendmsg.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.datagram import HEADER_BYTES, REPORT, write_header
from lightning_topt.communication.bounded_loss.rate_rule import answer_seconds
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    Array,
    inner,
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

# of Linux: flags of send and recv, errno, levels and names of socket options
DONT_WAIT, NO_SIGNAL = 0x40, 0x4000
AGAIN, INTERRUPTED = 11, 4
SOL_UDP, UDP_SEGMENT, UDP_GRO, IP_TOS = 17, 103, 104, 1

CONTROL_TOS = 46 << 2  # expedited forwarding
BODY = HEADER_BYTES  # in `Tables.message`
REPORT_BYTES = 64
# A sender that said it has more, and of which nothing came for so long, is not counted.
EXPIRE_NS = 10_000_000


@compiled
def send_control(
    t: Root,
    peer: int,
    kind: int,
    flags: int,
    step: int,
    part: int,
    serial: int,
    body: int,
) -> None:
    """Send a control message whose `body` bytes are in ``t.message + BODY`` already.

    Args:
        t: the tables.
        peer: the receiver.
        kind: one of `datagram`'s.
        flags: which data a message about a part means, `CONTRIBUTION` or `RESULT`.
        step: of the part; 0 for messages that are not about one.
        part: its number.
        serial: of a probe, and of the answer to it.
        body: bytes after the header.
    """
    config, counters = config_of(t), counters_of(t)
    clock = nanoseconds(CLOCK_REALTIME, t.work)
    size = HEADER_BYTES + body
    write_header(
        t.message, kind, flags, config.rank, step, config.key, part, serial, body, 0, clock
    )
    counters.control_sent += 1
    counters.sent_bytes += size
    piece = sent_piece(t, 0)
    piece[0], piece[1] = t.message, size
    used = write_ancillary(t.send_ancillary, 0, CONTROL_TOS if config.marking else -1)
    name = source_address(t, peer)
    write_message(sent_message(t, 0), name, t.send_pieces, 1, t.send_ancillary, used)
    send_message(np.int32(config.udp_socket), t.send, np.int32(DONT_WAIT | NO_SIGNAL))


@inner
def answer_nanoseconds(t: Root, peer: int, tries: int) -> int:
    """Return how long to wait for an answer of `peer` after that many without one."""
    once = answer_seconds(path_of(t, peer))
    return int(min(once * 2.0 ** min(tries, 8), max(0.2, 2 * once)) * 1e9)


# ---- reports


@inner
def send_report(t: Root, peer: int, now: int) -> None:
    """Report to a sender what came of its datagrams; `engine_loop` reads it."""
    config, row, body = config_of(t), peer_of(t, peer), t.message + BODY
    clock = nanoseconds(CLOCK_REALTIME, t.work)
    store64(body, row.highest_seen)
    store64(body + 8, max(0, row.highest_seen + 1 - row.seen))  # missing
    store64(body + 16, row.marked)
    # its clock back, and how long it lay here: a round trip without the time of a late thread
    store64(body + 24, row.stamp)
    store64(body + 32, clock - row.arrived_ns)
    # data of all ranks, and when the last came: the rate of this rank's link
    store64(body + 40, config.arrived)
    store64(body + 48, config.arrived_ns)
    store64(body + 56, count_senders(t, clock))
    send_control(t, peer, REPORT, 0, 0, 0, 0, REPORT_BYTES)
    row.unreported, row.reported_ns, row.stamp = 0, now, 0


@compiled
def count_senders(t: Root, clock: int) -> int:
    """Return how many ranks have data for this one at the time `clock` (CLOCK_REALTIME)."""
    senders = 0
    for peer in range(config_of(t).world_size):
        row = peer_of(t, peer)
        senders += row.has_data != 0 and clock - row.arrived_ns < EXPIRE_NS
    return senders


# ---- structures of sendmsg


@inner
def write_message(
    row: Array, name: int, pieces: int, count: int, ancillary: int, ancillary_size: int
) -> None:
    """Fill a struct mmsghdr.

    Args:
        row: (8,) int64, the structure.
        name: address of the receiver's struct sockaddr_in.
        pieces: address of `count` struct iovec.
        count: pieces of memory.
        ancillary: address of ancillary messages.
        ancillary_size: their bytes, 0 for none.
    """
    row[0], row[1], row[2], row[3] = name, 16, pieces, count
    row[4], row[5], row[6], row[7] = ancillary if ancillary_size else 0, ancillary_size, 0, 0


@inner
def write_ancillary(address: int, segment: int, tos: int) -> int:
    """Write ancillary messages of sendmsg at `address`.

    Args:
        address: room for both.
        segment: bytes of the segments that the kernel is to cut, 0 for none.
        tos: byte of DSCP and ECN, -1 for none.

    Returns:
        Their bytes.
    """
    size = 0
    if segment > 0:
        store64(address, 18)
        store64(address + 8, SOL_UDP | UDP_SEGMENT << 32)
        store64(address + 16, segment)
        size = 24
    if tos >= 0:
        store64(address + size, 20)
        store64(address + size + 8, 0 | IP_TOS << 32)
        store64(address + size + 16, tos)
        size += 24
    return size
