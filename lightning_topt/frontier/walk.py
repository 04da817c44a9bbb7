"""Partial plans that grow layer by layer from one end of a chain of layers, compiled: of every
group those that may matter.
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

from lightning_topt.frontier.layers import Layer
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2
from lightning_topt.frontier.prices import Bounds, state_kernels
from lightning_topt.frontier.sweep import follow

_CHUNK = 2**18  # candidates held at once
_BINS = (256, 8192)
# with more columns than this, where few are beaten, each is compared with this many blocks only
_COMPARED = (4, 6)


class GiveUpError(Exception):
    """A walk ran out of time, or of room while nothing was known that could narrow it."""


@dataclass(frozen=True, eq=False)
class States:
    """Partial plans of a boundary, sorted by group: `costs` (n, c), ``first`` (G + 1,), and where
    they come from.
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
    """Return the way from the first layer to the last; `lifts` are those of `columns.raises`."""
    prepared = [_prepare(layer, lift) for layer, lift in zip(layers, lifts[1:], strict=True)]
    orders, arrays = zip(*prepared, strict=True)
    return Side(tuple(layers), orders, arrays, (2, *(layer.columns for layer in layers)))


def make_way_back(layers: Sequence[Layer]) -> Side:
    """Return the way from the last layer to the first: states are what is still added to every
    column up to the end.
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
    nothing = [np.full((columns, columns), -np.inf) for _, columns in before]
    return make_side(flipped[::-1], lifts=nothing[::-1])


class Walk:
    """A walk along `side` with at most `cap` states at a time; `bounds` show which may become
    better than known plans.

    `dropped` is what states that were given up could have gained at most, `states` are those after
    `done` layers.
    """

    def __init__(self, side: Side, bounds: Bounds | None, *, cap: int, deadline: float) -> None:
        self.side, self.bounds, self.cap, self.deadline = side, bounds, cap, deadline
        zero = np.zeros(1, np.int32)
        self.states = States(np.zeros((1, 2)), np.array([0, 1]), zero, zero)
        self.back: list[tuple[Rows, Rows]] = []
        self.done, self.dropped = 0, 0.0

    def step(self) -> None:
        """Take one layer more. Raises GiveUpError at the deadline, and where there are more than
        `cap` states and no bounds.
        """
        n = self.done
        last = n + 1 == len(self.side.layers)
        bounds = _NONE if self.bounds is None or last else self.bounds.at(n + 1)
        pairs = (
            self.side.columns[n] == self.side.columns[n + 1] == len(self.side.layers[n].start) == 2
        )
        states = self._extend_pairs(bounds) if pairs else self._extend(bounds)
        self.check_time()
        if len(states.costs) > self.cap and not last:
            if self.bounds is None:
                raise GiveUpError
            gains = self.bounds.gains(n + 1, states.costs, states.group)
            rank = np.argsort(gains)
            self.dropped = max(self.dropped, float(gains[rank[-self.cap - 1]]))
            rows = np.sort(rank[-self.cap :])
            states = states.take(rows, np.diff(np.searchsorted(rows, states.first), prepend=0))
        self.back.append((states.parent, self.side.orders[n][states.via]))
        self.states, self.done = states, n + 1

    def plans(self, rows: Rows) -> Rows:
        """Return the transitions (n, done) of these states, in the order of the walk."""
        return follow(self.back, rows)

    def check_time(self) -> None:
        """Raise GiveUpError at the deadline."""
        if time.thread_time() > self.deadline:
            raise GiveUpError

    def _extend_pairs(self, bounds: tuple[Array, Array, Array]) -> States:
        """One layer between boundaries with two columns."""
        states, layer, extend = (
            self.states,
            self.side.arrays[self.done],
            state_kernels().extend_pairs,
        )
        bins = int(np.clip(2 * np.diff(states.first).max(), *_BINS))
        best, parts, counts = np.empty(bins + 1), [], [0]
        room = _room(4 * len(states.costs) + 4096, 2)
        for group in range(self.side.layers[self.done].groups):
            while (size := extend(states.costs, states.first, layer, group, best, *room)) < 0:
                room = _room(len(room[1]) * 4, 2)
            after, parent, via = (part[:size] for part in room)
            rows = pareto_rows_2(after[:, 1], after[:, 0])
            parts.append((after[rows], parent[rows], via[rows]))
            counts.append(len(rows))
        costs, parents, vias = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _hopeful(States(costs, np.cumsum(counts), parents, vias), bounds)

    def _extend(self, bounds: tuple[Array, Array, Array]) -> States:
        """One layer between any boundaries, in chunks of transitions.

        What drops more comes first: with few columns most partial plans are beaten by others, with
        many columns most show by their prices that they are hopeless.
        """
        states, layer = self.states, self.side.arrays[self.done]
        begin, source = layer[:2]
        columns = self.side.columns[self.done + 1]
        priced_first = bounds if columns > _COMPARED[0] else _NONE
        counts, found = np.cumsum(np.diff(states.first)[source]), None
        for some in np.split(np.arange(len(source)), np.flatnonzero(np.diff(counts // _CHUNK)) + 1):
            room = _room(int(counts[some[-1]] - (counts[some[0] - 1] if some[0] else 0)), columns)
            first, ends = np.empty(len(begin), np.int64), np.array([some[0], some[-1] + 1])
            size = state_kernels().extend(
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
    """Without those that others of their group beat; where there are two columns, by bytes
    ascending.
    """
    costs, first = states.costs, states.first
    if costs.shape[1] == 2:
        rows = [
            a + pareto_rows_2(costs[a:b, 1], costs[a:b, 0]) for a, b in itertools.pairwise(first)
        ]
        return states.take(np.concatenate(rows), np.array([0, *map(len, rows)]))
    size = int(np.diff(first).max())
    held, floor = np.empty((size, costs.shape[1])), np.empty((size // 16 + 1, costs.shape[1]))
    kept, counts = np.empty(len(costs), np.int64), np.zeros(len(first), np.int64)
    most = _COMPARED[1] if costs.shape[1] > _COMPARED[0] else len(costs)
    state_kernels().minimal(costs, first, _who_beats_first(states), held, floor, kept, counts, most)
    return states.take(kept[: counts.sum()], counts)


def _who_beats_first(states: States) -> Rows:
    """Return an order of the states, group after group, in which those that beat others come before
    them.
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
    """Without those that `bounds` show to become no better than known plans."""
    if not len(bounds[2]):
        return states
    kept, counts = np.empty(len(states.costs), np.int64), np.zeros(len(states.first), np.int64)
    state_kernels().hopeful(states.costs, states.first, *bounds, kept, counts)
    return states.take(kept[: counts.sum()], counts)


def _prepare(layer: Layer, lift: Array) -> tuple[Rows, tuple[Array, ...]]:
    """Transitions by target, and the arrays that the kernels take."""
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
    order = np.argsort(np.concatenate([left.group, right.group]), kind="stable")
    costs, parent, via = (
        np.concatenate([getattr(side, name) for side in (left, right)])[order]
        for name in ("costs", "parent", "via")
    )
    return States(costs, left.first + right.first, parent, via)
