"""Staleness of the passes of a continuous pipeline.

Staleness is the number of updates between the weights that a pass finds and those that it should
have. `staleness` counts them for a whole schedule; for a run of which only the near future is known
`execution.pipeline.stage_weights` does. Weight prediction bridges them (`weight_prediction`).

[Note: round trips] A minibatch ends where stage 0 has applied it. SpecTrain (Chen et al., arXiv
1809.02839, section 3) lets all stages compute with the weights of that instant, so that they agree.
The round trip counts the updates of the stage from the start of the pass to then. Ties count, the
minibatch's own update does not. With N stages in the steady state stage k has the paper's numbers:

    forward    N - 1 - k + k // 2
    backward   k // 2
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import NamedTuple

from lightning_topt.schedules.schedules import Schedule
from lightning_topt.schedules.timing import StageCosts, timed_walk


class Staleness(NamedTuple):
    """Updates of a stage around a pass of a minibatch.

    `version` of them were done when the pass begins, counted from the last drained state. `missing`
    more come before the update with this minibatch. `round_trip` are those until stage 0 has done
    its update with the minibatch, but for that one.
    """

    version: int
    missing: int
    round_trip: int


class StageStaleness(NamedTuple):
    """The staleness of a stage's passes by minibatch, (minibatches,) each."""

    forward: tuple[Staleness, ...]
    backward: tuple[Staleness, ...]


@lru_cache(maxsize=256)
def staleness(schedule: Schedule) -> tuple[StageStaleness, ...]:
    """Return the staleness of all passes of each stage, (stages,).

    Forward and backward are taken to take equal time, updates and transfers none. A minibatch that
    no update comes after counts all updates to the end. `schedule` is one with updates.
    """
    ones = [1.0] * schedule.num_stages
    walk, times = timed_walk(schedule, StageCosts(ones, ones))
    # of each stage: when its updates end, and their last minibatches
    updates: list[list[tuple[float, int]]] = [[] for _ in ones]
    begun: dict[tuple[str, int, int], int] = {}  # updates before each pass
    for (_, action), end in zip(walk.actions, times.ends, strict=True):  # in the order of each rank
        kind, stage, index = action.kind, action.stage_index, action.microbatch_index
        begun[kind, stage, index] = len(updates[stage])
        if kind == "update":
            updates[stage].append((end, index))
    assert any(updates), "a schedule without updates has no staleness"
    last = [index for _, index in updates[0]]
    ends = [[end for end, _ in of_stage] for of_stage in updates]

    def of_pass(kind: str, stage: int, index: int) -> Staleness:
        version, own = begun[kind, stage, index], bisect_left(last, index)
        if own == len(last):
            return Staleness(version, own - version, own - version)
        return Staleness(
            version, own - version, bisect_right(ends[stage], ends[0][own]) - version - 1
        )

    count = range(schedule.num_microbatches)
    return tuple(
        StageStaleness(
            *(
                tuple(of_pass(kind, stage, index) for index in count)
                for kind in ("forward", "backward")
            )
        )
        for stage in range(schedule.num_stages)
    )
