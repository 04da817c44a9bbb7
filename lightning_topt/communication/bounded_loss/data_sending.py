"""Data on its way out: paced, the most urgent part first, peers in turn."""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.control_messages import (
    BODY,
    BY_DATAGRAM,
    answer_nanoseconds,
    send_control,
)
from lightning_topt.communication.bounded_loss.datagram import SYNC
from lightning_topt.communication.bounded_loss.link_shares import divide_link, most_urgent
from lightning_topt.communication.bounded_loss.path_measures import SHARE
from lightning_topt.communication.bounded_loss.rate_rule import (
    BATCH,
    BURST,
    BURST_USED,
    LIMITED,
    WINDOW,
    pacing_rate,
)
from lightning_topt.communication.bounded_loss.raw_memory import inner, store64
from lightning_topt.communication.bounded_loss.sent_batches import REFUSED, send_batch
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
    config_row,
    link_row,
    path_row,
    peer_row,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    DATAGRAM,
    LAST_PEER,
    LINK_PACE_NS,
    MOST_IN_FLIGHT,
    NEXT_SEQUENCE,
    NEXT_TIMER,
    PACE_NS,
    RANK,
    REPORT_HIGHEST,
    SEND_AT_ONCE,
    SYNC_NS,
    SYNC_TRIES,
    WORLD,
    WRITABLE,
)

# what one call sends takes that long at the rate: short against queues
BATCH_NS, BATCH_SECONDS = 120_000, 1.2e-4
SLACK_SECONDS = 5e-3  # of data may be under way without a report: a receiver's thread may be late
LEAST_IN_FLIGHT = 16  # datagrams
# token buckets of 16 kB, which are common, take a piece as it is; they cut longer ones
BUCKET_BYTES = 15_500


@inner
def most_in_flight(t: int, peer: int) -> int:
    """Return how many datagrams may be under way to `peer` that it has not reported."""
    link, datagram = link_row(t), config_row(t)[DATAGRAM]
    window = path_row(t, peer)[SHARE] * (
        2 * link[WINDOW] + pacing_rate(link, datagram) * SLACK_SECONDS / datagram
    )
    return max(LEAST_IN_FLIGHT, int(min(window, float(peer_row(t, peer)[MOST_IN_FLIGHT]))))


@inner
def _send_to(t: int, peer: int, now: int) -> bool:
    """Send one batch to `peer` if its pace allows; returns whether anything left. Sets the next
    time to look.
    """
    config, row, link = config_row(t), peer_row(t, peer), link_row(t)
    slot, way = most_urgent(t, peer)
    if slot < 0:
        return False
    in_flight = row[NEXT_SEQUENCE] - 1 - row[REPORT_HIGHEST]
    room = most_in_flight(t, peer) - in_flight
    if room <= 0:
        link[LIMITED] = 1.0
        _ask_for_report(t, peer, now)
        return False
    if row[PACE_NS] > now:
        link[LIMITED] = 1.0
        config[NEXT_TIMER] = min(config[NEXT_TIMER], row[PACE_NS])
        return False
    row[SYNC_TRIES], row[SYNC_NS] = 0, 0
    whole = pacing_rate(link, config[DATAGRAM])
    speed = whole * path_row(t, peer)[SHARE]
    most = max(
        1,
        min(
            SEND_AT_ONCE,
            65000 // config[DATAGRAM],
            int(whole * BATCH_SECONDS / config[DATAGRAM]),
            room,
        ),
    )
    if most < 2 * BUCKET_BYTES // config[DATAGRAM]:
        most = max(1, min(most, BUCKET_BYTES // config[DATAGRAM], int(link[BATCH])))
    nbytes = send_batch(t, slot, peer, way, most, now)
    if nbytes == REFUSED:  # what is before it leaves at the rate of the link
        config[LINK_PACE_NS] = now + int(BATCH_SECONDS / 2 * 1e9)
    if nbytes < 0:
        return False
    burst = link[BURST] * config[DATAGRAM]
    used = max(0, now - config[LINK_PACE_NS] - BATCH_NS) * 1e-9 * whole
    link[BURST_USED] = max(link[BURST_USED], min(used, burst) / config[DATAGRAM])
    config[LINK_PACE_NS] = _next_time(config[LINK_PACE_NS], now, nbytes, whole, burst)
    row[PACE_NS] = _next_time(row[PACE_NS], now, nbytes, speed, burst)
    return True


@inner
def _next_time(due: int, now: int, nbytes: int, speed: float, burst: float) -> int:
    """Return when the next batch may leave after one of `nbytes` that was `due` and leaves now.

    A thread that was late makes up for it, as far as the queues on the way have taken bursts
    before.
    """
    return max(due, now - BATCH_NS - int(burst / speed * 1e9)) + int(nbytes / speed * 1e9)


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
    if divide_link(t) == 0:
        return 0
    while sent < most_batches and idle < config[WORLD] and config[WRITABLE]:
        if config[LINK_PACE_NS] > now:
            link_row(t)[LIMITED] = 1.0
            config[NEXT_TIMER] = min(config[NEXT_TIMER], config[LINK_PACE_NS])
            break
        peer = (peer + 1) % config[WORLD]
        if peer != config[RANK] and _send_to(t, peer, now):
            sent, idle = sent + 1, 0
        else:
            idle += 1
    config[LAST_PEER] = peer
    return sent
