"""Seconds of a step under a schedule: one walk over its passes in an order that they can run in,
for one or many sets of costs.

Links are first in, first out, and what a rank sends follows its list of actions. So the passes and
transfers form a fixed graph whose longest path is the step; no queue of events is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_topt.schedules.chained_timing import (
    chained_rank_seconds,
    is_chain,
    is_worth_compiling,
)
from lightning_topt.schedules.schedule import Action, Kind, Schedule
from lightning_topt.schedules.schedule_check import check_schedule
from lightning_topt.schedules.schedule_order import Edges, run_order
from lightning_topt.schedules.stage_costs import Edge, StageCosts

_KINDS: tuple[Kind, ...] = get_args(Kind)


class Transfer(NamedTuple):
    """A tensor on its way between ranks: along `edge` forward, or back along it as a gradient."""

    edge: Edge
    is_gradient: bool
    microbatch_index: int


class Step(NamedTuple):
    """A pass: its rank, the place of its seconds, and (transfer, [link,] place of the transfer's
    seconds) of what it moves.
    """

    rank: int
    cost: int
    received: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Walk:
    """The passes of a schedule in an order that they can run in, its transfers, and the kinds of
    passes in it.
    """

    steps: tuple[Step, ...]
    actions: tuple[tuple[int, Action], ...]
    transfers: tuple[Transfer, ...]
    num_links: int
    kinds: frozenset[Kind]


class Times(NamedTuple):
    """Starts and ends of passes in a walk's order, and of transfers: what left at `sent` is there
    at `arrived`.
    """

    starts: list[Any]
    ends: list[Any]
    sent: list[Any]
    arrived: list[Any]
    rank_seconds: list[Any]
    step_seconds: Any


def step_seconds(schedule: Schedule, costs: StageCosts) -> float:
    """Return the seconds from the first pass to the end of the last; see `StageCosts` for what
    overlaps.

    Raises ValueError for costs that do not fit, ScheduleError where the schedule hangs.
    """
    walk, times = timed_walk(schedule, costs)
    return float(times.step_seconds) if walk.steps else 0.0


def many_step_seconds(
    schedule: Schedule,
    *,
    forward: ArrayLike,
    backward: ArrayLike,
    backward_input: ArrayLike | None = None,
    backward_weight: ArrayLike | None = None,
    transfer_seconds: Mapping[Edge, ArrayLike] | None = None,
    gradient_seconds: Mapping[Edge, ArrayLike] | None = None,
    overlapped: bool = True,
    update: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Return `step_seconds` of n sets of costs, (n,): passes are (stages, n), transfers (n,) or a
    number for all.

    Takes about as long for a thousand sets as for one.
    """
    passes = forward, backward, backward_input, backward_weight, update
    between = transfer_seconds, gradient_seconds
    return np.asarray(
        many_rank_seconds(schedule, passes, between, overlapped=overlapped).max(axis=0), float
    )


def many_rank_seconds(
    schedule: Schedule,
    passes: tuple[ArrayLike, ArrayLike, ArrayLike | None, ArrayLike | None, ArrayLike | None],
    transfers: tuple[Mapping[Edge, ArrayLike] | None, Mapping[Edge, ArrayLike] | None],
    *,
    overlapped: bool = True,
) -> NDArray[np.float64]:
    """Return when each rank has run its last pass, (ranks, n), as `many_step_seconds`; `passes` are
    the seconds of forward, backward, backward_input, backward_weight and update, `transfers` those
    of transfers and of their gradients.
    """
    transfer_seconds, gradient_seconds = transfers
    rows = [None if each is None else np.asarray(each, float) for each in passes]
    assert rows[0] is not None
    count = rows[0].shape[1]
    edges = _edges_of(schedule, transfer_seconds)
    if is_worth_compiling(schedule) and is_chain(edges, schedule.num_stages):
        found = chained_rank_seconds(schedule, rows, transfers, overlapped=overlapped)
        if found is not None:
            return found
    walk = walk_of(schedule, edges)
    seconds = _places(schedule, walk, rows)
    back = gradient_seconds if gradient_seconds is not None else transfer_seconds
    crossing = [
        np.broadcast_to(0.0 if each is None else each[edge], count)
        for each in (transfer_seconds, back)
        for edge in edges
    ]
    zero = np.zeros(count)
    times = _run(walk, seconds, crossing, zero=zero, larger=np.maximum, overlapped=overlapped)
    return np.stack(np.broadcast_arrays(*times.rank_seconds)).astype(float)


def timed_walk(schedule: Schedule, costs: StageCosts) -> tuple[Walk, Times]:
    """Return the passes of a schedule and when they and their transfers begin and end, in
    seconds.
    """
    costs.check(schedule)
    edges = costs.edges(schedule.num_stages)
    walk = walk_of(schedule, edges)
    seconds = _places(schedule, walk, [costs.seconds(kind) for kind in _KINDS])
    there, back = costs.transfer_seconds, costs.gradient_seconds
    back = there if back is None else back
    crossing = [0.0 if each is None else each[edge] for each in (there, back) for edge in edges]
    return walk, _run(walk, seconds, crossing, zero=0.0, larger=max, overlapped=costs.overlapped)


@lru_cache(maxsize=256)
def walk_of(schedule: Schedule, edges: tuple[Edge, ...]) -> Walk:
    """Return the walk over a schedule whose stages need one another along `edges` (source, target).

    Raises ScheduleError where the schedule hangs, ValueError where an edge does not go forward.
    """
    needs: dict[int, list[int]] = {}
    for source, target in edges:
        needs.setdefault(target, []).append(source)
    between = Edges(schedule.num_stages, needs=needs)
    order, waiting = run_order(schedule, between)
    if waiting:
        check_schedule(schedule, needs=needs)
        raise AssertionError("the checker passes a schedule that hangs")
    crossing = _crossing(between, schedule.rank_of_stage, edges)
    transfers: dict[tuple[int, int], int] = {}  # by place of the seconds, and microbatch
    links: dict[tuple[int, int], int] = {}
    steps = []
    for rank, action in order:
        kind, stage, index = action.kind, action.stage_index, action.microbatch_index
        incoming, outgoing = crossing.get((kind, stage), ((), ()))
        received = tuple([(transfers[place, index], place) for _, place in incoming])
        sent = tuple(
            [
                (
                    transfers.setdefault((place, index), len(transfers)),
                    links.setdefault((rank, other), len(links)),
                    place,
                )
                for other, place in outgoing
            ]
        )
        steps.append(Step(rank, _KINDS.index(kind) * schedule.num_stages + stage, received, sent))
    moved = tuple(
        Transfer(edges[place % len(edges)], place >= len(edges), index)
        for place, index in transfers
    )
    return Walk(
        tuple(steps), tuple(order), moved, len(links), frozenset(action.kind for _, action in order)
    )


_Ends = tuple[
    tuple[int, int], ...
]  # the other rank, and the place of the transfer's seconds: gradients after all edges


def _crossing(
    between: Edges, ranks: Sequence[int], edges: tuple[Edge, ...]
) -> dict[tuple[Kind, int], tuple[_Ends, _Ends]]:
    """Return for each pass (kind, stage) its receives from other ranks and its sends to them."""
    places = {edge: place for place, edge in enumerate(edges)}
    found: dict[tuple[Kind, int], tuple[_Ends, _Ends]] = {}
    for stage, rank in enumerate(ranks):
        before = [
            (ranks[each], places[each, stage])
            for each in between.sources[stage]
            if ranks[each] != rank
        ]
        behind = [
            (ranks[each], places[stage, each])
            for each in between.readers[stage]
            if ranks[each] != rank
        ]
        found["forward", stage] = tuple(before), tuple(behind)
        back = tuple(
            [
                tuple((other, place + len(edges)) for other, place in ends)
                for ends in (behind, before)
            ]
        )
        found["backward", stage] = found["backward_input", stage] = back[0], back[1]
    return found


def _places(schedule: Schedule, walk: Walk, rows: Sequence[Any]) -> list[Any]:
    """Seconds by kind and stage; raises ValueError where a kind that the schedule runs has none."""
    if rows[-1] is None:
        # updates take no time unless it is given
        rows = [*rows[:-1], [each * 0 for each in rows[0]]]
    for kind, row in zip(_KINDS, rows, strict=True):
        if row is None and kind in walk.kinds:
            raise ValueError(
                f"schedule {schedule.name!r} splits backward; its costs have no seconds of {kind}"
            )
    return [
        None if row is None else row[stage] for row in rows for stage in range(schedule.num_stages)
    ]


def _edges_of(
    schedule: Schedule, transfer_seconds: Mapping[Edge, ArrayLike] | None
) -> tuple[Edge, ...]:
    if transfer_seconds is None:
        return tuple((stage, stage + 1) for stage in range(schedule.num_stages - 1))
    return tuple(sorted(transfer_seconds))


def _run(
    walk: Walk,
    seconds: list[Any],
    crossing: list[Any],
    *,
    zero: Any,
    larger: Callable[[Any, Any], Any],
    overlapped: bool,
) -> Times:
    """Times of a walk, of one set of costs (floats) or of many (arrays)."""
    free: dict[int, Any] = {}
    links = [zero] * walk.num_links
    sent, arrived = [zero] * len(walk.transfers), [zero] * len(walk.transfers)
    starts, ends = [], []
    for rank, cost, receives, sends in walk.steps:
        time = free.get(rank, zero)
        for number, edge in receives:
            if overlapped:
                time = larger(time, arrived[number])
            else:
                time = arrived[number] = larger(time, sent[number]) + crossing[edge]
        starts.append(time)
        time = time + seconds[cost]
        ends.append(time)
        for number, link, edge in sends:
            if overlapped:
                sent[number] = larger(time, links[link])
                arrived[number] = links[link] = sent[number] + crossing[edge]
            else:
                sent[number] = time
                time = time + crossing[edge]
        free[rank] = time
    total, by_rank = zero, [free.get(rank, zero) for rank in range(max(free, default=0) + 1)]
    for time in by_rank:
        total = larger(total, time)
    return Times(starts, ends, sent, arrived, by_rank, total)
