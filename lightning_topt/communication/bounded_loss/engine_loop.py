"""The loop of an exchange's thread, compiled: receive, act, send, sleep until there is more to do.

`run_loop` is where the thread spends its time, without the GIL. It returns to Python when a part is
done or free, when a rank may be gone, when another thread wakes it, or at a time that Python set.

What arrives passes three checks: `_take_datagram` that it is complete, of this exchange and from
whom it says; `_take_data` and `_take_control` that it fits the tables; then `part_progress` that it
is of the present step. What fails one of the first two is counted and dropped. That a rank is gone,
the network says (`_take_errors`).
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.messages import (
    BITMAP,
    CONTRIBUTION,
    DONT_WAIT,
    HEADER_BYTES,
    LEAVE,
    MASK32,
    OPEN,
    PROBE,
    REPORT,
    REPORT_BYTES,
    RESULT,
    SOL_UDP,
    STOP,
    SYNC,
    UDP_GRO,
    is_valid,
    send_report,
    unwrapped,
)
from lightning_topt.communication.bounded_loss.part_progress import (
    segment_elements,
    stop_results,
    sum_more,
    take_part_message,
    take_segment,
)
from lightning_topt.communication.bounded_loss.rate_rule import measure_trip, take_report
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_MONOTONIC,
    CLOCK_REALTIME,
    NANOSECONDS,
    control_process,
    inner,
    integers,
    load8,
    load16,
    load32,
    load64,
    nanoseconds,
    receive_messages,
    store64,
    wait_for_files,
)
from lightning_topt.communication.bounded_loss.sending import repeat_probes, send_data
from lightning_topt.communication.bounded_loss.tables import (
    ADDRESS_STRUCT,
    ANCILLARY_BYTES,
    IN_CONTRIBUTION,
    IN_RESULT,
    NEVER,
    PIECE_STRUCT,
    RECEIVE_AT_ONCE,
    RECEIVE_BYTES,
    Root,
    config_of,
    counters_of,
    flow_of,
    link_of,
    path_of,
    peer_of,
    received_message,
    slot_of,
    source_address,
)

# of Linux: prctl, poll, and what recvmmsg says
SET_TIMER_SLACK = 29
READABLE, CAN_WRITE, BROKEN = 0x1, 0x4, 0x8 | 0x10 | 0x20
SOL_SOCKET, TIMESTAMP, TRUNCATED_FLAG, ERROR_QUEUE = 1, 35, 0x20, 0x2000
RECEIVED_ERROR, BY_ICMP, REFUSED = 11, 2, 111  # of the queue of errors: kind, origin, errno

RECEIVE_CALLS, SEND_CALLS = 4, 8  # before the other direction is served
RECEIVE_PAUSE_NS = 120_000  # after data: what comes meanwhile is taken together
REPORT_EVERY_NS, REPORT_AT = 500_000, 128
LEAST_REPORTED = 8  # datagrams: half of what may always be under way at least
FURTHEST_JUMP = 1 << 20  # of a sequence number


@compiled
def run_loop(t: Root, return_ns: int) -> int:
    """Work until something needs Python: an event, a wake-up, or the time `return_ns`.

    Returns:
        1 if it was woken, else 0.
    """
    config, counters = config_of(t), counters_of(t)
    config.return_ns = return_ns
    while True:
        # what arrived
        now = nanoseconds(CLOCK_MONOTONIC, t.work)
        before = counters.received_datagrams
        for _ in range(RECEIVE_CALLS):
            if _receive_datagrams(t, now) < RECEIVE_AT_ONCE:
                break
        # what follows from it; each step that has something to do later lowers the timer
        config.timer_ns = NEVER
        _send_reports(t, now)
        repeat_probes(t, now)
        sum_more(t)
        sent = send_data(t, now, SEND_CALLS)
        if config.events or now >= return_ns:
            config.events = 0
            return 0
        if sent == SEND_CALLS or config.parts_summing:
            config.timer_ns = now
        # sleep
        now_ns = nanoseconds(CLOCK_MONOTONIC, t.work)
        _sleep(t, now_ns, counters.received_datagrams > before)
        if _ready(t, 0) & CAN_WRITE:
            config.writable = 1
        if _ready(t, 0) & BROKEN:
            _take_errors(t, now)
        if _ready(t, 1):
            config.events = 0
            return 1


@compiled
def sleep_precisely() -> None:
    """Let this thread's sleeps end on time: 50 us late, the default, is long beside a batch."""
    control_process(np.int32(SET_TIMER_SLACK), 1, 0, 0, 0)


# ---- sleep


@inner
def _sleep(t: Root, now: int, busy: bool) -> None:
    """Sleep until a socket has something or the timer is due, and note what is ready.

    While data come (`busy`) their socket is read every so often: to be woken by each datagram costs
    more than the datagram.
    """
    config = config_of(t)
    until = min(config.timer_ns, config.return_ns)
    if busy:
        until = min(until, now + RECEIVE_PAUSE_NS)
    wait = max(0, until - now)
    # struct pollfd: 4 bytes of file, 2 of events, 2 of what is ready
    files = integers(t.files, 2)
    events = (0 if busy else READABLE) | (0 if config.writable else CAN_WRITE)
    files[0] = config.udp_socket | events << 32
    files[1] = config.wake_file | READABLE << 32
    timespec = t.work + 32
    store64(timespec, wait // NANOSECONDS)
    store64(timespec + 8, wait % NANOSECONDS)
    wait_for_files(t.files, np.uint64(2), timespec, 0)


@inner
def _ready(t: Root, index: int) -> int:
    return (load64(t.files + 8 * index) >> 48) & 0xFFFF


@inner
def _send_reports(t: Root, now: int) -> None:
    """Report what came, every so many datagrams or microseconds.

    The more senders there are, the more rarely to each.
    """
    config, senders = config_of(t), 0
    for peer in range(config.world_size):
        senders += peer_of(t, peer).unreported != 0
    for peer in range(config.world_size):
        row = peer_of(t, peer)
        if row.unreported == 0:
            continue
        due = row.reported_ns + REPORT_EVERY_NS * senders
        if row.unreported >= max(REPORT_AT // senders, LEAST_REPORTED) or due <= now:
            send_report(t, peer, now)
        else:
            config.timer_ns = min(config.timer_ns, due)


# ---- from the sockets


@inner
def _receive_datagrams(t: Root, now: int) -> int:
    """Receive what waits at the socket, one call's worth; return how many messages.

    The kernel may hand over several datagrams of one sender in a message (UDP_GRO).
    """
    got = _receive(t, DONT_WAIT)
    if got <= 0:
        return 0
    clock = nanoseconds(CLOCK_REALTIME, t.work)
    for index in range(got):
        row = received_message(t, index)
        size, flags = row[7] & 0xFFFFFFFF, row[6] & 0xFFFFFFFF
        if flags & TRUNCATED_FLAG:
            counters_of(t).rejected += 1
            continue
        segment, arrived, _ = _ancillary(t, index)
        arrived = arrived if arrived else clock
        address = t.receive_memory + RECEIVE_BYTES * index
        source = load64(t.receive_names + ADDRESS_STRUCT * index)
        step = segment if segment > 0 else max(size, 1)
        for offset in range(0, max(size, 1), step):
            part = min(step, size - offset)
            _take_datagram(t, address + offset, part, source, arrived, now)
    return got


@inner
def _receive(t: Root, flags: int) -> int:
    # Receive messages as `flags` say; return how many, or a negative number
    for index in range(RECEIVE_AT_ONCE):
        row = received_message(t, index)
        row[0], row[1] = t.receive_names + ADDRESS_STRUCT * index, ADDRESS_STRUCT
        row[2], row[3] = t.receive_pieces + PIECE_STRUCT * index, 1
        row[4], row[5] = t.receive_ancillary + ANCILLARY_BYTES * index, ANCILLARY_BYTES
        row[6], row[7] = 0, 0
    udp, most = np.int32(config_of(t).udp_socket), np.uint32(RECEIVE_AT_ONCE)
    return receive_messages(udp, t.receive, most, np.int32(flags), 0)


@inner
def _ancillary(t: Root, index: int) -> tuple[int, int, bool]:
    """Read the ancillary messages of a received message.

    Returns:
        The size of coalesced datagrams (0: one), when they arrived (CLOCK_REALTIME; 0: unknown),
        and whether nothing takes what was sent there.
    """
    address, size = t.receive_ancillary + ANCILLARY_BYTES * index, received_message(t, index)[5]
    segment, arrived, offset, is_refused = 0, 0, 0, False
    while offset + 16 <= size:
        length = load64(address + offset)
        level, kind = load32(address + offset + 8), load32(address + offset + 12)
        if length < 16 or offset + length > size:
            break
        data = address + offset + 16
        if level == SOL_UDP and kind == UDP_GRO:
            segment = load32(data)
        elif level == SOL_SOCKET and kind == TIMESTAMP:
            arrived = load64(data) * NANOSECONDS + load64(data + 8)
        elif level == 0 and kind == RECEIVED_ERROR and load8(data + 4) == BY_ICMP:
            # struct sock_extended_err: errno, and where the error comes from
            is_refused = load32(data) == REFUSED
        offset += (length + 7) // 8 * 8
    return segment, arrived, is_refused


@inner
def _take_datagram(t: Root, address: int, size: int, source: int, arrived: int, now: int) -> None:
    """Act on a datagram of `size` bytes that came from `source`, a struct sockaddr_in.

    `arrived` is the time when it came, CLOCK_REALTIME; `now` is CLOCK_MONOTONIC.
    """
    config = config_of(t)
    if not is_valid(address, size, config.key, config.rank, config.world_size):
        counters_of(t).rejected += 1
        return
    peer = load16(address + 2)
    if load64(source_address(t, peer)) != source:
        counters_of(t).rejected += 1
        return
    peer_of(t, peer).heard_ns = now
    if load8(address) > RESULT:
        _take_control(t, peer, address, size - HEADER_BYTES, arrived, now)
    else:
        _take_data(t, peer, address, size, arrived, now)


@inner
def _take_errors(t: Root, now: int) -> None:
    # Read the socket's queue of errors: where nothing takes a datagram, that rank has ended
    for index in range(_receive(t, DONT_WAIT | ERROR_QUEUE)):
        target = load64(t.receive_names + ADDRESS_STRUCT * index)
        _, _, is_refused = _ancillary(t, index)
        for peer in range(config_of(t).world_size if is_refused else 0):
            if peer != config_of(t).rank and load64(source_address(t, peer)) == target:
                _close(t, peer, now)


@inner
def _close(t: Root, peer: int, now: int) -> None:
    # Note that a rank has gone. One that leaves has all the results that it needs.
    row, config = peer_of(t, peer), config_of(t)
    if row.closed:
        return
    row.closed = 1
    config.events += 1
    for slot in range(config.used_slots):
        if slot_of(t, slot).active:
            stop_results(t, slot, peer, now)


# ---- messages


@inner
def _take_data(t: Root, peer: int, address: int, size: int, arrived: int, now: int) -> None:
    # Check a segment against the tables, count it for the next report, and put it in its place
    step, segment = load32(address + 4), load32(address + 20)
    slot = _find_slot(t, load32(address + 16))
    if slot < 0 or step > slot_of(t, slot).step & MASK32:
        counters_of(t).rejected += 1
        return
    way = IN_CONTRIBUTION if load8(address) == CONTRIBUTION else IN_RESULT
    flow = flow_of(t, slot, peer, way)
    index = segment - flow.first
    if (
        index < 0
        or index >= flow.count
        or size != HEADER_BYTES + 4 * segment_elements(t, slot, segment)
        or not _count_data(t, peer, address, arrived)
    ):
        counters_of(t).rejected += 1
        return
    elements = address + HEADER_BYTES
    take_segment(t, slot, peer, way, step, segment, elements, size - HEADER_BYTES, now)


@inner
def _find_slot(t: Root, part: int) -> int:
    # The slot of a part, -1 if this rank does not know it
    config = config_of(t)
    if config.recent_slot < config.used_slots and slot_of(t, config.recent_slot).part == part:
        return config.recent_slot
    for slot in range(config.used_slots):
        if slot_of(t, slot).part == part:
            config.recent_slot = slot
            return slot
    return -1


@inner
def _count_data(t: Root, peer: int, address: int, arrived: int) -> bool:
    # Count a datagram of data for reports; return whether its number is a likely one
    config, counters, row = config_of(t), counters_of(t), peer_of(t, peer)
    sequence = unwrapped(load32(address + 28), row.highest_seen)
    if abs(sequence - row.highest_seen) > FURTHEST_JUMP or sequence < 0:
        return False
    if sequence > row.highest_seen:
        row.highest_seen, row.has_data = sequence, load8(address + 1)
    row.seen += 1
    row.unreported += 1
    row.stamp, row.arrived_ns = load64(address + 32), arrived
    config.arrived, config.arrived_ns = config.arrived + 1, max(config.arrived_ns, arrived)
    counters.received_datagrams += 1
    return True


@inner
def _take_control(t: Root, peer: int, address: int, body: int, arrived: int, now: int) -> None:
    # Act on a control message; one about a part that this rank does not know is dropped
    kind, content, row = load8(address), address + HEADER_BYTES, peer_of(t, peer)
    if kind == REPORT and body == REPORT_BYTES:
        _take_report(t, peer, content, arrived, now)
    elif kind == SYNC and body == 8:
        _raise_highest(t, peer, load64(content))
        send_report(t, peer, now)
    elif kind == LEAVE and body == 8:
        row.failed_rank = 1 + load64(content)  # 0 for none
        _close(t, peer, now)
    elif kind in (OPEN, PROBE, BITMAP, STOP):
        if kind == PROBE and body == 8:  # it came behind the data
            _raise_highest(t, peer, load64(content))
            if row.unreported:
                send_report(t, peer, now)
        slot = _find_slot(t, load32(address + 16))
        if slot >= 0:
            take_part_message(t, slot, peer, address, body, now)
    else:
        counters_of(t).rejected += 1


@inner
def _raise_highest(t: Root, peer: int, sequence: int) -> None:
    # Count what was sent before number `sequence` and is not here as lost
    row = peer_of(t, peer)
    if row.highest_seen < sequence - 1 <= row.highest_seen + FURTHEST_JUMP:
        row.highest_seen = sequence - 1
        row.unreported += 1


@inner
def _take_report(t: Root, peer: int, body: int, arrived: int, now: int) -> None:
    # Take in what `send_report` wrote, after a check that the counts are possible
    row, link, path = peer_of(t, peer), link_of(t), path_of(t, peer)
    highest, lost = load64(body), load64(body + 8)
    stamp, held = load64(body + 16), load64(body + 24)
    if not -1 <= highest < row.next_sequence or not 0 <= lost <= highest + 1:
        counters_of(t).rejected += 1
        return
    # An old one, which the network held back or somebody sends again, would count the time between.
    if stamp and highest > path.highest:
        measure_trip(path, link, (arrived - stamp - held) * 1e-9)
    row.reported_highest = max(row.reported_highest, highest)
    row.senders = min(max(load64(body + 48), 0), config_of(t).world_size)
    all_arrived, last_arrived = load64(body + 32), load64(body + 40) * 1e-9
    take_report(path, link, highest, lost, all_arrived, last_arrived, now * 1e-9)
