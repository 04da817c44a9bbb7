"""Control messages on their way out: as datagrams, which are lost at times, and over the side
channel (TCP), which is late at times. Every message may come twice; the first counts.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.datagram import HEADER_BYTES, REPORT, write_header
from lightning_topt.communication.bounded_loss.link_shares import count_senders
from lightning_topt.communication.bounded_loss.path_measures import answer_seconds
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    copy_memory,
    error_number,
    inner,
    move_memory,
    nanoseconds,
    send_bytes,
    send_message,
    store64,
)
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
    PENDING,
    SEND,
    SEND_CONTROL,
    SEND_PARTS,
    WORK,
    config_row,
    counter_row,
    path_row,
    peer_row,
    sent_message,
    sent_part,
    source_of,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    ARRIVED_NS,
    CLOSED,
    CONTROL_SENT,
    COUNT_SEEN,
    EVENTS,
    HIGHEST_SEEN,
    KEY,
    MARKING,
    MARKS_SEEN,
    PENDING_BYTES,
    RANK,
    REACHED,
    REACHED_NS,
    REPORTED_NS,
    SENT_BYTES,
    STAMP_SEEN,
    STREAM,
    STREAM_BYTES,
    UDP,
    UNREPORTED,
)

DONT_WAIT, NO_SIGNAL = 0x40, 0x4000
AGAIN, INTERRUPTED = 11, 4
SOL_UDP, UDP_SEGMENT, UDP_GRO, IP_TOS = 17, 103, 104, 1
CONTROL_TOS = 46 << 2  # expedited forwarding
BODY = 8 + HEADER_BYTES  # in `Tables.message`
BY_DATAGRAM, BY_STREAM, BY_BOTH = 1, 2, 3
REPORT_BYTES = 64


@inner
def write_ancillary(address: int, segment: int, tos: int) -> int:
    """Write the control messages of a sendmsg at `address`: size of segments (0: none), byte of
    DSCP and ECN (-1: none).

    Returns their bytes.
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


@inner
def write_message(
    row: np.ndarray, name: int, parts: int, count: int, ancillary: int, ancillary_size: int
) -> None:
    """Fill a struct mmsghdr: to the address at `name`, `count` pieces of memory at `parts`."""
    row[0], row[1], row[2], row[3] = name, 16, parts, count
    row[4], row[5], row[6], row[7] = ancillary if ancillary_size else 0, ancillary_size, 0, 0


@compiled
def send_control(
    t: int,
    peer: int,
    kind: int,
    flags: int,
    step: int,
    tensor: int,
    serial: int,
    body: int,
    ways: int,
) -> None:
    """Send a control message whose `body` bytes are in ``t.message[BODY:]`` already, by datagram,
    stream or both.
    """
    config, address = config_row(t), table(t, MESSAGE)
    clock = nanoseconds(CLOCK_REALTIME, table(t, WORK))
    size = HEADER_BYTES + body
    write_header(
        address + 8, kind, flags, config[RANK], step, config[KEY], tensor, serial, body, 0, clock
    )
    counter_row(t)[CONTROL_SENT] += 1
    counter_row(t)[SENT_BYTES] += size
    if ways & BY_DATAGRAM:
        part = sent_part(t, 0)
        part[0], part[1] = address + 8, size
        ancillary = table(t, SEND_CONTROL)
        used = write_ancillary(ancillary, 0, CONTROL_TOS if config[MARKING] else -1)
        write_message(
            sent_message(t, 0), source_of(t, peer), table(t, SEND_PARTS), 1, ancillary, used
        )
        send_message(np.int32(config[UDP]), table(t, SEND), np.int32(DONT_WAIT | NO_SIGNAL))
    if ways & BY_STREAM and peer_row(t, peer)[STREAM] >= 0 and not peer_row(t, peer)[CLOSED]:
        store64(address, size)
        _send_stream(t, peer, address, size + 8)


@inner
def _send_stream(t: int, peer: int, address: int, size: int) -> None:
    """Send over the side channel, behind what waits there. What does not fit is dropped: it is
    asked for again.
    """
    waiting = peer_row(t, peer)[PENDING_BYTES]
    if waiting + size > STREAM_BYTES:
        return
    copy_memory(table(t, PENDING) + STREAM_BYTES * peer + waiting, address, size)
    peer_row(t, peer)[PENDING_BYTES] = waiting + size
    flush_stream(t, peer)


@inner
def flush_stream(t: int, peer: int) -> None:
    """Send what waits for the side channel, as far as it takes it."""
    waiting, memory = peer_row(t, peer)[PENDING_BYTES], table(t, PENDING) + STREAM_BYTES * peer
    if waiting == 0 or peer_row(t, peer)[CLOSED]:
        return
    sent = send_bytes(
        np.int32(peer_row(t, peer)[STREAM]), memory, waiting, np.int32(DONT_WAIT | NO_SIGNAL)
    )
    if sent < 0:
        if error_number() != AGAIN and error_number() != INTERRUPTED:
            peer_row(t, peer)[CLOSED] = 1
            config_row(t)[EVENTS] += 1
        return
    move_memory(memory, memory + sent, waiting - sent)
    peer_row(t, peer)[PENDING_BYTES] = waiting - sent


@inner
def send_report(t: int, peer: int, now: int) -> None:
    """Tell a sender what came of its datagrams: highest number, missing, marked; its clock back,
    how long it lay here; how many datagrams of all ranks came and when the last did; how many ranks
    have data for this one.
    """
    row, body = peer_row(t, peer), table(t, MESSAGE) + BODY
    clock = nanoseconds(CLOCK_REALTIME, table(t, WORK))
    store64(body, row[HIGHEST_SEEN])
    store64(body + 8, max(0, row[HIGHEST_SEEN] + 1 - row[COUNT_SEEN]))
    store64(body + 16, row[MARKS_SEEN])
    store64(body + 24, row[STAMP_SEEN])
    store64(body + 32, clock - row[ARRIVED_NS])
    store64(body + 40, config_row(t)[REACHED])
    store64(body + 48, config_row(t)[REACHED_NS])
    store64(body + 56, count_senders(t, clock))
    send_control(t, peer, REPORT, 0, 0, 0, 0, REPORT_BYTES, BY_DATAGRAM)
    row[UNREPORTED], row[REPORTED_NS], row[STAMP_SEEN] = 0, now, 0


@inner
def answer_nanoseconds(t: int, peer: int, tries: int) -> int:
    """Return how long to wait for an answer of `peer` after that many without one."""
    seconds = answer_seconds(path_row(t, peer)) * 2.0 ** min(tries, 8)
    return int(min(seconds, max(0.2, 2 * answer_seconds(path_row(t, peer)))) * 1e9)
