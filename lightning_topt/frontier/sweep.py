"""The search in its plainest form, by NumPy: layer after layer all partial plans, without those
that others beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_topt.frontier.layers import Layer, apply
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows, pareto_rows_2

_PER_GROUP = 2**11  # what the calls for one group cost, in numbers
_PER_COLUMNS = 16  # what comparing more than two columns costs, in passes over them


def sweep(
    layers: Sequence[Layer], *, lifts: Sequence[Array] | None = None, work: float = np.inf
) -> tuple[Array, Rows, Rows] | None:
    """Return the columns (n, c), groups (n,) and transitions (n, N) of the best plans of every last
    group; None above `work`.

    `lifts` are those of `columns.raises`. `work` counts the numbers computed, with a charge for
    every group of a layer.
    """
    work -= sum(_PER_GROUP * layer.groups + layer.values.size for layer in layers)
    states, group, back = np.zeros((1, 2)), np.zeros(1, np.intp), []
    for n, layer in enumerate(layers):
        counts = np.bincount(group, minlength=int(layer.source.max(initial=0)) + 1)
        work -= (
            int(counts[layer.source].sum())
            * len(layer.start)
            * (1 if layer.columns == 2 else _PER_COLUMNS)
        )
        if work < 0:
            return None
        parent, via = pairs(group, layer.source)
        after = apply(layer, states[parent], via)
        after = after if lifts is None else lifted(after, lifts[n + 1])
        kept = _minimal(after, layer.target[via])
        states, group = after[kept], layer.target[via[kept]]
        back.append((parent[kept], via[kept]))
    return states, group, follow(back, np.arange(len(states)))


def pairs(group: Rows, source: Rows) -> tuple[Rows, Rows]:
    """Return (state, transition) for all transitions from the `group` (n,) of every state."""
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], group)
    count = np.searchsorted(source[order], group, side="right") - first
    state = np.repeat(np.arange(len(group)), count)
    within = np.arange(len(state)) - np.repeat(np.cumsum(count) - count, count)
    return state, order[first[state] + within]


def lifted(states: Array, lift: Array) -> Array:
    """Return the columns (n, c), each at least the others plus what `lift` (c, c) says."""
    raised = states
    for a, b in np.argwhere(np.isfinite(lift)):
        raised = states.copy() if raised is states else raised
        np.maximum(raised[:, a], states[:, b] + lift[a, b], out=raised[:, a])
    return raised


def follow(back: Sequence[tuple[Rows, Rows]], rows: Rows) -> Rows:
    """Return the transitions (n, N) that led to the states `rows` (n,) after the last layer, by
    back-pointers.
    """
    plans = np.empty((len(rows), len(back)), np.intp)
    for n in range(len(back) - 1, -1, -1):
        parent, via = back[n]
        plans[:, n] = via[rows]
        rows = parent[rows].astype(np.intp)
    return plans


def _minimal(states: Array, group: Rows) -> Rows:
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
