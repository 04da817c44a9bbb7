"""The life of a part on one rank, compiled: opened, contributions closed, summed, results in, free.

A part is cut into one shard per rank, a shard into segments, which travel in a datagram each. With
every peer there are four flows (`tables`). For one shard, between its owner and another rank:

    another rank                            the owner of the shard

    contribution                            contribution
    WAIT_OPEN   <-- OPEN -----------------  RECEIVING, since `open_part`
    SENDING     --- data ---------------->  `take_segment`
    PROBING     --- PROBE --------------->  enough is here? `_close_contribution`, else
    SENDING     <-- BITMAP ---------------  what is; the rest is sent again
    STOPPED     <-- STOP, with bitmap ----  CLOSED; after the last one `sum_more`
    result                                  result
    RECEIVING   <-- data -----------------  SENDING, to all ranks
                <-- PROBE ----------------  PROBING
                --- BITMAP -------------->  SENDING what is missing
    CLOSED      --- STOP ---------------->  STOPPED

- The owner closes a contribution when all of it is there, or when its sender is through, at most
  the tolerated share is missing, and nothing of what is exact. The bitmap at that time is what went
  into the sum; STOP carries it to the sender.
- Results close when they are complete and the receiver also knows the bitmap of its own
  contribution. So an owner that has seen all results closed owes nobody anything, and may begin the
  part's next step. In return, who has begun the next step has all of this one.
- PROBE is repeated until it is answered, see `sending`. Every other message is repeated as the
  answer to a probe, so any of them may be lost.

The owner of a shard adds up all contributions in rank order, so sums do not depend on the order of
arrival. What a contribution lacks counts as 0. Sums are made in float32, also of halves.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.messages import (
    BITMAP,
    BODY,
    CONTRIBUTION,
    HEADER_BYTES,
    MASK32,
    OPEN,
    PROBE,
    RESULT,
    STOP,
    answer_nanoseconds,
    pack_halves,
    send_control,
    unpack_halves,
    unwrapped,
)
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    address_of,
    copy_memory,
    fill_memory,
    floats,
    inner,
    load8,
    load32,
    load64,
    store64,
)
from lightning_topt.communication.bounded_loss.tables import (
    CLOSED,
    IDLE,
    IN_CONTRIBUTION,
    IN_RESULT,
    OUT_CONTRIBUTION,
    OUT_RESULT,
    PROBING,
    RECEIVING,
    SENDING,
    STOPPED,
    WAIT_OPEN,
    Root,
    bits_of,
    config_of,
    counters_of,
    exact_bits,
    flow_of,
    inbox_address,
    peer_of,
    scale_of,
    slot_of,
)

SEGMENTS_AT_ONCE = 32  # some tens of microseconds

# ---- opened


@compiled
def open_part(t: Root, slot: int, tolerance: float, now: int) -> None:
    """Begin the next step of a part whose slot says what and where, and say so to all ranks."""
    config, row = config_of(t), slot_of(t, slot)
    rank = config.rank
    row.active, row.done, row.wanted, row.summing, row.progress_ns = 1, 0, 0, 0, now
    row.open_contributions = row.missing_results = 0
    row.unstopped_contributions = row.unstopped_results = 0
    for peer in range(config.world_size):
        if peer == rank:
            continue
        # the peer's shard: this rank contributes, and gets the sum
        out, results = flow_of(t, slot, peer, OUT_CONTRIBUTION), flow_of(t, slot, peer, IN_RESULT)
        _reset_flow(t, slot, peer, OUT_CONTRIBUTION, peer, WAIT_OPEN)
        _reset_flow(t, slot, peer, IN_RESULT, peer, RECEIVING)
        if out.count == 0:
            out.state, results.state = STOPPED, CLOSED
        else:
            row.unstopped_contributions += 1
            row.missing_results += 1
            if out.opened_step >= row.step:
                out.state = SENDING
            out.probe_ns = now + answer_nanoseconds(t, peer, 0)
            config.probe_ns = min(config.probe_ns, out.probe_ns)
        # this rank's shard: the peer contributes, and gets the sum
        given, sums = flow_of(t, slot, peer, IN_CONTRIBUTION), flow_of(t, slot, peer, OUT_RESULT)
        _reset_flow(t, slot, peer, IN_CONTRIBUTION, rank, RECEIVING)
        _reset_flow(t, slot, peer, OUT_RESULT, rank, IDLE)
        if given.count == 0:
            given.state, sums.state = CLOSED, STOPPED
        else:
            row.open_contributions += 1
            row.unstopped_results += 1
            exact = 0
            for index in range(given.count):
                exact += has_bit(exact_bits(t, slot), given.first + index)
            given.may_miss, given.exact_missing = int(tolerance * given.count), exact
        store64(t.message + BODY, row.numel)
        send_control(t, peer, OPEN, 0, row.step, row.part, 0, 8)
    _check_done(t, slot)


@inner
def _reset_flow(t: Root, slot: int, peer: int, way: int, shard: int, state: int) -> None:
    flow, segments, world = (
        flow_of(t, slot, peer, way),
        slot_of(t, slot).segments,
        config_of(t).world_size,
    )
    flow.first = segments * shard // world
    flow.count = segments * (shard + 1) // world - flow.first
    flow.state, flow.received, flow.next, flow.serial, flow.tries = state, 0, 0, 0, 0
    flow.to_send = flow.count
    bits_of(t, slot, peer, way)[:] = np.uint64(0)


# ---- data arrive


@inner
def take_segment(
    t: Root,
    slot: int,
    peer: int,
    way: int,
    step: int,
    segment: int,
    address: int,
    size: int,
    now: int,
) -> None:
    """Put a segment of a flow where it belongs, once.

    `step` is the low 32 bits of the sender's step, `segment` the number in the part, which is one
    of the flow's. Its elements are `size` bytes at `address`.
    """
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, way)
    index, each = segment - flow.first, config_of(t).segment_elements
    # late, or twice
    if step != row.step & MASK32 or flow.state != RECEIVING:
        return
    if has_bit(bits_of(t, slot, peer, way), index):
        return
    target = row.out + 4 * segment * each
    if way == IN_CONTRIBUTION:
        target = inbox_address(t, slot, peer) + 4 * index * each
        flow.exact_missing -= has_bit(exact_bits(t, slot), segment)
    copy_memory(target, address, size)
    set_bit(bits_of(t, slot, peer, way), index)
    flow.received += 1
    if flow.received < flow.count:
        return
    row.progress_ns = now
    if way == IN_CONTRIBUTION:
        _close_contribution(t, slot, peer, now)
        return
    row.missing_results -= 1
    _close_result(t, slot, peer)
    _check_done(t, slot)


# ---- messages arrive


@inner
def take_part_message(t: Root, slot: int, peer: int, address: int, body: int, now: int) -> None:
    """Act on OPEN, PROBE, BITMAP or STOP about a part that this rank knows.

    Its header is at `address`, followed by `body` bytes.
    """
    kind, of, row = load8(address), load8(address + 1), slot_of(t, slot)
    if kind != OPEN and of != CONTRIBUTION and of != RESULT:
        return
    step = unwrapped(load32(address + 4), row.step)
    serial, content = load32(address + 20), address + HEADER_BYTES
    if step > row.step:  # who has begun the next step has all of this one
        stop_results(t, slot, peer, now)
    if kind == OPEN and body == 8:
        _take_open(t, slot, peer, step, load64(content))
    elif kind == PROBE and body == 8:
        _take_probe(t, slot, peer, of, step, serial, now)
    elif step == row.step and row.active:
        if kind == BITMAP:
            _take_bitmap(t, slot, peer, of, serial, content, body, now)
        elif kind == STOP and of == RESULT:
            stop_results(t, slot, peer, now)
        elif kind == STOP:
            _take_stop(t, slot, peer, content, body, now)


@inner
def _take_open(t: Root, slot: int, peer: int, step: int, numel: int) -> None:
    # `peer` takes data of this step from now on
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, OUT_CONTRIBUTION)
    if numel != row.numel:  # another model, or other buckets
        peer_of(t, peer).failed_rank = -1 - slot
        config_of(t).events += 1
        return
    flow.opened_step = max(flow.opened_step, step)
    if step == row.step and row.active and flow.state == WAIT_OPEN:
        flow.state = SENDING


@inner
def _take_probe(t: Root, slot: int, peer: int, of: int, step: int, serial: int, now: int) -> None:
    # `peer` has sent all of a flow: say what arrived, or that it is enough
    way = IN_CONTRIBUTION if of == CONTRIBUTION else IN_RESULT
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, way)
    if step < row.step:  # all of that step was here before the next began
        if way == IN_RESULT:
            send_control(t, peer, STOP, RESULT, step, row.part, 0, 0)
        return
    if step > row.step:
        return
    if flow.state == RECEIVING:
        may_close = flow.count - flow.received <= flow.may_miss and flow.exact_missing == 0
        if way == IN_CONTRIBUTION and may_close:
            _close_contribution(t, slot, peer, now)
            return
        _send_bitmap(t, slot, peer, way, BITMAP, serial)
    elif flow.state == CLOSED and flow.count:
        if way == IN_CONTRIBUTION:
            _send_bitmap(t, slot, peer, way, STOP, 0)
        else:
            send_control(t, peer, STOP, RESULT, step, row.part, 0, 0)


@inner
def _take_bitmap(
    t: Root, slot: int, peer: int, of: int, serial: int, address: int, body: int, now: int
) -> None:
    # Send again what is missing; the answer to an earlier probe is dropped
    way = OUT_CONTRIBUTION if of == CONTRIBUTION else OUT_RESULT
    flow = flow_of(t, slot, peer, way)
    words = (flow.count + 63) // 64
    if body != 8 * words:
        counters_of(t).rejected += 1
        return
    if flow.state == WAIT_OPEN:
        flow.state = SENDING
        return
    if flow.state != PROBING or serial != flow.serial:
        return
    missing, bits = 0, bits_of(t, slot, peer, way)
    for word in range(words):
        bits[word] |= np.uint64(load64(address + 8 * word))
    for index in range(flow.count):
        missing += not has_bit(bits, index)
    flow.tries = 0
    if missing:
        flow.state, flow.next, flow.to_send = SENDING, 0, missing
        slot_of(t, slot).progress_ns = now


@inner
def _take_stop(t: Root, slot: int, peer: int, address: int, body: int, now: int) -> None:
    # The bitmap is what the sum has of this rank's contribution to `peer`'s shard
    row, flow, counters = (
        slot_of(t, slot),
        flow_of(t, slot, peer, OUT_CONTRIBUTION),
        counters_of(t),
    )
    words, bits = (flow.count + 63) // 64, bits_of(t, slot, peer, OUT_CONTRIBUTION)
    if body != 8 * words:
        counters_of(t).rejected += 1
        return
    if flow.state == STOPPED:
        return
    for word in range(words):
        bits[word] = np.uint64(load64(address + 8 * word))
    flow.state = STOPPED
    row.progress_ns = now
    row.unstopped_contributions -= 1
    for index in range(flow.count):
        elements = segment_elements(t, slot, flow.first + index)
        counters.contributed_elements += elements
        if not has_bit(bits, index):
            counters.lost_elements += elements
    _close_result(t, slot, peer)
    _check_done(t, slot)


# ---- closed and summed


@inner
def _close_contribution(t: Root, slot: int, peer: int, now: int) -> None:
    # Take what came of `peer`'s contribution as all of it; with the last one, begin to sum
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, IN_CONTRIBUTION)
    flow.state = CLOSED
    row.progress_ns = now
    if flow.received < flow.count:
        clear_missing(t, slot, peer)
    _send_bitmap(t, slot, peer, IN_CONTRIBUTION, STOP, 0)
    row.open_contributions -= 1
    if row.open_contributions == 0:
        row.summing, row.summed = 1, 0
        config_of(t).parts_summing += 1


@inner
def _send_bitmap(t: Root, slot: int, peer: int, way: int, kind: int, serial: int) -> None:
    # Send a BITMAP or STOP about what came of a flow
    row, count = slot_of(t, slot), flow_of(t, slot, peer, way).count
    size = 8 * ((count + 63) // 64)
    copy_memory(t.message + BODY, address_of(bits_of(t, slot, peer, way)), size)
    flags = CONTRIBUTION if way == IN_CONTRIBUTION else RESULT
    send_control(t, peer, kind, flags, row.step, row.part, serial, size)


@inner
def sum_more(t: Root) -> None:
    """Sum some segments of one part whose contributions are closed.

    Not all at once, so that datagrams need not wait for it.
    """
    config = config_of(t)
    for slot in range(config.used_slots if config.parts_summing else 0):
        if slot_of(t, slot).summing:
            _sum_some(t, slot)
            return


@inner
def _sum_some(t: Root, slot: int) -> None:
    config, row = config_of(t), slot_of(t, slot)
    each = config.segment_elements
    first = row.segments * config.rank // config.world_size
    count = row.segments * (config.rank + 1) // config.world_size - first
    done = row.summed
    now = min(count - done, SEGMENTS_AT_ONCE)
    sum_segments(t, slot, first, done, now)
    begin = (first + done) * each
    size = min(now * each, row.numel - begin)
    copy_memory(row.out + 4 * begin, row.shard_sum + 4 * done * each, 4 * size)
    row.summed = done + now
    if row.summed < count:
        return
    row.summing = 0
    config.parts_summing -= 1
    for peer in range(config.world_size):
        if peer != config.rank:
            flow_of(t, slot, peer, OUT_RESULT).state = SENDING
    _check_done(t, slot)


# ---- results in, done, free


@inner
def _close_result(t: Root, slot: int, peer: int) -> None:
    # Stop the results of `peer`'s shard if all are here and the contribution's fate is known
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, IN_RESULT)
    if (
        flow.state != RECEIVING
        or flow.received < flow.count
        or flow_of(t, slot, peer, OUT_CONTRIBUTION).state != STOPPED
    ):
        return
    flow.state = CLOSED
    send_control(t, peer, STOP, RESULT, row.step, row.part, 0, 0)


@inner
def stop_results(t: Root, slot: int, peer: int, now: int) -> None:
    """Note that `peer` has all it needs of this part."""
    row, flow = slot_of(t, slot), flow_of(t, slot, peer, OUT_RESULT)
    if flow.state == STOPPED or flow.state == IDLE:
        return
    flow.state = STOPPED
    set_first_bits(bits_of(t, slot, peer, OUT_RESULT), flow.count)
    row.progress_ns = now
    row.unstopped_results -= 1
    _check_done(t, slot)


@inner
def _check_done(t: Root, slot: int) -> None:
    # Report a part whose sums are here, and free one that no rank needs any more
    row = slot_of(t, slot)
    if not row.active:
        return
    if (
        not row.done
        and row.open_contributions == 0
        and not row.summing
        and row.missing_results == 0
        and row.unstopped_contributions == 0
    ):
        row.done = 1
        config_of(t).events += 1
    if row.done and row.unstopped_results == 0:
        row.active = 0
        if row.wanted:
            config_of(t).events += 1


# ---- the sum


@inner
def sum_segments(t: Root, slot: int, first: int, begin: int, count: int) -> None:
    """Sum some segments of this rank's shard over all contributions, in rank order, and scale them.

    Args:
        t: the tables.
        slot: the part.
        first: the shard's first segment.
        begin: the first segment to sum, counted from `first`.
        count: how many.
    """
    config, row = config_of(t), slot_of(t, slot)
    world, rank, each = config.world_size, config.rank, config.segment_elements
    # room for the values of a segment of halves, and for their sum
    wide, sums = np.empty(2 * each, np.float32), np.empty(2 * each, np.float32)
    for index in range(begin, begin + count):
        size = segment_elements(t, slot, first + index)
        words = floats(row.shard_sum + 4 * index * each, size)
        total = sums[: 2 * size] if config.halves else words
        for peer in range(world):
            if peer == rank:
                part = floats(row.values + 4 * (first + index) * each, size)
            else:
                part = floats(inbox_address(t, slot, peer) + 4 * index * each, size)
            if config.halves:
                unpack_halves(part.view(np.uint32), wide[: 2 * size])
                part = wide[: 2 * size]
            _add(part, total, peer == 0)
        scale = np.float32(scale_of(t, slot))
        if scale != np.float32(1.0):
            for i in range(len(total)):
                total[i] *= scale
        if config.halves:
            pack_halves(total, words.view(np.uint32))


@inner
def _add(part: Array, total: Array, first: bool) -> None:
    if first:
        for i in range(len(part)):
            total[i] = part[i]
    else:
        for i in range(len(part)):
            total[i] += part[i]


@inner
def segment_elements(t: Root, slot: int, segment: int) -> int:
    """Return how many elements a segment of the part has: the last one may be shorter."""
    each = config_of(t).segment_elements
    return min(each, slot_of(t, slot).numel - segment * each)


# ---- what is missing


@inner
def clear_missing(t: Root, slot: int, peer: int) -> None:
    """Let what did not arrive of `peer`'s contribution read as zeros."""
    flow, each = flow_of(t, slot, peer, IN_CONTRIBUTION), config_of(t).segment_elements
    words = bits_of(t, slot, peer, IN_CONTRIBUTION)
    for index in range(flow.count):
        if not has_bit(words, index):
            size = segment_elements(t, slot, flow.first + index)
            fill_memory(inbox_address(t, slot, peer) + 4 * index * each, np.int32(0), 4 * size)


@compiled
def undelivered_segments(t: Root, slot: int, found: Array) -> int:
    """Write the segments of this rank's contribution that no sum has to `found`, ascending.

    Returns:
        How many they are.
    """
    total = 0
    for peer in range(config_of(t).world_size):
        if peer == config_of(t).rank:
            continue
        flow = flow_of(t, slot, peer, OUT_CONTRIBUTION)
        for index in range(flow.count):
            if not has_bit(bits_of(t, slot, peer, OUT_CONTRIBUTION), index):
                found[total] = flow.first + index
                total += 1
    return total


# ---- bits


@inner
def has_bit(words: Array, index: int) -> bool:
    """Return whether bit `index` is set."""
    return (words[index >> 6] >> np.uint64(index & 63)) & np.uint64(1) != np.uint64(0)


@inner
def set_bit(words: Array, index: int) -> None:
    """Set bit `index`."""
    words[index >> 6] |= np.uint64(1) << np.uint64(index & 63)


@inner
def set_first_bits(words: Array, count: int) -> None:
    """Set bits 0 to `count` - 1 and clear the others."""
    words[:] = np.uint64(0)
    for index in range(count):
        set_bit(words, index)
