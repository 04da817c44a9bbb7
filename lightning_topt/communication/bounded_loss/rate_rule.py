"""The rule for how fast datagrams leave this rank: a window of datagrams for each round, of one
round trip or 1 ms.

There is one window for the rank's link, not one for each receiver: all wait for the slowest anyway,
receivers that share a queue would starve each other, and reports of all say sooner what the link
carries. Receivers get shares of it (`link_shares`).

The window grows as TCP CUBIC's (RFC 9438), so that a competing TCP flow in the same queue keeps its
share; these things differ, because a bounded loss is allowed here:

1. *Loss that is not congestion.* Rounds right after a reduction measure the loss of the path itself
   (`FLOOR`, at most 2 %). A round shows congestion if it lost more than that share explains: ``m >
   f n + 3 sqrt(f n)``. A path that loses packets at random does not slow the exchange down; a full
   queue, which loses many packets in one round, does.
2. *Shallow queues.* What a round lost in excess says by how much the rate was too high: it shrinks
   by that share and 5 %. Only where there also is a queue of more than `QUEUE_LIMIT`, it shrinks to
   0.7 as CUBIC does.
3. *Loss that is caused.* The share lost in excess of the path's own, averaged over the last
   reductions (`CAUSED`), is held below `TARGET`, half of what the exchange tolerates: growth is
   slowed down by ``TARGET / CAUSED`` where it is above.
4. *Deep queues.* With more than `QUEUE_LIMIT` of queue on all paths in all of a round, the window
   grows only while the exchange gets less than half of the best rate that a receiver had (`BEST`),
   and shrinks to a little less than what gets through else: alone it keeps deep queues short. A
   queue that does not get shorter by that is kept full by others: then it grows as CUBIC.
5. *Marks.* Where the path marks packets (ECN), the window shrinks by half of the marked share's
   running mean, once in a round, as DCTCP's (RFC 8257).

6. *Bursts.* A thread that was late makes up for it, by at most `BURST` datagrams at once. Where a
   round with such a burst shows congestion, the burst is blamed and shrinks; where there was none,
   what one call sends (`BATCH`) does, until it is as small as it may be; only then the window does.

Datagrams leave at ``window / round``, spread over time: nothing waits for single acknowledgements,
and receivers report counts. Rounds of less than 1 ms would make a window of a few datagrams, too
coarse to steer with. After a pause the window is what it was.
"""

from __future__ import annotations

import math

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.raw_memory import Array, inner

BETA, CUBIC, MARK_GAIN = 0.7, 0.4, 1 / 16
RENO_STEP = 3 * (1 - BETA) / (1 + BETA)  # datagrams per round
FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 10.0, 0.25, 1e6  # datagrams
MOST_ROUND_TRIP, LEAST_ROUND = 10.0, 1e-3  # seconds
# a rate is measured over so long; without a report nothing was sent
PERIOD_SECONDS, PAUSE = 1e-2, 5e-3
NO_QUEUE = 1e9  # seconds: nothing was measured
FLOOR_HORIZON, MOST_FLOOR = 2000.0, 0.02  # datagrams; share
STARTING_SHARE = 0.05
MOST_TRIPS = 4.0  # round trips that a round counts for: reports may be rarer
LOW_WINDOW = 0.97  # of the one that overflowed: below it what is lost is the path's
REFUSED_ABOVE, REFUSED_LEAST = 1.05, 0.95  # of the rate that gets through; of the best one
ALONE, REFUSED_MOST = 0.7, 0.4  # of the best rate; of a round
MOST_ABOVE, SEARCH_ABOVE = 1.25, 4.5  # of the best rate
# of a reduction beyond what was lost; the least that the search ends with
MARGIN, LEAST_FIRST = 0.05, 0.3
# seconds; of the best rate; until it is forgotten
QUEUE_LIMIT, FAIR_SHARE, BEST_SECONDS = 5e-4, 0.5, 60.0
# datagrams; of growth in a round
FIRST_BURST, LEAST_BURST, MOST_BURST, BURST_STEP = 12.0, 1.0, 256.0, 0.5
LEAST_BATCH, MOST_BATCH, BATCH_STEP = 5.0, 10.0, 5e-3  # datagrams; of growth in a round
DRAIN = 0.97  # of the rate that gets through, until a queue that is too long is gone
# A queue that is not down to this share after so long has other senders, for as long as this.
DRAINS, DRAIN_SECONDS, COMPETING_SECONDS = 0.9, 0.1, 5.0
TARGET_SHARE, DEFAULT_TARGET = 0.5, 0.005

# Columns of the link's row of float64.
WINDOW, ROUND_TRIP, ROUND_QUEUE, W_MAX, SINCE, W_RENO, ALPHA, CAUSED, FLOOR, TARGET = range(10)
(
    ACKED, LOST, MARKED, ROUND_BEGAN, EPOCH_ACKED, EPOCH_LOST, LIMITED, STARTING, MOST_RATE,
    REDUCTIONS, TRIPS, MEASURED, BEST, INFLECTION, BURST, BURST_USED, REFUSED_IN_ROUND, RATE,
    PERIOD_BEGAN, PERIOD_CAME, PERIOD_SHARES, SHARES, LAST_REPORT, LAST_RATE, DRAIN_BEGAN,
    DRAIN_QUEUE, COMPETING_UNTIL, BATCH,
) = range(10, 38)  # fmt: skip
LINK_COLUMNS = 38


@compiled
def reset_link(row: Array) -> None:
    """Set the row to that of an unknown link."""
    row[:] = 0.0
    row[WINDOW], row[ROUND_TRIP], row[ROUND_QUEUE], row[TARGET] = (
        FIRST_WINDOW,
        LEAST_ROUND,
        NO_QUEUE,
        DEFAULT_TARGET,
    )
    row[STARTING], row[MOST_RATE], row[BURST], row[SHARES] = 1.0, math.inf, FIRST_BURST, 1.0
    row[BATCH] = MOST_BATCH


@inner
def round_seconds(row: Array) -> float:
    """Return how long a round takes."""
    return max(row[ROUND_TRIP], LEAST_ROUND)


@compiled
def pacing_rate(row: Array, datagram_bytes: int) -> float:
    """Return the bytes per second that may leave this rank."""
    return min(row[WINDOW] * datagram_bytes / round_seconds(row), row[MOST_RATE])


@inner
def note_trip(row: Array, seconds: float, queue: float) -> None:
    """Take in a round trip to any receiver, `queue` longer than the least to that one."""
    row[ROUND_QUEUE] = min(row[ROUND_QUEUE], queue)
    row[ROUND_TRIP] += (
        (seconds - row[ROUND_TRIP]) / 8 if row[MEASURED] else seconds - row[ROUND_TRIP]
    )
    row[MEASURED] = 1.0


@inner
def count_report(row: Array, acked: float, lost: float, marked: float, now: float) -> None:
    """Count what a receiver said of datagrams that it had not told of before; ends a round when its
    time is over.
    """
    row[ACKED] += acked
    row[LOST] += lost
    row[MARKED] += marked
    row[PERIOD_SHARES] = max(row[PERIOD_SHARES], row[SHARES])
    paused, row[LAST_REPORT] = now - row[LAST_REPORT] > PAUSE, now
    period = now - row[PERIOD_BEGAN]
    if paused or period >= PERIOD_SECONDS:
        if not paused:
            rate = (row[PERIOD_CAME] + acked - lost) / period / row[PERIOD_SHARES]
            # a thread that is late makes one period slow
            row[RATE], row[LAST_RATE] = max(rate, row[LAST_RATE]), rate
        row[PERIOD_BEGAN], row[PERIOD_CAME], row[PERIOD_SHARES] = now, 0.0, row[SHARES]
    else:
        row[PERIOD_CAME] += acked - lost
    if row[ACKED] > 0 and now - row[ROUND_BEGAN] >= round_seconds(row):
        _end_round(row, now)
        row[ACKED] = row[LOST] = row[MARKED] = row[LIMITED] = row[BURST_USED] = row[
            REFUSED_IN_ROUND
        ] = 0.0
        row[ROUND_BEGAN], row[ROUND_QUEUE] = now, NO_QUEUE


@inner
def _end_round(row: Array, now: float) -> None:
    count, lost, marked = row[ACKED], row[LOST], row[MARKED]
    row[TRIPS] += 1
    row[EPOCH_ACKED] += count
    expected = row[FLOOR] * count
    # The first overflow loses a good part of a round; a loss at random must not end the search for
    # the rate.
    allowed = STARTING_SHARE * count + 2 if row[STARTING] else expected + 3 * math.sqrt(expected)
    row[EPOCH_LOST] += lost - expected
    seconds = now - row[ROUND_BEGAN]
    row[BEST] *= 1 - min(seconds / BEST_SECONDS, 1.0)
    row[ALPHA] += (marked / count - row[ALPHA]) * MARK_GAIN
    refused = row[REFUSED_IN_ROUND]
    if lost > allowed and row[BURST_USED] > 1.0 and row[BURST] > LEAST_BURST and not row[STARTING]:
        row[BURST] = max(row[BURST] * BETA, LEAST_BURST)
    elif lost > allowed and row[BATCH] > LEAST_BATCH and not row[STARTING]:
        row[BATCH] = max(row[BATCH] * BETA, LEAST_BATCH)
    elif lost > allowed:
        # once for what one overflow lost in two rounds
        if row[STARTING] or row[EPOCH_ACKED] > count:
            _reduce(row, _factor(row, (lost - expected) / count))
    elif refused and not row[STARTING]:
        _follow(row, count, min(seconds, MOST_TRIPS * round_seconds(row)), now)
    elif refused:
        _reduce(row, max(LEAST_FIRST, 1 - refused / (count + refused) - MARGIN))
    elif marked:
        _reduce(row, 1 - row[ALPHA] / 2)
    elif row[STARTING]:
        _start(row, count)
    else:
        _grow(row, count, min(seconds, MOST_TRIPS * round_seconds(row)), now)
    if lost <= allowed:
        row[BATCH] = min(row[BATCH] + BATCH_STEP, MOST_BATCH)
    if lost <= allowed and row[BURST_USED] >= BETA * row[BURST]:
        row[BURST] = min(row[BURST] + BURST_STEP, MOST_BURST)
    # Until a queue overflowed once, nothing says where a loss comes from; later a loss below the
    # path's own always counts.
    if not row[STARTING] and (row[WINDOW] <= LOW_WINDOW * row[W_MAX] or lost < expected):
        row[FLOOR] += (lost / count - row[FLOOR]) * min(1.0, count / FLOOR_HORIZON)
        row[FLOOR] = min(row[FLOOR], MOST_FLOOR)


@inner
def _factor(row: Array, excess: float) -> float:
    """Return what the window is multiplied by after a round that lost the share `excess` to
    congestion.
    """
    if row[STARTING]:
        return max(LEAST_FIRST, 1 - excess - MARGIN)
    return BETA if _has_queue(row) else max(BETA, 1 - excess - MARGIN)


@inner
def _has_queue(row: Array) -> bool:
    """Return whether even the least round trip of this round says that a queue stood."""
    return QUEUE_LIMIT < row[ROUND_QUEUE] < NO_QUEUE


@inner
def _start(row: Array, count: float) -> None:
    """Double the window in a round, until the round trip shows a queue, or it is far above what
    gets through.
    """
    most = SEARCH_ABOVE * row[BEST] * round_seconds(row)
    if 0 < most < row[WINDOW]:
        row[WINDOW] = MOST_ABOVE / SEARCH_ABOVE * most
        row[STARTING], row[W_MAX], row[W_RENO], row[SINCE], row[INFLECTION] = (
            0.0,
            row[WINDOW],
            row[WINDOW],
            0.0,
            0.0,
        )
        return
    if _has_queue(row):
        row[STARTING], row[W_MAX], row[W_RENO], row[SINCE], row[INFLECTION] = (
            0.0,
            row[WINDOW],
            row[WINDOW],
            0.0,
            0.0,
        )
    elif row[LIMITED]:
        row[WINDOW] = min(row[WINDOW] + min(count, row[WINDOW]), MOST_WINDOW)


@inner
def _follow(row: Array, count: float, seconds: float, now: float) -> None:
    """Take note that a queue of this host refused datagrams of a round: nothing is lost, it tells
    when to go on.

    Alone the window stays just above what gets through, or near the best rate; beside others it
    shrinks as after a loss.
    """
    rate = row[RATE]
    window = max(REFUSED_ABOVE * rate, REFUSED_LEAST * row[BEST]) * round_seconds(row)
    if rate > ALONE * row[BEST]:
        if window < row[WINDOW]:
            row[WINDOW] = row[W_MAX] = row[W_RENO] = window
            row[SINCE] = row[INFLECTION] = 0.0
    elif rate > 0 and row[REFUSED_IN_ROUND] > REFUSED_MOST * count:
        _reduce(row, BETA)
    else:
        _grow(row, count, seconds, now)


@inner
def _drain(row: Array, now: float) -> None:
    """Send a little less than what gets through until the queue is gone; one that stays is filled
    by others: keep a share.
    """
    if row[DRAIN_BEGAN] == 0 or row[ROUND_QUEUE] < DRAINS * row[DRAIN_QUEUE]:
        row[DRAIN_BEGAN], row[DRAIN_QUEUE] = now, row[ROUND_QUEUE]
    elif now - row[DRAIN_BEGAN] > DRAIN_SECONDS + 4 * row[ROUND_TRIP]:
        row[COMPETING_UNTIL], row[DRAIN_BEGAN] = now + COMPETING_SECONDS, 0.0
        row[W_MAX], row[SINCE], row[INFLECTION] = row[WINDOW], 0.0, 0.0
        return
    excess = (row[ROUND_QUEUE] - QUEUE_LIMIT) / round_seconds(row)
    drained = max(row[WINDOW] * (1 - excess), DRAIN * row[RATE] * round_seconds(row), LEAST_WINDOW)
    row[WINDOW] = row[W_RENO] = min(row[WINDOW], drained)


@inner
def _grow(row: Array, count: float, seconds: float, now: float) -> None:
    """Grow as CUBIC does, only while the window is what limits."""
    if not _has_queue(row):
        row[DRAIN_BEGAN] = row[COMPETING_UNTIL] = 0.0
    elif now >= row[COMPETING_UNTIL] and row[RATE] > FAIR_SHARE * row[BEST]:
        _drain(row, now)
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
    if not row[STARTING] and not _has_queue(row):
        row[CAUSED] += (max(row[EPOCH_LOST], 0.0) / max(row[EPOCH_ACKED], 1.0) - row[CAUSED]) / 4
    row[EPOCH_ACKED] = row[EPOCH_LOST] = 0.0
    window = row[WINDOW]
    row[WINDOW] = max(window * factor, LEAST_WINDOW)
    # the search ends far above what the path takes
    row[W_MAX] = row[WINDOW] if row[STARTING] else window
    row[INFLECTION] = (max(row[W_MAX] - row[WINDOW], 0.0) / CUBIC) ** (1 / 3)
    row[W_RENO], row[SINCE], row[STARTING] = row[WINDOW], 0.0, 0.0
    row[REDUCTIONS] += 1
