"""`simulate`: when each pass of a schedule runs, how long ranks wait, and what they hold, for given
costs of the stages.

Forward and backward of different microbatches side by side on one device (BaPipe's FBP, arXiv
2012.12544) is no list of passes and not simulated: a rank here runs one pass at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_topt.schedules.schedule import Action, Schedule
from lightning_topt.schedules.schedule_memory import MemoryCurve, memory_curves, peak_bytes
from lightning_topt.schedules.schedule_timing import Times, Transfer, Walk, timed_walk
from lightning_topt.schedules.stage_costs import StageCosts


class Span(NamedTuple):
    """A pass on a rank, from `start` to `end` in seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float


class TransferSpan(NamedTuple):
    """A transfer, from `start` to `end` in seconds since the step began."""

    transfer: Transfer
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A `Simulation` has the time `step_seconds` of a step, its `spans` and `transfers`, and the
    memory of each rank.
    """

    schedule: Schedule
    costs: StageCosts
    walk: Walk
    times: Times

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last, transfers that occupy
        ranks included.
        """
        return float(self.times.step_seconds)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Passes in an order in which they can run, those of a rank as they follow each other."""
        return tuple(
            Span(rank, action, start, end)
            for (rank, action), start, end in zip(
                self.walk.actions, self.times.starts, self.times.ends, strict=True
            )
        )

    @cached_property
    def transfers(self) -> tuple[TransferSpan, ...]:
        """All that moved between ranks; where transfers occupy ranks, from the start of sending to
        the end of receiving.
        """
        return tuple(map(TransferSpan, self.walk.transfers, self.times.sent, self.times.arrived))

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank runs passes, (ranks,)."""
        busy = [0.0] * self.schedule.num_ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank runs no pass, (ranks,): it waits, or sends and receives where
        that occupies it.
        """
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they run no pass, 0 to 1."""
        total = self.step_seconds * self.schedule.num_ranks
        return sum(self.idle_seconds) / total if total > 0 else 0.0

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Bytes of each rank over time, (ranks,)."""
        return memory_curves(self.schedule, self.costs, walk=self.walk, times=self.times)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds at once, (ranks,)."""
        return peak_bytes(self.memory)


def simulate(schedule: Schedule, costs: StageCosts) -> Simulation:
    """Return when each pass of a step runs and what each rank holds, with these costs; memory is
    computed when asked for.

    `schedule_timing.step_seconds` and `many_step_seconds` give the time alone. Raises ValueError
    for costs that do not fit the schedule, ScheduleError where the schedule hangs.
    """
    walk, times = timed_walk(schedule, costs)
    return Simulation(schedule, costs, walk, times)
