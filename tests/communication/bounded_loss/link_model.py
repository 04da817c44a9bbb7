"""A link with a queue, in steps of time: what several senders of datagrams get through it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lightning_topt.communication.bounded_loss.rate_rule import (
    LINK,
    PATH,
    measure_trip,
    pacing_rate,
    reset_link,
    reset_path,
    take_report,
)
from lightning_topt.communication.bounded_loss.raw_memory import new_record

REPORT_SECONDS = 5e-4


@dataclass
class Sender:
    """One flow: datagrams sent, delivered and lost so far; fractions wait for the next
    step.
    """

    window: float = 10.0
    sent: float = 0.0
    lost: float = 0.0
    delivered: float = 0.0
    reports: deque = field(default_factory=deque)
    last_report: float = 0.0

    def rate(self, round_trip: float) -> float:
        """Datagrams per second."""
        return self.window / round_trip

    def take(self, now: float, trip: float, highest: int, lost: int) -> None:
        raise NotImplementedError


class Ours(Sender):
    """The rule under test."""

    def __init__(self, target: float = 0.005) -> None:
        super().__init__()
        self.row, self.path = new_record(LINK), new_record(PATH)
        reset_link(self.row)
        reset_path(self.path)
        self.row.target = target

    def rate(self, round_trip: float) -> float:
        return pacing_rate(self.row, 1)

    def take(self, now: float, trip: float, highest: int, lost: int) -> None:
        self.row.limited = 1.0
        measure_trip(self.path, self.row, trip)
        take_report(self.path, self.row, highest, lost, highest + 1 - lost, 1 + now, now)


class Cubic(Sender):
    """TCP CUBIC without slow start: one reduction in a round trip with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.reno, self.since, self.round_ends, self.known_lost = 0.0, 10.0, 0.0, 0.0, 0

    def take(self, now: float, trip: float, highest: int, lost: int) -> None:
        if now < self.round_ends:
            return
        seconds = trip
        self.round_ends = now + trip
        if lost > self.known_lost:
            self.known_lost = lost
            self.most = self.window
            self.window = self.reno = max(2.0, 0.7 * self.window)
            self.since = 0.0
            return
        self.since += seconds
        self.reno += 0.53
        root = (self.most * 0.3 / 0.4) ** (1 / 3)
        self.window = max(self.window, self.reno, 0.4 * (self.since - root) ** 3 + self.most)


def run_link(
    senders: list[Sender],
    *,
    capacity: float,
    base: float,
    queue: float,
    seconds: float,
    loss: float = 0.0,
    starts: list[float] | None = None,
    step: float = 1e-4,
) -> list[float]:
    """Let `senders` share a link of `capacity` datagrams/s, round trip `base` s, `queue` datagrams,
    random `loss`.

    Returns the datagrams/s of each that were delivered in the last half of the time; `starts` says
    when each begins.
    """
    random = np.random.default_rng(0)
    waiting = [0.0] * len(senders)
    at_half = [0.0] * len(senders)
    starts = starts or [0.0] * len(senders)
    for tick in range(int(seconds / step)):
        now = tick * step
        if tick == int(seconds / step) // 2:
            at_half = [sender.delivered for sender in senders]
        trip = base + sum(waiting) / capacity
        for index, sender in enumerate(senders):
            if now < starts[index]:
                continue
            amount = sender.rate(trip) * step
            sender.sent += amount
            if loss:
                dropped = min(amount, float(random.poisson(amount * loss)))
                sender.lost += dropped
                amount -= dropped
            waiting[index] += amount
        served = min(sum(waiting), capacity * step)
        total = sum(waiting)
        for index, sender in enumerate(senders):
            if total > 0:
                sender.delivered += served * waiting[index] / total
                waiting[index] *= 1 - served / total
        over = sum(waiting) - queue
        if over > 0:
            total = sum(waiting)
            for index, sender in enumerate(senders):
                sender.lost += over * waiting[index] / total
                waiting[index] *= 1 - over / total
        _report(senders, now, trip)
    half = seconds / 2
    return [
        (sender.delivered - before) / half for sender, before in zip(senders, at_half, strict=True)
    ]


def _report(senders: list[Sender], now: float, trip: float) -> None:
    for sender in senders:
        if now - sender.last_report >= REPORT_SECONDS and sender.sent >= 1:
            sender.last_report = now
            state = (now + trip, trip, int(sender.sent) - 1, int(sender.lost))
            sender.reports.append(state)
        while sender.reports and sender.reports[0][0] <= now:
            _, measured, highest, lost = sender.reports.popleft()
            sender.take(now, measured, highest, min(lost, highest + 1))
