"""Seconds of a step under a schedule: one walk over its passes, for one or many costs.

    step = simulate(schedule, StageCosts(forward=[1.0, 1.0], backward=[2.0, 2.0]))
    step.step_seconds, step.bubble_fraction

Links are first in, first out, and what a rank sends follows its list of actions. So the passes and
transfers form a fixed graph whose longest path is the step; no queue of events is needed. The walk
is found once per schedule (`walk_of`) and then runs over floats (`timed_walk`, `step_seconds`) or
arrays (`many_rank_seconds`). Where each stage receives from the one before alone and there is much
to walk, it is compiled (`timing_kernels`).

`StageCosts` are the seconds of one microbatch in each stage. `seconds_per_minibatch` is the pace of
a continuous pipeline in closed form. `held_counts` gives the most activations in flight, for any
sizes.

Forward and backward of different microbatches side by side on one device (BaPipe's FBP, arXiv
2012.12544) is no list of passes and not simulated: a rank here runs one pass at a time.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_topt.schedules.check import Edges, check_schedule, run_order
from lightning_topt.schedules.schedules import Action, Kind, Schedule

Edge = tuple[int, int]  # source stage, target stage
Seconds = Any  # a float, or an array over sets of costs
_KINDS: tuple[Kind, ...] = get_args(Kind)
_SMALL = 2**14  # passes up to which compiled code is not worth loading
_COLUMNS = 64  # sets of costs that compiled code walks at once


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch in each stage, and of what crosses between stages.

    All sequences are per stage, (stages,); stages may differ as models and devices do.

    `backward_input` and `backward_weight` are needed by schedules that split backward; an
    `update` takes no time unless given. `transfer_seconds` are by (source stage, target stage) in
    the direction of the forward pass. Their keys say what stages need of one another; None: each
    needs the one before, at no cost. Gradients come back along the same edges, in
    `gradient_seconds` if that differs. Edges between stages of one rank cost nothing.

    The network runs beside the ranks: one link per pair of ranks and direction carries one tensor
    at a time, in the order in which they were made.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float] | None = None
    backward_weight: Sequence[float] | None = None
    transfer_seconds: Mapping[Edge, float] | None = None
    gradient_seconds: Mapping[Edge, float] | None = None
    update: Sequence[float] | None = None

    def seconds(self, kind: Kind) -> Sequence[float] | None:
        """Return the seconds of a kind of pass, (stages,), None where they are not known."""
        found: Sequence[float] | None = getattr(self, kind)
        return found

    def edges(self, num_stages: int) -> tuple[Edge, ...]:
        """Return the edges between stages, in order of their sources."""
        return _edges_of(num_stages, self.transfer_seconds)

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError where costs do not fit `schedule` or are no times and sizes."""
        # transfer_seconds says which edges there are; the others follow it
        edges, count = self.edges(schedule.num_stages), schedule.num_stages
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            # a sequence has a number for each stage, a mapping one for each edge
            by_edge = isinstance(value, Mapping)
            if set(value) - set(edges) if by_edge else len(value) != count:
                raise ValueError(
                    f"{field.name} has a number for each of {count} stages, or by edge among "
                    f"{edges}; got {value}"
                )
            values = value.values() if by_edge else value
            if any(not (math.isfinite(each) and each >= 0) for each in values):
                raise ValueError(f"{field.name} has finite numbers of at least 0; got {value}")
        if self.gradient_seconds is not None and len(self.gradient_seconds) < len(edges):
            raise ValueError("gradient_seconds has every edge of transfer_seconds, or is None")


def step_seconds(schedule: Schedule, costs: StageCosts) -> float:
    """Return the seconds from the first pass to the end of the last.

    Raises ValueError for costs that do not fit, ScheduleError where the schedule hangs.
    """
    walk, times = timed_walk(schedule, costs)
    return float(times.step_seconds) if walk.steps else 0.0


def many_rank_seconds(
    schedule: Schedule,
    passes: tuple[ArrayLike, ArrayLike, ArrayLike | None, ArrayLike | None, ArrayLike | None],
    transfers: tuple[Mapping[Edge, ArrayLike] | None, Mapping[Edge, ArrayLike] | None],
) -> NDArray[np.float64]:
    """Return when each rank has run its last pass, (ranks, n), of n sets of costs.

    Args:
        schedule: the schedule.
        passes: seconds (stages, n) of forward, backward, backward_input, backward_weight, update.
        transfers: seconds, (n,) or a number for all, of transfers and of their gradients.
    """
    transfer_seconds, gradient_seconds = transfers
    rows = [None if each is None else np.asarray(each, float) for each in passes]
    assert rows[0] is not None
    count = rows[0].shape[1]
    edges = _edges_of(schedule.num_stages, transfer_seconds)
    # compiled where stages form a chain and it pays; else the walk below, over arrays
    if is_worth_compiling(schedule) and is_chain(edges, schedule.num_stages):
        found = chained_rank_seconds(schedule, rows, transfers)
        if found is not None:
            return found
    # also where compiled code could not run: this walk names what is wrong
    walk = walk_of(schedule, edges)
    seconds = _seconds_by_place(schedule, walk, rows)
    # gradients take as long as what went forward, unless they have times of their own
    back = gradient_seconds if gradient_seconds is not None else transfer_seconds
    # by place: all edges forward, then the same edges back
    crossing = [
        np.broadcast_to(0.0 if each is None else each[edge], count)
        for each in (transfer_seconds, back)
        for edge in edges
    ]
    zero = np.zeros(count)
    times = _run(walk, seconds, crossing, zero=zero, larger=np.maximum)
    return np.stack(np.broadcast_arrays(*times.rank_seconds)).astype(float)


def timed_walk(schedule: Schedule, costs: StageCosts) -> tuple[Walk, Times]:
    """Return the passes of a schedule, and when they and their transfers begin and end."""
    costs.check(schedule)
    edges = costs.edges(schedule.num_stages)
    walk = walk_of(schedule, edges)
    seconds = _seconds_by_place(schedule, walk, [costs.seconds(kind) for kind in _KINDS])
    there, back = costs.transfer_seconds, costs.gradient_seconds
    back = there if back is None else back
    crossing = [0.0 if each is None else each[edge] for each in (there, back) for edge in edges]
    return walk, _run(walk, seconds, crossing, zero=0.0, larger=max)


# ---- The walk: passes in an order in which they can run, with the transfers that they wait for.


class TimedPass(NamedTuple):
    """A pass of a walk.

    `cost` is the place of its seconds. What it receives are transfers, what it sends (transfer,
    link, place of its seconds).
    """

    rank: int
    cost: int
    received: tuple[int, ...]
    sent: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Walk:
    """The passes of a schedule in an order in which they can run, and its transfers.

    `actions` are (rank, action) of the `steps`, `kinds` the kinds of passes among them. `transfers`
    are the edges along which tensors move forward, or gradients back.
    """

    steps: tuple[TimedPass, ...]
    actions: tuple[tuple[int, Action], ...]
    transfers: tuple[Edge, ...]
    num_links: int
    kinds: frozenset[Kind]


class Times(NamedTuple):
    """Starts and ends of passes in a walk's order, and of transfers.

    What left at `sent` is there at `arrived`.
    """

    starts: list[Seconds]
    ends: list[Seconds]
    sent: list[Seconds]
    arrived: list[Seconds]
    rank_seconds: list[Seconds]
    step_seconds: Seconds


@lru_cache(maxsize=256)
def walk_of(schedule: Schedule, edges: tuple[Edge, ...]) -> Walk:
    """Return the walk over a schedule whose stages need one another along `edges`.

    Raises ScheduleError where the schedule hangs, ValueError where an edge does not go forward.
    """
    # an order in which all passes can run, or an error that says which ranks wait in a circle
    needs: dict[int, list[int]] = {}
    for source, target in edges:
        needs.setdefault(target, []).append(source)
    between = Edges(schedule.num_stages, needs=needs)
    order, waiting = run_order(schedule, between)
    if waiting:  # the checker names what is wrong
        check_schedule(schedule, needs=needs)
        raise AssertionError("the checker passes a schedule that hangs")
    crossing = _crossing(between, schedule.rank_of_stage, edges)
    transfers: dict[tuple[int, int], int] = {}  # by place of the seconds, and microbatch
    links: dict[tuple[int, int], int] = {}  # by sending and receiving rank
    steps = []
    for rank, action in order:
        kind, stage, index = action.kind, action.stage_index, action.microbatch_index
        incoming, outgoing = crossing.get((kind, stage), ((), ()))
        # receives: what an earlier pass of the order has sent
        received = tuple([transfers[place, index] for _, place in incoming])
        # sends: transfers and links are numbered as they are met
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
        # its seconds are found by kind, then stage
        steps.append(
            TimedPass(rank, _KINDS.index(kind) * schedule.num_stages + stage, received, sent)
        )
    # places behind those of all edges are of gradients
    moved = tuple(edges[place % len(edges)] for place, _ in transfers)
    return Walk(
        tuple(steps), tuple(order), moved, len(links), frozenset(action.kind for _, action in order)
    )


# (other rank, place of the transfer's seconds) each; gradients have their places after all edges
_Ends = tuple[tuple[int, int], ...]


def _crossing(
    between: Edges, ranks: Sequence[int], edges: tuple[Edge, ...]
) -> dict[tuple[Kind, int], tuple[_Ends, _Ends]]:
    # For each pass (kind, stage) its receives from other ranks and its sends to them
    places = {edge: place for place, edge in enumerate(edges)}
    found: dict[tuple[Kind, int], tuple[_Ends, _Ends]] = {}
    for stage, rank in enumerate(ranks):
        # stages of one rank hand tensors over without a transfer
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
        # Gradients go back along the same edges: from the readers, to the sources.
        back = tuple(
            [
                tuple((other, place + len(edges)) for other, place in ends)
                for ends in (behind, before)
            ]
        )
        # backward_weight and update send and receive nothing
        found["backward", stage] = found["backward_input", stage] = back[0], back[1]
    return found


def _seconds_by_place(schedule: Schedule, walk: Walk, rows: Sequence[Any]) -> list[Seconds]:
    # Return seconds by kind and stage.
    # Raises ValueError where a kind that the schedule runs has none.
    if rows[-1] is None:  # updates take no time unless it is given
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
    num_stages: int, transfer_seconds: Mapping[Edge, ArrayLike] | None
) -> tuple[Edge, ...]:
    if transfer_seconds is None:
        return tuple(pairwise(range(num_stages)))
    return tuple(sorted(transfer_seconds))


def _run(
    walk: Walk,
    seconds: list[Seconds],
    crossing: list[Seconds],
    *,
    zero: object,
    larger: Callable[[Seconds, Seconds], Seconds],
) -> Times:
    # The times of a walk, of one set of costs (floats) or of many (arrays)
    free: dict[int, Seconds] = {}  # when each rank has done what it ran so far
    links = [zero] * walk.num_links  # when each link is free
    sent, arrived = [zero] * len(walk.transfers), [zero] * len(walk.transfers)
    starts, ends = [], []
    for rank, cost, receives, sends in walk.steps:
        # receive
        time = free.get(rank, zero)
        for number in receives:
            time = larger(time, arrived[number])
        # run the pass
        starts.append(time)
        time = time + seconds[cost]
        ends.append(time)
        # send, beside the rank
        for number, link, edge in sends:
            sent[number] = larger(time, links[link])
            arrived[number] = links[link] = sent[number] + crossing[edge]
        free[rank] = time
    # a rank without a pass is done at 0
    total, by_rank = zero, [free.get(rank, zero) for rank in range(max(free, default=0) + 1)]
    for time in by_rank:
        total = larger(total, time)
    return Times(starts, ends, sent, arrived, by_rank, total)


# ---- The compiled walk, where each stage receives from the one before alone.


def is_chain(edges: Sequence[Edge], num_stages: int) -> bool:
    """Return whether each stage receives from the one before, and from no other."""
    return tuple(edges) == tuple(pairwise(range(num_stages)))


def is_worth_compiling(schedule: Schedule) -> bool:
    """Return whether compiled code is loaded, or there are so many passes that it may be."""
    return "numba" in sys.modules or sum(map(len, schedule.actions)) > _SMALL


def chained_rank_seconds(
    schedule: Schedule,
    rows: Sequence[Any],
    transfers: tuple[Mapping[Edge, ArrayLike] | None, Mapping[Edge, ArrayLike] | None],
) -> NDArray[np.float64] | None:
    """Return when each rank has run its last pass, (ranks, n), the same to the last bit.

    `rows` are the seconds (stages, n) of each kind of pass. None for a schedule that hangs and for
    costs that do not fit: the walk in Python names what is wrong.
    """
    actions, begin = _arrays_of(schedule)
    stages, count = rows[0].shape
    if stages != schedule.num_stages or any(
        rows[kind] is None
        for kind in np.unique(actions[:, 0]).tolist()
        if kind != _KINDS.index("update")
    ):
        return None
    # (kind, stages, n); crossing (2, stages, n): into each stage from the one before, and back
    seconds = np.stack([np.zeros((stages, count)) if each is None else each for each in rows])
    there, back = transfers[0], transfers[0] if transfers[1] is None else transfers[1]
    crossing = np.zeros((2, stages, count))
    for side, each in enumerate((there, back)):
        for edge in pairwise(range(stages)):
            crossing[side, edge[1]] = 0.0 if each is None else each[edge]
    # loading it loads numba, which takes longer than a short walk
    run = importlib.import_module("lightning_topt.schedules.timing_kernels").run_passes
    sizes = stages, int(actions[:, 2].max(initial=0)) + 1
    # so many sets of costs at a time
    found = np.zeros((schedule.num_ranks, count))
    for first in range(0, count, _COLUMNS):
        some = slice(first, first + _COLUMNS)
        done = np.zeros(found[:, some].shape)
        costs = np.ascontiguousarray(seconds[..., some]), np.ascontiguousarray(crossing[..., some])
        if not run(actions, begin, np.array(schedule.rank_of_stage), sizes, *costs, done):
            return None
        found[:, some] = done
    return found


@lru_cache(maxsize=256)
def _arrays_of(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # (kind, stage, microbatch) of all actions, (A, 3), and where each rank's begin
    # rank by rank, as they follow one another
    rows = [
        (_KINDS.index(a.kind), a.stage_index, a.microbatch_index)
        for actions in schedule.actions
        for a in actions
    ]
    return np.array(rows, np.int64).reshape(-1, 3), np.cumsum([0, *map(len, schedule.actions)])


# ---- The pace of a continuous pipeline, once it has filled.


def seconds_per_minibatch(
    passes: ArrayLike, updates: ArrayLike, transfers: ArrayLike, *, lag_per_hop: int
) -> NDArray[np.float64]:
    """Return the seconds from one minibatch to the next of a continuous pipeline, (n,).

    Stage a sends a minibatch on as far as stage b and waits for its gradient; (b - a) *
    lag_per_hop minibatches later it updates, and begins the next one. So many and one more
    minibatches take, in seconds, at least what is on this way:

        passes of stages a to b + transfers between them, there and back + the update of stage a

    No other loop of the schedule is longer (stages turn a minibatch round once), so the largest of
    these, by minibatch, is the pace; a = b is a stage alone. A link carries one tensor at a time.

    Args:
        passes: seconds (stages, n) of forward and backward.
        updates: seconds (stages, n).
        transfers: (2, stages, n); ``[:, s]`` is what a tensor takes into stage s and its gradient
            back, and that of stage 0 does not count.
        lag_per_hop: as in `schedules.continuous_schedule`.
    """
    work, last = np.asarray(passes, float), np.asarray(updates, float)
    between = np.asarray(transfers, float).copy()
    between[:, 0] = 0.0
    # a = b: a stage, or a link, that is busy all the time
    longest = np.maximum((work + last).max(axis=0), between.max(axis=(0, 1)))
    # a < b: prefix sums give the passes and transfers of the stages in between
    sums = np.cumsum(work + between.sum(axis=0), axis=0)
    for a in range(len(work)):
        for b in range(a + 1, len(work)):
            seconds = work[a] + sums[b] - sums[a] + last[a]
            longest = np.maximum(longest, seconds / ((b - a) * lag_per_hop + 1))
    return np.asarray(longest)


# ---- A simulated step: passes over time, and what ranks hold.


def simulate(schedule: Schedule, costs: StageCosts) -> Simulation:
    """Return when each pass of a step runs, with these costs. `step_seconds` gives the time alone.

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


@dataclass(frozen=True)
class Simulation:
    """A simulated step: its time and its passes."""

    schedule: Schedule
    costs: StageCosts
    walk: Walk
    times: Times

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last."""
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
