"""Pareto-minimal rows of a matrix of costs: the array kernels below all searches.

Row x dominates row y when x <= y in every column and x != y. Symbols: n rows (plans), c columns
(costs).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.intp]

_FEW = 192  # rows of which all pairs are compared at once
_BLOCK, _CHUNK = 256, 4096  # candidates, and kept rows, that are compared at once
_BINS = 4096  # of the first of two columns
_ODD = np.uint64(0x9E3779B97F4A7C15)  # multiplier of the hash of rows


def pareto_rows(costs: Array) -> Rows:
    """Return indices of the Pareto-minimal rows of `costs` (n, c); of equal rows one is kept.

    Where at most two columns matter they ascend in the first of these; otherwise the order is
    unspecified.
    """
    rows = unique_rows(costs)
    # Without constant columns, and with one of those that order the rows alike.
    ranks = _ranks(costs[rows])
    seen = {column.tobytes(): index for index, column in enumerate(ranks.T) if column.any()}
    ranks = ranks[:, sorted(seen.values())]
    if ranks.shape[1] <= 2:
        return rows[_sweep(ranks[:, 0], ranks[:, -1])] if ranks.shape[1] else rows[:1]
    return rows[_filter(ranks)]


def pareto_rows_of_few(costs: Array) -> Rows:
    """Return `pareto_rows` in ascending order; few rows are all compared at once."""
    if len(costs) > _FEW:
        return np.sort(pareto_rows(costs))
    below = np.ones((len(costs), len(costs)), bool)
    for column in costs.T:
        below &= column[:, None] <= column
    # Of equal rows the first one stays.
    return np.flatnonzero(
        ~(below & (~below.T | np.tri(len(costs), k=-1, dtype=bool).T)).any(axis=0)
    )


def pareto_rows_2(first: Array, second: Array) -> Rows:
    """Return `pareto_rows` of two columns (n,): sort and sweep.

    `first` ascends in their order, and `second` descends.
    """
    if len(first) <= 4 * _BINS:
        return _sweep(first, second)
    rows = np.flatnonzero(_not_behind(first, second))
    return rows[_sweep(first[rows], second[rows])]


def unique_rows(costs: Array) -> Rows:
    """Return indices of one row out of every set of equal rows of `costs` (n, c)."""
    if len(costs) == 0 or costs.shape[1] == 0:
        return np.arange(min(len(costs), 1))
    # + 0.0 makes -0.0 and 0.0 the same bits
    words = (np.ascontiguousarray(costs) + 0.0).view(np.uint64)
    digest = np.zeros(len(costs), np.uint64)
    for column in words.T:
        digest = (digest ^ column) * _ODD
        digest ^= digest >> np.uint64(29)
    _, rows, group = np.unique(digest, return_index=True, return_inverse=True)
    if np.array_equal(words[rows[group]], words):
        return np.asarray(rows)
    # two different rows had one digest
    return np.asarray(np.unique(costs + 0.0, axis=0, return_index=True)[1])


def _sweep(first: NDArray[np.generic], second: NDArray[np.generic]) -> Rows:
    order = np.lexsort((second, first))
    values = second[order]
    keep = np.ones(len(order), bool)
    keep[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return order[keep]


def _not_behind(first: Array, second: Array) -> NDArray[np.bool_]:
    """Return False for rows that a row of an earlier bin of `first` beats.

    That leaves little for the sort.
    """
    low, high = float(first.min()), float(first.max())
    width = (high - low) / _BINS
    if not width > 0:
        return np.ones(len(first), bool)
    bins = np.minimum(((first - low) / width).astype(np.intp), _BINS - 1)
    best = np.full(_BINS + 1, np.inf)
    np.minimum.at(best, bins + 1, second)
    return np.asarray(second < np.minimum.accumulate(best)[bins])


def _ranks(costs: Array) -> NDArray[np.unsignedinteger]:
    # Dense ranks of every column: small integers are compared faster than floats
    kind = np.uint16 if len(costs) < 2**16 else np.uint32
    ranks = np.empty(costs.shape, kind)
    for column in range(costs.shape[1]):
        order = np.argsort(costs[:, column])
        values = costs[order, column]
        ranks[order, column] = np.concatenate([[0], np.cumsum(values[1:] != values[:-1])])
    return ranks


def _filter(ranks: NDArray[np.unsignedinteger]) -> Rows:
    """Return the minimal rows, block by block in the order of the sum of ranks.

    In that order only an earlier row can dominate another.
    """
    order = np.argsort(ranks.sum(axis=1, dtype=np.int64), kind="stable")
    columns = np.ascontiguousarray(ranks[order].T)
    kept = np.empty_like(columns)
    rows: list[Rows] = []
    count = 0
    for start in range(0, len(order), _BLOCK):
        block = columns[:, start : start + _BLOCK]
        alive = np.arange(block.shape[1])
        for begin in range(0, count, _CHUNK):
            alive = alive[~_dominated(block[:, alive], kept[:, begin : min(begin + _CHUNK, count)])]
        inside = block[:, alive]
        alive = alive[~_dominated(inside, inside, itself=True)]
        kept[:, count : count + len(alive)] = block[:, alive]
        count += len(alive)
        rows.append(order[start + alive])
    return np.concatenate(rows)


def _dominated(
    candidates: NDArray[np.unsignedinteger],
    others: NDArray[np.unsignedinteger],
    *,
    itself: bool = False,
) -> NDArray[np.bool_]:
    # Which `candidates` (c, n) some of `others` (c, m) are at or below in every column
    if not candidates.size:
        return np.zeros(candidates.shape[1], bool)
    below = candidates[0][:, None] >= others[0]
    for candidate, other in zip(candidates[1:], others[1:], strict=True):
        below &= candidate[:, None] >= other
    if itself:
        np.fill_diagonal(below, False)
    return np.asarray(below.any(axis=1))
