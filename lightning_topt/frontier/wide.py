"""The search where there is much to do: compiled, pruned by prices, and bounded in points, seconds and memory.

Two columns (seconds, bytes) are swept through at once. With more, nearly every partial plan is minimal, so sweeps keep at most
`cap` of them, those that could gain most, and make better plans known for the next, wider one; the first that gives none up is
exact. A search that ends before has missed at most what the partial plans that it gave up could gain.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.frontier.layers import Layer
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2
from lightning_topt.frontier.prices import ELSEWHERE, Known, Prices, improve, make_prices, state_kernels
from lightning_topt.frontier.sweep import follow

_FIRST_CAP, _WIDER = 512, 16
_ROUGH = 0.02  # what the first sweep may miss without better plans being sought at once
_CHUNK = 2**18  # candidates held at once
_BINS = (256, 8192)
_COMPARED = (4, 6)  # with more columns than this, where few are beaten, each is compared with this many blocks only


@dataclass(frozen=True)
class Budget:
    """What a search may take: partial plans at one time, joint configurations of operators, seconds, bytes; and what it may
    miss: plans that are less than `epsilon` better.
    """

    max_points: int
    max_branches: int
    max_seconds: float
    max_bytes: float
    epsilon: float = 0.0


class _GiveUp(Exception):
    """A sweep ran out of time, or of points before prices were known."""


@dataclass(frozen=True, eq=False)
class _States:
    """Partial plans of a boundary, sorted by group: `costs` (n, c), ``first`` (G + 1,), and where they come from."""

    costs: Array
    first: Rows
    parent: Rows
    via: Rows

    @property
    def group(self) -> Rows:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def take(self, rows: Rows, counts: Rows) -> _States:
        """These rows only, of which the groups have ``counts[1:]``."""
        return _States(self.costs[rows], np.cumsum(counts), self.parent[rows], self.via[rows])


def search_wide(
    layers: Sequence[Layer], *, lifts: Sequence[Array], budget: Budget, deadline: float, rivals: Array
) -> tuple[Rows, float]:
    """Return transitions (n, N) and the error bound of the best plans, see `Frontier`.

    `lifts` are those of `columns.raises`; `deadline` is a time of `time.perf_counter`. Every layer has transitions. Plans
    that one of `rivals` (m, 2), (seconds, bytes) of plans found elsewhere, beats may be left out.
    """
    search = _Search(layers, lifts, budget, deadline)
    if not search.several and budget.epsilon == 0:
        try:
            known, _ = search.sweep(search.most, None, None)
        except _GiveUp:
            pass
        else:
            return known.plans, 0.0
    prices, known = make_prices(layers)
    known = known.joined(rivals, np.full((len(rivals), len(layers)), ELSEWHERE, np.int32))
    missed, cap, last = prices.gain(known), _FIRST_CAP, False
    while missed > budget.epsilon and not last:
        cap, began = min(cap, search.most), time.perf_counter()
        try:
            found, dropped = search.sweep(cap, prices, known)
            known, missed = known.joined(found.costs, found.plans), min(missed, dropped)
        except _GiveUp:
            last = True
        now = time.perf_counter()
        wider = min(_WIDER, (deadline - now) / (now - began))  # as far as there is time for
        last |= cap == search.most or wider < 2
        if missed > max(budget.epsilon, 0.0 if last or cap > _FIRST_CAP else _ROUGH):
            known = improve(layers, known)
            missed = min(missed, prices.gain(known))
        cap = int(cap * wider)
    return known.plans[(known.plans != ELSEWHERE).all(axis=1)], max(missed, 0.0)


class _Search:
    """Sweeps through `layers`, again and again."""

    def __init__(self, layers: Sequence[Layer], lifts: Sequence[Array], budget: Budget, deadline: float) -> None:
        self.layers, self.budget, self.deadline = layers, budget, deadline
        self.prepared = [_prepare(layer, lift) for layer, lift in zip(layers, lifts[1:], strict=True)]
        self.columns = [2, *(layer.columns for layer in layers)]
        self.several = max(self.columns) > 2 or any(len(layer.start) > 2 for layer in layers)
        per_state = 8 * len(layers) + 64 * max(self.columns)  # back-pointers of all layers, columns of one
        self.most = int(max(1, min(budget.max_points, budget.max_bytes / per_state)))

    def sweep(self, cap: int, prices: Prices | None, known: Known | None) -> tuple[Known, float]:
        """Return the plans found with at most `cap` partial plans at a time, and what those given up could gain at most.

        Raises _GiveUp at the deadline, and where more are needed and there are no `prices`.
        """
        limits = np.zeros((0, 1)) if prices is None or known is None else prices.limits(known)
        limits = np.where(limits > 0, limits / (1 + self.budget.epsilon), limits)
        states = _States(np.zeros((1, 2)), np.array([0, 1]), np.zeros(1, np.int32), np.zeros(1, np.int32))
        back, dropped = [], self.budget.epsilon
        for n in range(len(self.layers)):
            bounds = _bounds(prices, n + 1, limits if n + 1 < len(self.layers) else limits[:0])
            pairs = self.columns[n] == self.columns[n + 1] == len(self.layers[n].start) == 2
            states = (self._extend_pairs if pairs else self._extend)(n, states, bounds)
            if time.perf_counter() > self.deadline:
                raise _GiveUp
            if len(states.costs) > cap and n + 1 < len(self.layers):
                if prices is None:
                    raise _GiveUp
                gains = prices.gains(n + 1, states.costs, states.group, limits)
                rank = np.argsort(gains)
                dropped = max(dropped, float(gains[rank[-cap - 1]]))
                rows = np.sort(rank[-cap:])
                states = states.take(rows, np.diff(np.searchsorted(rows, states.first), prepend=0))
            back.append((states.parent, self.prepared[n][0][states.via]))
        order = np.argsort(states.costs[:, 0])
        return Known(states.costs[order], follow(back, order)), dropped

    def _extend_pairs(self, n: int, states: _States, bounds: tuple[Array, Array, Array]) -> _States:
        """One layer between boundaries with two columns."""
        _, layer = self.prepared[n]
        bins = int(np.clip(2 * np.diff(states.first).max(), *_BINS))
        best, room, parts, counts = np.empty(bins + 1), 4 * len(states.costs) + 4096, [], [0]
        after, parent, via = _room(room, 2)
        for group in range(self.layers[n].groups):
            while (
                size := state_kernels().extend_pairs(states.costs, states.first, layer, group, best, after, parent, via)
            ) < 0:
                after, parent, via = _room(len(via) * 4, 2)
            rows = pareto_rows_2(after[:size, 1], after[:size, 0])
            if len(bounds[2]) and len(rows):
                kept = np.empty(len(rows), np.int64)
                rows = rows[kept[: state_kernels().hopeful(after[rows], group, *bounds, kept)]]
            parts.append((after[rows], parent[rows], via[rows]))
            counts.append(len(rows))
        costs, parents, vias = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _States(costs, np.cumsum(counts), parents, vias)

    def _extend(self, n: int, states: _States, bounds: tuple[Array, Array, Array]) -> _States:
        """One layer between any boundaries, in chunks of transitions."""
        begin, source = self.prepared[n][1][:2]
        counts = np.cumsum(np.diff(states.first)[source])
        found = None
        for some in np.split(np.arange(len(source)), np.flatnonzero(np.diff(counts // _CHUNK)) + 1):
            size = int(counts[some[-1]] - (counts[some[0] - 1] if some[0] else 0))
            after, parent, via = _room(size, self.columns[n + 1])
            first = np.empty(len(begin), np.int64)
            ends = np.array([some[0], some[-1] + 1])
            size = state_kernels().extend(
                states.costs, states.first, self.prepared[n][1], bounds, ends, first, after, parent, via
            )
            more = self._minimal(_States(after[:size], first, parent[:size], via[:size]))
            found = more if found is None else self._minimal(_joined(found, more))
            if time.perf_counter() > self.deadline:
                raise _GiveUp
        assert found is not None
        return found

    @staticmethod
    def _minimal(states: _States) -> _States:
        """Without those that others of their group beat; where there are two columns, by bytes ascending."""
        costs, first, rows = states.costs, states.first, [np.zeros(0, np.int64)]
        size = int(np.diff(first).max(initial=0))
        held, kept = np.empty((size, costs.shape[1])), np.empty(size, np.int64)
        floor = np.empty((size // 16 + 1, costs.shape[1]))
        spread = np.ptp(costs, axis=0) if len(costs) else np.ones(costs.shape[1])
        most = _COMPARED[1] if costs.shape[1] > _COMPARED[0] else len(costs)
        keys = costs @ (1 / np.where(spread > 0, spread, 1.0))
        for a, b in itertools.pairwise(first):
            if costs.shape[1] == 2:
                rows.append(a + pareto_rows_2(costs[a:b, 1], costs[a:b, 0]))
            else:
                rows.append(
                    a + kept[: state_kernels().minimal(costs[a:b], np.argsort(keys[a:b]), held, floor, kept, most)]
                )
        return states.take(np.concatenate(rows), np.array([len(part) for part in rows]))


def _prepare(layer: Layer, lift: Array) -> tuple[Rows, tuple[Array, ...]]:
    """Transitions by target, and the arrays that the kernels take."""
    order = np.argsort(layer.target, kind="stable")
    begin = np.searchsorted(layer.target[order], np.arange(layer.groups + 1))
    pairs = np.argwhere(np.isfinite(lift))
    arrays = (begin, layer.source[order], layer.values[order], layer.start, layer.end, pairs, lift[tuple(pairs.T)])
    return order, tuple(np.ascontiguousarray(a, np.float64 if a.dtype.kind == "f" else np.int64) for a in arrays)


def _bounds(prices: Prices | None, n: int, limits: Array) -> tuple[Array, Array, Array]:
    if prices is None:
        return np.zeros((0, 1)), np.zeros((0, 1)), np.zeros((0, 1))
    return prices.masses[n], prices.potentials[n], limits


def _room(size: int, columns: int) -> tuple[Array, Rows, Rows]:
    return np.empty((size, columns)), np.empty(size, np.int32), np.empty(size, np.int32)


def _joined(left: _States, right: _States) -> _States:
    group = np.concatenate([left.group, right.group])
    order = np.argsort(group, kind="stable")
    parts = (
        np.concatenate([getattr(side, name) for side in (left, right)])[order] for name in ("costs", "parent", "via")
    )
    costs, parent, via = parts
    return _States(costs, left.first + right.first, parent, via)
