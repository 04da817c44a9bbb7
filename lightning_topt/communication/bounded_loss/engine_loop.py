"""The loop of the exchange's thread: receive, act, send, sleep until there is more to do. Runs
without the GIL.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.control_messages import flush_stream, send_report
from lightning_topt.communication.bounded_loss.data_sending import send_data
from lightning_topt.communication.bounded_loss.part_progress import sum_more
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_MONOTONIC,
    NANOSECONDS,
    control_process,
    inner,
    load64,
    nanoseconds,
    store64,
    wait_for_files,
)
from lightning_topt.communication.bounded_loss.receiving import (
    forget_errors,
    receive_datagrams,
    receive_stream,
)
from lightning_topt.communication.bounded_loss.repeated_probes import repeat_probes
from lightning_topt.communication.bounded_loss.table_views import (
    FILES,
    WORK,
    config_row,
    counter_row,
    integers,
    peer_row,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    CLOSED,
    EVENTS,
    NEVER,
    NEXT_TIMER,
    PENDING_BYTES,
    RECEIVE_AT_ONCE,
    RECEIVED_DATAGRAMS,
    REPORTED_NS,
    RETURN_NS,
    STREAM,
    SUMS,
    UDP,
    UNREPORTED,
    WAKE,
    WORLD,
    WRITABLE,
)

SET_TIMER_SLACK = 29  # of prctl
READABLE, CAN_WRITE, BROKEN = 0x1, 0x4, 0x8 | 0x10 | 0x20
# datagrams: half of what may always be under way at least
REPORT_EVERY_NS, REPORT_AT, LEAST_REPORTED = 500_000, 128, 8
RECEIVE_TURNS, SEND_TURNS = 4, 8  # calls before the other direction gets its turn
RECEIVE_PAUSE_NS = 120_000  # after data: what comes meanwhile is taken together


@inner
def _send_reports(t: int, now: int) -> None:
    """Report what came, every so many datagrams or microseconds, to each the more rarely the more
    there are.
    """
    senders = 0
    for peer in range(config_row(t)[WORLD]):
        senders += peer_row(t, peer)[UNREPORTED] != 0
    for peer in range(config_row(t)[WORLD]):
        row = peer_row(t, peer)
        if row[UNREPORTED] == 0:
            continue
        due = row[REPORTED_NS] + REPORT_EVERY_NS * senders
        if row[UNREPORTED] >= max(REPORT_AT // senders, LEAST_REPORTED) or due <= now:
            send_report(t, peer, now)
        else:
            config_row(t)[NEXT_TIMER] = min(config_row(t)[NEXT_TIMER], due)


@inner
def _sleep(t: int, now: int, busy: bool) -> None:
    """Sleep until a socket has something or the next time to act, and note what is ready.

    While data come (`busy`) their socket is looked at every so often: to be woken by each costs
    more than they do.
    """
    config, world = config_row(t), config_row(t)[WORLD]
    until = min(config[NEXT_TIMER], config[RETURN_NS])
    if busy:
        until = min(until, now + RECEIVE_PAUSE_NS)
    wait = max(0, until - now)
    files = integers(table(t, FILES), world + 2)
    files[0] = (
        config[UDP] | ((0 if busy else READABLE) | (0 if config[WRITABLE] else CAN_WRITE)) << 32
    )
    files[1] = config[WAKE] | READABLE << 32
    for peer in range(world):
        row = peer_row(t, peer)
        if row[STREAM] < 0 or row[CLOSED]:
            files[2 + peer] = 0xFFFFFFFF  # a negative file is ignored
        else:
            files[2 + peer] = (
                row[STREAM] | (READABLE | (CAN_WRITE if row[PENDING_BYTES] else 0)) << 32
            )
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
    """Let sleeps of this thread end on time: by default they may be 50 us late, as long as a batch
    takes.
    """
    control_process(np.int32(SET_TIMER_SLACK), 1, 0, 0, 0)


@compiled
def run_loop(t: int) -> int:
    """Work until something needs Python: an event, a wake-up, or the time `RETURN_NS`. Returns
    whether it was woken.
    """
    config = config_row(t)
    timespec = table(t, WORK)
    while True:
        now = nanoseconds(CLOCK_MONOTONIC, timespec)
        before = counter_row(t)[RECEIVED_DATAGRAMS]
        for _ in range(RECEIVE_TURNS):
            if receive_datagrams(t, now) < RECEIVE_AT_ONCE:
                break
        config[NEXT_TIMER] = NEVER
        _send_reports(t, now)
        repeat_probes(t, now)
        sum_more(t)
        sent = send_data(t, now, SEND_TURNS)
        if config[EVENTS] or now >= config[RETURN_NS]:
            return 0
        if sent == SEND_TURNS or config[SUMS]:
            config[NEXT_TIMER] = now
        _sleep(
            t, nanoseconds(CLOCK_MONOTONIC, timespec), counter_row(t)[RECEIVED_DATAGRAMS] > before
        )
        if _ready(t, 0) & CAN_WRITE:
            config[WRITABLE] = 1
        if _ready(t, 0) & BROKEN:
            forget_errors(t)
        _serve_streams(t, now)
        if _ready(t, 1):
            return 1
