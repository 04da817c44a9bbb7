"""A batch of data goes out in one system call: several segments of one part, in the service class
of their priority.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.communication.bounded_loss.control_messages import (
    AGAIN,
    DONT_WAIT,
    INTERRUPTED,
    NO_SIGNAL,
    write_ancillary,
    write_message,
)
from lightning_topt.communication.bounded_loss.datagram import (
    CONTRIBUTION,
    HEADER_BYTES,
    MORE,
    RESULT,
    write_header,
)
from lightning_topt.communication.bounded_loss.link_shares import has_other_data
from lightning_topt.communication.bounded_loss.rate_rule import REFUSED_IN_ROUND
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    error_number,
    inner,
    load8,
    load32,
    nanoseconds,
    send_message,
    send_messages,
    store8,
)
from lightning_topt.communication.bounded_loss.repeated_probes import send_probe
from lightning_topt.communication.bounded_loss.shard_sum import has_bit, segment_elements
from lightning_topt.communication.bounded_loss.table_views import (
    SEND,
    SEND_CONTROL,
    SEND_HEADERS,
    SEND_PARTS,
    WORK,
    bit_row,
    config_row,
    counter_row,
    flow_row,
    large_of,
    link_row,
    peer_row,
    sent_message,
    sent_part,
    slot_row,
    source_of,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    BLOCKED,
    BY_SIZE,
    COUNT,
    DATAGRAM,
    ELEMENTS,
    FIRST,
    KEY,
    LARGE_BLOCK,
    MARKING,
    NEXT,
    NEXT_SEQUENCE,
    OFFLOAD,
    OUT_C,
    OUT_R,
    PRIORITY,
    PROBING,
    RANK,
    REFUSED_DATAGRAMS,
    RESENT_DATAGRAMS,
    SEND_CALLS,
    SENT_BYTES,
    SENT_DATAGRAMS,
    SERIAL,
    STATE,
    STEP,
    SUM,
    TENSOR,
    TO_SEND,
    TRIES,
    UDP,
    VALUES,
    WRITABLE,
)

IO_ERROR, INVALID, NO_BUFFERS = 5, 22, 105
REFUSED = -2
CAPABLE = 2  # ECN: packets may be marked instead of dropped


@inner
def service_class(priority: int, large: bool) -> int:
    """Return the byte of DSCP and ECN: assured forwarding class 1 to 4 for priority 0 to 3,
    precedence 1 or 3 (RFC 2597).
    """
    return (8 * (priority + 1) + (2 if large else 6)) << 2 | CAPABLE


@inner
def _is_large(t: int, slot: int, way: int, segment: int) -> bool:
    return (
        way == OUT_R
        or not slot_row(t, slot)[BY_SIZE]
        or load8(large_of(t, slot, segment // LARGE_BLOCK)) != 0
    )


@inner
def _fill_batch(t: int, slot: int, peer: int, way: int, most: int, clock: int) -> tuple[int, int]:
    """Write headers and pieces of the next segments that are missing, at most `most`; returns how
    many, and their DSCP byte.
    """
    config, row, flow, each = (
        config_row(t),
        slot_row(t, slot),
        flow_row(t, slot, peer, way),
        config_row(t)[ELEMENTS],
    )
    kind = CONTRIBUTION if way == OUT_C else RESULT
    base = row[VALUES] if way == OUT_C else row[SUM] - 4 * flow[FIRST] * each
    count, index, large = 0, flow[NEXT], False
    sequence = peer_row(t, peer)[NEXT_SEQUENCE]
    while index < flow[COUNT] and count < most:
        if not has_bit(bit_row(t, slot, peer, way), index):
            segment = flow[FIRST] + index
            if count and _is_large(t, slot, way, segment) != large:
                break
            large = _is_large(t, slot, way, segment)
            size = 4 * segment_elements(t, slot, segment)
            header = table(t, SEND_HEADERS) + HEADER_BYTES * count
            write_header(
                header, kind, MORE, config[RANK], row[STEP], config[KEY], row[TENSOR], segment,
                size, sequence + count, clock,
            )  # fmt: skip
            part = sent_part(t, 2 * count)
            part[0], part[1] = header, HEADER_BYTES
            part = sent_part(t, 2 * count + 1)
            part[0], part[1] = base + 4 * segment * each, size
            count += 1
        index += 1
    flow[NEXT] = index
    if count:
        more = flow[TO_SEND] > count or has_other_data(t, slot, peer, way)
        store8(table(t, SEND_HEADERS) + HEADER_BYTES * (count - 1) + 1, more)
    return count, service_class(row[PRIORITY], large) if config[MARKING] else -1


@inner
def _transmit(t: int, peer: int, count: int, tos: int) -> int:
    """Send the batch: in one piece that the kernel cuts, or one by one.

    Returns how many left; `REFUSED` where a full queue of this host took none. On other errors they
    are lost.
    """
    config, ancillary = config_row(t), table(t, SEND_CONTROL)
    name, flags = source_of(t, peer), np.int32(DONT_WAIT | NO_SIGNAL)
    counter_row(t)[SEND_CALLS] += 1
    if config[OFFLOAD]:
        used = write_ancillary(ancillary, config[DATAGRAM] if count > 1 else 0, tos)
        write_message(sent_message(t, 0), name, table(t, SEND_PARTS), 2 * count, ancillary, used)
        if send_message(np.int32(config[UDP]), table(t, SEND), flags) >= 0:
            return count
        error = error_number()
        if error in (AGAIN, INTERRUPTED):
            return 0
        if error == NO_BUFFERS:
            return REFUSED
        if error != IO_ERROR and error != INVALID:
            return count
        config[OFFLOAD] = 0  # a device or kernel without it says so only here
    used = write_ancillary(ancillary, 0, tos)
    for index in range(count):
        write_message(
            sent_message(t, index), name, table(t, SEND_PARTS) + 32 * index, 2, ancillary, used
        )
    sent = send_messages(np.int32(config[UDP]), table(t, SEND), np.uint32(count), flags)
    if sent >= 0:
        return sent
    error = error_number()
    if error == NO_BUFFERS:
        return REFUSED
    return 0 if error in (AGAIN, INTERRUPTED) else count


@inner
def send_batch(t: int, slot: int, peer: int, way: int, most: int, now: int) -> int:
    """Send the next segments of one way; returns their bytes, -1 where the socket takes no more,
    `REFUSED` where the queue.
    """
    config, flow, row = config_row(t), flow_row(t, slot, peer, way), peer_row(t, peer)
    before = flow[NEXT]
    count, tos = _fill_batch(t, slot, peer, way, most, nanoseconds(CLOCK_REALTIME, table(t, WORK)))
    sent = _transmit(t, peer, count, tos) if count else 0
    if sent == REFUSED:
        flow[NEXT] = before
        link_row(t)[REFUSED_IN_ROUND] += count
        counter_row(t)[REFUSED_DATAGRAMS] += count
        return REFUSED
    if sent < count:  # the rest again: find the first that did not leave
        flow[NEXT] = (
            before
            if sent == 0
            else load32(table(t, SEND_HEADERS) + HEADER_BYTES * sent + 20) - flow[FIRST]
        )
    row[NEXT_SEQUENCE] += sent
    flow[TO_SEND] -= sent
    nbytes = sent * config[DATAGRAM]
    counter_row(t)[SENT_DATAGRAMS] += sent
    counter_row(t)[SENT_BYTES] += nbytes
    if flow[SERIAL]:
        counter_row(t)[RESENT_DATAGRAMS] += sent
    if flow[NEXT] >= flow[COUNT]:
        flow[STATE], flow[TRIES] = PROBING, 0
        flow[SERIAL] += 1
        send_probe(t, slot, peer, way, now)
    if sent < count:
        config[WRITABLE] = 0
        counter_row(t)[BLOCKED] += 1
        return -1
    return nbytes
