"""The rule for how fast datagrams go to one receiver: a window of datagrams for each round, of one round trip or 1 ms.

The window grows as TCP CUBIC's (RFC 9438), so that a competing TCP flow in the same queue keeps its share; these things differ,
because a bounded loss is allowed here:

1. *Loss that is not congestion.* Rounds right after a reduction measure the loss of the path itself (`FLOOR`, at most 2 %).
   A round shows congestion if it lost more than that share explains: ``m > f n + 3 sqrt(f n)``. A path that loses packets at
   random does not slow the exchange down; a full queue, which loses many packets in one round, does.
2. *Shallow queues.* What a round lost in excess says by how much the rate was too high: it shrinks by that share and 5 %.
   Only where there also is a queue of more than `QUEUE_LIMIT`, it shrinks to 0.7 as CUBIC does.
3. *Loss that is caused.* The share lost in excess of the path's own, averaged over the last reductions (`CAUSED`), is held
   below `TARGET`, half of what the exchange tolerates: growth is slowed down by ``TARGET / CAUSED`` where it is above.
4. *Deep queues.* With more than `QUEUE_LIMIT` of queue in all of a round, the window grows only while the exchange gets less
   than half of the best rate it had (`BEST`), and shrinks by 2 % else: alone it keeps deep queues short, beside a flow that
   fills them it takes half.
5. *Marks.* Where the path marks packets (ECN), the window shrinks by half of the marked share's running mean, once in a round,
   as DCTCP's (RFC 8257).

6. *Bursts.* A thread that was late makes up for it, by at most `BURST` datagrams at once. Where a round with such a burst shows
   congestion, the burst is blamed and shrinks; only where there was none, the window does.

Datagrams leave at ``window / round``, spread over time: nothing waits for single acknowledgements, and receivers report
counts. Rounds of less than 1 ms would make a window of a few datagrams, too coarse to steer with. After a pause the window is
what it was.
"""

from __future__ import annotations

import math

from lightning_topt.communication.bounded_loss.raw_memory import Array, inner
from lightning_topt.communication.compiled import compiled

BETA, CUBIC, MARK_GAIN = 0.7, 0.4, 1 / 16
RENO_STEP = 3 * (1 - BETA) / (1 + BETA)  # datagrams per round
FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 10.0, 0.25, 1e6  # datagrams
FIRST_ROUND_TRIP, MOST_ROUND_TRIP = 1e-3, 10.0  # seconds
LEAST_ROUND = 1e-3  # seconds
FLOOR_HORIZON, MOST_FLOOR = 2000.0, 0.02  # datagrams; share
STARTING_SHARE = 0.05
MOST_TRIPS = 4.0  # round trips that a round counts for: reports may be rarer
LOW_WINDOW = 0.97  # of the one that overflowed: below it what is lost is the path's
REFUSED_ABOVE, ALONE, REFUSED_MOST = 1.05, 0.7, 0.4  # of the rate that gets through; of the best one; of a round
MOST_ABOVE, SEARCH_ABOVE = 1.25, 4.5  # of the best rate
MARGIN, LEAST_FIRST = 0.05, 0.3  # of a reduction beyond what was lost; the least that the search ends with
DELAY_FACTOR, DELAY_MARGIN = 1.5, 5e-4  # of the least round trip, seconds: a queue builds up
QUEUE_LIMIT, FAIR_SHARE, BEST_SECONDS = 5e-4, 0.5, 60.0  # seconds; of the best rate; until it is forgotten
FIRST_BURST, LEAST_BURST, MOST_BURST, BURST_STEP = 12.0, 1.0, 256.0, 0.5  # datagrams; of growth in a round
DRAIN = 0.98  # in a round, of a queue that is too long
TARGET_SHARE, DEFAULT_TARGET = 0.5, 0.005

# Columns of a receiver's row of float64.
WINDOW, ROUND_TRIP, VARIATION, LEAST_TRIP, ROUND_LEAST, W_MAX, SINCE, W_RENO, ALPHA, CAUSED, FLOOR, TARGET = range(12)
(
    ACKED, LOST, MARKED, ROUND_END, ROUND_BEGAN, EPOCH_ACKED, EPOCH_LOST, HIGHEST, ALL_LOST, ALL_MARKED, LIMITED,
    STARTING, MOST_RATE, REDUCTIONS, TRIPS, MEASURED, BEST, ROUND_ARRIVED, INFLECTION, BURST, BURST_USED,
    REFUSED_IN_ROUND,
) = range(12, 34)  # fmt: skip
RATE_COLUMNS = 34


@compiled
def reset_rate(row: Array) -> None:
    """Set a row to that of an unknown path."""
    row[:] = 0.0
    row[WINDOW], row[ROUND_TRIP], row[VARIATION] = FIRST_WINDOW, FIRST_ROUND_TRIP, FIRST_ROUND_TRIP / 2
    row[LEAST_TRIP], row[ROUND_LEAST], row[TARGET], row[STARTING] = (
        MOST_ROUND_TRIP,
        MOST_ROUND_TRIP,
        DEFAULT_TARGET,
        1.0,
    )
    row[MOST_RATE], row[HIGHEST], row[BURST] = math.inf, -1.0, FIRST_BURST


@inner
def round_seconds(row: Array) -> float:
    """Return how long a round takes."""
    return max(row[ROUND_TRIP], LEAST_ROUND)


@compiled
def pacing_rate(row: Array, datagram_bytes: int) -> float:
    """Return the bytes per second that may leave for this receiver."""
    return min(row[WINDOW] * datagram_bytes / round_seconds(row), row[MOST_RATE])


@compiled
def answer_seconds(row: Array) -> float:
    """Return how long an answer may take: the round trip and its variation, measured (as RFC 6298)."""
    return row[ROUND_TRIP] + max(4 * row[VARIATION], 1e-3)


@compiled
def measure_trip(row: Array, seconds: float) -> None:
    """Take in a measured round trip; nonsense (a clock that was set) is dropped."""
    if not 0 < seconds < MOST_ROUND_TRIP:
        return
    row[LEAST_TRIP] = min(row[LEAST_TRIP], seconds)
    row[ROUND_LEAST] = min(row[ROUND_LEAST], seconds)
    if not row[MEASURED]:
        row[ROUND_TRIP], row[VARIATION], row[MEASURED] = seconds, seconds / 2, 1.0
        return
    row[VARIATION] += (abs(seconds - row[ROUND_TRIP]) - row[VARIATION]) / 4
    row[ROUND_TRIP] += (seconds - row[ROUND_TRIP]) / 8


@compiled
def take_report(
    row: Array, highest: int, lost: int, marked: int, next_sequence: int, arrived: float, now: float
) -> None:
    """Take in a receiver's counts since the beginning: highest sequence number, how many are missing, how many were marked.

    `next_sequence` will be sent next; `arrived` says when the last one did, by the receiver's clock, `now` is this rank's, both
    in seconds. Old reports, which datagrams may bring late, are dropped.
    """
    if highest < row[HIGHEST]:
        return
    row[ACKED] += highest - row[HIGHEST]
    row[HIGHEST] = highest
    row[LOST] += max(0.0, lost - row[ALL_LOST])
    row[ALL_LOST] = max(row[ALL_LOST], float(lost))
    row[MARKED] += max(0.0, marked - row[ALL_MARKED])
    row[ALL_MARKED] = max(row[ALL_MARKED], float(marked))
    if highest >= row[ROUND_END] and row[ACKED] > 0 and now - row[ROUND_BEGAN] >= LEAST_ROUND:
        _end_round(row, arrived, now)
        row[ROUND_END], row[ROUND_BEGAN], row[ROUND_ARRIVED] = next_sequence, now, arrived
        row[ACKED] = row[LOST] = row[MARKED] = row[LIMITED] = row[BURST_USED] = row[REFUSED_IN_ROUND] = 0.0
        row[ROUND_LEAST] = MOST_ROUND_TRIP


@inner
def _end_round(row: Array, arrived: float, now: float) -> None:
    count, lost, marked = row[ACKED], row[LOST], row[MARKED]
    row[TRIPS] += 1
    row[EPOCH_ACKED] += count
    expected = row[FLOOR] * count
    # The first overflow loses a good part of a round; a loss at random must not end the search for the rate.
    allowed = STARTING_SHARE * count + 2 if row[STARTING] else expected + 3 * math.sqrt(expected)
    row[EPOCH_LOST] += lost - expected
    seconds = now - row[ROUND_BEGAN]
    took = arrived - row[ROUND_ARRIVED]
    rate = (count - lost) / took if took >= LEAST_ROUND / 2 and row[ROUND_ARRIVED] > 0 else 0.0
    row[BEST] = max(row[BEST] * (1 - min(seconds / BEST_SECONDS, 1.0)), rate)
    row[ALPHA] += (marked / count - row[ALPHA]) * MARK_GAIN
    refused = row[REFUSED_IN_ROUND]
    if lost > allowed and row[BURST_USED] > 1.0 and row[BURST] > LEAST_BURST and not row[STARTING]:
        row[BURST] = max(row[BURST] * BETA, LEAST_BURST)
    elif lost > allowed:
        if row[STARTING] or row[EPOCH_ACKED] > count:  # once for what one overflow lost in two rounds
            _reduce(row, _factor(row, (lost - expected) / count))
    elif refused and not row[STARTING]:
        _follow(row, count, rate, min(seconds, MOST_TRIPS * round_seconds(row)))
    elif refused:
        _reduce(row, max(LEAST_FIRST, 1 - refused / (count + refused) - MARGIN))
    elif marked:
        _reduce(row, 1 - row[ALPHA] / 2)
    elif row[STARTING]:
        _start(row, count)
    else:
        _grow(row, count, rate, min(seconds, MOST_TRIPS * round_seconds(row)))
    if lost <= allowed and row[BURST_USED] >= BETA * row[BURST]:
        row[BURST] = min(row[BURST] + BURST_STEP, MOST_BURST)
    # Until a queue overflowed once, nothing says where a loss comes from; later a loss below the path's own always counts.
    if not row[STARTING] and (row[WINDOW] <= LOW_WINDOW * row[W_MAX] or lost < expected):
        row[FLOOR] += (lost / count - row[FLOOR]) * min(1.0, count / FLOOR_HORIZON)
        row[FLOOR] = min(row[FLOOR], MOST_FLOOR)


@inner
def _factor(row: Array, excess: float) -> float:
    """Return what the window is multiplied by after a round that lost the share `excess` to congestion."""
    if row[STARTING]:
        return max(LEAST_FIRST, 1 - excess - MARGIN)
    return BETA if _has_queue(row, 1.0, QUEUE_LIMIT) else max(BETA, 1 - excess - MARGIN)


@inner
def _has_queue(row: Array, factor: float, margin: float) -> bool:
    """Return whether even the least round trip of this round is above `factor` times the least ever, and `margin`."""
    return row[ROUND_LEAST] < MOST_ROUND_TRIP and row[ROUND_LEAST] > factor * row[LEAST_TRIP] + margin


@inner
def _start(row: Array, count: float) -> None:
    """Double the window in a round, until the round trip shows a queue, or it is far above what gets through."""
    most = SEARCH_ABOVE * row[BEST] * round_seconds(row)
    if 0 < most < row[WINDOW]:
        row[WINDOW] = MOST_ABOVE / SEARCH_ABOVE * most
        row[STARTING], row[W_MAX], row[W_RENO], row[SINCE], row[INFLECTION] = 0.0, row[WINDOW], row[WINDOW], 0.0, 0.0
        return
    if _has_queue(row, DELAY_FACTOR, DELAY_MARGIN):
        row[STARTING], row[W_MAX], row[W_RENO], row[SINCE], row[INFLECTION] = 0.0, row[WINDOW], row[WINDOW], 0.0, 0.0
    elif row[LIMITED]:
        row[WINDOW] = min(row[WINDOW] + min(count, row[WINDOW]), MOST_WINDOW)


@inner
def _follow(row: Array, count: float, rate: float, seconds: float) -> None:
    """Take note that a queue of this host refused datagrams of a round: nothing is lost, it tells when to go on.

    Alone the window stays just above what gets through; beside others it shrinks as after a loss.
    """
    window = REFUSED_ABOVE * rate * round_seconds(row)
    if rate > ALONE * row[BEST]:
        if window < row[WINDOW]:
            row[WINDOW] = row[W_MAX] = row[W_RENO] = window
            row[SINCE] = row[INFLECTION] = 0.0
    elif rate > 0 and row[REFUSED_IN_ROUND] > REFUSED_MOST * count:
        _reduce(row, BETA)
    else:
        _grow(row, count, rate, seconds)


@inner
def _grow(row: Array, count: float, rate: float, seconds: float) -> None:
    """Grow as CUBIC does, only while the window is what limits."""
    if _has_queue(row, 1.0, QUEUE_LIMIT) and rate > FAIR_SHARE * row[BEST]:
        row[WINDOW] = row[W_RENO] = max(row[WINDOW] * DRAIN, LEAST_WINDOW)
        return
    if not row[LIMITED]:
        return
    slower = min(1.0, row[TARGET] / row[CAUSED]) if row[CAUSED] > 0 else 1.0
    row[SINCE] += seconds * slower
    row[W_RENO] += RENO_STEP * slower * min(count / max(row[WINDOW], 1.0), MOST_TRIPS)
    cubic = CUBIC * (row[SINCE] - row[INFLECTION]) ** 3 + row[W_MAX]
    wanted = max(cubic, row[W_RENO])
    most = MOST_ABOVE * row[BEST] * round_seconds(row) if row[BEST] > 0 else MOST_WINDOW
    row[WINDOW] = max(row[WINDOW], min(wanted, 1.5 * row[WINDOW], most, MOST_WINDOW))


@inner
def _reduce(row: Array, factor: float) -> None:
    """Shrink after congestion."""
    # The search loses more, once; in a queue that is never empty others decide what is lost.
    if not row[STARTING] and not _has_queue(row, 1.0, QUEUE_LIMIT):
        row[CAUSED] += (max(row[EPOCH_LOST], 0.0) / max(row[EPOCH_ACKED], 1.0) - row[CAUSED]) / 4
    row[EPOCH_ACKED] = row[EPOCH_LOST] = 0.0
    window = row[WINDOW]
    row[WINDOW] = max(window * factor, LEAST_WINDOW)
    row[W_MAX] = row[WINDOW] if row[STARTING] else window  # the search ends far above what the path takes
    row[INFLECTION] = (max(row[W_MAX] - row[WINDOW], 0.0) / CUBIC) ** (1 / 3)
    row[W_RENO], row[SINCE], row[STARTING] = row[WINDOW], 0.0, 0.0
    row[REDUCTIONS] += 1
