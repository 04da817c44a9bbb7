"""Bytes that each rank of a pipeline holds while a schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_topt.schedules.kept_versions import KeptVersions
from lightning_topt.schedules.schedule import Action, Schedule
from lightning_topt.schedules.schedule_timing import Times, Walk
from lightning_topt.schedules.stage_costs import Edge, StageCosts


class MemoryCurve(NamedTuple):
    """Bytes of a rank over time: from ``seconds[i]`` on ``nbytes[i]`` are held, (points,) each;
    instants may come twice.
    """

    seconds: NDArray[np.float64]
    nbytes: NDArray[np.float64]


def held_counts(schedule: Schedule) -> tuple[NDArray[np.int64], ...]:
    """Return for each rank the most that it holds at once: rows of counts, (rows, 2 x stages of the
    rank).

    The first half of a row are microbatches of each stage (in order of `stages_of`) between the
    start of forward and the end of backward or backward_input, the second half those between the
    ends of backward_input and of backward_weight. Rows that another row covers are left out. So
    ``(counts @ bytes).max()`` is the peak of activations for any sizes. Without any backward pass
    nothing is held.
    """
    found = []
    is_training = any(
        action.kind != "forward" for actions in schedule.actions for action in actions
    )
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        now = [0] * (2 * len(stages))
        rows = {tuple(now)}
        for action in actions if is_training else ():
            place = stages.index(action.stage_index)
            if action.kind == "forward":
                now[place] += 1
            elif action.kind in ("backward", "backward_input"):
                now[place] -= 1
                now[place + len(stages)] += action.kind == "backward_input"
            elif action.kind == "backward_weight":
                now[place + len(stages)] -= 1
            rows.add(tuple(now))
        found.append(np.array(_uncovered(sorted(rows, reverse=True)), dtype=np.int64))
    return tuple(found)


def _uncovered(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for row in rows:  # a row that covers another comes before it
        if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
    return kept


def memory_curves(
    schedule: Schedule, costs: StageCosts, *, walk: Walk, times: Times
) -> tuple[MemoryCurve, ...]:
    """Return the bytes of each rank over time, (ranks,).

    A tensor that is received is held from when its transfer starts: until its forward starts, as an
    activation of that stage from then on; a gradient until the end of its backward. The sender
    holds a gradient until it has arrived.
    """
    changes = _Changes(schedule, costs)
    is_training = any(action.kind != "forward" for _, action in walk.actions)
    for step, (rank, action), start, end in zip(
        walk.steps, walk.actions, times.starts, times.ends, strict=True
    ):
        is_forward = action.kind == "forward"
        for number, _ in step.received:
            changes.hold(
                rank, walk.transfers[number].edge, times.sent[number], start if is_forward else end
            )
        changes.run(rank, action, start, end, is_training)
        if not is_forward or not is_training:
            for number, _, _ in step.sent:
                changes.hold(rank, walk.transfers[number].edge, end, times.arrived[number])
    return tuple(changes.curve(rank) for rank in range(schedule.num_ranks))


class _Changes:
    """Changes of the bytes of each rank, (second, bytes)."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        zeros = [0.0] * schedule.num_stages
        self._activation = costs.activation_bytes or zeros
        self._weight = costs.weight_bytes or zeros
        self._during = {
            "forward": costs.forward_bytes or zeros,
            "backward": costs.backward_bytes or zeros,
        }
        self._crossing = costs.transfer_bytes or {}
        self._version = costs.version_bytes or zeros
        self._versions = [KeptVersions() for _ in zeros]
        static = costs.static_bytes or zeros
        self._static = [
            sum(static[stage] for stage in schedule.stages_of(rank))
            for rank in range(schedule.num_ranks)
        ]
        self._changes: list[list[tuple[float, float]]] = [[] for _ in range(schedule.num_ranks)]

    def run(self, rank: int, action: Action, start: float, end: float, is_training: bool) -> None:
        kind, stage = action.kind, action.stage_index
        during = (
            0.0
            if kind == "update"
            else self._during["forward" if kind == "forward" else "backward"][stage]
        )
        at_start, at_end = during, -during
        if kind == "forward" and is_training:
            at_start += self._activation[stage]
        elif kind in ("backward", "backward_input"):
            at_end -= self._activation[stage]
        if kind == "backward_input":
            at_end += self._weight[stage]
        elif kind == "backward_weight":
            at_end -= self._weight[stage]
        kept = self._versions[stage].change(action) * self._version[stage]
        at_start, at_end = at_start + max(kept, 0.0), at_end + min(kept, 0.0)
        self._changes[rank] += [(start, at_start), (end, at_end)]

    def hold(self, rank: int, edge: Edge, start: float, end: float) -> None:
        nbytes = self._crossing.get(edge, 0.0)
        if nbytes and end > start:
            self._changes[rank] += [(start, nbytes), (end, -nbytes)]

    def curve(self, rank: int) -> MemoryCurve:
        """Return the bytes of a rank. Changes of one instant keep their order: what ended makes
        room for what starts.
        """
        changes = sorted(self._changes[rank], key=itemgetter(0))
        seconds = np.array([0.0, *(second for second, _ in changes)])
        return MemoryCurve(
            seconds, self._static[rank] + np.cumsum([0.0, *(change for _, change in changes)])
        )


def peak_bytes(curves: Sequence[MemoryCurve]) -> tuple[float, ...]:
    """Return the most bytes that each rank holds at once, (ranks,)."""
    return tuple(float(curve.nbytes.max()) for curve in curves)
