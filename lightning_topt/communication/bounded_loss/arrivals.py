"""The handling of a control message, by datagram or over the side channel: checked, then acted on
or answered.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.communication.bounded_loss.control_messages import (
    BY_BOTH,
    BY_DATAGRAM,
    REPORT_BYTES,
    send_control,
    send_report,
)
from lightning_topt.communication.bounded_loss.data_arrivals import (
    FURTHEST_JUMP,
    find_slot,
    reject,
    take_data,
)
from lightning_topt.communication.bounded_loss.datagram import (
    BITMAP,
    CONTRIBUTION,
    FAILED,
    HEADER_BYTES,
    LEAVE,
    OPEN,
    PING,
    PONG,
    PROBE,
    REPORT,
    RESULT,
    STOP,
    SYNC,
    unwrapped,
)
from lightning_topt.communication.bounded_loss.part_progress import (
    close_contribution,
    contribution_stopped,
    may_close,
    result_stopped,
    send_bitmap,
)
from lightning_topt.communication.bounded_loss.path_measures import measure_trip, take_report
from lightning_topt.communication.bounded_loss.raw_memory import (
    inner,
    load8,
    load16,
    load32,
    load64,
)
from lightning_topt.communication.bounded_loss.shard_sum import has_bit
from lightning_topt.communication.bounded_loss.table_views import (
    bit_row,
    config_row,
    flow_row,
    link_row,
    path_row,
    peer_row,
    slot_row,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    CLOSED_WAY,
    COUNT,
    EVENTS,
    FAILED_RANK,
    HEARD_NS,
    HIGHEST_SEEN,
    IN_C,
    IN_R,
    LEFT,
    NEXT,
    NEXT_SEQUENCE,
    NUMEL,
    OPENED,
    OUT_C,
    OUT_R,
    PROBING,
    PROGRESS_NS,
    RECEIVING,
    REPORT_HIGHEST,
    SENDERS,
    SENDING,
    SERIAL,
    STATE,
    STEP,
    STOPPED,
    TENSOR,
    TO_SEND,
    TRIES,
    UNREPORTED,
    WAIT_OPEN,
    WORLD,
    WRONG_PLACE,
)


@inner
def take_control(
    t: int, peer: int, address: int, size: int, arrived: int, is_stream: bool, now: int
) -> None:
    """Act on a control message; one about something that this rank does not know is dropped."""
    kind, body = load8(address), size - HEADER_BYTES
    row = peer_row(t, peer)
    if kind == REPORT and body == REPORT_BYTES:
        _take_report(t, peer, address + HEADER_BYTES, arrived, now)
    elif kind == SYNC and body == 8:
        _raise_highest(t, peer, load64(address + HEADER_BYTES))
        send_report(t, peer, now)
    elif kind == PING and body == 0:
        send_control(t, peer, PONG, 0, 0, 0, 0, 0, BY_BOTH if is_stream else BY_DATAGRAM)
    elif kind == FAILED and body == 8 and is_stream:
        row[FAILED_RANK] = 1 + load64(address + HEADER_BYTES)
        config_row(t)[EVENTS] += 1
    elif kind == LEAVE and is_stream:
        row[LEFT] = 1
    elif kind in (OPEN, PROBE, BITMAP, STOP):
        _take_of_part(t, peer, address, body, is_stream, now)
    elif kind != PONG:
        reject(t, WRONG_PLACE)


@inner
def _take_of_part(t: int, peer: int, address: int, body: int, is_stream: bool, now: int) -> None:
    kind, of = load8(address), load8(address + 1)
    if kind == PROBE and body == 8 and not is_stream:  # it came behind the data
        _raise_highest(t, peer, load64(address + HEADER_BYTES))
        if peer_row(t, peer)[UNREPORTED]:
            send_report(t, peer, now)
    slot = find_slot(t, load32(address + 16))
    if slot < 0 or (kind != OPEN and of != CONTRIBUTION and of != RESULT):
        return
    step = unwrapped(load32(address + 4), slot_row(t, slot)[STEP])
    if step > slot_row(t, slot)[STEP]:  # who has begun the next step has all of this one
        result_stopped(t, slot, peer, now)
    if kind == OPEN and body == 8:
        _take_open(t, slot, peer, step, load64(address + HEADER_BYTES), now)
    elif kind == PROBE and body == 8:
        _take_probe(t, slot, peer, of, step, load32(address + 20), is_stream, now)
    elif step == slot_row(t, slot)[STEP] and slot_row(t, slot)[ACTIVE]:
        if kind == BITMAP:
            _take_bitmap(t, slot, peer, of, load32(address + 20), address + HEADER_BYTES, body, now)
        elif kind == STOP:
            _take_stop(t, slot, peer, of, address + HEADER_BYTES, body, now)


@inner
def _raise_highest(t: int, peer: int, sequence: int) -> None:
    """Count what was sent before number `sequence` and is not here as lost."""
    row = peer_row(t, peer)
    if row[HIGHEST_SEEN] < sequence - 1 <= row[HIGHEST_SEEN] + FURTHEST_JUMP:
        row[HIGHEST_SEEN] = sequence - 1
        row[UNREPORTED] += 1


@inner
def _take_report(t: int, peer: int, body: int, arrived: int, now: int) -> None:
    row, highest = peer_row(t, peer), load64(body)
    lost, marked, stamp, held = (
        load64(body + 8),
        load64(body + 16),
        load64(body + 24),
        load64(body + 32),
    )
    if (
        not -1 <= highest < row[NEXT_SEQUENCE]
        or not 0 <= lost <= highest + 1
        or not 0 <= marked <= highest + 1
    ):
        reject(t, WRONG_PLACE)
        return
    if stamp:
        measure_trip(path_row(t, peer), link_row(t), (arrived - stamp - held) * 1e-9)
    row[REPORT_HIGHEST] = max(row[REPORT_HIGHEST], highest)
    row[SENDERS] = min(max(load64(body + 56), 0), config_row(t)[WORLD])
    reached, there = load64(body + 40), load64(body + 48) * 1e-9
    take_report(path_row(t, peer), link_row(t), highest, lost, marked, reached, there, now * 1e-9)


@inner
def _take_open(t: int, slot: int, peer: int, step: int, numel: int, now: int) -> None:
    if numel != slot_row(t, slot)[NUMEL]:  # another model, or other buckets
        peer_row(t, peer)[FAILED_RANK] = -1 - slot
        config_row(t)[EVENTS] += 1
        return
    flow = flow_row(t, slot, peer, OUT_C)
    flow[OPENED] = max(flow[OPENED], step)
    if step == slot_row(t, slot)[STEP] and slot_row(t, slot)[ACTIVE] and flow[STATE] == WAIT_OPEN:
        flow[STATE] = SENDING


@inner
def _take_probe(
    t: int, slot: int, peer: int, of: int, step: int, serial: int, is_stream: bool, now: int
) -> None:
    way = IN_C if of == CONTRIBUTION else IN_R
    flow, ways = flow_row(t, slot, peer, way), BY_BOTH if is_stream else BY_DATAGRAM
    if step < slot_row(t, slot)[STEP]:  # all of that step was here before the next began
        if way == IN_R:
            send_control(t, peer, STOP, RESULT, step, slot_row(t, slot)[TENSOR], 0, 0, ways)
        return
    if step > slot_row(t, slot)[STEP]:
        return
    if flow[STATE] == RECEIVING:
        if way == IN_C and may_close(t, slot, peer):
            close_contribution(t, slot, peer, now)
            return
        send_bitmap(t, slot, peer, way, BITMAP, serial, ways)
    elif flow[STATE] == CLOSED_WAY and flow[COUNT]:
        if way == IN_C:
            send_bitmap(t, slot, peer, way, STOP, 0, ways)
        else:
            send_control(t, peer, STOP, RESULT, step, slot_row(t, slot)[TENSOR], 0, 0, ways)


@inner
def _words(t: int, slot: int, peer: int, way: int) -> int:
    return (flow_row(t, slot, peer, way)[COUNT] + 63) // 64


@inner
def _take_bitmap(
    t: int, slot: int, peer: int, of: int, serial: int, address: int, body: int, now: int
) -> None:
    """Resend what is missing; the answer to an earlier question is dropped."""
    way = OUT_C if of == CONTRIBUTION else OUT_R
    flow, words = flow_row(t, slot, peer, way), _words(t, slot, peer, way)
    if body != 8 * words:
        reject(t, WRONG_PLACE)
        return
    if flow[STATE] == WAIT_OPEN:
        flow[STATE] = SENDING
        return
    if flow[STATE] != PROBING or serial != flow[SERIAL]:
        return
    missing = 0
    for word in range(words):
        bit_row(t, slot, peer, way)[word] |= np.uint64(load64(address + 8 * word))
    for index in range(flow[COUNT]):
        missing += not has_bit(bit_row(t, slot, peer, way), index)
    flow[TRIES] = 0
    if missing:
        flow[STATE], flow[NEXT], flow[TO_SEND] = SENDING, 0, missing
        slot_row(t, slot)[PROGRESS_NS] = now


@inner
def _take_stop(t: int, slot: int, peer: int, of: int, address: int, body: int, now: int) -> None:
    if of == RESULT:
        result_stopped(t, slot, peer, now)
        return
    flow, words = flow_row(t, slot, peer, OUT_C), _words(t, slot, peer, OUT_C)
    if body != 8 * words:
        reject(t, WRONG_PLACE)
        return
    if flow[STATE] == STOPPED:
        return
    for word in range(words):
        bit_row(t, slot, peer, OUT_C)[word] = np.uint64(load64(address + 8 * word))
    contribution_stopped(t, slot, peer, now)


@inner
def handle(
    t: int, address: int, size: int, arrived: int, marked: int, is_stream: bool, now: int
) -> None:
    """Handle a message that `is_valid`, and that came from the address of its sender."""
    peer = load16(address + 2)
    peer_row(t, peer)[HEARD_NS] = now
    if load8(address) > RESULT:
        take_control(t, peer, address, size, arrived, is_stream, now)
    elif is_stream:
        reject(t, WRONG_PLACE)
    else:
        take_data(t, peer, address, size, arrived, marked, now)
