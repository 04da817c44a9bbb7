"""Layers of transitions between groups of partial plans, and what no best plan needs of them.

A search takes one decision per layer, in (max, +) costs. A partial plan is in a *group* (the table
that it is a plan of) and has a vector of *columns*. Transition j of a layer leads from group
``source[j]`` to group ``target[j]`` and changes the columns by

    after[b] = max over entries e with end[e] = b of  before[start[e]] + values[j, e]

Costs that add up are entries from a column to itself. A pair of (level, peak) columns has a third
entry, from level to peak. Such maps are monotone, so partial plans of a group are compared column
by column. Before the first layer and after the last there is one group, and the columns are
(seconds, bytes).

`reduce_layers` takes out, exactly, transitions and columns that cannot matter; what is left is
searched by `chain_search`.

Symbols: N layers, T transitions, E entries, G groups, c columns. All `values` are finite and on a
grid where sums are exact (`exact_grid`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows

_CHUNK = 2**20  # numbers held at once to compare all pairs of columns
_APART = np.where(np.eye(2, dtype=bool), 0.0, -np.inf)  # seconds and bytes are never compared


@dataclass(frozen=True, eq=False)
class Layer:
    """One decision of a search.

    `source` and `target` (T,) are groups, `values` (T, E) and `start`, `end` (E,) the entries,
    `choice` (T,) is what each transition decides. `groups` and `columns` are their numbers after
    the layer.
    """

    source: Rows
    target: Rows
    values: Array
    start: Rows
    end: Rows
    choice: Rows
    groups: int
    columns: int

    def take(self, rows: Rows) -> Layer:
        """Return the layer with these transitions only.

        Itself where those are all: equal blocks go on sharing one layer.
        """
        if len(rows) == len(self.source):
            return self
        return dataclasses.replace(
            self,
            source=self.source[rows],
            target=self.target[rows],
            values=self.values[rows],
            choice=self.choice[rows],
        )

    @property
    def cells(self) -> Rows:
        """One number (T,) for each pair of groups."""
        return self.source * self.groups + self.target


def apply(layer: Layer, states: Array, transitions: Rows) -> Array:
    """Return the columns (n, c') after `transitions` (n,) of partial plans `states` (n, c)."""
    # a column is the largest of all entries that end in it
    after = np.full((len(states), layer.columns), -np.inf)
    for e, (start, end) in enumerate(zip(layer.start, layer.end, strict=True)):
        np.maximum(
            after[:, end], states[:, start] + layer.values[transitions, e], out=after[:, end]
        )
    return after


def choices(layers: Sequence[Layer], plans: Rows) -> Rows:
    """Return what each layer decides (n, N) in plans given as transitions (n, N)."""
    return np.stack([layer.choice[plans[:, n]] for n, layer in enumerate(layers)], axis=1)


def exact_grid(costs: Sequence[Array]) -> float:
    """Return a power of two on whose multiples all sums of one of each of `costs` are exact.

    It is so small that rounding to it changes a sum by about an ulp. Equal plans then have equal
    costs, in whatever order they were added.
    """
    # sums up to the total take 50 of the 53 bits of a number
    total = sum(float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) for part in costs)
    return float(2.0 ** (np.ceil(np.log2(total)) - 50)) if total > 0 else 1.0


def reduce_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without what no best plan needs; all are empty when there is no plan."""
    # columns may make more transitions equal
    layers = without_dead_ends(layers)
    if not all(len(layer.source) for layer in layers):
        return layers
    return without_dominated(reduce_columns(without_dominated(layers)))


# ---- Fewer transitions.


def without_dead_ends(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without transitions that no plan can take.

    All are empty when there is no plan.
    """
    # forward: from the start; backward: to the end
    kept, reached = [], np.ones(1, bool)
    for layer in layers:
        kept.append(layer.take(np.flatnonzero(reached[layer.source])))
        reached = _mask(kept[-1].target, layer.groups)
    for n in range(len(kept) - 1, -1, -1):
        kept[n] = kept[n].take(np.flatnonzero(reached[kept[n].target]))
        groups = kept[n - 1].groups if n else 1
        reached = _mask(kept[n].source, groups)
    return kept


def without_dominated(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without dominated transitions.

    Another one between the same groups beats those in every entry.
    """
    made = {
        id(layer): _without_dominated(layer)
        for layer in {id(layer): layer for layer in layers}.values()
    }
    return [made[id(layer)] for layer in layers]


def _without_dominated(layer: Layer) -> Layer:
    # transitions between the same two groups lie side by side
    order = np.argsort(layer.cells, kind="stable")
    first = np.flatnonzero(np.diff(layer.cells[order], prepend=-1))
    if len(first) == len(order):
        return layer
    kept = [rows[pareto_rows(layer.values[rows])] for rows in np.split(order, first[1:])]
    return layer.take(np.sort(np.concatenate(kept)))


# ---- Fewer columns: only those that can still matter.
#
# For two columns a and b of a boundary, `past` and `future` are lower bounds over all partial plans
# of how much b is above a there, and of how much more b gains than a from there on (along the
# entries on which each gains most). Then, exactly:
#
#     past[a, b] + future[a, b] >= 0     a never decides: it is left out
#     future[a, b] = d                   a below b + d never decides: in every partial plan it may
#                                        be set to that (`column_lifts`)
#
# So columns that gain the same from a boundary on are equal there.


def reduce_columns(layers: Sequence[Layer]) -> list[Layer]:
    """Return the same layers without columns that never decide."""
    reduced, past, future = list(layers), _APART, _futures(layers)
    made: dict[tuple[int, bytes, bool], Layer] = {}
    # what lies before n is reduced already, what lies behind is not
    for n in range(1, len(layers)):
        before, count = reduced[n - 1], layers[n - 1].columns
        above = _least_differences(before.values, before.end, before.start, past, count)
        keep = _deciding(above, future[n], layers[n])
        past = above[np.ix_(keep, keep)]
        if len(keep) < count:
            reduced[n - 1] = _with_columns_once(made, before, keep, after=True)
            reduced[n] = _with_columns_once(made, reduced[n], keep, after=False)
    return reduced


def column_lifts(layers: Sequence[Layer]) -> list[Array]:
    """Return for every boundary (c, c): column a may be set to column b plus entry [a, b] at least.

    -inf says nothing.
    """
    return [np.where(np.eye(len(table), dtype=bool), -np.inf, table) for table in _futures(layers)]


def _futures(layers: Sequence[Layer]) -> list[Array]:
    # `future` (c, c) of every boundary, before the first layer to after the last
    found, counts = [_APART], [2, *(layer.columns for layer in layers)]
    for layer, count in zip(reversed(layers), counts[-2::-1], strict=True):
        found.append(_least_differences(layer.values, layer.start, layer.end, found[-1], count))
    return found[::-1]


def _least_differences(values: Array, own: Rows, other: Rows, known: Array, count: int) -> Array:
    """Return (count, count): how much column b gains more than column a, at least.

    This is the least over transitions and entries i of column a of the largest over entries j of
    column b of ``values[j] - values[i] + known[other[i], other[j]]``. Inf where column a has no
    entry, -inf where b has none.
    """
    order = np.argsort(own, kind="stable")
    values, other = values[:, order], other[order]
    present, first = np.unique(own[order], return_index=True)
    known = known[other[:, None], other]
    least = np.full((len(order), len(present)), np.inf)
    step = max(1, _CHUNK // len(order) ** 2)
    for start in range(0, len(values), step):
        some = values[start : start + step]
        more = some[:, None, :] - some[:, :, None] + known  # (transition, i, j)
        if len(present) < len(order):
            more = np.maximum.reduceat(more, first, axis=2)
        least = np.minimum(least, more.min(axis=0, initial=np.inf))
    found = np.full((count, count), -np.inf)
    found[~_mask(present, count)] = np.inf
    found[present[:, None], present] = np.minimum.reduceat(least, first, axis=0)
    return found


def _deciding(past: Array, future: Array, after: Layer) -> Rows:
    # The columns that may decide, in ascending order
    gone = ~_mask(after.start, len(past))
    with np.errstate(invalid="ignore"):
        never = past + future >= 0
    np.fill_diagonal(never, False)
    for a in np.flatnonzero(never.any(axis=1) & ~gone):
        gone[a] = bool((never[a] & ~gone).any())
    return np.flatnonzero(~gone)


def _with_columns_once(
    made: dict[tuple[int, bytes, bool], Layer], layer: Layer, keep: Rows, *, after: bool
) -> Layer:
    """Return the layer with the columns `keep` alone, after it or before it.

    Equal layers that change alike go on sharing one object.
    """
    key = id(layer), keep.tobytes(), after
    if key not in made:
        entries = np.flatnonzero(np.isin(layer.end if after else layer.start, keep))
        start, end = layer.start[entries], layer.end[entries]
        if after:
            end = np.searchsorted(keep, end)
        else:
            start = np.searchsorted(keep, start)
        made[key] = dataclasses.replace(
            layer,
            values=layer.values[:, entries],
            start=start,
            end=end,
            columns=len(keep) if after else layer.columns,
        )
    return made[key]


def _mask(indices: Rows, count: int) -> NDArray[np.bool_]:
    # (count,) whether a number is among `indices`
    found = np.zeros(count, bool)
    found[indices] = True
    return found
