"""Data on its way out, compiled: divided among receivers, paced, in batches, and probed for.

`send_data` is called once in each round of the loop, and goes from the link to the segment:

    divide_link     which share of the link each receiver may use
    _send_to        whether a receiver's pace, and what is under way to it, allow a batch
    _most_urgent    of which part: highest priority first, sums before contributions
    _send_batch     several segments of the part in one system call
    send_probe      behind the last segment: what arrived?

Shares. Ranks that send to one, and receivers that one sends to, divide the links between them, so
that no queue fills. A rank with data for k receivers gives one that n ranks send to 1 / max(k, n)
of its link: neither this rank's link nor the receiver's is asked for more than it has. Each
datagram says whether its sender has more for the receiver (`MORE`), and reports say how many such
senders there are. Where all ranks have data for all others, all links are full without a word
between them. Where a rank is late, or done, the others take its share with the next report.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.messages import (
    AGAIN,
    BODY,
    CONTRIBUTION,
    DONT_WAIT,
    HEADER_BYTES,
    INTERRUPTED,
    MORE,
    NO_SIGNAL,
    PROBE,
    RESULT,
    SYNC,
    answer_nanoseconds,
    send_control,
    write_header,
    write_message,
    write_segment_bytes,
)
from lightning_topt.communication.bounded_loss.part_progress import has_bit, segment_elements
from lightning_topt.communication.bounded_loss.rate_rule import pacing_rate
from lightning_topt.communication.bounded_loss.raw_memory import (
    CLOCK_REALTIME,
    error_number,
    inner,
    load32,
    nanoseconds,
    send_message,
    send_messages,
    store8,
    store64,
)
from lightning_topt.communication.bounded_loss.tables import (
    NEVER,
    OUT_CONTRIBUTION,
    OUT_RESULT,
    PIECE_STRUCT,
    PROBING,
    SEND_AT_ONCE,
    SENDING,
    WAIT_OPEN,
    Root,
    bits_of,
    config_of,
    counters_of,
    flow_of,
    link_of,
    path_of,
    peer_of,
    sent_message,
    sent_piece,
    slot_of,
    source_address,
)

# what one call sends takes that long at the rate: short against queues
BATCH_NS, BATCH_SECONDS = 120_000, 1.2e-4
SLACK_SECONDS = 5e-3  # of data may be under way without a report: a receiver's thread may be late
LEAST_IN_FLIGHT = 16  # datagrams
# Token buckets of 16 kB, which are common, take a piece of this size as it is and cut longer ones.
BUCKET_BYTES = 15_500
IO_ERROR, INVALID, NO_BUFFERS = 5, 22, 105  # errno
BLOCKED, REFUSED = -1, -2  # by the socket; by a queue of this host


@inner
def send_data(t: Root, now: int, most_batches: int) -> int:
    """Send up to `most_batches` batches, to peers in rotation; return how many."""
    config, sent, idle = config_of(t), 0, 0
    peer = config.last_peer
    if divide_link(t) == 0:
        return 0
    while sent < most_batches and idle < config.world_size and config.writable:
        if config.pace_ns > now:
            link_of(t).limited = 1.0
            config.timer_ns = min(config.timer_ns, config.pace_ns)
            break
        peer = (peer + 1) % config.world_size
        if peer != config.rank and _send_to(t, peer, now):
            sent, idle = sent + 1, 0
        else:
            idle += 1
    config.last_peer = peer
    return sent


# ---- shares


@compiled
def divide_link(t: Root) -> int:
    """Set the share of each receiver that this rank has data for; return how many there are."""
    config, receivers, shares = config_of(t), 0, 0.0
    for peer in range(config.world_size):
        has_data = peer != config.rank and _has_other_data(t, -1, peer, 0)
        path_of(t, peer).share = 1.0 if has_data else 0.0
        receivers += path_of(t, peer).share > 0
    for peer in range(config.world_size):
        path_of(t, peer).share /= max(1, receivers, peer_of(t, peer).senders)
        shares += path_of(t, peer).share
    if receivers:
        link_of(t).shares = shares
    return receivers


@inner
def _has_other_data(t: Root, slot: int, peer: int, way: int) -> bool:
    # Whether there are data for `peer` beside those of this slot and way (slot -1: any)
    for other in range(config_of(t).used_slots):
        if not slot_of(t, other).active:
            continue
        for kind in (OUT_RESULT, OUT_CONTRIBUTION):
            if (other != slot or kind != way) and flow_of(t, other, peer, kind).state == SENDING:
                return True
    return False


@inner
def _most_urgent(t: Root, peer: int) -> tuple[int, int]:
    # The slot and way whose data for `peer` go first; (-1, 0) if there are none
    best, best_way, best_key = -1, 0, -1
    for slot in range(config_of(t).used_slots):
        if not slot_of(t, slot).active:
            continue
        for way in (OUT_RESULT, OUT_CONTRIBUTION):
            key = 2 * slot_of(t, slot).priority + (way == OUT_RESULT)
            if flow_of(t, slot, peer, way).state == SENDING and key > best_key:
                best, best_way, best_key = slot, way, key
    return best, best_way


# ---- pace


@inner
def _send_to(t: Root, peer: int, now: int) -> bool:
    """Send one batch to `peer` if its pace allows; return whether anything left.

    If not, the loop's timer says when to try again.
    """
    config, row, link = config_of(t), peer_of(t, peer), link_of(t)
    slot, way = _most_urgent(t, peer)
    if slot < 0:
        return False
    # what is under way to it
    room = _most_in_flight(t, peer) - (row.next_sequence - 1 - row.reported_highest)
    if room <= 0:
        link.limited = 1.0
        _ask_for_report(t, peer, now)
        return False
    # its share of the rate
    if row.pace_ns > now:
        link.limited = 1.0
        config.timer_ns = min(config.timer_ns, row.pace_ns)
        return False
    row.sync_tries, row.sync_ns = 0, 0
    whole = pacing_rate(link, config.datagram_bytes)
    speed = whole * path_of(t, peer).share
    most = max(
        1,
        min(
            SEND_AT_ONCE,
            65000 // config.datagram_bytes,
            int(whole * BATCH_SECONDS / config.datagram_bytes),
            room,
        ),
    )
    if most < 2 * BUCKET_BYTES // config.datagram_bytes:
        most = max(1, min(most, BUCKET_BYTES // config.datagram_bytes, int(link.batch)))
    nbytes = _send_batch(t, slot, peer, way, most, now)
    if nbytes == REFUSED:  # what is before it leaves at the rate of the link
        config.pace_ns = now + int(BATCH_SECONDS / 2 * 1e9)
    if nbytes < 0:
        return False
    burst = link.burst * config.datagram_bytes
    used = max(0, now - config.pace_ns - BATCH_NS) * 1e-9 * whole
    link.burst_used = max(link.burst_used, min(used, burst) / config.datagram_bytes)
    config.pace_ns = _next_time(config.pace_ns, now, nbytes, whole, burst)
    row.pace_ns = _next_time(row.pace_ns, now, nbytes, speed, burst)
    return True


@inner
def _most_in_flight(t: Root, peer: int) -> int:
    # How many datagrams may be under way to `peer` that it has not reported
    link, datagram = link_of(t), config_of(t).datagram_bytes
    window = path_of(t, peer).share * (
        2 * link.window + pacing_rate(link, datagram) * SLACK_SECONDS / datagram
    )
    return max(LEAST_IN_FLIGHT, int(min(window, float(peer_of(t, peer).most_in_flight))))


@inner
def _next_time(due: int, now: int, nbytes: int, speed: float, burst: float) -> int:
    """Return when the next batch may leave, after one of `nbytes` that was `due` and leaves now.

    A thread that was late makes up for it, as far as the queues on the way have taken bursts
    before.
    """
    return max(due, now - BATCH_NS - int(burst / speed * 1e9)) + int(nbytes / speed * 1e9)


@inner
def _ask_for_report(t: Root, peer: int, now: int) -> None:
    # Ask for a report if too much is under way for too long: the last datagrams may be lost
    config, row = config_of(t), peer_of(t, peer)
    if row.sync_ns == 0:
        row.sync_ns = now + answer_nanoseconds(t, peer, 0)
    elif row.sync_ns <= now:
        store64(t.message + BODY, row.next_sequence)
        send_control(t, peer, SYNC, 0, 0, 0, 0, 8)
        row.sync_tries += 1
        row.sync_ns = now + answer_nanoseconds(t, peer, row.sync_tries)
    config.timer_ns = min(config.timer_ns, row.sync_ns)


# ---- a batch


@inner
def _send_batch(t: Root, slot: int, peer: int, way: int, most: int, now: int) -> int:
    """Send the next segments of a flow, at most `most`; behind the last one, a probe.

    Returns:
        Their bytes, `BLOCKED` if the socket takes no more, `REFUSED` if a queue does not.
    """
    config, counters, row = config_of(t), counters_of(t), peer_of(t, peer)
    flow = flow_of(t, slot, peer, way)
    before = flow.next
    count = _fill_batch(t, slot, peer, way, most, nanoseconds(CLOCK_REALTIME, t.work))
    sent = _transmit(t, peer, count) if count else 0
    if sent == REFUSED:
        flow.next = before
        link_of(t).refused += count
        return REFUSED
    if sent < count:  # the rest again: find the first that did not leave
        first_left = load32(t.send_headers + HEADER_BYTES * sent + 20) - flow.first
        flow.next = before if sent == 0 else first_left
    row.next_sequence += sent
    flow.to_send -= sent
    nbytes = sent * config.datagram_bytes
    counters.sent_datagrams += sent
    counters.sent_bytes += nbytes
    if flow.serial:
        counters.resent_datagrams += sent
    if flow.next >= flow.count:
        flow.state, flow.tries = PROBING, 0
        flow.serial += 1
        send_probe(t, slot, peer, way, now)
    if sent < count:
        config.writable = 0
        return BLOCKED
    return nbytes


@inner
def _fill_batch(t: Root, slot: int, peer: int, way: int, most: int, clock: int) -> int:
    # Write headers and pieces of the next segments that are missing, at most `most`; how many
    config, row, flow = config_of(t), slot_of(t, slot), flow_of(t, slot, peer, way)
    each = config.segment_elements
    kind = CONTRIBUTION if way == OUT_CONTRIBUTION else RESULT
    base = row.values if way == OUT_CONTRIBUTION else row.shard_sum - 4 * flow.first * each
    count, index = 0, flow.next
    sequence = peer_of(t, peer).next_sequence
    while index < flow.count and count < most:
        if not has_bit(bits_of(t, slot, peer, way), index):
            segment = flow.first + index
            size = 4 * segment_elements(t, slot, segment)
            header = t.send_headers + HEADER_BYTES * count
            write_header(
                header, kind, MORE, config.rank, row.step, config.key, row.part, segment, size,
                sequence + count, clock,
            )  # fmt: skip
            piece = sent_piece(t, 2 * count)
            piece[0], piece[1] = header, HEADER_BYTES
            piece = sent_piece(t, 2 * count + 1)
            piece[0], piece[1] = base + 4 * segment * each, size
            count += 1
        index += 1
    flow.next = index
    if count:
        more = flow.to_send > count or _has_other_data(t, slot, peer, way)
        store8(t.send_headers + HEADER_BYTES * (count - 1) + 1, more)
    return count


@inner
def _transmit(t: Root, peer: int, count: int) -> int:
    """Send the batch: in one piece that the kernel cuts, or one by one.

    Returns:
        How many left, or `REFUSED`: a full queue of this host took none. On other errors they are
        lost.
    """
    config, ancillary, pieces = config_of(t), t.send_ancillary, t.send_pieces
    name, flags = source_address(t, peer), np.int32(DONT_WAIT | NO_SIGNAL)
    if config.offload:
        write_segment_bytes(ancillary, config.datagram_bytes)
        write_message(sent_message(t, 0), name, pieces, 2 * count, ancillary if count > 1 else 0)
        if send_message(np.int32(config.udp_socket), t.send, flags) >= 0:
            return count
        error = error_number()
        if error in (AGAIN, INTERRUPTED):
            return 0
        if error == NO_BUFFERS:
            return REFUSED
        if error != IO_ERROR and error != INVALID:
            return count
        config.offload = 0  # a device or kernel without it says so only here
    for index in range(count):
        first = pieces + 2 * PIECE_STRUCT * index  # header and elements
        write_message(sent_message(t, index), name, first, 2, 0)
    sent = send_messages(np.int32(config.udp_socket), t.send, np.uint32(count), flags)
    if sent >= 0:
        return sent
    error = error_number()
    if error == NO_BUFFERS:
        return REFUSED
    return 0 if error in (AGAIN, INTERRUPTED) else count


# ---- probes


@inner
def send_probe(t: Root, slot: int, peer: int, way: int, now: int) -> None:
    """Ask what came, behind the data."""
    config, row, flow = config_of(t), slot_of(t, slot), flow_of(t, slot, peer, way)
    store64(t.message + BODY, peer_of(t, peer).next_sequence)
    kind = CONTRIBUTION if way == OUT_CONTRIBUTION else RESULT
    send_control(t, peer, PROBE, kind, row.step, row.part, flow.serial, 8)
    flow.probe_ns = now + answer_nanoseconds(t, peer, flow.tries)
    config.probe_ns = min(config.probe_ns, flow.probe_ns)


@inner
def repeat_probes(t: Root, now: int) -> None:
    """Repeat the probes that were not answered in time; ask who has not opened a part as well."""
    config, counters = config_of(t), counters_of(t)
    if now < config.probe_ns:
        config.timer_ns = min(config.timer_ns, config.probe_ns)
        return
    config.probe_ns = NEVER
    for slot in range(config.used_slots):
        if not slot_of(t, slot).active:
            continue
        for peer in range(config.world_size):
            for way in (OUT_CONTRIBUTION, OUT_RESULT):
                flow = flow_of(t, slot, peer, way)
                if peer == config.rank or (flow.state != PROBING and flow.state != WAIT_OPEN):
                    continue
                if flow.probe_ns <= now:
                    flow.tries += 1
                    if flow.state == PROBING:
                        counters.stalled_ns += answer_nanoseconds(t, peer, flow.tries - 1)
                    send_probe(t, slot, peer, way, now)
                config.probe_ns = min(config.probe_ns, flow.probe_ns)
    config.timer_ns = min(config.timer_ns, config.probe_ns)
