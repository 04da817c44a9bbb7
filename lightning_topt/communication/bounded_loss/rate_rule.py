"""How fast datagrams leave this rank: what reports say of the paths, and the window they lead to.

The window is a number of datagrams per round, a round being one round trip or 1 ms. There is one
window for the rank's link, not one per receiver. All wait for the slowest receiver anyway,
receivers that share a queue would starve each other, and reports of all of them say sooner what the
link carries. Receivers get shares of it (`sending.divide_link`).

The window grows as TCP CUBIC's (RFC 9438), so a competing TCP flow in the same queue keeps its
share. Some things differ, because a bounded loss is allowed here:

1. *Loss that is not congestion.* Rounds right after a reduction measure the loss of the path itself
   (`path_loss`, f, at most 2 %). A round of n datagrams shows congestion if it lost more than that
   explains: ``m > f n + 3 sqrt(f n)``. A path that loses packets at random does not slow the
   exchange down. A full queue does: it loses many packets in one round.
2. *Shallow queues.* The excess of a round's loss says by how much the rate was too high. The window
   shrinks by that share and 5 %. Only with a queue of more than `QUEUE_LIMIT` it shrinks to 0.7, as
   CUBIC does.
3. *Loss that is caused.* `caused_loss` is the share lost in excess, averaged over the last
   reductions. It is held below `target`, half of what the exchange tolerates: above it, growth is
   slowed down by ``target / caused_loss``.
4. *Deep queues.* Suppose all paths have a queue of more than `QUEUE_LIMIT` in all of a round. The
   window then grows only while the exchange gets less than half of the best rate that a receiver
   had (`best_rate`). Otherwise it shrinks to a little less than what gets through. So an exchange
   that is alone keeps deep queues short. A queue that does not get shorter by that is kept full by
   others: the window then grows as CUBIC's.
5. *Bursts.* A thread that was late makes up for it, by at most `burst` datagrams at once. Where a
   round with such a burst shows congestion, the burst is blamed and shrinks. Where there was none,
   what one call sends (`batch`) shrinks, down to its least size. Only then the window does.

Datagrams leave at ``window / round``, spread over time. Nothing waits for single acknowledgements:
receivers report counts. Rounds of less than 1 ms would make a window of a few datagrams, too coarse
to steer with. After a pause the window is what it was.
"""

from __future__ import annotations

import math

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.raw_memory import inner, layout_of

BETA, CUBIC = 0.7, 0.4
RENO_STEP = 3 * (1 - BETA) / (1 + BETA)  # datagrams per round
FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 10.0, 0.25, 1e6  # datagrams
FIRST_ROUND_TRIP, MOST_ROUND_TRIP, LEAST_ROUND = 1e-3, 10.0, 1e-3  # seconds
# A rate is measured over PERIOD_SECONDS. Without a report for PAUSE seconds nothing was sent.
PERIOD_SECONDS, PAUSE = 1e-2, 5e-3
# What a receiver got is a rate over so long at least: token buckets let short bursts pass.
RATE_SECONDS = 1e-2
NO_QUEUE = 1e9  # seconds: nothing was measured
PATH_LOSS_HORIZON, MOST_PATH_LOSS = 2000.0, 0.02  # datagrams; share
STARTING_SHARE = 0.05
MOST_TRIPS = 4.0  # round trips that a round counts for: reports may be rarer
LOW_WINDOW = 0.97  # of the one that overflowed: below it what is lost is the path's
REFUSED_ABOVE, REFUSED_LEAST = 1.05, 0.95  # of the rate that gets through; of the best one
ALONE, REFUSED_MOST = 0.7, 0.4  # of the best rate; of a round
MOST_ABOVE, SEARCH_ABOVE = 1.25, 4.5  # of the best rate
MARGIN = 0.05  # of a reduction beyond what was lost
LEAST_FIRST = 0.3  # factor that the search ends with
QUEUE_LIMIT, FAIR_SHARE, BEST_SECONDS = 5e-4, 0.5, 60.0  # seconds; of the best rate; its memory
FIRST_BURST, LEAST_BURST, MOST_BURST, BURST_STEP = 12.0, 1.0, 256.0, 0.5  # datagrams; per round
LEAST_BATCH, MOST_BATCH, BATCH_STEP = 5.0, 10.0, 5e-3  # datagrams; per round
DRAIN = 0.97  # of the rate that gets through, until a queue that is too long is gone
# A queue that is not down to this share after so long has other senders, for as long as this.
DRAINS, DRAIN_SECONDS, COMPETING_SECONDS = 0.9, 0.1, 5.0
TARGET_SHARE, DEFAULT_TARGET = 0.5, 0.005


class LinkState:
    """This rank's link: the window, the round that is under way, and what earlier ones showed."""

    # the window, in datagrams
    window: float
    w_max: float  # where the last reduction began (RFC 9438)
    w_reno: float  # what Reno would have
    since_reduction: float  # seconds, fewer where growth is slowed down
    inflection: float  # seconds after a reduction until the window is `w_max` again
    starting: float  # 1 while the first search doubles the window
    reductions: float
    most_rate: float  # bytes per second that the user allows
    # round trips and queues, seconds
    round_trip: float
    measured: float  # 1 once there was a round trip
    round_queue: float  # the least of the round
    drain_began: float
    drain_queue: float
    competing_until: float
    # the round that is under way, in datagrams
    round_began: float
    acked: float
    lost: float
    refused: float  # by a queue of this host
    limited: float  # 1 if the window kept something back
    burst_used: float
    # shares of loss
    path_loss: float
    caused_loss: float
    target: float
    epoch_acked: float  # since the last reduction, datagrams
    epoch_lost: float
    # rates of one receiver with the whole link, datagrams per second
    rate: float
    last_rate: float
    best_rate: float
    period_began: float
    period_arrived: float
    period_shares: float
    shares: float  # of all receivers that there are data for
    last_report: float
    # what may leave at once, datagrams
    burst: float
    batch: float


class Path:
    """The way to one receiver, by its reports."""

    trip: float  # seconds
    variation: float
    least_trip: float
    measured: float  # 1 once there was a round trip
    highest: float  # sequence number
    lost: float  # datagrams since the beginning
    share: float  # of the link
    arrived_before: float  # at the receiver from all ranks, when a rate was last measured
    arrived_at: float


LINK, PATH = layout_of(LinkState), layout_of(Path)


@compiled
def reset_link(link: LinkState) -> None:
    """Set a record, all zeros, to an unknown link."""
    link.window, link.round_trip, link.round_queue = FIRST_WINDOW, LEAST_ROUND, NO_QUEUE
    link.starting, link.most_rate, link.target = 1.0, math.inf, DEFAULT_TARGET
    link.burst, link.batch, link.shares = FIRST_BURST, MOST_BATCH, 1.0


@compiled
def reset_path(path: Path) -> None:
    """Set a record, all zeros, to an unknown path."""
    path.trip, path.variation = FIRST_ROUND_TRIP, FIRST_ROUND_TRIP / 2
    path.least_trip, path.highest, path.share = MOST_ROUND_TRIP, -1.0, 1.0


@compiled
def pacing_rate(link: LinkState, datagram_bytes: int) -> float:
    """Return the bytes per second that may leave this rank."""
    return min(link.window * datagram_bytes / round_seconds(link), link.most_rate)


@inner
def round_seconds(link: LinkState) -> float:
    """Return how long a round takes."""
    return max(link.round_trip, LEAST_ROUND)


@compiled
def answer_seconds(path: Path) -> float:
    """Return how long an answer may take: round trip and variation as measured (RFC 6298)."""
    return float(path.trip + max(4 * path.variation, LEAST_ROUND))


# ---- what reports say


@compiled
def measure_trip(path: Path, link: LinkState, seconds: float) -> None:
    """Take in a measured round trip; nonsense (a clock that was set) is dropped."""
    if not 0 < seconds < MOST_ROUND_TRIP:
        return
    path.least_trip = min(path.least_trip, seconds)
    # Of all receivers: a round trip, and by how much it is longer than the least to that receiver.
    link.round_queue = min(link.round_queue, seconds - path.least_trip)
    link.round_trip += (
        (seconds - link.round_trip) / 8 if link.measured else seconds - link.round_trip
    )
    link.measured = 1.0
    if not path.measured:
        path.trip, path.variation, path.measured = seconds, seconds / 2, 1.0
        return
    path.variation += (abs(seconds - path.trip) - path.variation) / 4
    path.trip += (seconds - path.trip) / 8


@compiled
def take_report(
    path: Path,
    link: LinkState,
    highest: int,
    lost: int,
    arrived: int,
    arrived_at: float,
    now: float,
) -> None:
    """Take in what a receiver counted; old reports, which datagrams may bring late, are dropped.

    Args:
        path: the receiver's.
        link: this rank's.
        highest: sequence number of a datagram from this rank.
        lost: datagrams up to that number that are missing, since the beginning.
        arrived: datagrams of all senders that came there.
        arrived_at: when the last of these came, in seconds of the receiver's clock.
        now: seconds of this rank's clock.
    """
    if highest < path.highest:
        return
    acked, more_lost = highest - path.highest, lost - path.lost
    path.highest = highest
    path.lost = max(path.lost, float(lost))
    took = arrived_at - path.arrived_at
    if took >= RATE_SECONDS:
        # What all senders got through is what the receiver's link carries, however they share it.
        if path.arrived_at > 0:
            link.best_rate = max(link.best_rate, (arrived - path.arrived_before) / took)
        path.arrived_before, path.arrived_at = arrived, arrived_at
    _count_report(link, acked, max(0.0, more_lost), now)


@inner
def _count_report(link: LinkState, acked: float, lost: float, now: float) -> None:
    # Count datagrams that were not reported before; end the round when its time is over
    link.acked += acked
    link.lost += lost
    # the rate of this period, unless it began before a pause
    link.period_shares = max(link.period_shares, link.shares)
    paused, link.last_report = now - link.last_report > PAUSE, now
    period = now - link.period_began
    if paused or period >= PERIOD_SECONDS:
        if not paused:
            rate = (link.period_arrived + acked - lost) / period / link.period_shares
            # a thread that is late makes one period slow
            link.rate, link.last_rate = max(rate, link.last_rate), rate
        link.period_began, link.period_arrived, link.period_shares = now, 0.0, link.shares
    else:
        link.period_arrived += acked - lost
    if link.acked > 0 and now - link.round_began >= round_seconds(link):
        _end_round(link, now)
        link.acked = link.lost = link.refused = 0.0
        link.limited = link.burst_used = 0.0
        link.round_began, link.round_queue = now, NO_QUEUE


# ---- the end of a round


@inner
def _end_round(link: LinkState, now: float) -> None:
    # Adapt the window, the burst and the batch to what the round showed
    count, lost, refused = link.acked, link.lost, link.refused
    link.epoch_acked += count
    expected = link.path_loss * count
    # The first overflow loses a good part of a round; a loss at random must not end the search for
    # the rate.
    allowed = STARTING_SHARE * count + 2 if link.starting else expected + 3 * math.sqrt(expected)
    link.epoch_lost += lost - expected
    seconds = now - link.round_began
    link.best_rate *= 1 - min(seconds / BEST_SECONDS, 1.0)
    if lost > allowed and link.burst_used > 1.0 and link.burst > LEAST_BURST and not link.starting:
        link.burst = max(link.burst * BETA, LEAST_BURST)
    elif lost > allowed and link.batch > LEAST_BATCH and not link.starting:
        link.batch = max(link.batch * BETA, LEAST_BATCH)
    elif lost > allowed:
        # once for what one overflow lost in two rounds
        if link.starting or link.epoch_acked > count:
            _reduce(link, _factor(link, (lost - expected) / count))
    elif refused and not link.starting:
        _follow(link, count, min(seconds, MOST_TRIPS * round_seconds(link)), now)
    elif refused:
        _reduce(link, max(LEAST_FIRST, 1 - refused / (count + refused) - MARGIN))
    elif link.starting:
        _search(link, count)
    else:
        _grow(link, count, min(seconds, MOST_TRIPS * round_seconds(link)), now)
    if lost <= allowed:
        link.batch = min(link.batch + BATCH_STEP, MOST_BATCH)
    if lost <= allowed and link.burst_used >= BETA * link.burst:
        link.burst = min(link.burst + BURST_STEP, MOST_BURST)
    # Until a queue overflowed once, nothing says where a loss comes from; later a loss below the
    # path's own always counts.
    if not link.starting and (link.window <= LOW_WINDOW * link.w_max or lost < expected):
        link.path_loss += (lost / count - link.path_loss) * min(1.0, count / PATH_LOSS_HORIZON)
        link.path_loss = min(link.path_loss, MOST_PATH_LOSS)


@inner
def _factor(link: LinkState, excess: float) -> float:
    # The factor of the window after a round that lost the share `excess` to congestion
    if link.starting:
        return max(LEAST_FIRST, 1 - excess - MARGIN)
    return BETA if _has_queue(link) else max(BETA, 1 - excess - MARGIN)


@inner
def _has_queue(link: LinkState) -> bool:
    # Whether even the least round trip of this round says that a queue stood
    return QUEUE_LIMIT < link.round_queue < NO_QUEUE


@inner
def _search(link: LinkState, count: float) -> None:
    # Double the window, until a queue shows or it is far above what gets through
    most = SEARCH_ABOVE * link.best_rate * round_seconds(link)
    too_fast = 0 < most < link.window
    if too_fast:
        link.window = MOST_ABOVE / SEARCH_ABOVE * most
    if too_fast or _has_queue(link):
        link.starting, link.w_max, link.w_reno = 0.0, link.window, link.window
        link.since_reduction = link.inflection = 0.0
    elif link.limited:
        link.window = min(link.window + min(count, link.window), MOST_WINDOW)


@inner
def _follow(link: LinkState, count: float, seconds: float, now: float) -> None:
    """Take note that a queue of this host refused datagrams: nothing is lost, it says when to go.

    Alone, the window stays just above what gets through, or near the best rate. Beside others it
    shrinks as after a loss.
    """
    rate = link.rate
    window = max(REFUSED_ABOVE * rate, REFUSED_LEAST * link.best_rate) * round_seconds(link)
    if rate > ALONE * link.best_rate:
        if window < link.window:
            link.window = link.w_max = link.w_reno = window
            link.since_reduction = link.inflection = 0.0
    elif rate > 0 and link.refused > REFUSED_MOST * count:
        _reduce(link, BETA)
    else:
        _grow(link, count, seconds, now)


@inner
def _grow(link: LinkState, count: float, seconds: float, now: float) -> None:
    # Grow as CUBIC does, only while the window is what limits
    if not _has_queue(link):
        link.drain_began = link.competing_until = 0.0
    elif now >= link.competing_until and link.rate > FAIR_SHARE * link.best_rate:
        _drain(link, now)
        return
    if not link.limited:
        return
    slower = min(1.0, link.target / link.caused_loss) if link.caused_loss > 0 else 1.0
    link.since_reduction += seconds * slower
    link.w_reno += RENO_STEP * slower * min(count / max(link.window, 1.0), MOST_TRIPS)
    cubic = CUBIC * (link.since_reduction - link.inflection) ** 3 + link.w_max
    wanted = max(cubic, link.w_reno)
    most = MOST_ABOVE * link.best_rate * round_seconds(link) if link.best_rate > 0 else MOST_WINDOW
    link.window = max(link.window, min(wanted, 1.5 * link.window, most, MOST_WINDOW))


@inner
def _drain(link: LinkState, now: float) -> None:
    """Send a little less than what gets through until the queue is gone.

    A queue that stays is filled by others: keep a share of it.
    """
    if link.drain_began == 0 or link.round_queue < DRAINS * link.drain_queue:
        link.drain_began, link.drain_queue = now, link.round_queue
    elif now - link.drain_began > DRAIN_SECONDS + 4 * link.round_trip:
        link.competing_until, link.drain_began = now + COMPETING_SECONDS, 0.0
        link.w_max, link.since_reduction, link.inflection = link.window, 0.0, 0.0
        return
    excess = (link.round_queue - QUEUE_LIMIT) / round_seconds(link)
    drained = max(link.window * (1 - excess), DRAIN * link.rate * round_seconds(link), LEAST_WINDOW)
    link.window = link.w_reno = min(link.window, drained)


@inner
def _reduce(link: LinkState, factor: float) -> None:
    # Shrink after congestion
    # The search loses more, once; in a queue that is never empty others decide what is lost.
    if not link.starting and not _has_queue(link):
        caused = max(link.epoch_lost, 0.0) / max(link.epoch_acked, 1.0)
        link.caused_loss += (caused - link.caused_loss) / 4
    link.epoch_acked = link.epoch_lost = 0.0
    window = link.window
    link.window = max(window * factor, LEAST_WINDOW)
    # the search ends far above what the path takes
    link.w_max = link.window if link.starting else window
    link.inflection = (max(link.w_max - link.window, 0.0) / CUBIC) ** (1 / 3)
    link.w_reno, link.since_reduction, link.starting = link.window, 0.0, 0.0
    link.reductions += 1
