"""The handling of a datagram with data: checked against the tables, counted, and put where it
belongs.
"""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.datagram import (
    CONTRIBUTION,
    HEADER_BYTES,
    MASK32,
    unwrapped,
)
from lightning_topt.communication.bounded_loss.part_progress import (
    check_done,
    close_contribution,
    close_result,
)
from lightning_topt.communication.bounded_loss.raw_memory import (
    copy_memory,
    inner,
    load8,
    load32,
    load64,
)
from lightning_topt.communication.bounded_loss.shard_sum import has_bit, segment_elements, set_bit
from lightning_topt.communication.bounded_loss.table_views import (
    bit_row,
    config_row,
    counter_row,
    exact_row,
    flow_row,
    inbox_of,
    peer_row,
    slot_row,
)
from lightning_topt.communication.bounded_loss.tables import (
    ARRIVED_NS,
    COUNT,
    COUNT_SEEN,
    DUPLICATES,
    ELEMENTS,
    EXACT,
    FIRST,
    HAS_DATA,
    HIGHEST_SEEN,
    IN_C,
    IN_R,
    LATE,
    MARKED_DATAGRAMS,
    MARKS_SEEN,
    MISSING_R,
    OUT,
    PROGRESS_NS,
    REACHED,
    REACHED_NS,
    RECEIVED,
    RECEIVED_DATAGRAMS,
    RECEIVING,
    RECENT_SLOT,
    REJECTED,
    STAMP_SEEN,
    STATE,
    STEP,
    TENSOR,
    UNREPORTED,
    USED_SLOTS,
    WRONG_PLACE,
)

FURTHEST_JUMP = 1 << 20  # of a sequence number


@inner
def reject(t: int, reason: int) -> None:
    """Count a datagram that is dropped, by reason and in total."""
    counter_row(t)[REJECTED] += 1
    counter_row(t)[reason] += 1


@inner
def find_slot(t: int, tensor: int) -> int:
    """Return the slot of a tensor, -1 where this rank does not know it."""
    config = config_row(t)
    if (
        config[RECENT_SLOT] < config[USED_SLOTS]
        and slot_row(t, config[RECENT_SLOT])[TENSOR] == tensor
    ):
        return config[RECENT_SLOT]
    for slot in range(config[USED_SLOTS]):
        if slot_row(t, slot)[TENSOR] == tensor:
            config[RECENT_SLOT] = slot
            return slot
    return -1


@inner
def _count_data(t: int, peer: int, address: int, arrived: int, marked: int) -> bool:
    """Count a datagram of data for reports; returns whether its number is a likely one."""
    row = peer_row(t, peer)
    sequence = unwrapped(load32(address + 28), row[HIGHEST_SEEN])
    if abs(sequence - row[HIGHEST_SEEN]) > FURTHEST_JUMP or sequence < 0:
        return False
    if sequence > row[HIGHEST_SEEN]:
        row[HIGHEST_SEEN], row[HAS_DATA] = sequence, load8(address + 1)
    row[COUNT_SEEN] += 1
    row[MARKS_SEEN] += marked
    row[UNREPORTED] += 1
    row[STAMP_SEEN], row[ARRIVED_NS] = load64(address + 32), arrived
    config = config_row(t)
    config[REACHED], config[REACHED_NS] = config[REACHED] + 1, max(config[REACHED_NS], arrived)
    counter_row(t)[RECEIVED_DATAGRAMS] += 1
    counter_row(t)[MARKED_DATAGRAMS] += marked
    return True


@inner
def take_data(
    t: int, peer: int, address: int, size: int, arrived: int, marked: int, now: int
) -> None:
    """Put a segment where it belongs, once."""
    kind, step = load8(address), load32(address + 4)
    slot = find_slot(t, load32(address + 16))
    if slot < 0 or step > slot_row(t, slot)[STEP] & MASK32:
        reject(t, WRONG_PLACE)
        return
    way = IN_C if kind == CONTRIBUTION else IN_R
    flow, segment = flow_row(t, slot, peer, way), load32(address + 20)
    index = segment - flow[FIRST]
    if (
        index < 0
        or index >= flow[COUNT]
        or size != HEADER_BYTES + 4 * segment_elements(t, slot, segment)
    ):
        reject(t, WRONG_PLACE)
        return
    if not _count_data(t, peer, address, arrived, marked):
        reject(t, WRONG_PLACE)
        return
    if step != slot_row(t, slot)[STEP] & MASK32 or flow[STATE] != RECEIVING:
        counter_row(t)[LATE] += 1
        return
    if has_bit(bit_row(t, slot, peer, way), index):
        counter_row(t)[DUPLICATES] += 1
        return
    target = slot_row(t, slot)[OUT] + 4 * segment * config_row(t)[ELEMENTS]
    if way == IN_C:
        target = inbox_of(t, slot, peer) + 4 * index * config_row(t)[ELEMENTS]
        flow[EXACT] -= has_bit(exact_row(t, slot), segment)
    copy_memory(target, address + HEADER_BYTES, size - HEADER_BYTES)
    set_bit(bit_row(t, slot, peer, way), index)
    flow[RECEIVED] += 1
    if flow[RECEIVED] == flow[COUNT]:
        _complete(t, slot, peer, way, now)


@inner
def _complete(t: int, slot: int, peer: int, way: int, now: int) -> None:
    slot_row(t, slot)[PROGRESS_NS] = now
    if way == IN_C:
        close_contribution(t, slot, peer, now)
        return
    slot_row(t, slot)[MISSING_R] -= 1
    close_result(t, slot, peer)
    check_done(t, slot)
