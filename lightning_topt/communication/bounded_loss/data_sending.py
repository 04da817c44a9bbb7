"""Data on its way out: paced, the most urgent part first, peers in turn."""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.control_messages import (
    BODY,
    BY_DATAGRAM,
    answer_nanoseconds,
    send_control,
)
from lightning_topt.communication.bounded_loss.datagram import SYNC
from lightning_topt.communication.bounded_loss.rate_rule import BURST, BURST_USED, LIMITED, WINDOW, pacing_rate
from lightning_topt.communication.bounded_loss.raw_memory import inner, store64
from lightning_topt.communication.bounded_loss.receiver_turns import WITHOUT_TURN, after_batch, turn_room, without_data
from lightning_topt.communication.bounded_loss.sent_batches import REFUSED, send_batch
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
    config_row,
    flow_row,
    peer_row,
    rate_row,
    slot_row,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    DATAGRAM,
    LAST_PEER,
    MOST_IN_FLIGHT,
    NEXT_SEQUENCE,
    NEXT_TIMER,
    OUT_C,
    OUT_R,
    PACE_NS,
    PRIORITY,
    RANK,
    REPORT_HIGHEST,
    SEND_AT_ONCE,
    SENDING,
    STATE,
    SYNC_NS,
    SYNC_TRIES,
    TO_SEND,
    USED_SLOTS,
    WORLD,
    WRITABLE,
)

BATCH_SECONDS = 1.2e-4  # what one call sends takes that long at the rate: short against the queues on the way
SLACK_SECONDS = 5e-3  # of data may be under way without a report: a receiver's thread may be late
LEAST_IN_FLIGHT = 16  # datagrams
BUCKET_BYTES = 15_500  # token buckets of 16 kB, which are common, take a piece as it is; they cut longer ones


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
    nbytes = send_batch(t, slot, peer, way, most, now)
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
