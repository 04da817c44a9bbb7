"""The search walks over layers of transitions between groups of partial plans, with (max, +) costs.

A partial plan is in a *group* (the configurations that later costs ask for) and has a vector of
*columns*. A layer takes one decision: its transition j leads from group ``source[j]`` to group
``target[j]`` and changes the columns by

    after[b] = max over entries e with end[e] = b of  before[start[e]] + values[j, e]

Costs that add up are entries from a column to itself; a pair of (level, peak) columns has a third
entry, from level to peak; columns that may be merged have entries that end in the same column. Such
maps are monotone, so partial plans of a group are compared column by column. Before the first layer
and after the last there is one group, and the columns are (seconds, bytes).

Symbols: N layers, T transitions, E entries, G groups, c columns. All `values` are finite and on a
grid where sums are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows

_DENSE = 2**22  # numbers held at once to compare all groups of a boundary with each other
_FEW = 2**18  # the same for all transitions of a layer


@dataclass(frozen=True, eq=False)
class Layer:
    """One decision: `source`, `target` (T,), `values` (T, E), `start`, `end` (E,); `choice` (T,) is
    what it decides.

    `groups` and `columns` are their numbers after it.
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
        """Return the layer with these transitions only, itself where those are all: equal blocks go
        on sharing one.
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
    """Return the columns (n, c') after `transitions` (n,) of partial plans with columns `states`
    (n, c).
    """
    after = np.full((len(states), layer.columns), -np.inf)
    for e, (start, end) in enumerate(zip(layer.start, layer.end, strict=True)):
        np.maximum(
            after[:, end], states[:, start] + layer.values[transitions, e], out=after[:, end]
        )
    return after


def choices(layers: Sequence[Layer], plans: Rows) -> Rows:
    """Return what each layer decides (n, N) in plans given as transitions (n, N)."""
    return np.stack([layer.choice[plans[:, n]] for n, layer in enumerate(layers)], axis=1)


def mask(indices: Rows, count: int) -> NDArray[np.bool_]:
    """Return (count,) whether a number is among `indices`."""
    found = np.zeros(count, bool)
    found[indices] = True
    return found


def exact_grid(costs: Sequence[Array]) -> float:
    """Return a power of two so small that rounding to its multiples changes a sum of one of each of
    `costs` by about an ulp.

    It is so large that all such sums are exact: then equal plans have equal costs, in whatever
    order they were added.
    """
    total = sum(float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) for part in costs)
    return float(2.0 ** (np.ceil(np.log2(total)) - 50)) if total > 0 else 1.0


def without_dominated(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without transitions that another one between the same groups beats in every
    entry.
    """
    made = {id(layer): _minimal(layer) for layer in {id(layer): layer for layer in layers}.values()}
    return [made[id(layer)] for layer in layers]


def _minimal(layer: Layer) -> Layer:
    order = np.argsort(layer.cells, kind="stable")
    first = np.flatnonzero(np.diff(layer.cells[order], prepend=-1))
    counts = np.diff(first, append=len(order))
    if len(first) == len(order):
        return layer
    if len(first) > 1 and len(first) * counts.max() ** 2 * len(layer.start) <= _FEW:
        return layer.take(np.sort(order[_minimal_together(layer.values[order], counts)]))
    kept = [rows[pareto_rows(layer.values[rows])] for rows in np.split(order, first[1:])]
    return layer.take(np.sort(np.concatenate(kept)))


def _minimal_together(values: Array, counts: Rows) -> Rows:
    """The minimal rows of `values` (n, E) within each of several small groups of `counts` rows; of
    equal ones the first.
    """
    group = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((len(counts), counts.max(), values.shape[1]), np.inf)
    table[group, place] = values
    below = np.all(table[:, :, None] <= table[:, None], axis=-1)  # (group, row, other row)
    earlier = np.triu(np.ones(below.shape[1:], bool), 1)
    beaten = np.any(below & (earlier | ~np.swapaxes(below, 1, 2)), axis=1)
    return np.flatnonzero(~beaten[group, place])


def without_dead_groups(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without groups that another group of the same boundary can stand in for at
    no cost.

    Dead-end elimination (Goldstein, Biophysical Journal 66, 1994) for several costs: to pass
    through another group must not be dearer in any column, from whatever group the plan comes and
    to whatever group it goes.
    """
    kept, before = list(layers), 1
    for n in range(len(kept) - 1):
        first, second = kept[n], kept[n + 1]
        size = before * len(first.start) + second.groups * len(second.start)
        if (
            first.groups > 1
            and size * first.groups**2 <= _DENSE
            and _simple(first)
            and _simple(second)
        ):
            into = _dense(first, before).transpose(1, 0, 2)
            alive = ~_dead(
                into, _dense(second, first.groups), first.end, second.start, first.columns
            )
            kept[n] = first.take(np.flatnonzero(alive[first.target]))
            kept[n + 1] = second.take(np.flatnonzero(alive[second.source]))
        before = first.groups
    return kept


def without_dead_ends(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without transitions that no plan can take; all are empty when there is no
    plan.
    """
    kept, reached = [], np.ones(1, bool)
    for layer in layers:
        kept.append(layer.take(np.flatnonzero(reached[layer.source])))
        reached = mask(kept[-1].target, layer.groups)
    for n in range(len(kept) - 1, -1, -1):
        kept[n] = kept[n].take(np.flatnonzero(reached[kept[n].target]))
        groups = kept[n - 1].groups if n else 1
        reached = mask(kept[n].source, groups)
    return kept


def _simple(layer: Layer) -> bool:
    return len(np.unique(layer.cells)) == len(layer.cells) > 0


def _dense(layer: Layer, before: int) -> Array:
    """Return (G before, G after, E), inf where there is no transition."""
    values = np.full((before, layer.groups, layer.values.shape[1]), np.inf)
    values[layer.source, layer.target] = layer.values
    return values


def _dead(into: Array, out: Array, end: Rows, start: Rows, columns: int) -> NDArray[np.bool_]:
    """Return the groups (G,) that are not needed, from `into` (G, before, E) and `out` (G, after,
    E').
    """
    dead = np.asarray(
        ~(np.isfinite(into[..., 0]).any(axis=1) & np.isfinite(out[..., 0]).any(axis=1))
    )
    spare = np.zeros((2, len(into), len(into), columns))
    for side, values, column in ((0, into, end), (1, out, start)):
        with np.errstate(invalid="ignore"):  # inf - inf: neither group can go there
            more = np.nan_to_num(
                values[:, None] - values, nan=np.inf, posinf=np.inf, neginf=-np.inf
            ).min(axis=2)
        for e, c in enumerate(column):
            spare[side, ..., c] = (
                np.minimum(spare[side, ..., c], more[..., e]) if c in column[:e] else more[..., e]
            )
    with np.errstate(invalid="ignore"):
        beaten = (spare.sum(axis=0) >= 0).all(axis=2)  # (group, rival)
    for g in range(len(into)):
        dead[g] |= bool((beaten[g] & ~dead & (np.arange(len(into)) != g)).any())
    return dead
