"""The frontier of a sum of independent parts: one point of each, added part by part.

After every part the sums so far are thinned out in four ways; the first three are exact:

    columns    to which all further parts add the same become one, their maximum          (columns.py)
    dominance  of equal sums one is kept, dominated ones go                               (pareto.py)
    bounds     sums whose every completion is dominated by a known plan go                (bounds.py)
    epsilon    when more than `max_points` are left: sums whose every completion is less than (1 + epsilon) times
               better than a known plan go; `epsilon` grows as needed and becomes the error bound. Where only two
               columns are left, `thin` does it: frontiers of two columns are dense

Dominance alone does not suffice: with eight columns nearly all of the C(N + k - 1, N) sums of N equal parts of k
points are minimal. Any list of parts is allowed; it is fast when neighbours in the list are neighbours in time, since
columns of moments that lie behind then merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.columns import needed_columns
from lightning_topt.frontier.bounds import Bounds, Parts, make_bounds
from lightning_topt.frontier.columns import merge, merge_plan
from lightning_topt.frontier.frontier import SMALLEST_EPSILON, Frontier, Summed, thin_to
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows, pareto_rows_2, thin_rows

_CHUNK = 2**22  # numbers held by one chunk of pairwise sums
_EXACT_DOMINANCE = 8192  # more points are only compared with the most promising ones
_PIVOTS = 512
_BOUNDS_FROM = 2048  # points from which on bounds are worth their price
_BOUNDS_SIZE = 2**18  # rows of all parts up to which they can be computed
_COMPLETED = 2048  # sums that are completed to known plans after each part
_KNOWN = 1024  # known plans from which on no more are sought
_SHRINK = 8  # once sums are given up, this many times fewer are kept: it costs little precision and saves much time


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums of the first k parts: merged `costs` (n, columns), and the `rows` (n, k) of the parts they take."""

    costs: Array
    rows: Rows

    def take(self, rows: Rows) -> _Sums:
        return _Sums(self.costs[rows], self.rows[rows])


class _Fold:
    """Adds parts up. `parts` (n_i, c) have a first part of one row and zeros in the first row of all others."""

    def __init__(self, parts: Parts, *, max_points: int, scales: Array) -> None:
        self.parts, self.max_points, self.scales = parts, max_points, scales
        columns = parts.costs[0].shape[1]
        kinds = (np.arange(columns) >= parts.paths).astype(np.intp)
        self.labels = merge_plan(parts.costs, kinds=kinds)
        self.bounds: Bounds | None = None
        self.epsilon = 0.0
        self.thinned = 0.0

    def run(self) -> _Sums:
        """The sums of all parts with the largest path and moment as their two columns."""
        sums = _Sums(merge(self.parts.costs[0], self.labels[1]), np.zeros((1, 1), np.intp))
        for k in range(1, len(self.parts.costs)):
            sums = self._add(sums, k)
            if len(sums.rows) == 0:  # no completion beats the known plans
                sums = _Sums(np.zeros((0, 2)), np.zeros((0, len(self.parts.costs)), np.intp))
                break
        if self.bounds is not None:
            known = np.stack(self.parts.objectives(self.parts.total(self.bounds.rows)), axis=1)
            sums = _Sums(np.concatenate([sums.costs, known]), np.concatenate([sums.rows, self.bounds.rows]))
        return sums.take(pareto_rows_2(sums.costs[:, 1], sums.costs[:, 0]))

    def _add(self, sums: _Sums, k: int) -> _Sums:
        """The sums of the parts 0 ... k from those of the parts 0 ... k-1."""
        first = np.unique(self.labels[k], return_index=True)[1]  # one column of each label
        part, labels = self.parts.costs[k][:, first], self.labels[k + 1][first]
        step = max(1, _CHUNK // part.size)
        held, size = [], 0
        for start in range(0, len(sums.costs), step):
            some = sums.take(np.arange(start, min(start + step, len(sums.costs))))
            costs = merge((some.costs[:, None] + part).reshape(-1, part.shape[1]), labels)
            rows = np.arange(len(costs))
            if self.bounds is not None:
                rows = np.flatnonzero(self._gains(costs, k) > self.epsilon)
            rows = rows[_minimal(costs[rows])]
            before, row = np.divmod(rows, len(part))
            held.append(_Sums(costs[rows], np.concatenate([some.rows[before], row[:, None]], axis=1)))
            size += len(rows)
            if size > 4 * self.max_points:
                held = [self._shrink(_join(held), k)]
                size = len(held[0].rows)
        return self._shrink(_join(held), k)

    def _shrink(self, sums: _Sums, k: int) -> _Sums:
        """What is needed of the sums of the parts 0 ... k, at most `max_points`."""
        sums = sums.take(_minimal(sums.costs))
        count, columns = sums.costs.shape
        if count > self.max_points and columns == 2 and (self.scales > 0).all():
            return self._thin(sums)
        if count > self.max_points or (columns > 2 and count > _BOUNDS_FROM):
            self.bounds = self.bounds or make_bounds(self.parts)
        if self.bounds is None or count == 0 or k + 1 == len(self.parts.costs):
            return sums
        if len(self.bounds.rows) < _KNOWN:
            some = sums.take(np.argsort(self._gains(sums.costs, k))[-_COMPLETED:])
            self.bounds = self.bounds.completed(self.parts, some.costs, some.rows, self.labels[k + 1])
        gains = self._gains(sums.costs, k)
        if np.count_nonzero(gains > self.epsilon) > self.max_points:
            self.epsilon = float(np.sort(gains)[-self.max_points // _SHRINK - 1])
        if self.epsilon > 1:
            raise ValueError(f"max_points={self.max_points} leaves no useful frontier; allow more points")
        return sums.take(np.flatnonzero(gains > self.epsilon))

    def _thin(self, sums: _Sums) -> _Sums:
        rows, epsilon = np.arange(len(sums.rows)), SMALLEST_EPSILON / 2
        while len(rows) > self.max_points:
            epsilon *= 2
            rows = thin_rows(sums.costs, widths=epsilon * self.scales)
        self.thinned += epsilon
        return sums.take(rows)

    def _gains(self, costs: Array, k: int) -> Array:
        assert self.bounds is not None
        return self.bounds.gains(k + 1, costs, self.labels[k + 1])


def combine(parts: Sequence[Frontier], *, max_points: int, seconds_scale: float, bytes_scale: float) -> Frontier:
    """The frontier of (largest path, largest moment) over all sums of one point of each of `parts`: (n, 1), (n, 1).

    Costs are finite and on a common grid on which sums are exact (`columns.exact_grid`). `max_points` limits the points
    held after each part; see `Frontier.error_bound` for what that may cost. The scales are lower bounds of every sum's
    seconds and bytes, for `thin`, which is used when parts are too large for better bounds.
    """
    if any(len(part) == 0 for part in parts):
        nothing = Summed(tuple(parts), np.zeros((0, len(parts)), np.intp))
        return Frontier(np.zeros((0, 1)), np.zeros((0, 1)), nothing)
    if len(parts) * max(len(part) for part in parts) > _BOUNDS_SIZE:
        limit = _BOUNDS_SIZE // len(parts)
        parts = [thin_to(part, limit, seconds_scale=seconds_scale, bytes_scale=bytes_scale) for part in parts]
    paths = parts[0].seconds.shape[1]
    costs = [part.costs for part in parts]
    base = np.sum([cost[:1] for cost in costs], axis=0)
    costs = [base, *(cost - cost[0] for cost in costs)]
    needed = [
        needed_columns([cost[:, kind] for cost in costs[1:]], fixed=base[0, kind])
        for kind in (slice(paths), slice(paths, None))
    ]
    columns = np.concatenate([needed[0], paths + needed[1]])
    fold = _Fold(
        Parts(tuple(cost[:, columns] for cost in costs), len(needed[0])),
        max_points=max_points,
        scales=np.array([seconds_scale, bytes_scale]),
    )
    sums = fold.run()
    inherited = 1 + sum(part.error_bound for part in parts) + fold.thinned
    return Frontier(
        sums.costs[:, :1],
        sums.costs[:, 1:],
        Summed(tuple(parts), sums.rows[:, 1:]),
        (1 + fold.epsilon) * inherited - 1,
    )


def _minimal(costs: Array) -> Rows:
    """Without equal rows and without (most of the) dominated rows."""
    if costs.shape[1] == 2:
        return pareto_rows_2(costs[:, 1], costs[:, 0])
    return pareto_rows(costs, pivots=None if len(costs) <= _EXACT_DOMINANCE else _PIVOTS)


def _join(parts: Sequence[_Sums]) -> _Sums:
    if len(parts) == 1:
        return parts[0]
    return _Sums(np.concatenate([part.costs for part in parts]), np.concatenate([part.rows for part in parts]))
