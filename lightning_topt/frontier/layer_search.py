"""Search layers of transitions for every plan that no other beats in both seconds and bytes.

`search_reduced` walks over layers that are reduced (`layers`). Of the partial plans of a
group it keeps those that no other one beats in every column:

- by NumPy where that is little (`sweep`),
- else compiled (`search_wide`), pruned by prices, and bounded in points, seconds and memory.

With several columns nearly every partial plan is minimal. So compiled sweeps keep at most `cap` of
them, those that could gain most. The plans that a
sweep finds narrow the next, wider one; the first that gives none up is exact. A search that ends
before has missed at most what the partial plans that it gave up could gain.

A compiled sweep walks from both ends, since the number of partial plans grows with their length,
and joins what meets: the costs of a whole plan are two numbers, so no more partial plans of full
length have to be held.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.layers import Layer, apply, column_lifts
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows, pareto_rows_2
from lightning_topt.frontier.prices import (
    Bounds,
    Known,
    Network,
    Prices,
    improve,
    layer_kernels,
    make_prices,
)

_SMALL = 2**19  # work up to which NumPy alone is used
_PER_GROUP = 2**11  # what NumPy's calls for one group cost, in numbers
_PER_COLUMNS = 16  # what comparing more than two columns costs, in passes over them
_FIRST_CAP, _WIDER = 512, 16  # partial plans of the first sweep, and how much wider the next is
_ROUGH = 0.02  # what the first sweep may miss without better plans being sought at once
_PAIRS = 2**25  # pairs of partial plans that are worth joining
_ROOM = 2**16  # joined plans held at once
_CHUNK = 2**18  # candidates held at once
# with more columns than this, where few are beaten, each is compared with this many blocks only
_COMPARED = (4, 6)


@dataclass(frozen=True)
class Budget:
    """What a search may take, and what it may miss.

    It may hold `max_points` partial plans and `max_bytes` at one time, and take `max_seconds`. It
    may miss plans that are less than the share `epsilon` better. Raises ValueError.
    """

    max_points: int
    max_seconds: float
    max_bytes: float
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not (self.max_points >= 1 and self.max_seconds > 0 and self.max_bytes > 0):
            raise ValueError(
                "max_points must be at least 1 and max_seconds and max_bytes positive, got "
                f"{self.max_points}, {self.max_seconds} and {self.max_bytes}"
            )
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon is a share from 0 to below 1, got {self.epsilon}")


def search_reduced(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    deadline: float,
    priced: tuple[Prices, Known] | None = None,
) -> tuple[Rows, float]:
    """Return the transitions of the best plans (n, N) of reduced layers, and the error bound.

    `deadline` is a time of `time.thread_time`, `priced` as in `search_wide`.
    """
    lifts = column_lifts(layers)
    # small searches need neither prices nor compiled code
    if priced is None and budget.epsilon == 0:
        swept = sweep(layers, lifts=lifts, work=min(_SMALL, budget.max_points))
        if swept is not None:
            return swept[2], 0.0
    return search_wide(layers, lifts=lifts, budget=budget, deadline=deadline, priced=priced)


# ---- By NumPy: layer after layer all partial plans, without those that others beat.


def sweep(
    layers: Sequence[Layer], *, lifts: Sequence[Array] | None = None, work: float = np.inf
) -> tuple[Array, Rows, Rows] | None:
    """Return the best plans of every last group; None where that takes more than `work`.

    Returns their columns (n, c), groups (n,) and transitions (n, N). `lifts` are those of
    `layers.column_lifts`. `work` counts the numbers computed, with a charge for every group of a
    layer.
    """
    work -= sum(_PER_GROUP * layer.groups + layer.values.size for layer in layers)
    # before the first layer: one state of no seconds and no bytes
    states, group, back = np.zeros((1, 2)), np.zeros(1, np.intp), []
    for n, layer in enumerate(layers):
        # how many states come of it, before any is made
        counts = np.bincount(group, minlength=int(layer.source.max(initial=0)) + 1)
        work -= (
            int(counts[layer.source].sum())
            * len(layer.start)
            * (1 if layer.columns == 2 else _PER_COLUMNS)
        )
        if work < 0:
            return None
        # States (parent) with each transition (via) from their groups.
        order = np.argsort(layer.source, kind="stable")
        first = np.searchsorted(layer.source[order], group)
        count = np.searchsorted(layer.source[order], group, side="right") - first
        parent = np.repeat(np.arange(len(group)), count)
        within = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
        via = order[first[parent] + within]
        after = apply(layer, states[parent], via)
        # raised where that decides nothing, so that more states can be compared
        after = after if lifts is None else _lifted(after, lifts[n + 1])
        kept = _minimal_by_group(after, layer.target[via])
        states, group = after[kept], layer.target[via[kept]]
        back.append((parent[kept], via[kept]))
    return states, group, _follow(back, np.arange(len(states)))


def _lifted(states: Array, lift: Array) -> Array:
    # The columns (n, c), each at least the others plus what `lift` (c, c) says
    raised = states
    for a, b in np.argwhere(np.isfinite(lift)):
        raised = states.copy() if raised is states else raised
        np.maximum(raised[:, a], states[:, b] + lift[a, b], out=raised[:, a])
    return raised


def _minimal_by_group(states: Array, group: Rows) -> Rows:
    order = np.argsort(group, kind="stable")
    kept = []
    for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        some = states[rows]
        kept.append(
            rows[
                pareto_rows_2(some[:, 1], some[:, 0]) if states.shape[1] == 2 else pareto_rows(some)
            ]
        )
    return np.concatenate(kept) if len(order) else order


def _follow(back: Sequence[tuple[Rows, Rows]], rows: Rows) -> Rows:
    # The transitions (n, N) that led to the states `rows` (n,), by back-pointers
    plans = np.empty((len(rows), len(back)), np.intp)
    # from the last layer back to the first
    for n in range(len(back) - 1, -1, -1):
        parent, via = back[n]
        plans[:, n] = via[rows]
        rows = parent[rows].astype(np.intp)
    return plans


# ---- Compiled: sweeps that grow wider, pruned by prices.


class GiveUpError(Exception):
    """A walk ran out of time."""


def search_wide(
    layers: Sequence[Layer],
    *,
    lifts: Sequence[Array],
    budget: Budget,
    deadline: float,
    priced: tuple[Prices, Known] | None = None,
) -> tuple[Rows, float]:
    """Return transitions (n, N) and the error bound of the best plans.

    Args:
        layers: each has transitions.
        lifts: those of `layers.column_lifts`.
        budget: what the search may take.
        deadline: a time of `time.thread_time`.
        priced: prices of these layers and good known plans. With them, all that may be better is
            searched at once, as far as three quarters of the time allow.
    """
    columns = max(2, *(layer.columns for layer in layers))
    per_state = 8 * len(layers) + 64 * columns  # back-pointers of all layers, columns of one
    most = int(max(1, min(budget.max_points, budget.max_bytes / per_state)))
    side = make_side(layers, lifts=lifts)
    prices, known = make_prices(layers) if priced is None else priced
    sides = side, make_way_back(layers)
    missed, cap, is_last = prices.gain(known), _FIRST_CAP, False
    # all at once, where there are good known plans
    if priced is not None and missed > budget.epsilon:
        known, dropped = _at_once(
            sides, prices, known, cap=most, epsilon=budget.epsilon, deadline=deadline
        )
        missed = min(missed, dropped)
    # sweeps, each wider than the last
    while missed > budget.epsilon and not is_last:
        cap, began = min(cap, most), time.thread_time()
        try:
            known, dropped = _sweep_with_cap(
                sides, prices, known, cap=cap, epsilon=budget.epsilon, deadline=deadline
            )
            missed = min(missed, dropped)
        except GiveUpError:
            is_last = True
        now = time.thread_time()
        wider = min(_WIDER, (deadline - now) / (now - began))  # as far as there is time for
        is_last |= cap == most or wider < 2
        if missed > max(budget.epsilon, 0.0 if is_last or cap > _FIRST_CAP else _ROUGH):
            known = improve(layers, known)
            missed = min(missed, prices.gain(known))
        cap = int(cap * wider)
    return known.plans, max(missed, 0.0)


def _sweep_with_cap(
    sides: tuple[Side, Side],
    prices: Prices,
    known: Known,
    *,
    cap: int,
    epsilon: float,
    deadline: float,
    looks_ahead: bool = False,
) -> tuple[Known, float]:
    """Return known plans with those found, and what others could gain at most.

    At most `cap` partial plans are held at a time. Raises GiveUpError at the deadline. Where it
    `looks_ahead`, it raises that as soon as the layers that are left would end too late. Each of
    them is taken to need a quarter of the time of the last one.
    """
    bounds = Bounds(prices, known, epsilon)
    ahead, behind = (
        LayerWalk(side, some, cap=cap, deadline=deadline)
        for side, some in zip(sides, (bounds, bounds.reversed), strict=True)
    )
    # from both ends, next the side with fewer partial plans, until they meet
    while (left := len(sides[0].layers) - ahead.done - behind.done) > 0:
        began = time.thread_time()
        (ahead if len(ahead.states.costs) <= len(behind.states.costs) else behind).step()
        now = time.thread_time()
        if looks_ahead and (left - 1) * (now - began) / 4 > deadline - now:
            raise GiveUpError
    counts = (np.diff(walk.states.first).astype(float) for walk in (ahead, behind))
    if np.dot(*counts) <= _PAIRS:
        known = _join(ahead, behind, Network(sides[0].layers).kinds[ahead.done], known)
        return known, _missed(epsilon, ahead.dropped, behind.dropped)
    # from one end only, where the pairs would be too many
    while ahead.done < len(sides[0].layers):
        ahead.step()
    rows = np.arange(len(ahead.states.costs))
    return known.merged(ahead.states.costs, ahead.plans(rows)), _missed(epsilon, ahead.dropped)


def _at_once(
    sides: tuple[Side, Side],
    prices: Prices,
    known: Known,
    *,
    cap: int,
    epsilon: float,
    deadline: float,
) -> tuple[Known, float]:
    """Return what `_sweep_with_cap` does, of all that may be better.

    What is known already, and no bound, where that would take over three quarters of the time.
    """
    most = 0.25 * time.thread_time() + 0.75 * deadline
    try:
        return _sweep_with_cap(
            sides, prices, known, cap=cap, epsilon=epsilon, deadline=most, looks_ahead=True
        )
    except GiveUpError:
        return known, np.inf


def _missed(epsilon: float, *dropped: float) -> float:
    """Return how much may be missed.

    What was dropped counts beside plans that are better by `epsilon` already.
    """
    return epsilon + (1 + epsilon) * max(dropped)


def _join(ahead: LayerWalk, behind: LayerWalk, kinds: Rows, known: Known) -> Known:
    """Return known plans with all pairs of partial plans from both ends that meet in a group.

    Raises GiveUpError at the deadline.
    """
    left, right = ahead.states, behind.states
    # room for the pairs of at least one state
    room = max(_ROOM, 2 * int(np.diff(right.first).max()))
    found, costs = np.empty((room, 2), np.int64), np.empty((room, 2))
    for group in range(len(left.first) - 1):
        begin, ends = int(left.first[group]), (int(right.first[group]), int(right.first[group + 1]))
        while begin < left.first[group + 1] and ends[0] < ends[1]:
            ahead.check_time()
            # as many states from the start as there is room for, with all from the end
            some = np.array([begin, left.first[group + 1], *ends])
            best = np.ascontiguousarray(known.costs.T)
            count, begin = layer_kernels().join(
                left.costs, right.costs, some, kinds, *best, found, costs
            )
            rows = Known(np.zeros((0, 2)), found[:0]).merged(costs[:count], found[:count])
            first, second = ahead.plans(rows.plans[:, 0]), behind.plans(rows.plans[:, 1])
            known = known.merged(
                rows.costs, np.concatenate([first, second[:, ::-1]], axis=1).astype(np.int32)
            )
    return known


# ---- A walk: partial plans that grow layer by layer from one end, of every group those that may
# matter.


@dataclass(frozen=True, eq=False)
class States:
    """Partial plans of a boundary, sorted by group.

    `costs` are (n, c), ``first`` (G + 1,) says where each group begins. They come from `parent`
    (n,), the state before the last layer, through its transition `via` (n,).
    """

    costs: Array
    first: Rows
    parent: NDArray[Any]
    via: NDArray[Any]

    @property
    def group(self) -> Rows:
        """The group (n,) of every state."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def take(self, rows: Rows, counts: Rows) -> States:
        """Return these rows only, of which the groups have ``counts[1:]``."""
        return States(self.costs[rows], np.cumsum(counts), self.parent[rows], self.via[rows])


@dataclass(frozen=True, eq=False)
class Side:
    """Layers in the order of a walk, and the arrays that the kernels take for each."""

    layers: tuple[Layer, ...]
    orders: tuple[Rows, ...]
    arrays: tuple[tuple[Array, ...], ...]
    columns: tuple[int, ...]


def make_side(layers: Sequence[Layer], *, lifts: Sequence[Array]) -> Side:
    """Return the way from the first layer to the last.

    `lifts` are those of `layers.column_lifts`.
    """
    prepared = [_prepare(layer, lift) for layer, lift in zip(layers, lifts[1:], strict=True)]
    orders, arrays = zip(*prepared, strict=True)
    return Side(tuple(layers), orders, arrays, (2, *(layer.columns for layer in layers)))


def make_way_back(layers: Sequence[Layer]) -> Side:
    """Return the way from the last layer to the first.

    States are what is still added to every column up to the end.
    """
    before = [(1, 2), *((layer.groups, layer.columns) for layer in layers)]
    flipped = [
        dataclasses.replace(
            layer,
            source=layer.target,
            target=layer.source,
            start=layer.end,
            end=layer.start,
            groups=groups,
            columns=columns,
        )
        for layer, (groups, columns) in zip(layers, before, strict=False)
    ]
    # on the way back no column is raised
    nothing = [np.full((columns, columns), -np.inf) for _, columns in before]
    return make_side(flipped[::-1], lifts=nothing[::-1])


class LayerWalk:
    """A walk along `side` with at most `cap` states at a time.

    `bounds` show which may become better than known plans. `dropped` is what states that were given
    up could have gained at most, `states` are those after `done` layers.
    """

    def __init__(self, side: Side, bounds: Bounds, *, cap: int, deadline: float) -> None:
        self.side, self.bounds, self.cap, self.deadline = side, bounds, cap, deadline
        zero = np.zeros(1, np.int32)
        self.states = States(np.zeros((1, 2)), np.array([0, 1]), zero, zero)
        self.back: list[tuple[Rows, Rows]] = []
        self.done, self.dropped = 0, 0.0

    def step(self) -> None:
        """Take one layer more. Raises GiveUpError at the deadline."""
        n = self.done
        last = n + 1 == len(self.side.layers)
        states = self._extend(_NONE if last else self.bounds.at(n + 1))
        self.check_time()
        # give up those that could gain least
        if len(states.costs) > self.cap and not last:
            gains = self.bounds.gains(n + 1, states.costs, states.group)
            rank = np.argsort(gains)
            # the best of those that are given up bounds what may be missed
            self.dropped = max(self.dropped, float(gains[rank[-self.cap - 1]]))
            rows = np.sort(rank[-self.cap :])
            states = states.take(rows, np.diff(np.searchsorted(rows, states.first), prepend=0))
        self.back.append((states.parent, self.side.orders[n][states.via]))
        self.states, self.done = states, n + 1

    def plans(self, rows: Rows) -> Rows:
        """Return the transitions (n, done) of these states, in the order of the walk."""
        return _follow(self.back, rows)

    def check_time(self) -> None:
        """Raise GiveUpError at the deadline."""
        if time.thread_time() > self.deadline:
            raise GiveUpError

    def _extend(self, bounds: tuple[Array, Array, Array]) -> States:
        """Take one layer between any boundaries, in chunks of transitions.

        What drops more comes first: with few columns most partial plans are beaten by others, with
        many columns most show by their prices that they are hopeless.
        """
        states, layer = self.states, self.side.arrays[self.done]
        begin, source = layer[:2]
        columns = self.side.columns[self.done + 1]
        # with few columns comparing drops more, with many prices do
        priced_first = bounds if columns > _COMPARED[0] else _NONE
        counts, found = np.cumsum(np.diff(states.first)[source]), None
        for some in np.split(np.arange(len(source)), np.flatnonzero(np.diff(counts // _CHUNK)) + 1):
            room = _room(int(counts[some[-1]] - (counts[some[0] - 1] if some[0] else 0)), columns)
            first, ends = np.empty(len(begin), np.int64), np.array([some[0], some[-1] + 1])
            size = layer_kernels().extend(
                states.costs, states.first, layer, priced_first, ends, first, *room
            )
            after, parent, via = (part[:size] for part in room)
            more = _minimal(States(after, first, parent, via))
            found = more if found is None else _minimal(_joined(found, more))
            self.check_time()
        assert found is not None
        return found if priced_first is bounds else _hopeful(found, bounds)


_NONE = np.zeros((0, 1)), np.zeros((0, 1)), np.zeros((0, 1))  # bounds that keep all


def _minimal(states: States) -> States:
    # The states that no other of their group beats, by bytes if these are two columns
    costs, first = states.costs, states.first
    if costs.shape[1] == 2:
        rows = [
            a + pareto_rows_2(costs[a:b, 1], costs[a:b, 0]) for a, b in itertools.pairwise(first)
        ]
        return states.take(np.concatenate(rows), np.array([0, *map(len, rows)]))
    size = int(np.diff(first).max())
    # the least of each block of 16 states (`layer_kernels.BLOCK`)
    held, floor = np.empty((size, costs.shape[1])), np.empty((size // 16 + 1, costs.shape[1]))
    kept, counts = np.empty(len(costs), np.int64), np.zeros(len(first), np.int64)
    most = _COMPARED[1] if costs.shape[1] > _COMPARED[0] else len(costs)
    layer_kernels().minimal(costs, first, _who_beats_first(states), held, floor, kept, counts, most)
    return states.take(kept[: counts.sum()], counts)


def _who_beats_first(states: States) -> Rows:
    """Return an order of the states, group after group.

    States that beat others come before them.
    """
    columns = np.ascontiguousarray(states.costs.T)
    if not columns.size:
        return np.zeros(0, np.intp)
    least, spread = columns.min(axis=1, keepdims=True), np.ptp(columns, axis=1)
    # all columns together are less than one group
    share = 0.5 / len(columns) / np.where(spread > 0, spread, 1.0)
    if len(columns) <= _COMPARED[0]:
        # those like one another come together, so most blocks of them are ruled out at once
        share[1:] *= 0.01
    return np.argsort(states.group + share @ (columns - least))


def _hopeful(states: States, bounds: tuple[Array, Array, Array]) -> States:
    # The states that `bounds` do not show to become no better than known plans
    if not len(bounds[2]):
        return states
    kept, counts = np.empty(len(states.costs), np.int64), np.zeros(len(states.first), np.int64)
    layer_kernels().hopeful(states.costs, states.first, *bounds, kept, counts)
    return states.take(kept[: counts.sum()], counts)


def _prepare(layer: Layer, lift: Array) -> tuple[Rows, tuple[Array, ...]]:
    # Transitions by target, and the arrays that the kernels take
    order = np.argsort(layer.target, kind="stable")
    begin = np.searchsorted(layer.target[order], np.arange(layer.groups + 1))
    pairs = np.argwhere(np.isfinite(lift))
    arrays = (
        begin,
        layer.source[order],
        layer.values[order],
        layer.start,
        layer.end,
        pairs,
        lift[tuple(pairs.T)],
    )
    return order, tuple(
        np.ascontiguousarray(a, np.float64 if a.dtype.kind == "f" else np.int64) for a in arrays
    )


def _room(size: int, columns: int) -> list[NDArray[Any]]:
    return [np.empty((size, columns)), np.empty(size, np.int32), np.empty(size, np.int32)]


def _joined(left: States, right: States) -> States:
    # both are sorted by group, and a stable sort keeps that
    order = np.argsort(np.concatenate([left.group, right.group]), kind="stable")
    costs, parent, via = (
        np.concatenate([getattr(side, name) for side in (left, right)])[order]
        for name in ("costs", "parent", "via")
    )
    return States(costs, left.first + right.first, parent, via)
