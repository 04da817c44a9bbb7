"""Columns of a sum of parts that may become one, and the grid on which sums are exact.

The step's time is the *largest* of the path columns of a whole plan, its memory the largest of the moment columns. So
two columns of a kind to which everything that is still to be added contributes the same are replaced by their maximum.

Symbols: c columns (paths first, then moments), part i has costs (n_i, c), parts are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_topt.frontier.pareto import Array, Rows


def exact_grid(costs: Sequence[Array]) -> float:
    """A power of two so small that rounding `costs` to its multiples changes a sum of one row of each by about an ulp,
    and so large that all such sums are exact: then equal plans have equal costs, in whatever order they were added.
    """
    total = sum(float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) for part in costs)
    return float(2.0 ** (np.ceil(np.log2(total)) - 51)) if total > 0 else 1.0


def merge_plan(parts: Sequence[Array], *, kinds: Rows) -> list[Rows]:
    """For k = 0 ... len(parts): labels (c,), equal where columns get the same from the parts k, k + 1, ...

    `parts` have zeros in their first row (a constant difference between two columns then lies in what was added
    before). Labels count 0, 1, ... in the order in which columns show them first.
    """
    labels = [_first_seen(kinds.tolist())]
    for part in reversed(parts):
        keys = [(int(label), column.tobytes()) for label, column in zip(labels[-1], part.T + 0.0, strict=True)]
        labels.append(_first_seen(keys))
    return labels[::-1]


def merge(costs: Array, labels: Rows) -> Array:
    """The largest of the columns of `costs` (n, c) of each label: (n, number of labels)."""
    count = int(labels.max()) + 1
    if count == len(labels):
        return costs
    merged = np.full((len(costs), count), -np.inf)
    for column, label in zip(costs.T, labels, strict=True):
        np.maximum(merged[:, label], column, out=merged[:, label])
    return merged


def _first_seen(keys: Sequence[object]) -> Rows:
    index: dict[object, int] = {}
    return np.array([index.setdefault(key, len(index)) for key in keys], dtype=np.intp)
