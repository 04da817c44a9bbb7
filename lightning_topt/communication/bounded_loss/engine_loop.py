"""The loop of the exchange's thread: receive, act, send, sleep until there is more to do. Runs without the GIL."""

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
    flush_stream,
    send_report,
)
from lightning_topt.communication.bounded_loss.data_arrivals import reject
from lightning_topt.communication.bounded_loss.data_sending import MOST_TIMER, send_data
from lightning_topt.communication.bounded_loss.datagram import HEADER_BYTES, is_valid
from lightning_topt.communication.bounded_loss.part_progress import sum_more
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_MONOTONIC,
    CLOCK_REALTIME,
    NANOSECONDS,
    Array,
    control_process,
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
    store64,
    wait_for_files,
)
from lightning_topt.communication.bounded_loss.receiver_turns import end_silent_turn
from lightning_topt.communication.bounded_loss.repeated_probes import repeat_probes
from lightning_topt.communication.bounded_loss.table_views import (
    FILES,
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
    NEXT_TIMER,
    PENDING_BYTES,
    RANK,
    RECEIVE_AT_ONCE,
    RECEIVE_BYTES,
    RECEIVE_CALLS,
    RECEIVED_DATAGRAMS,
    REPORTED_NS,
    RETURN_NS,
    STREAM,
    STREAM_BYTES,
    STREAM_FILLED,
    STREAM_FRAMES,
    SUMS,
    TRUNCATED,
    UDP,
    UNREPORTED,
    WAKE,
    WORLD,
    WRITABLE,
    WRONG_KEY,
    WRONG_SIZE,
    WRONG_SOURCE,
)
from lightning_topt.communication.compiled import compiled

SET_TIMER_SLACK = 29  # of prctl
SOL_SOCKET, TIMESTAMP, TRUNCATED_FLAG = 1, 35, 0x20
READABLE, CAN_WRITE, BROKEN = 0x1, 0x4, 0x8 | 0x10 | 0x20
REPORT_EVERY_NS, REPORT_AT = 500_000, 64  # datagrams
RECEIVE_TURNS, SEND_TURNS = 4, 8  # calls before the other direction gets its turn
CONGESTION_MARK = 3
ERROR_QUEUE = 0x2000
RECEIVE_PAUSE_NS = 70_000  # after data: what comes meanwhile is taken together


@inner
def _received(t: int, index: int) -> Array:
    return integers(table(t, RECEIVE) + 64 * index, 8)


@inner
def _ancillary(t: int, index: int) -> tuple[int, int, int]:
    """Return the size of coalesced datagrams (0: one), whether they are marked, and when they arrived (0: unknown)."""
    address, size = table(t, RECEIVE_CONTROL) + CONTROL_BYTES * index, _received(t, index)[5]
    segment, marked, arrived, offset = 0, 0, 0, 0
    while offset + 16 <= size:
        length, level, kind = load64(address + offset), load32(address + offset + 8), load32(address + offset + 12)
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
def _take_datagram(t: int, address: int, size: int, source: int, arrived: int, marked: int, now: int) -> None:
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
        np.int32(config_row(t)[UDP]), table(t, RECEIVE), np.uint32(RECEIVE_AT_ONCE), np.int32(DONT_WAIT), 0
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
        address, source = table(t, RECEIVE_MEMORY) + RECEIVE_BYTES * index, load64(table(t, RECEIVE_NAMES) + 16 * index)
        step = segment if segment > 0 else max(size, 1)
        for offset in range(0, max(size, 1), step):
            part = min(step, size - offset)
            _take_datagram(t, address + offset, part, source, arrived if arrived else clock, marked, now)
    return got


@inner
def _forget_errors(t: int) -> None:
    """Empty the queue of what hosts answered to datagrams: who is gone is told by the side channel."""
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
    got = receive_bytes(np.int32(row[STREAM]), memory + filled, STREAM_BYTES - filled, np.int32(DONT_WAIT))
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
        if not is_valid(message, size, config[KEY], config[RANK], config[WORLD]) or load16(message + 2) != peer:
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


@inner
def _send_reports(t: int, now: int) -> None:
    """Report what came, every so many datagrams or microseconds."""
    for peer in range(config_row(t)[WORLD]):
        row = peer_row(t, peer)
        if row[UNREPORTED] == 0:
            continue
        due = row[REPORTED_NS] + REPORT_EVERY_NS
        if row[UNREPORTED] >= REPORT_AT or due <= now:
            send_report(t, peer, now)
        else:
            config_row(t)[NEXT_TIMER] = min(config_row(t)[NEXT_TIMER], due)


@inner
def _sleep(t: int, now: int, busy: bool) -> None:
    """Sleep until a socket has something or the next time to act, and note what is ready.

    While data come (`busy`) their socket is looked at every so often: to be woken by each costs more than they do.
    """
    config, world = config_row(t), config_row(t)[WORLD]
    until = min(config[NEXT_TIMER], config[RETURN_NS])
    if busy:
        until = min(until, now + RECEIVE_PAUSE_NS)
    wait = max(0, until - now)
    files = integers(table(t, FILES), world + 2)
    files[0] = config[UDP] | ((0 if busy else READABLE) | (0 if config[WRITABLE] else CAN_WRITE)) << 32
    files[1] = config[WAKE] | READABLE << 32
    for peer in range(world):
        row = peer_row(t, peer)
        if row[STREAM] < 0 or row[CLOSED]:
            files[2 + peer] = 0xFFFFFFFF  # a negative file is ignored
        else:
            files[2 + peer] = row[STREAM] | (READABLE | (CAN_WRITE if row[PENDING_BYTES] else 0)) << 32
    timespec = table(t, WORK) + 32
    store64(timespec, wait // NANOSECONDS)
    store64(timespec + 8, wait % NANOSECONDS)
    wait_for_files(table(t, FILES), np.uint64(2 + world), timespec, 0)


@inner
def _ready(t: int, index: int) -> int:
    return (load64(table(t, FILES) + 8 * index) >> 48) & 0xFFFF


@inner
def _serve_streams(t: int, now: int) -> None:
    for peer in range(config_row(t)[WORLD]):
        ready = _ready(t, 2 + peer)
        if peer_row(t, peer)[STREAM] < 0 or peer_row(t, peer)[CLOSED] or ready == 0:
            continue
        if ready & (READABLE | BROKEN):
            receive_stream(t, peer, now)
        if peer_row(t, peer)[PENDING_BYTES]:
            flush_stream(t, peer)


@compiled
def sleep_precisely() -> None:
    """Let sleeps of this thread end on time: by default they may be 50 us late, as long as a batch takes."""
    control_process(np.int32(SET_TIMER_SLACK), 1, 0, 0, 0)


@compiled
def run_loop(t: int) -> int:
    """Work until something needs Python: an event, a wake-up, or the time `RETURN_NS`. Returns whether it was woken."""
    config = config_row(t)
    timespec = table(t, WORK)
    while True:
        now = nanoseconds(CLOCK_MONOTONIC, timespec)
        before = counter_row(t)[RECEIVED_DATAGRAMS]
        for _ in range(RECEIVE_TURNS):
            if receive_datagrams(t, now) < RECEIVE_AT_ONCE:
                break
        config[NEXT_TIMER] = MOST_TIMER
        _send_reports(t, now)
        repeat_probes(t, now)
        end_silent_turn(t, now)
        sum_more(t)
        sent = send_data(t, now, SEND_TURNS)
        if config[EVENTS] or now >= config[RETURN_NS]:
            return 0
        if sent == SEND_TURNS or config[SUMS]:
            config[NEXT_TIMER] = now
        _sleep(t, nanoseconds(CLOCK_MONOTONIC, timespec), counter_row(t)[RECEIVED_DATAGRAMS] > before)
        if _ready(t, 0) & CAN_WRITE:
            config[WRITABLE] = 1
        if _ready(t, 0) & BROKEN:
            _forget_errors(t)
        _serve_streams(t, now)
        if _ready(t, 1):
            return 1
