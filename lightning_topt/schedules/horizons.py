"""Horizons: how many updates of a stage lie between the weights that a pass finds and those that it
should have.

[Note: round trips] A minibatch ends where stage 0 has applied it. SpecTrain (Chen et al., arXiv
1809.02839, section 3) lets all stages compute with the weights of that instant, so that they agree.
Counted are the updates of the stage from the start of the pass to then, ties too, but for the
minibatch's own one: with N stages in the steady state forward N - 1 - k + k // 2 and backward k //
2, the paper's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import Literal, NamedTuple

from lightning_topt.schedules.continuous import Completes, continuous_schedule
from lightning_topt.schedules.schedule import Schedule
from lightning_topt.schedules.schedule_timing import timed_walk
from lightning_topt.schedules.stage_costs import StageCosts

_SETTLED = 4  # round trips after which a schedule of unit passes repeats itself, generously


class Horizon(NamedTuple):
    """Updates of a stage around a pass of a minibatch.

    `version` of them were done when the pass begins, counted from the last drained state. `missing`
    more come before the update with this minibatch. `round_trip` are those until stage 0 has done
    its update with the minibatch, but for that one.
    """

    version: int
    missing: int
    round_trip: int


class StageHorizons(NamedTuple):
    """The horizons of a stage's passes by minibatch, (minibatches,) each."""

    forward: tuple[Horizon, ...]
    backward: tuple[Horizon, ...]


@lru_cache(maxsize=256)
def horizons(schedule: Schedule) -> tuple[StageHorizons, ...]:
    """Return the horizons of each stage, where forward and backward take equal time and updates and
    transfers none.

    A minibatch that no update comes after counts all updates to the end. `schedule` is one with
    updates.
    """
    ones = [1.0] * schedule.num_stages
    walk, times = timed_walk(schedule, StageCosts(ones, ones))
    # of each stage: when it ends, its minibatch
    updates: list[list[tuple[float, int]]] = [[] for _ in ones]
    begun: dict[tuple[str, int, int], int] = {}  # updates before each pass
    for (_, action), end in zip(walk.actions, times.ends, strict=True):  # in the order of each rank
        kind, stage, index = action.kind, action.stage_index, action.microbatch_index
        begun[kind, stage, index] = len(updates[stage])
        if kind == "update":
            updates[stage].append((end, index))
    assert any(updates), "a schedule without updates has no horizons"
    last = [index for _, index in updates[0]]
    ends = [[end for end, _ in of_stage] for of_stage in updates]

    def of_pass(kind: str, stage: int, index: int) -> Horizon:
        version, own = begun[kind, stage, index], bisect_left(last, index)
        if own == len(last):
            return Horizon(version, own - version, own - version)
        return Horizon(
            version, own - version, bisect_right(ends[stage], ends[0][own]) - version - 1
        )

    count = range(schedule.num_microbatches)
    return tuple(
        StageHorizons(
            *(
                tuple(of_pass(kind, stage, index) for index in count)
                for kind in ("forward", "backward")
            )
        )
        for stage in range(schedule.num_stages)
    )


def running_horizon(
    minibatch: int,
    *,
    stage: int,
    kind: Literal["forward", "backward"],
    num_stages: int,
    completes: Completes,
    num_minibatches: int | None = None,
    lag_per_hop: int = 1,
) -> Horizon:
    """Return the horizon of a pass in a run of which only the near future is known; `version` is of
    no use then.

    `completes` says of minibatches around this one whether they complete an update, and
    `num_minibatches`, where that is known, how many there are from the last drained state to the
    next. The same as that of `horizons` for the whole schedule.
    """
    reach = _SETTLED * num_stages * lag_per_hop
    total = minibatch + reach if num_minibatches is None else num_minibatches
    start = max(0, min(minibatch - reach, total - 2 * reach))
    stop = (
        min(total, max(minibatch + reach, 2 * reach))
        if num_minibatches is not None
        else start + 2 * reach
    )
    pattern = tuple(completes(index) for index in range(start, stop))
    stages = _of_pattern(pattern, num_stages=num_stages, lag_per_hop=lag_per_hop)
    of_stage = stages[stage].forward if kind == "forward" else stages[stage].backward
    return of_stage[minibatch - start]


@lru_cache(maxsize=512)
def _of_pattern(
    pattern: tuple[bool, ...], *, num_stages: int, lag_per_hop: int
) -> tuple[StageHorizons, ...]:
    if not any(pattern):
        none = (Horizon(0, 0, 0),) * len(pattern)
        return (StageHorizons(none, none),) * num_stages
    schedule = continuous_schedule(
        num_ranks=num_stages,
        num_minibatches=len(pattern),
        lag_per_hop=lag_per_hop,
        completes=pattern.__getitem__,
    )
    return horizons.__wrapped__(schedule)
