"""Data on its way out: paced, the most urgent part first, several segments in one system call."""

from __future__ import annotations

import numpy as np

from lightning_topt.communication.bounded_loss.control_messages import (
    AGAIN,
    BODY,
    BY_DATAGRAM,
    DONT_WAIT,
    INTERRUPTED,
    NO_SIGNAL,
    answer_nanoseconds,
    send_control,
    write_ancillary,
    write_message,
)
from lightning_topt.communication.bounded_loss.datagram import (
    CONTRIBUTION,
    HEADER_BYTES,
    RESULT,
    SYNC,
    write_header,
)
from lightning_topt.communication.bounded_loss.rate_rule import (
    BURST,
    BURST_USED,
    LIMITED,
    REFUSED_IN_ROUND,
    WINDOW,
    pacing_rate,
)
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    error_number,
    inner,
    load8,
    load32,
    nanoseconds,
    send_message,
    send_messages,
    store64,
)
from lightning_topt.communication.bounded_loss.receiver_turns import WITHOUT_TURN, after_batch, turn_room, without_data
from lightning_topt.communication.bounded_loss.repeated_probes import send_probe
from lightning_topt.communication.bounded_loss.shard_sum import has_bit, segment_elements
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
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
    peer_row,
    rate_row,
    sent_message,
    sent_part,
    slot_row,
    source_of,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    BLOCKED,
    BY_SIZE,
    COUNT,
    DATAGRAM,
    ELEMENTS,
    FIRST,
    KEY,
    LARGE_BLOCK,
    LAST_PEER,
    MARKING,
    MOST_IN_FLIGHT,
    NEXT,
    NEXT_SEQUENCE,
    NEXT_TIMER,
    OFFLOAD,
    OUT_C,
    OUT_R,
    PACE_NS,
    PRIORITY,
    PROBING,
    RANK,
    REFUSED_DATAGRAMS,
    REPORT_HIGHEST,
    RESENT_DATAGRAMS,
    SEND_AT_ONCE,
    SEND_CALLS,
    SENDING,
    SENT_BYTES,
    SENT_DATAGRAMS,
    SERIAL,
    STATE,
    STEP,
    SUM,
    SYNC_NS,
    SYNC_TRIES,
    TENSOR,
    TO_SEND,
    TRIES,
    UDP,
    USED_SLOTS,
    VALUES,
    WORLD,
    WRITABLE,
)

BATCH_SECONDS = 1.2e-4  # what one call sends takes that long at the rate: short against the queues on the way
SLACK_SECONDS = 5e-3  # of data may be under way without a report: a receiver's thread may be late
LEAST_IN_FLIGHT = 16  # datagrams
BUCKET_BYTES = 15_500  # token buckets of 16 kB, which are common, take a piece as it is; they cut longer ones
IO_ERROR, INVALID, NO_BUFFERS = 5, 22, 105
REFUSED = -2
MOST_TIMER = 1 << 62
CAPABLE = 2  # ECN: packets may be marked instead of dropped


@inner
def service_class(priority: int, large: bool) -> int:
    """Return the byte of DSCP and ECN: assured forwarding class 1 to 4 for priority 0 to 3, precedence 1 or 3 (RFC 2597)."""
    return (8 * (priority + 1) + (2 if large else 6)) << 2 | CAPABLE


@inner
def _most_urgent(t: int, peer: int) -> tuple[int, int]:
    """Return the slot and way that has data for `peer` and goes first; (-1, 0): none. Sums go before contributions."""
    best, best_way, best_key = -1, 0, -1
    for slot in range(config_row(t)[USED_SLOTS]):
        if not slot_row(t, slot)[ACTIVE]:
            continue
        for way in (OUT_R, OUT_C):
            key = 2 * slot_row(t, slot)[PRIORITY] + (way == OUT_R)
            if flow_row(t, slot, peer, way)[STATE] == SENDING and key > best_key:
                best, best_way, best_key = slot, way, key
    return best, best_way


@inner
def _is_large(t: int, slot: int, way: int, segment: int) -> bool:
    return way == OUT_R or not slot_row(t, slot)[BY_SIZE] or load8(large_of(t, slot, segment // LARGE_BLOCK)) != 0


@inner
def _fill_batch(t: int, slot: int, peer: int, way: int, most: int, clock: int) -> tuple[int, int]:
    """Write headers and pieces of the next segments that are missing, at most `most`; returns how many, and their DSCP byte."""
    config, row, flow, each = config_row(t), slot_row(t, slot), flow_row(t, slot, peer, way), config_row(t)[ELEMENTS]
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
            write_header(header, kind, 0, config[RANK], row[STEP], config[KEY], row[TENSOR], segment, size,
                         sequence + count, clock)  # fmt: skip
            part = sent_part(t, 2 * count)
            part[0], part[1] = header, HEADER_BYTES
            part = sent_part(t, 2 * count + 1)
            part[0], part[1] = base + 4 * segment * each, size
            count += 1
        index += 1
    flow[NEXT] = index
    return count, service_class(row[PRIORITY], large) if config[MARKING] else -1


@inner
def _transmit(t: int, peer: int, count: int, tos: int) -> int:
    """Send the batch: in one piece that the kernel cuts, or one by one.

    Returns how many left; `REFUSED` where a full queue of this host took none. On other errors they are lost.
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
        write_message(sent_message(t, index), name, table(t, SEND_PARTS) + 32 * index, 2, ancillary, used)
    sent = send_messages(np.int32(config[UDP]), table(t, SEND), np.uint32(count), flags)
    if sent >= 0:
        return sent
    error = error_number()
    if error == NO_BUFFERS:
        return REFUSED
    return 0 if error in (AGAIN, INTERRUPTED) else count


@inner
def _send_batch(t: int, slot: int, peer: int, way: int, most: int, now: int) -> int:
    """Send the next segments of one way; returns their bytes, -1 where the socket takes no more, `REFUSED` where the queue."""
    config, flow, row = config_row(t), flow_row(t, slot, peer, way), peer_row(t, peer)
    before = flow[NEXT]
    count, tos = _fill_batch(t, slot, peer, way, most, nanoseconds(CLOCK_REALTIME, table(t, WORK)))
    sent = _transmit(t, peer, count, tos) if count else 0
    if sent == REFUSED:
        flow[NEXT] = before
        rate_row(t, peer)[REFUSED_IN_ROUND] += count
        counter_row(t)[REFUSED_DATAGRAMS] += count
        return REFUSED
    if sent < count:  # the rest again: find the first that did not leave
        flow[NEXT] = before if sent == 0 else load32(table(t, SEND_HEADERS) + HEADER_BYTES * sent + 20) - flow[FIRST]
    row[NEXT_SEQUENCE] += sent
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


@inner
def most_in_flight(t: int, peer: int) -> int:
    """Return how many datagrams may be under way to `peer` that it has not reported."""
    rate = rate_row(t, peer)
    window = 2 * rate[WINDOW] + pacing_rate(rate, config_row(t)[DATAGRAM]) * SLACK_SECONDS / config_row(t)[DATAGRAM]
    return max(LEAST_IN_FLIGHT, int(min(window, float(peer_row(t, peer)[MOST_IN_FLIGHT]))))


@inner
def _send_to(t: int, peer: int, now: int) -> bool:
    """Send one batch to `peer` if its pace allows; returns whether anything left. Sets the next time to look."""
    config, row, rate = config_row(t), peer_row(t, peer), rate_row(t, peer)
    slot, way = _most_urgent(t, peer)
    if slot < 0:
        without_data(t, peer)
        return False
    turn = turn_room(t, peer, now)
    if turn <= 0:
        turn = WITHOUT_TURN
        if flow_row(t, slot, peer, way)[TO_SEND] > WITHOUT_TURN:
            return False
    in_flight = row[NEXT_SEQUENCE] - 1 - row[REPORT_HIGHEST]
    room = min(turn, most_in_flight(t, peer) - in_flight)
    if room <= 0:
        rate[LIMITED] = 1.0
        _ask_for_report(t, peer, now)
        return False
    if row[PACE_NS] > now:
        rate[LIMITED] = 1.0
        config[NEXT_TIMER] = min(config[NEXT_TIMER], row[PACE_NS])
        return False
    row[SYNC_TRIES], row[SYNC_NS] = 0, 0
    speed = pacing_rate(rate, config[DATAGRAM])
    most = max(1, min(SEND_AT_ONCE, 65000 // config[DATAGRAM], int(speed * BATCH_SECONDS / config[DATAGRAM]), room))
    if most < 2 * BUCKET_BYTES // config[DATAGRAM]:
        most = max(1, min(most, BUCKET_BYTES // config[DATAGRAM]))
    nbytes = _send_batch(t, slot, peer, way, most, now)
    if nbytes == REFUSED:  # what is before it leaves at the rate of the link
        row[PACE_NS] = now + int(BATCH_SECONDS / 2 * 1e9)
        config[NEXT_TIMER] = min(config[NEXT_TIMER], row[PACE_NS])
    if nbytes < 0:
        return False
    after_batch(t, peer)
    # A thread that was late makes up for it, as far as the queues on the way have taken bursts before.
    late = now - row[PACE_NS] - int(BATCH_SECONDS * 1e9)
    credit = min(late, int(rate[BURST] * config[DATAGRAM] / speed * 1e9))
    if late > 0:
        rate[BURST_USED] = max(rate[BURST_USED], credit * 1e-9 * speed / config[DATAGRAM])
        row[PACE_NS] = now - int(BATCH_SECONDS * 1e9) - credit
    row[PACE_NS] += int(nbytes / speed * 1e9)
    return True


@inner
def _ask_for_report(t: int, peer: int, now: int) -> None:
    """Ask for a report where too much is under way for too long: what was last may be lost."""
    row = peer_row(t, peer)
    if row[SYNC_NS] == 0:
        row[SYNC_NS] = now + answer_nanoseconds(t, peer, 0)
    elif row[SYNC_NS] <= now:
        store64(table(t, MESSAGE) + BODY, row[NEXT_SEQUENCE])
        send_control(t, peer, SYNC, 0, 0, 0, 0, 8, BY_DATAGRAM)
        row[SYNC_TRIES] += 1
        row[SYNC_NS] = now + answer_nanoseconds(t, peer, row[SYNC_TRIES])
    config_row(t)[NEXT_TIMER] = min(config_row(t)[NEXT_TIMER], row[SYNC_NS])


@inner
def send_data(t: int, now: int, most_batches: int) -> int:
    """Send up to `most_batches` batches, peers in turn; returns how many."""
    config, sent, idle = config_row(t), 0, 0
    peer = config[LAST_PEER]
    while sent < most_batches and idle < config[WORLD] and config[WRITABLE]:
        peer = (peer + 1) % config[WORLD]
        if peer != config[RANK] and _send_to(t, peer, now):
            sent, idle = sent + 1, 0
        else:
            idle += 1
    config[LAST_PEER] = peer
    return sent
