"""Simulate a schedule: when each pass runs, how long ranks wait, and what they hold.

    found = simulate(schedule, StageCosts(forward=[1.0, 1.0], backward=[2.0, 2.0]))
    found.step_seconds, found.bubble_fraction, found.peak_bytes

Times are those of the walk in `timing`. Memory is added up from what each pass and each transfer
holds (`memory_curves`); `held_counts` gives the most activations in flight for any sizes.

Forward and backward of different microbatches side by side on one device (BaPipe's FBP, arXiv
2012.12544) is no list of passes and not simulated: a rank here runs one pass at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_topt.schedules.schedules import Action, Schedule
from lightning_topt.schedules.timing import Edge, StageCosts, Times, Walk, timed_walk


def simulate(schedule: Schedule, costs: StageCosts) -> Simulation:
    """Return when each pass of a step runs and what each rank holds, with these costs.

    Memory is computed when asked for. `timing.step_seconds` gives the time alone.

    Raises:
        ValueError: for costs that do not fit the schedule.
        ScheduleError: where the schedule hangs.
    """
    walk, times = timed_walk(schedule, costs)
    return Simulation(schedule, costs, walk, times)


class PassSpan(NamedTuple):
    """A pass on a rank, from `start` to `end` in seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float


class MemoryCurve(NamedTuple):
    """Bytes of a rank over time, (points,) each.

    From ``seconds[i]`` on ``nbytes[i]`` are held; an instant may come twice.
    """

    seconds: NDArray[np.float64]
    nbytes: NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """A simulated step: its time, its passes, and the memory of each rank."""

    schedule: Schedule
    costs: StageCosts
    walk: Walk
    times: Times

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last.

        Transfers that occupy ranks are included.
        """
        return float(self.times.step_seconds)

    @cached_property
    def spans(self) -> tuple[PassSpan, ...]:
        """Passes in an order in which they can run, those of a rank as they follow each other."""
        return tuple(
            PassSpan(rank, action, start, end)
            for (rank, action), start, end in zip(
                self.walk.actions, self.times.starts, self.times.ends, strict=True
            )
        )

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank runs passes, (ranks,)."""
        busy = [0.0] * self.schedule.num_ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they run no pass, 0 to 1."""
        total = self.step_seconds * self.schedule.num_ranks
        return 1 - sum(self.busy_seconds) / total if total > 0 else 0.0

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Bytes of each rank over time, (ranks,)."""
        return memory_curves(self)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds at once, (ranks,)."""
        return tuple(float(curve.nbytes.max()) for curve in self.memory)


def memory_curves(simulation: Simulation) -> tuple[MemoryCurve, ...]:
    """Return the bytes of each rank over time, (ranks,).

    A received tensor is held from when its transfer starts. An activation is held until its
    forward starts, where it becomes part of the stage's activations; a gradient until the end of
    its backward. The sender holds a gradient until it has arrived.
    """
    schedule, walk, times = simulation.schedule, simulation.walk, simulation.times
    changes = _MemoryChanges(schedule, simulation.costs)
    for step, (rank, action), start, end in zip(
        walk.steps, walk.actions, times.starts, times.ends, strict=True
    ):
        is_forward = action.kind == "forward"
        # received: until it is part of the activations, or for all of a backward pass
        for number, _ in step.received:
            changes.hold_tensor(
                rank, walk.transfers[number], times.sent[number], start if is_forward else end
            )
        changes.run_pass(rank, action, start, end)
        # the outputs of a forward pass are among its activations
        if not is_forward:
            for number, _, _ in step.sent:
                changes.hold_tensor(rank, walk.transfers[number], end, times.arrived[number])
    return tuple(changes.curve(rank) for rank in range(schedule.num_ranks))


class _MemoryChanges:
    """Changes of the bytes of each rank, (second, bytes)."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        zeros = [0.0] * schedule.num_stages
        self._activation = costs.activation_bytes or zeros
        self._weight = costs.weight_bytes or zeros
        self._forward = costs.forward_bytes or zeros
        self._backward = costs.backward_bytes or zeros
        self._crossing = costs.transfer_bytes or {}
        self._version = costs.version_bytes or zeros
        self._versions = [_StashedVersions() for _ in zeros]
        static = costs.static_bytes or zeros
        self._static = [
            sum(static[stage] for stage in schedule.stages_of(rank))
            for rank in range(schedule.num_ranks)
        ]
        self._changes: list[list[tuple[float, float]]] = [[] for _ in range(schedule.num_ranks)]

    def run_pass(self, rank: int, action: Action, start: float, end: float) -> None:
        kind, stage = action.kind, action.stage_index
        # what is held while the pass runs
        during = 0.0
        if kind != "update":
            during = (self._forward if kind == "forward" else self._backward)[stage]
        at_start, at_end = during, -during
        # activations of the stage, and what a split backward keeps for its second half
        if kind == "forward":
            at_start += self._activation[stage]
        elif kind in ("backward", "backward_input"):
            at_end -= self._activation[stage]
        if kind == "backward_input":
            at_end += self._weight[stage]
        elif kind == "backward_weight":
            at_end -= self._weight[stage]
        # copies of weights of other versions
        stashed = self._versions[stage].change(action) * self._version[stage]
        at_start, at_end = at_start + max(stashed, 0.0), at_end + min(stashed, 0.0)
        self._changes[rank] += [(start, at_start), (end, at_end)]

    def hold_tensor(self, rank: int, edge: Edge, start: float, end: float) -> None:
        nbytes = self._crossing.get(edge, 0.0)
        if nbytes and end > start:
            self._changes[rank] += [(start, nbytes), (end, -nbytes)]

    def curve(self, rank: int) -> MemoryCurve:
        # Return the bytes of a rank.
        # Changes of one instant keep their order: what ended makes room for what starts.
        changes = sorted(self._changes[rank], key=itemgetter(0))
        seconds = np.array([0.0, *(second for second, _ in changes)])
        return MemoryCurve(
            seconds, self._static[rank] + np.cumsum([0.0, *(change for _, change in changes)])
        )


class _StashedVersions:
    """Counts the copies of a stage's weights under weight stashing, action by action.

    A copy is made when an update is to replace weights that a forward pass in flight has used. It
    is given up after the last backward pass of the minibatches that used them.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # version by minibatch
        self._newest = 0

    def change(self, action: Action) -> int:
        # Return how many copies more there are with this action, -1 to 1.
        if action.kind == "forward":
            # a minibatch keeps the version that its forward pass has used
            self._used[action.microbatch_index] = self._newest
        elif action.kind in ("backward", "backward_weight"):
            # the last minibatch that used an old version gives up its copy
            version = self._used.pop(action.microbatch_index, self._newest)
            return -1 if version != self._newest and version not in self._used.values() else 0
        elif action.kind == "update":
            # a copy is needed where a minibatch in flight has used what is replaced
            self._newest += 1
            return int(self._newest - 1 in self._used.values())
        return 0


def held_counts(schedule: Schedule) -> tuple[NDArray[np.int64], ...]:
    """Return for each rank the most microbatches that it holds at once, for any sizes.

    Each rank has rows of counts, (rows, 2 x stages of the rank), stages in order of `stages_of`.
    The first half of a row counts microbatches between the start of forward and the end of
    backward or backward_input. The second half counts those between the ends of backward_input and
    of backward_weight. Rows that another row covers are left out, so ``(counts @ bytes).max()`` is
    the peak of activations.
    """
    found = []
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        now = [0] * (2 * len(stages))  # activations of each stage, then halves of split backwards
        rows = {tuple(now)}
        for action in actions:
            # each action moves a count; every state between two actions is a row
            place = stages.index(action.stage_index)
            if action.kind == "forward":
                now[place] += 1
            elif action.kind in ("backward", "backward_input"):
                now[place] -= 1
                now[place + len(stages)] += action.kind == "backward_input"
            elif action.kind == "backward_weight":
                now[place + len(stages)] -= 1
            rows.add(tuple(now))
        kept: list[tuple[int, ...]] = []
        for row in sorted(rows, reverse=True):  # a row that covers another comes before it
            if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
                kept.append(row)
        found.append(np.array(kept, dtype=np.int64))
    return tuple(found)
