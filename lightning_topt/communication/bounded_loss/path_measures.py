"""The way to one receiver as it was measured: its round trip, what reports about it said, its share
of this rank's link.
"""

from __future__ import annotations

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.rate_rule import (
    BEST,
    LEAST_ROUND,
    MOST_ROUND_TRIP,
    count_report,
    note_trip,
)
from lightning_topt.communication.bounded_loss.raw_memory import Array

FIRST_ROUND_TRIP = 1e-3  # seconds
# what a receiver got is a rate over so long at least: token buckets let short bursts pass
RATE_SECONDS = 1e-2

# Columns of a receiver's row of float64.
(
    TRIP,
    VARIATION,
    LEAST_TRIP,
    MEASURED,
    HIGHEST,
    ALL_LOST,
    ALL_MARKED,
    SHARE,
    REACHED_BEFORE,
    ARRIVED_BEFORE,
) = range(10)
PATH_COLUMNS = 10


@compiled
def reset_path(row: Array) -> None:
    """Set a row to that of an unknown path."""
    row[:] = 0.0
    row[TRIP], row[VARIATION], row[LEAST_TRIP] = (
        FIRST_ROUND_TRIP,
        FIRST_ROUND_TRIP / 2,
        MOST_ROUND_TRIP,
    )
    row[HIGHEST], row[SHARE] = -1.0, 1.0


@compiled
def answer_seconds(row: Array) -> float:
    """Return how long an answer may take: the round trip and its variation, measured (as RFC
    6298).
    """
    return float(row[TRIP] + max(4 * row[VARIATION], LEAST_ROUND))


@compiled
def measure_trip(row: Array, link: Array, seconds: float) -> None:
    """Take in a measured round trip; nonsense (a clock that was set) is dropped."""
    if not 0 < seconds < MOST_ROUND_TRIP:
        return
    row[LEAST_TRIP] = min(row[LEAST_TRIP], seconds)
    note_trip(link, seconds, seconds - row[LEAST_TRIP])
    if not row[MEASURED]:
        row[TRIP], row[VARIATION], row[MEASURED] = seconds, seconds / 2, 1.0
        return
    row[VARIATION] += (abs(seconds - row[TRIP]) - row[VARIATION]) / 4
    row[TRIP] += (seconds - row[TRIP]) / 8


@compiled
def take_report(
    row: Array,
    link: Array,
    highest: int,
    lost: int,
    marked: int,
    reached: int,
    arrived: float,
    now: float,
) -> None:
    """Take in a receiver's counts since the beginning: highest sequence number, how many are
    missing, how many were marked.

    `reached` datagrams of all senders came there, the last one when `arrived` says, by the
    receiver's clock; `now` is this rank's, both in seconds. Old reports, which datagrams may bring
    late, are dropped.
    """
    if highest < row[HIGHEST]:
        return
    acked, more_lost, more_marked = (
        highest - row[HIGHEST],
        lost - row[ALL_LOST],
        marked - row[ALL_MARKED],
    )
    row[HIGHEST] = highest
    row[ALL_LOST], row[ALL_MARKED] = (
        max(row[ALL_LOST], float(lost)),
        max(row[ALL_MARKED], float(marked)),
    )
    took = arrived - row[ARRIVED_BEFORE]
    if took >= RATE_SECONDS:
        # What all senders got through is what the receiver's link carries, however they share it.
        if row[ARRIVED_BEFORE] > 0:
            link[BEST] = max(link[BEST], (reached - row[REACHED_BEFORE]) / took)
        row[REACHED_BEFORE], row[ARRIVED_BEFORE] = reached, arrived
    count_report(link, acked, max(0.0, more_lost), max(0.0, more_marked), now)
