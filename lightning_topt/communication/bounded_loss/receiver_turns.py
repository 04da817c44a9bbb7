"""Turns: where several ranks send to one, its link is one sender's at a time: what they send does not meet in its queue.

- A sender that has data for a receiver ASKs it. The receiver GRANTs its link to one sender at a time: to the one that had the
  fewest turns so far, of equal ones to the next in the circle of ranks, so that ranks which all have data for all others send
  in a rotation, each to another one.
- A turn is some milliseconds of data. A round trip before its last datagrams leave, the sender says that it is DONE, so that
  the next one's data arrive behind its own; it says END where it has no more data.
- A sender uses one grant at a time. One that comes shortly before the end of a turn waits; another is given back (LATER), and
  asked for again.

Turns are advice: data without one are taken as any others. A lost message costs time only: a turn without data ends.
"""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.control_messages import BY_DATAGRAM, answer_nanoseconds, send_control
from lightning_topt.communication.bounded_loss.datagram import ASK, DONE_TURN, END_TURN, GRANT, LATER, TURN
from lightning_topt.communication.bounded_loss.rate_rule import ROUND_ARRIVED, ROUND_TRIP, pacing_rate
from lightning_topt.communication.bounded_loss.raw_memory import inner
from lightning_topt.communication.bounded_loss.table_views import config_row, peer_row, rate_row
from lightning_topt.communication.bounded_loss.tables import (
    ANNOUNCED,
    ASK_NS,
    COUNT_SEEN,
    DATAGRAM,
    GRANTED_NS,
    HAS_DATA,
    HELD,
    NEXT_SEQUENCE,
    NEXT_TIMER,
    RANK,
    TURN_COUNT,
    TURN_END,
    TURN_OF,
    TURN_TO,
    TURNS,
    WORLD,
)

TURN_SECONDS, LEAST_TURN, MOST_TURN = 6e-3, 32, 1 << 14  # of data; datagrams
EXPIRE_NS = 2_000_000  # without data, beside an answer's time
LEAST_AHEAD = 12  # datagrams
WITHOUT_TURN = 4  # datagrams of one way that may leave at any time: every queue has room for them


@inner
def _turn_datagrams(t: int, peer: int, seconds: float) -> int:
    """Return what leaves for `peer` in so many seconds."""
    config = config_row(t)
    return int(pacing_rate(rate_row(t, peer), config[DATAGRAM]) * seconds / config[DATAGRAM])


@inner
def _ahead(t: int, peer: int) -> int:
    """Return how many datagrams before the end of a turn the next one is prepared."""
    return max(LEAST_AHEAD, _turn_datagrams(t, peer, min(rate_row(t, peer)[ROUND_TRIP], TURN_SECONDS / 2)))


@inner
def _send_turn(t: int, peer: int, what: int) -> None:
    send_control(t, peer, TURN, what, 0, 0, 0, 0, BY_DATAGRAM)


# ---- senders --------------------------------------------------------------------------------------------------------


@inner
def turn_room(t: int, peer: int, now: int) -> int:
    """Return how many datagrams may leave for `peer` in this rank's turn; asks for one where there is none."""
    config, row = config_row(t), peer_row(t, peer)
    if config[WORLD] == 2:
        return MOST_TURN
    if config[TURN_TO] < 0 and row[HELD]:
        config[TURN_TO], row[HELD], row[ANNOUNCED] = peer, 0, 0
        rate_row(t, peer)[ROUND_ARRIVED] = 0.0  # no rate is measured over the pause
        row[TURN_END] = row[NEXT_SEQUENCE] + max(LEAST_TURN, min(MOST_TURN, _turn_datagrams(t, peer, TURN_SECONDS)))
    if config[TURN_TO] == peer:
        return int(row[TURN_END] - row[NEXT_SEQUENCE])
    if config[TURN_TO] < 0 or peer_row(t, config[TURN_TO])[ANNOUNCED]:
        _ask(t, peer, now)
    return 0


@inner
def _ask(t: int, peer: int, now: int) -> None:
    row = peer_row(t, peer)
    if row[HELD]:
        return
    if row[ASK_NS] <= now:
        _send_turn(t, peer, ASK)
        row[ASK_NS] = now + answer_nanoseconds(t, peer, 1)
    config_row(t)[NEXT_TIMER] = min(config_row(t)[NEXT_TIMER], row[ASK_NS])


@inner
def after_batch(t: int, peer: int) -> None:
    """Announce the end of this rank's turn at `peer` in time, and end it."""
    config, row = config_row(t), peer_row(t, peer)
    if config[WORLD] == 2 or config[TURN_TO] != peer:
        return
    rest = row[TURN_END] - row[NEXT_SEQUENCE]
    if not row[ANNOUNCED] and rest <= _ahead(t, peer):
        row[ANNOUNCED], row[ASK_NS] = 1, 0
        _send_turn(t, peer, DONE_TURN)
    if rest <= 0:
        config[TURN_TO] = -1


@inner
def without_data(t: int, peer: int) -> None:
    """Give back the turn at `peer`, for which there are no data."""
    config, row = config_row(t), peer_row(t, peer)
    if config[WORLD] == 2 or (config[TURN_TO] != peer and not row[HELD]):
        return
    row[HELD], row[ASK_NS] = 0, 0
    if config[TURN_TO] == peer:
        config[TURN_TO] = -1
    _send_turn(t, peer, END_TURN)


@inner
def _take_grant(t: int, peer: int) -> None:
    config, row = config_row(t), peer_row(t, peer)
    current, held = config[TURN_TO], False
    for other in range(config[WORLD]):
        held = held or (other != peer and peer_row(t, other)[HELD] != 0)
    row[ASK_NS] = 0
    if current == peer and not row[ANNOUNCED]:
        return  # an answer to an earlier question
    if held or (current >= 0 and not peer_row(t, current)[ANNOUNCED]):
        _send_turn(t, peer, LATER)
    else:
        row[HELD] = 1


# ---- receivers ------------------------------------------------------------------------------------------------------


@inner
def take_turn_message(t: int, peer: int, what: int, now: int) -> None:
    """Act on a message about turns."""
    config, row = config_row(t), peer_row(t, peer)
    if what == GRANT:
        _take_grant(t, peer)
        return
    if what == ASK and config[TURN_OF] == peer:  # the grant was lost, or that the turn is over
        _send_turn(t, peer, GRANT)
        return
    if what == ASK and not row[HAS_DATA]:
        _catch_up(t, peer)
    row[HAS_DATA] = what in (ASK, DONE_TURN)
    if config[TURN_OF] == peer:
        config[TURN_OF] = -1
        row[TURNS] -= what == LATER
    if config[TURN_OF] < 0:
        _grant_next(t, now)


@inner
def _catch_up(t: int, peer: int) -> None:
    """Let a sender that had nothing to send for a while not have all turns that it missed."""
    most = 0
    for other in range(config_row(t)[WORLD]):
        most = max(most, peer_row(t, other)[TURNS])
    peer_row(t, peer)[TURNS] = max(peer_row(t, peer)[TURNS], most - 1)


@inner
def _grant_next(t: int, now: int) -> None:
    config, best = config_row(t), -1
    for distance in range(1, config[WORLD]):
        peer = (config[RANK] - distance) % config[WORLD]
        row = peer_row(t, peer)
        if row[HAS_DATA] and (best < 0 or row[TURNS] < peer_row(t, best)[TURNS]):
            best = peer
    if best < 0:
        return
    row = peer_row(t, best)
    row[TURNS] += 1
    config[TURN_OF], config[TURN_COUNT], config[GRANTED_NS] = best, row[COUNT_SEEN], now
    _send_turn(t, best, GRANT)


@inner
def end_silent_turn(t: int, now: int) -> None:
    """End a turn in which nothing arrives: messages got lost, or its sender is late."""
    config, peer = config_row(t), config_row(t)[TURN_OF]
    if config[WORLD] == 2 or peer < 0:
        return
    row = peer_row(t, peer)
    if row[COUNT_SEEN] != config[TURN_COUNT]:
        config[TURN_COUNT], config[GRANTED_NS] = row[COUNT_SEEN], now
    until = config[GRANTED_NS] + EXPIRE_NS + answer_nanoseconds(t, peer, 0)
    if until <= now:
        row[HAS_DATA], config[TURN_OF] = 0, -1
        _grant_next(t, now)
        if config[TURN_OF] < 0:
            return
        until = now + EXPIRE_NS
    config[NEXT_TIMER] = min(config[NEXT_TIMER], until)
