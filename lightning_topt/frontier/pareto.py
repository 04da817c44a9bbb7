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


def pareto_rows(costs: Array) -> Rows:
    """Return indices of the Pareto-minimal rows of `costs` (n, c), ascending.

    Of equal rows the first is kept.
    """
    if len(costs) <= _FEW:
        below = np.ones((len(costs), len(costs)), bool)  # (row, row that it is at or below)
        for column in costs.T:
            below &= column[:, None] <= column
        earlier = np.tri(len(costs), k=-1, dtype=bool).T
        return np.flatnonzero(~(below & (~below.T | earlier)).any(axis=0))
    # in the order of rows only an earlier one can dominate another: the first that is left stays
    kept: list[np.intp] = []
    left = np.lexsort(costs.T[::-1])
    while len(left):
        kept.append(left[0])
        left = left[(costs[left] < costs[left[0]]).any(axis=1)]
    return np.sort(kept)


def pareto_rows_2(first: Array, second: Array) -> Rows:
    """Return `pareto_rows` of two columns (n,): sort and sweep.

    `first` ascends in their order, and `second` descends.
    """
    order = np.lexsort((second, first))
    values = second[order]
    keep = np.ones(len(order), bool)
    keep[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return order[keep]
