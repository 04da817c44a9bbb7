"""Datagrams from the socket and messages of the side channels are checked here, and given to what
handles them.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.communication.bounded_loss.arrivals import handle
from lightning_topt.communication.bounded_loss.control_messages import (
    AGAIN,
    DONT_WAIT,
    INTERRUPTED,
    IP_TOS,
    SOL_UDP,
    UDP_GRO,
)
from lightning_topt.communication.bounded_loss.data_arrivals import reject
from lightning_topt.communication.bounded_loss.datagram import HEADER_BYTES, is_valid
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    NANOSECONDS,
    Array,
    error_number,
    inner,
    load8,
    load16,
    load32,
    load64,
    move_memory,
    nanoseconds,
    receive_bytes,
    receive_messages,
)
from lightning_topt.communication.bounded_loss.table_views import (
    RECEIVE,
    RECEIVE_CONTROL,
    RECEIVE_MEMORY,
    RECEIVE_NAMES,
    RECEIVE_PARTS,
    STREAMS,
    WORK,
    config_row,
    counter_row,
    integers,
    peer_row,
    source_of,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    CLOSED,
    CONTROL_BYTES,
    EVENTS,
    KEY,
    RANK,
    RECEIVE_AT_ONCE,
    RECEIVE_BYTES,
    RECEIVE_CALLS,
    STREAM,
    STREAM_BYTES,
    STREAM_FILLED,
    STREAM_FRAMES,
    TRUNCATED,
    UDP,
    WORLD,
    WRONG_KEY,
    WRONG_SIZE,
    WRONG_SOURCE,
)

SOL_SOCKET, TIMESTAMP, TRUNCATED_FLAG = 1, 35, 0x20
CONGESTION_MARK = 3
ERROR_QUEUE = 0x2000


@inner
def _received(t: int, index: int) -> Array:
    return integers(table(t, RECEIVE) + 64 * index, 8)


@inner
def _ancillary(t: int, index: int) -> tuple[int, int, int]:
    """Return the size of coalesced datagrams (0: one), whether they are marked, and when they
    arrived (0: unknown).
    """
    address, size = table(t, RECEIVE_CONTROL) + CONTROL_BYTES * index, _received(t, index)[5]
    segment, marked, arrived, offset = 0, 0, 0, 0
    while offset + 16 <= size:
        length, level, kind = (
            load64(address + offset),
            load32(address + offset + 8),
            load32(address + offset + 12),
        )
        if length < 16 or offset + length > size:
            break
        data = address + offset + 16
        if level == SOL_UDP and kind == UDP_GRO:
            segment = load32(data)
        elif level == 0 and kind == IP_TOS:
            marked = 1 if load8(data) & CONGESTION_MARK == CONGESTION_MARK else 0
        elif level == SOL_SOCKET and kind == TIMESTAMP:
            arrived = load64(data) * NANOSECONDS + load64(data + 8)
        offset += (length + 7) // 8 * 8
    return segment, marked, arrived


@inner
def _take_datagram(
    t: int, address: int, size: int, source: int, arrived: int, marked: int, now: int
) -> None:
    config = config_row(t)
    if not is_valid(address, size, config[KEY], config[RANK], config[WORLD]):
        wrong_key = size >= HEADER_BYTES and load64(address + 8) != config[KEY]
        reject(t, WRONG_KEY if wrong_key else WRONG_SIZE)
    elif load64(source_of(t, load16(address + 2))) != source:
        reject(t, WRONG_SOURCE)
    else:
        handle(t, address, size, arrived, marked, False, now)


@inner
def receive_datagrams(t: int, now: int) -> int:
    """Receive what waits at the socket, one call's worth; returns how many messages."""
    for index in range(RECEIVE_AT_ONCE):
        row = _received(t, index)
        row[0], row[1] = table(t, RECEIVE_NAMES) + 16 * index, 16
        row[2], row[3] = table(t, RECEIVE_PARTS) + 16 * index, 1
        row[4], row[5] = table(t, RECEIVE_CONTROL) + CONTROL_BYTES * index, CONTROL_BYTES
        row[6], row[7] = 0, 0
    got = receive_messages(
        np.int32(config_row(t)[UDP]),
        table(t, RECEIVE),
        np.uint32(RECEIVE_AT_ONCE),
        np.int32(DONT_WAIT),
        0,
    )
    if got <= 0:
        return 0
    counter_row(t)[RECEIVE_CALLS] += 1
    clock = nanoseconds(CLOCK_REALTIME, table(t, WORK))
    for index in range(got):
        size, flags = _received(t, index)[7] & 0xFFFFFFFF, _received(t, index)[6] & 0xFFFFFFFF
        if flags & TRUNCATED_FLAG:
            reject(t, TRUNCATED)
            continue
        segment, marked, arrived = _ancillary(t, index)
        address, source = (
            table(t, RECEIVE_MEMORY) + RECEIVE_BYTES * index,
            load64(table(t, RECEIVE_NAMES) + 16 * index),
        )
        step = segment if segment > 0 else max(size, 1)
        for offset in range(0, max(size, 1), step):
            part = min(step, size - offset)
            _take_datagram(
                t, address + offset, part, source, arrived if arrived else clock, marked, now
            )
    return got


@inner
def forget_errors(t: int) -> None:
    """Empty the queue of what hosts answered to datagrams: who is gone is told by the side
    channel.
    """
    receive_messages(
        np.int32(config_row(t)[UDP]),
        table(t, RECEIVE),
        np.uint32(RECEIVE_AT_ONCE),
        np.int32(DONT_WAIT | ERROR_QUEUE),
        0,
    )


@inner
def receive_stream(t: int, peer: int, now: int) -> None:
    """Receive what waits on the side channel of `peer`; its end, or nonsense, closes it."""
    row, config = peer_row(t, peer), config_row(t)
    filled = row[STREAM_FILLED]
    memory = table(t, STREAMS) + STREAM_BYTES * peer
    got = receive_bytes(
        np.int32(row[STREAM]), memory + filled, STREAM_BYTES - filled, np.int32(DONT_WAIT)
    )
    if got < 0 and (error_number() == AGAIN or error_number() == INTERRUPTED):
        return
    broken = got <= 0
    filled += max(got, 0)
    offset = 0
    while not broken and filled - offset >= 8:
        size = load64(memory + offset)
        if size < HEADER_BYTES or size > STREAM_BYTES - 8:
            broken = True
            break
        if filled - offset - 8 < size:
            break
        message = memory + offset + 8
        if (
            not is_valid(message, size, config[KEY], config[RANK], config[WORLD])
            or load16(message + 2) != peer
        ):
            broken = True
            break
        counter_row(t)[STREAM_FRAMES] += 1
        handle(t, message, size, nanoseconds(CLOCK_REALTIME, table(t, WORK)), 0, True, now)
        offset += 8 + size
    move_memory(memory, memory + offset, filled - offset)
    row[STREAM_FILLED] = filled - offset
    if broken:
        row[CLOSED] = 1
        config[EVENTS] += 1
