"""The life of a part on one rank: opened, contributions closed one by one, summed, results in,
done, and no longer needed.

- The owner of a shard closes a contribution when all of it is there, or when its sender is through
  and at most the tolerated share is missing. The bitmap at that time is what went into the sum;
  STOP carries it to the sender.
- Results close when complete, and when the receiver also knows the bitmap of its own contribution:
  an owner that has seen all results closed owes nobody anything, and may begin the tensor's next
  step.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.control_messages import (
    BODY,
    BY_BOTH,
    answer_nanoseconds,
    send_control,
)
from lightning_topt.communication.bounded_loss.datagram import CONTRIBUTION, OPEN, RESULT, STOP
from lightning_topt.communication.bounded_loss.raw_memory import (
    address_of,
    copy_memory,
    inner,
    store64,
)
from lightning_topt.communication.bounded_loss.shard_sum import (
    clear_missing,
    find_large,
    has_bit,
    segment_elements,
    set_first_bits,
    sum_segments,
)
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
    bit_row,
    config_row,
    counter_row,
    exact_row,
    flow_row,
    slot_row,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    ALLOWED,
    BY_SIZE,
    CLOSED_WAY,
    CONTRIBUTED_ELEMENTS,
    COUNT,
    DONE,
    ELEMENTS,
    EVENTS,
    EXACT,
    FIRST,
    IDLE,
    IN_C,
    IN_R,
    LOST_ELEMENTS,
    MISSING_R,
    NEXT,
    NUMEL,
    OPENED,
    OUT,
    OUT_C,
    OUT_R,
    PROBE_NS,
    PROBES_NS,
    PROGRESS_NS,
    RANK,
    RECEIVED,
    RECEIVING,
    SEGMENTS,
    SENDING,
    SERIAL,
    STARTED_NS,
    STATE,
    STEP,
    STOPPED,
    SUM,
    SUMMED,
    SUMMING,
    SUMS,
    TENSOR,
    TO_SEND,
    TRIES,
    UNSTOPPED_C,
    UNSTOPPED_R,
    USED_SLOTS,
    WAIT_OPEN,
    WAITING_C,
    WANTED,
    WORLD,
)

SEGMENTS_AT_ONCE = 32  # some tens of microseconds


@inner
def _reset_way(t: int, slot: int, peer: int, way: int, shard: int, state: int) -> None:
    flow, segments, world = (
        flow_row(t, slot, peer, way),
        slot_row(t, slot)[SEGMENTS],
        config_row(t)[WORLD],
    )
    flow[FIRST] = segments * shard // world
    flow[COUNT] = segments * (shard + 1) // world - flow[FIRST]
    flow[STATE], flow[RECEIVED], flow[NEXT], flow[SERIAL], flow[TRIES] = state, 0, 0, 0, 0
    flow[TO_SEND] = flow[COUNT]
    bit_row(t, slot, peer, way)[:] = np.uint64(0)


@compiled
def open_part(t: int, slot: int, tolerance: float, now: int) -> None:
    """Begin the next step of a part whose row in ``t.slots`` says what and where, and tell all
    ranks.
    """
    config, row = config_row(t), slot_row(t, slot)
    rank, world = config[RANK], config[WORLD]
    row[ACTIVE], row[DONE], row[WANTED], row[SUMMING] = 1, 0, 0, 0
    row[PROGRESS_NS] = row[STARTED_NS] = now
    row[WAITING_C] = row[MISSING_R] = row[UNSTOPPED_C] = row[UNSTOPPED_R] = 0
    if row[BY_SIZE]:
        find_large(t, slot)
    for peer in range(world):
        if peer == rank:
            continue
        _reset_way(t, slot, peer, OUT_C, peer, WAIT_OPEN)
        _reset_way(t, slot, peer, IN_R, peer, RECEIVING)
        _reset_way(t, slot, peer, IN_C, rank, RECEIVING)
        _reset_way(t, slot, peer, OUT_R, rank, IDLE)
        own, theirs = flow_row(t, slot, peer, IN_C)[COUNT], flow_row(t, slot, peer, OUT_C)[COUNT]
        if theirs == 0:
            flow_row(t, slot, peer, OUT_C)[STATE], flow_row(t, slot, peer, IN_R)[STATE] = (
                STOPPED,
                CLOSED_WAY,
            )
        else:
            row[UNSTOPPED_C] += 1
            row[MISSING_R] += 1
            if flow_row(t, slot, peer, OUT_C)[OPENED] >= row[STEP]:
                flow_row(t, slot, peer, OUT_C)[STATE] = SENDING
            flow_row(t, slot, peer, OUT_C)[PROBE_NS] = now + answer_nanoseconds(t, peer, 0)
            config[PROBES_NS] = min(config[PROBES_NS], flow_row(t, slot, peer, OUT_C)[PROBE_NS])
        if own == 0:
            flow_row(t, slot, peer, IN_C)[STATE], flow_row(t, slot, peer, OUT_R)[STATE] = (
                CLOSED_WAY,
                STOPPED,
            )
        else:
            row[WAITING_C] += 1
            row[UNSTOPPED_R] += 1
            _expect(t, slot, peer, tolerance)
        store64(table(t, MESSAGE) + BODY, row[NUMEL])
        send_control(t, peer, OPEN, 0, row[STEP], row[TENSOR], 0, 8, BY_BOTH)
    check_done(t, slot)


@inner
def _expect(t: int, slot: int, peer: int, tolerance: float) -> None:
    """Set how many segments of `peer`'s contribution may be missing, and how many of those that may
    not are.
    """
    flow, exact = flow_row(t, slot, peer, IN_C), 0
    for index in range(flow[COUNT]):
        exact += has_bit(exact_row(t, slot), flow[FIRST] + index)
    flow[EXACT], flow[ALLOWED] = exact, int(tolerance * flow[COUNT])


@inner
def may_close(t: int, slot: int, peer: int) -> bool:
    """Return whether the contribution of `peer` may be closed now that its sender is through."""
    flow = flow_row(t, slot, peer, IN_C)
    return flow[COUNT] - flow[RECEIVED] <= flow[ALLOWED] and flow[EXACT] == 0


@inner
def send_bitmap(t: int, slot: int, peer: int, way: int, kind: int, serial: int, ways: int) -> None:
    """Send a BITMAP or STOP about what came on `way`."""
    row, count = slot_row(t, slot), flow_row(t, slot, peer, way)[COUNT]
    size = 8 * ((count + 63) // 64)
    copy_memory(table(t, MESSAGE) + BODY, address_of(bit_row(t, slot, peer, way)), size)
    flags = CONTRIBUTION if way == IN_C else RESULT
    send_control(t, peer, kind, flags, row[STEP], row[TENSOR], serial, size, ways)


@inner
def close_contribution(t: int, slot: int, peer: int, now: int) -> None:
    """Take what came of `peer`'s contribution as all of it; with the last one, begin to sum."""
    row, flow = slot_row(t, slot), flow_row(t, slot, peer, IN_C)
    flow[STATE] = CLOSED_WAY
    row[PROGRESS_NS] = now
    if flow[RECEIVED] < flow[COUNT]:
        clear_missing(t, slot, peer)
    send_bitmap(t, slot, peer, IN_C, STOP, 0, BY_BOTH)
    row[WAITING_C] -= 1
    if row[WAITING_C] == 0:
        row[SUMMING], row[SUMMED] = 1, 0
        config_row(t)[SUMS] += 1


@inner
def sum_more(t: int) -> None:
    """Sum some segments of a part whose contributions are closed: datagrams do not wait until all
    of it is summed.
    """
    config = config_row(t)
    for slot in range(config[USED_SLOTS] if config[SUMS] else 0):
        if slot_row(t, slot)[SUMMING]:
            _sum_some(t, slot)
            return


@inner
def _sum_some(t: int, slot: int) -> None:
    config, row = config_row(t), slot_row(t, slot)
    first = row[SEGMENTS] * config[RANK] // config[WORLD]
    count = row[SEGMENTS] * (config[RANK] + 1) // config[WORLD] - first
    done = row[SUMMED]
    now = min(count - done, SEGMENTS_AT_ONCE)
    sum_segments(t, slot, first, done, now)
    begin = (first + done) * config[ELEMENTS]
    size = min(now * config[ELEMENTS], row[NUMEL] - begin)
    copy_memory(row[OUT] + 4 * begin, row[SUM] + 4 * done * config[ELEMENTS], 4 * size)
    row[SUMMED] = done + now
    if row[SUMMED] < count:
        return
    row[SUMMING] = 0
    config[SUMS] -= 1
    for peer in range(config[WORLD]):
        if peer != config[RANK]:
            flow_row(t, slot, peer, OUT_R)[STATE] = SENDING
    check_done(t, slot)


@inner
def close_result(t: int, slot: int, peer: int) -> None:
    """Tell the owner of a shard that its results are here, once that is so and the fate of the
    contribution is known.
    """
    flow = flow_row(t, slot, peer, IN_R)
    if (
        flow[STATE] != RECEIVING
        or flow[RECEIVED] < flow[COUNT]
        or flow_row(t, slot, peer, OUT_C)[STATE] != STOPPED
    ):
        return
    flow[STATE] = CLOSED_WAY
    send_control(
        t, peer, STOP, RESULT, slot_row(t, slot)[STEP], slot_row(t, slot)[TENSOR], 0, 0, BY_BOTH
    )


@inner
def contribution_stopped(t: int, slot: int, peer: int, now: int) -> None:
    """Take the bitmap that is in the tables by now as what became of this rank's contribution to
    `peer`'s shard.
    """
    row, flow = slot_row(t, slot), flow_row(t, slot, peer, OUT_C)
    flow[STATE] = STOPPED
    row[PROGRESS_NS] = now
    row[UNSTOPPED_C] -= 1
    for index in range(flow[COUNT]):
        elements = segment_elements(t, slot, flow[FIRST] + index)
        counter_row(t)[CONTRIBUTED_ELEMENTS] += elements
        if not has_bit(bit_row(t, slot, peer, OUT_C), index):
            counter_row(t)[LOST_ELEMENTS] += elements
    close_result(t, slot, peer)
    check_done(t, slot)


@inner
def result_stopped(t: int, slot: int, peer: int, now: int) -> None:
    """Note that `peer` has all it needs of this part."""
    flow = flow_row(t, slot, peer, OUT_R)
    if flow[STATE] == STOPPED or flow[STATE] == IDLE:
        return
    flow[STATE] = STOPPED
    set_first_bits(bit_row(t, slot, peer, OUT_R), flow[COUNT])
    slot_row(t, slot)[PROGRESS_NS] = now
    slot_row(t, slot)[UNSTOPPED_R] -= 1
    check_done(t, slot)


@inner
def check_done(t: int, slot: int) -> None:
    """Report a part that this rank has whole, and free one that nobody needs any more."""
    row = slot_row(t, slot)
    if not row[ACTIVE]:
        return
    if (
        not row[DONE]
        and row[WAITING_C] == 0
        and not row[SUMMING]
        and row[MISSING_R] == 0
        and row[UNSTOPPED_C] == 0
    ):
        row[DONE] = 1
        config_row(t)[EVENTS] += 1
    if row[DONE] and row[UNSTOPPED_R] == 0:
        row[ACTIVE] = 0
        if row[WANTED]:
            config_row(t)[EVENTS] += 1
