"""What ranks hold while a schedule runs: the bytes of passes and transfers, added up over time.

    costs = MemoryCosts([1.0] * 2, [2.0] * 2, activation_bytes=[2.0**20] * 2)
    peak_bytes(simulate(schedule, costs))      # of each rank

The search counts with `schedules.timing.held_counts`; this is what it and runs are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_topt.execution.pipeline.split_backward import SplitBackward
from lightning_topt.schedules.schedules import Action, Schedule
from lightning_topt.schedules.timing import Edge, Simulation, StageCosts


@dataclass(frozen=True)
class MemoryCosts(StageCosts):
    """Seconds and bytes of one microbatch in each stage.

    `transfer_bytes` are by (source stage, target stage), all other bytes per stage:
        `static_bytes`: held all the time.
        `activation_bytes`: from the start of forward to the end of backward (or backward_input),
            with what was received and what was sent.
        `weight_bytes`: from the end of backward_input to the end of backward_weight. Autograd
            keeps the whole graph until then, and gradients of what operators with parameters made.
        `version_bytes`: of continuous schedules, a copy of weights that an update is to replace
            but backward passes in flight still need (weight stashing).
        `forward_bytes`, `backward_bytes`: while a pass runs, beyond those (in either half of a
            split backward).
    """

    static_bytes: Sequence[float] | None = None
    activation_bytes: Sequence[float] | None = None
    weight_bytes: Sequence[float] | None = None
    forward_bytes: Sequence[float] | None = None
    backward_bytes: Sequence[float] | None = None
    transfer_bytes: Mapping[Edge, float] | None = None
    version_bytes: Sequence[float] | None = None


class MemoryCurve(NamedTuple):
    """Bytes of a rank over time, (points,) each.

    From ``seconds[i]`` on ``nbytes[i]`` are held; an instant may come twice.
    """

    seconds: NDArray[np.float64]
    nbytes: NDArray[np.float64]


def peak_bytes(simulation: Simulation) -> tuple[float, ...]:
    """Return the most bytes that each rank holds at once, (ranks,)."""
    return tuple(float(curve.nbytes.max()) for curve in memory_curves(simulation))


def memory_curves(simulation: Simulation) -> tuple[MemoryCurve, ...]:
    """Return the bytes of each rank over time, (ranks,).

    A received tensor is held from when its transfer starts. An activation is held until its
    forward starts, where it becomes part of the stage's activations; a gradient until the end of
    its backward. The sender holds a gradient until it has arrived.
    """
    schedule, walk, times = simulation.schedule, simulation.walk, simulation.times
    costs = simulation.costs
    assert isinstance(costs, MemoryCosts)
    changes = _MemoryChanges(schedule, costs)
    for step, (rank, action), start, end in zip(
        walk.steps, walk.actions, times.starts, times.ends, strict=True
    ):
        is_forward = action.kind == "forward"
        # received: until it is part of the activations, or for all of a backward pass
        for number in step.received:
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

    def __init__(self, schedule: Schedule, costs: MemoryCosts) -> None:
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


def arrived_bytes(split: SplitBackward) -> int:
    """Return the bytes of the gradients that are kept from `inputs` to `parameters` of `split`."""
    kept = [g for gradients in split._arrived.values() for g in gradients if g is not None]
    storages = [gradient.untyped_storage() for gradient in kept]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
