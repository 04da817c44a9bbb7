"""ChainTable -> layers: blocks are folded from the last to the first, the order of the backward
pass.

Five columns sum up the blocks folded so far, whatever their number. With the names of `BlockCosts`:

    C  computation        C' = C + seconds
    F  network finishes   F' = max(F - backward, C) + seconds + exchange
    L  level              L' = L + static + late
    x  peak of backward   x' = max(x + kept, L + hump) + static
    z  peak of forward    z' = max(z + held, L + forward_hump) + static

C and F start from fixed_seconds, L, x and z from fixed_bytes; the step takes F (never less than C),
and the largest of x, z and L + update_bytes. z is left out where forward takes the same as
backward. Edges add to C and F, or to L, x and z. That F counts from the start of the step, not from
C, makes more plans comparable.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, BlockEdge, ChainTable
from lightning_topt.frontier.layers import Layer, exact_grid
from lightning_topt.frontier.pareto import Array

C, F, L, X, Z = range(5)
START, END = np.array([C, F, C, L, X, L, Z, L]), np.array([C, F, F, L, X, X, Z, Z])
_FINAL = np.array([0, 0, 1, 1, 1])  # what becomes of the columns: seconds, bytes


def chain_layers(
    table: ChainTable, *, grids: tuple[float, float] | None = None, columns: int | None = None
) -> list[Layer]:
    """Return the start, one layer for each block from the last to the first, and the end; costs are
    rounded to `grids`.

    Equal blocks between equal edges share one layer. `grids` (seconds, bytes) and the number of
    `columns` are those that the table needs (`exact_grids`, `column_count`), or, beside other
    tables, all of them.
    """
    grids = exact_grids(table) if grids is None else grids
    count = column_count(table) if columns is None else columns
    fixed = np.array([[table.fixed_seconds] * 2 + [table.fixed_bytes] * (count - 2)])
    update = np.where(np.arange(count) == L, table.update_bytes, 0.0)[None]
    grid = np.array(grids)[_FINAL[:count]]
    one, final, own = np.zeros(1, np.intp), _FINAL[:count], np.arange(count)
    layers = [Layer(one, one, np.round(fixed / grid) * grid, final, own, one, 1, count)]
    made: dict[tuple[int, int, int], Layer] = {}
    for n in range(len(table.order) - 1, -1, -1):
        behind = table.edge(n) if n + 1 < len(table.order) else None
        before = table.edge(n - 1) if n else None
        key = table.order[n], id(behind), id(before)
        if key not in made:
            made[key] = _block_layer(table.block(n), behind, before, grids, count)
        layers.append(made[key])
    return [*layers, Layer(one, one, np.round(update / grid) * grid, own, final, one, 1, 2)]


def column_count(table: ChainTable) -> int:
    """Return how many of the five columns the chain needs: z only where forward takes other bytes
    than backward.
    """
    return 5 if any(block.splits_forward for block in table.blocks) else 4


def waiting_layer(columns: int) -> Layer:
    """Return a layer that decides nothing and changes no column, between boundaries with one
    group.
    """
    one, used = np.zeros(1, np.intp), np.flatnonzero(columns > END)
    return Layer(one, one, np.zeros((1, len(used))), START[used], END[used], one, 1, columns)


def _block_layer(
    block: BlockCosts,
    behind: BlockEdge | None,
    before: BlockEdge | None,
    grids: tuple[float, float],
    columns: int,
) -> Layer:
    """Transitions from the input layout of the block behind to that of this one; without an edge
    there is one group.
    """
    entries = _entries(block, grids)
    groups = 1 if behind is None else behind.seconds.shape[1]
    choice, source = (rows.ravel() for rows in np.indices((len(entries), groups)))
    values = entries[choice]
    if behind is not None:
        values = values + _edge_entries(behind, grids)[block.layouts("outputs")[choice], source]
    allowed = np.flatnonzero(np.isfinite(values).all(axis=1))
    choice, source = choice[allowed], source[allowed]
    target = np.zeros_like(choice) if before is None else block.layouts("inputs")[choice]
    used = np.flatnonzero(columns > END)
    groups = 1 if before is None else before.seconds.shape[1]
    return Layer(
        source, target, values[allowed][:, used], START[used], END[used], choice, groups, columns
    )


def _entries(block: BlockCosts, grids: tuple[float, float]) -> Array:
    seconds, backward, exchange = (
        np.round(part / grids[0]) * grids[0]
        for part in (block.seconds, block.backward, block.exchange)
    )
    static, late, *peaks = (
        np.round(block.cost(name) / grids[1]) * grids[1]
        for name in ("static", "late", "kept", "hump", "held", "forward_hump")
    )
    last = (static + late, *(static + peak for peak in peaks))
    return np.stack([seconds, seconds - backward + exchange, seconds + exchange, *last], axis=1)


def _edge_entries(edge: BlockEdge, grids: tuple[float, float]) -> Array:
    """Return the entries (config, next config, entry)."""
    parts = (
        np.round(edge.seconds / grids[0]) * grids[0],
        np.round(edge.bytes / grids[1]) * grids[1],
    )
    return np.repeat(np.stack(parts, axis=-1), [3, len(END) - 3], axis=-1)


def exact_grids(table: ChainTable) -> tuple[float, float]:
    """Return grids of seconds and bytes on which all sums of the chain are exact, see
    `exact_grid`.
    """
    seconds, size = (
        [np.array([table.fixed_seconds])],
        [np.array([table.fixed_bytes, table.update_bytes])],
    )
    for index, count in Counter(table.order).items():
        block = table.blocks[index]
        seconds += [count * part for part in (block.seconds, block.backward, block.exchange)]
        size += [
            count * block.cost(name)
            for name in ("static", "kept", "late", "hump", "held", "forward_hump")
        ]
    for edge in table.edges:
        if edge is not None:
            seconds.append(edge.seconds)
            size.append(edge.bytes)
    return exact_grid(seconds), exact_grid(size)
