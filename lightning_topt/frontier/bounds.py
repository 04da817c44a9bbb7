"""Bounds that let a search drop partial plans which cannot become part of the frontier (branch and bound in dynamic
programming, Morin & Marsten 1976; Lagrangian bounds, Geoffrion 1974).

For prices of one second on each path and of one byte at each moment, with sums r and s, every plan has

    r * step_seconds + s * peak_bytes  >=  prices . costs of the plan

and the right side is a sum over parts, so its least value over all completions of a partial plan is a sum of minima.
The plans already known leave a staircase of corners (T, M): a plan that none of them dominates has
``step_seconds < T and peak_bytes < M`` at some corner. A partial plan is dropped when at every corner one of the L
price vectors shows that it cannot get there. Prices maximise the Lagrangian dual for L ratios r : s (multiplicative
weights, Arora, Hazan & Kale 2012, section 3); the plans met on the way, improved by single changes, are the known ones.

Symbols: parts i = 0 ... N-1 with rows k, costs (n_i, c), the first p columns are paths (seconds), the others moments.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2

_RATIOS = 30
_STEPS = 300
_WORK = 10**9  # multiply-adds the dual may take
_CORNERS = 96
_CHUNK = 2**16  # ratios held at once: they stay in the cache
_IMPROVED = 256  # plans tried to improve in one round
_ROUNDS = 12
_KNOWN = 1024  # plans from which on no more are sought
_CHANGES = 2**22  # numbers held at once while doing so
_TINY = 1e-28  # beside prices, which are about 1
_TOLERANCE = 1e-6  # above the rounding of single precision, which must not drop a plan


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a sum: `costs` of each (n_i, p + m); the first `paths` columns are seconds."""

    costs: tuple[Array, ...]
    paths: int

    def total(self, rows: Rows) -> Array:
        """(q, p + m) costs of the plans that take the rows (q, N)."""
        return np.asarray(np.sum([part[rows[:, i]] for i, part in enumerate(self.costs)], axis=0, dtype=float))

    def objectives(self, totals: Array) -> tuple[Array, Array]:
        """(step seconds, peak bytes) of cost vectors (..., p + m)."""
        return totals[..., : self.paths].max(axis=-1), totals[..., self.paths :].max(axis=-1)


@dataclass(frozen=True, eq=False)
class Bounds:
    """What `make_bounds` found: plans `rows` (q, N) with `known_seconds` (q,) ascending and `known_bytes` descending;
    `most` (2,), above which no plan's seconds and bytes are; `prices` (L, c), their sums `exchange` (L, 2) over paths
    and over moments; and `floors` (N + 1, L), the least price of the parts k, k + 1, ... together.
    """

    rows: Rows
    known_seconds: Array
    known_bytes: Array
    most: Array
    prices: Array
    exchange: Array
    floors: Array

    def gains(self, k: int, costs: Array, labels: Rows) -> Array:
        """(n,) by how much sums of parts 0 ... k-1 could still beat the known plans, at most.

        Gain g: every completion is dominated by a known plan that counts as (1 + g) times better. A sum with g <= 0 is
        not needed. `costs` (n, labels) are the sums, their columns merged by `labels` (c,). Valid up to a gain of 1.
        """
        merged = np.stack([np.bincount(labels, prices, costs.shape[1]) for prices in self.prices])
        corners = _corners(np.append(self.known_seconds, self.most[0]), np.append(self.most[1], self.known_bytes))
        # Where a price or a limit is not positive their ratio says nothing: it is made too large to drop a sum.
        limits = np.maximum(self.exchange @ corners, _TINY).astype(np.float32)
        priced = costs @ merged.T + self.floors[k]
        inverse = (1 / np.maximum(priced, _TINY**1.2)).astype(np.float32)
        gains = np.empty(len(costs))
        step = max(1, _CHUNK // limits.shape[1])
        for start in range(0, len(costs), step):
            gains[start : start + step] = _best_ratio(inverse[start : start + step], limits) * (1 + _TOLERANCE) - 1
        return gains

    def completed(self, parts: Parts, costs: Array, rows: Rows, labels: Rows) -> Bounds:
        """With more known plans: sums of parts 0 ... k-1, completed by the rows of the others that are cheapest.

        `costs` (n, labels) are the sums, `rows` (n, k) their rows, `labels` (c,) the labels of their merged columns.
        """
        k = rows.shape[1]
        best = np.stack([(part @ self.prices.T).argmin(axis=0) for part in parts.costs[k:]], axis=1)  # (L, N - k)
        best = np.unique(best, axis=0)
        rest = np.sum([part[best[:, i]] for i, part in enumerate(parts.costs[k:])], axis=0)
        first = np.unique(labels, return_index=True)[1]  # columns of a label get the same from these parts
        totals = (costs[:, None] + rest[:, first]).reshape(-1, len(first))
        paths = int(labels[: parts.paths].max()) + 1
        seconds, size = totals[:, :paths].max(axis=1), totals[:, paths:].max(axis=1)
        keep = pareto_rows_2(size, seconds)
        sums, tails = np.divmod(keep, len(best))
        found = np.concatenate([self.rows, np.concatenate([rows[sums], best[tails]], axis=1)])
        seconds, size = np.append(self.known_seconds, seconds[keep]), np.append(self.known_bytes, size[keep])
        order = pareto_rows_2(seconds, size)
        return dataclasses.replace(self, rows=found[order], known_seconds=seconds[order], known_bytes=size[order])


def make_bounds(parts: Parts) -> Bounds:
    """Prices, known plans and least prices of the completions for `parts`."""
    prices, exchange, tried = _maximise_dual(parts)
    rows = _improve(parts, tried)
    seconds, size = parts.objectives(parts.total(rows))
    order = np.argsort(seconds)
    least = [(part @ prices.T).min(axis=0) for part in parts.costs]
    floors = np.cumsum([np.zeros(len(prices)), *reversed(least)], axis=0)[::-1]
    most = parts.objectives(np.sum([part.max(axis=0) for part in parts.costs], axis=0))
    above = 2 * np.abs(np.array(most)) + 1  # strictly above every plan, where the most expensive one is known, too
    return Bounds(rows[order], seconds[order], size[order], above, prices, exchange, floors)


def _corners(seconds: Array, size: Array) -> Array:
    """(2, at most `_CORNERS`): the staircase of corners, coarser; of a run of corners, the one above them all."""
    if len(seconds) <= _CORNERS:
        return np.stack([seconds, size])
    inner = np.diff(seconds[:-1]) / np.abs(seconds[:-1]).mean(), -np.diff(size[1:]) / np.abs(size[1:]).mean()
    length = np.concatenate([[0], np.cumsum(inner[0] + inner[1])])  # along the known plans
    ends = np.searchsorted(length, np.linspace(0, length[-1], _CORNERS - 1), side="right")
    ends = np.unique(np.concatenate([[0, 1], ends, [len(seconds)]]))
    return np.stack([seconds[ends[1:] - 1], size[ends[:-1]]])


def _best_ratio(inverse: NDArray[np.float32], limits: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n,) max over corners of min over prices of ``limits`` (L, corners) times `inverse` (n, L)."""
    least = inverse[:, :1] * limits[0]
    ratio = np.empty_like(least)
    for column, limit in zip(inverse.T[1:], limits[1:], strict=True):
        np.multiply(column[:, None], limit, out=ratio)
        np.minimum(least, ratio, out=least)
    return np.asarray(least.max(axis=1))


def _maximise_dual(parts: Parts) -> tuple[Array, Array, Rows]:
    """Prices (L, c), their sums over paths and over moments (L, 2), and the plans (q, N) met on the way."""
    longest, kinds = max(len(part) for part in parts.costs), (parts.paths, parts.costs[0].shape[1] - parts.paths)
    costs = np.stack([np.concatenate([part, np.repeat(part[:1], longest - len(part), axis=0)]) for part in parts.costs])
    spread = np.ptp(costs, axis=1).sum(axis=0)
    units = np.array([part.max() or 1.0 for part in np.split(spread, [parts.paths])])
    ratios = np.stack([np.append(np.geomspace(1 / 64, 64, _RATIOS), [1, 0]), np.append(np.ones(_RATIOS), [0, 1])], 1)
    exchange, weight = ratios / units, np.repeat(ratios / units, kinds, axis=1)
    rate = 16 / ratios.sum(axis=1, keepdims=True)
    several, numbers = np.arange(len(ratios))[:, None], np.arange(len(costs))
    logs, best, mean = (np.zeros_like(weight) for _ in range(3))
    best_value, tried, often = np.full(len(ratios), -np.inf), [], np.zeros((len(ratios), *costs.shape[:2]))
    steps = int(np.clip(_WORK / (len(ratios) * costs.size), 30, _STEPS))
    for step in range(steps + 1):
        shares = _normalise(np.exp(logs) if step < steps else mean, kinds)
        priced = np.einsum("lc,nkc->lnk", shares * weight, costs, optimize=True)
        chosen = priced.argmin(axis=2)
        value = np.take_along_axis(priced, chosen[..., None], axis=2).sum(axis=(1, 2))
        better = value > best_value
        best[better], best_value[better] = shares[better], value[better]
        tried.append(chosen)
        logs += rate / np.sqrt(step + 1) * weight * costs[numbers, chosen].sum(axis=1)
        logs -= _by_kind(np.maximum, logs, kinds)
        if step >= steps // 3:
            mean += shares
            often[several, numbers, chosen] += 1
    tried += _round(often, np.array([len(part) for part in parts.costs])) + _crossed(tried[-1])
    return best * weight, exchange, np.unique(np.concatenate(tried), axis=0)


def _round(often: Array, lengths: Rows) -> list[Rows]:
    """Plans that take the rows of each part (N,) about as `often` (L, N, k) as the dual's average did."""
    shares = np.cumsum(often / often.sum(axis=2, keepdims=True), axis=2)
    golden = np.arange(len(lengths)) * 0.6180339887498949  # spreads equal parts evenly over their shares
    offsets = [(start + golden) % 1 for start in np.linspace(0, 1, 16, endpoint=False)]
    return [(shares < offset[:, None]).sum(axis=2).clip(max=lengths - 1) for offset in offsets]


def _crossed(plans: Rows) -> list[Rows]:
    """Plans that take the first parts from one of `plans` (L, N) and the rest from a neighbour: they fill wide gaps."""
    first = np.tri(plans.shape[1], k=-1, dtype=bool)[:, None]  # (N, 1, N)
    pairs = ((plans[:-1], plans[1:]), (plans[1:], plans[:-1]))
    return [np.where(first, one, other).reshape(-1, plans.shape[1]) for one, other in pairs]


def _by_kind(function: np.ufunc, values: Array, kinds: tuple[int, int]) -> Array:
    """(L, c) `function` of the path columns in each path column, of the moment columns in each moment column."""
    return np.repeat(function.reduceat(values, [0, kinds[0]], axis=1), kinds, axis=1)


def _normalise(values: Array, kinds: tuple[int, int]) -> Array:
    return np.asarray(values / _by_kind(np.add, values, kinds))


def _improve(parts: Parts, rows: Rows) -> Rows:
    """The frontier of the plans `rows` (q, N) and of what changing one part at a time makes of them."""
    rows = _frontier_rows(parts, rows)
    for _ in range(_ROUNDS):
        some = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _IMPROVED)).astype(np.intp))]
        totals = parts.total(some)
        found = [rows]
        for i, part in enumerate(parts.costs):
            only = np.arange(len(part))[: max(1, _CHANGES // totals.size)]
            seconds, size = parts.objectives((totals - part[some[:, i]])[:, None] + part[only])
            plan, row = np.divmod(pareto_rows_2(size.ravel(), seconds.ravel()), len(only))
            changed = some[plan]
            changed[:, i] = row
            found.append(changed)
        better = _frontier_rows(parts, np.concatenate(found))
        if np.array_equal(better, rows):
            break
        rows = better
        if len(rows) > _KNOWN:
            break
    return rows


def _frontier_rows(parts: Parts, rows: Rows) -> Rows:
    rows = np.unique(rows, axis=0)
    seconds, size = parts.objectives(parts.total(rows))
    return np.asarray(rows[pareto_rows_2(size, seconds)])
