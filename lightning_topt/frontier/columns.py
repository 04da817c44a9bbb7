"""Fewer columns: of a boundary between two layers, only those that can still matter and can differ.

For two columns a and b of a boundary, `past` and `future` are lower bounds over all partial plans
of how much b is above a there, and of how much more b gains than a from there on (along the entries
on which each gains most). Then, exactly:

    past[a, b] + future[a, b] >= 0   a never decides: it is left out
    future[a, b] = -future[b, a]     both gain the same: only the larger one counts, they become one
    past[a, b] = -past[b, a]         they differ by a constant so far: one is kept, the other
                                     derived where they part
    future[a, b] = d                 a below b + d never decides: in every partial plan it may be
                                     set to that (`raises`)

With a column for each point of a step's timeline this leaves a few at each boundary, whatever the
depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lightning_topt.frontier.layers import Layer, mask
from lightning_topt.frontier.pareto import Array, Rows

_CHUNK = 2**20  # numbers held at once
_APART = np.where(np.eye(2, dtype=bool), 0.0, -np.inf)  # seconds and bytes are never compared


def reduce_columns(layers: Sequence[Layer]) -> list[Layer]:
    """Return the same layers with fewer columns at the boundaries between them."""
    reduced, past, future = list(layers), _APART, _futures(layers)
    made: dict[tuple[int, bytes, bytes, bool], Layer] = {}
    # what lies before n is reduced already, what lies behind is not
    for n in range(1, len(layers)):
        above = _step(
            reduced[n - 1].values,
            reduced[n - 1].end,
            reduced[n - 1].start,
            past,
            layers[n - 1].columns,
        )
        keep = _needed(above, future[n], layers[n])
        into, offset_into, out, offset_out = _merge(above, future[n], keep)
        kept = reduced[n - 1] = _redirect_once(made, reduced[n - 1], into, offset_into, after=True)
        reduced[n] = _redirect_once(made, reduced[n], out, offset_out, after=False)
        past = _step(kept.values, kept.end, kept.start, past, kept.columns)
    return reduced


def raises(layers: Sequence[Layer]) -> list[Array]:
    """Return for every boundary (c, c): column a may be set to at least column b plus entry [a, b];
    -inf says nothing.
    """
    return [np.where(np.eye(len(table), dtype=bool), -np.inf, table) for table in _futures(layers)]


def _futures(layers: Sequence[Layer]) -> list[Array]:
    """Return `future` (c, c) of every boundary, before the first layer to after the last."""
    found, counts = [_APART], [2, *(layer.columns for layer in layers)]
    for layer, count in zip(reversed(layers), counts[-2::-1], strict=True):
        found.append(_step(layer.values, layer.start, layer.end, found[-1], count))
    return found[::-1]


def _step(values: Array, own: Rows, other: Rows, known: Array, count: int) -> Array:
    """Return (count, count): least over transitions and entries i of column a of the largest over
    entries j of column b of

    values[j] - values[i] + known[other[i], other[j]]. Inf where column a has no entry, -inf where b
    has none.
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
    found[~mask(present, count)] = np.inf
    found[present[:, None], present] = np.minimum.reduceat(least, first, axis=0)
    return found


def _needed(past: Array, future: Array, after: Layer) -> Rows:
    """Columns that may decide, in ascending order."""
    gone = ~mask(after.start, len(past))
    with np.errstate(invalid="ignore"):
        never = past + future >= 0
    np.fill_diagonal(never, False)
    for a in np.flatnonzero(never.any(axis=1) & ~gone):
        gone[a] = bool((never[a] & ~gone).any())
    return np.flatnonzero(~gone)


def _merge(past: Array, future: Array, keep: Rows) -> tuple[Rows, Array, Rows, Array]:
    """For every column its new number (-1: none) and what it is above that one, for entries into it
    and for those out of it.
    """
    count = len(past)
    into, out = np.full(count, -1), np.full(count, -1)
    offset_into, offset_out = np.zeros(count), np.zeros(count)
    gains = {
        int(a): int(keep[np.argmax(future[a, keep] == -future[keep, a])]) for a in keep
    }  # the first that gains the same
    alone = [a for a in gains if list(gains.values()).count(a) == 1 and gains[a] == a]
    kept = 0
    for a, b in gains.items():
        same = next(
            (c for c in alone if c < a and out[c] == into[c] >= 0 and past[a, c] == -past[c, a]),
            None,
        )
        if b != a:
            into[a], offset_into[a] = into[b], future[b, a]
        elif a in alone and same is not None:
            out[a], offset_out[a] = out[same], past[same, a]
        else:
            into[a] = out[a] = kept
            kept += 1
    return into, offset_into, out, offset_out


def _redirect_once(
    made: dict[tuple[int, bytes, bytes, bool], Layer],
    layer: Layer,
    number: Rows,
    offset: Array,
    *,
    after: bool,
) -> Layer:
    """The layer with other columns after or before it; one object for equal layers that change
    alike.
    """
    if not offset.any() and (number == np.arange(len(number))).all():
        return layer
    key = id(layer), number.tobytes(), offset.tobytes(), after
    if key not in made:
        flipped = layer if after else _flip(layer, len(number))
        found = _redirect(flipped, number, offset)
        made[key] = found if after else _flip(found, layer.columns)
    return made[key]


def _redirect(layer: Layer, number: Rows, offset: Array) -> Layer:
    """Entries end in column ``number[end]`` with `offset` added to their values; of several between
    two columns one is left.
    """
    rows = np.flatnonzero(number[layer.end] >= 0)
    start, end = layer.start[rows], number[layer.end[rows]]
    values = layer.values[:, rows] + offset[layer.end[rows]]
    columns = int(number.max()) + 1
    cells, first = np.unique(start * columns + end, return_inverse=True)
    if len(cells) < len(rows):
        order = np.argsort(first, kind="stable")
        values = np.maximum.reduceat(
            values[:, order], np.searchsorted(first[order], np.arange(len(cells))), axis=1
        )
    else:
        values = values[:, np.argsort(first)]
    return dataclasses.replace(
        layer, start=cells // columns, end=cells % columns, values=values, columns=columns
    )


def _flip(layer: Layer, columns: int) -> Layer:
    return dataclasses.replace(layer, start=layer.end, end=layer.start, columns=columns)
