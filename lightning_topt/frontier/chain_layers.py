"""ChainTable -> layers: blocks are folded from the last to the first, the order of the backward pass.

Two pairs of columns sum up the blocks folded so far, whatever their number. With the names of `BlockCosts`:

    C  computation        C' = C + seconds
    F  network finishes   F' = max(F - backward, C) + seconds + exchange
    L  level              L' = L + static + late
    x  peak               x' = max(x + kept, L + hump) + static

C and F start from fixed_seconds, L and x from fixed_bytes; the step takes F (never less than C), and x or L + update_bytes.
Edges add to C and F, or to L and x. That F counts from the start of the step, not from C, makes more plans comparable.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, BlockEdge, ChainTable
from lightning_topt.frontier.layers import Layer, exact_grid
from lightning_topt.frontier.pareto import Array

C, F, L, X = range(4)
START, END = np.array([C, F, C, L, X, L]), np.array([C, F, F, L, X, X])


def chain_layers(table: ChainTable) -> list[Layer]:
    """Return the start, one layer for each block from the last to the first, and the end; costs are rounded to a grid.

    Equal blocks between equal edges share one layer.
    """
    grids = _grids(table)
    fixed = np.array([[table.fixed_seconds, table.fixed_seconds, table.fixed_bytes, table.fixed_bytes]])
    update = np.array([[0.0, 0.0, table.update_bytes, 0.0]])
    grid = np.array(grids)[[0, 0, 1, 1]]
    one, pair, four = np.zeros(1, np.intp), np.array([0, 0, 1, 1]), np.array([C, F, L, X])
    layers = [Layer(one, one, np.round(fixed / grid) * grid, pair, four, one, 1, 4)]
    made: dict[tuple[int, int, int], Layer] = {}
    for n in range(len(table.order) - 1, -1, -1):
        behind = table.edge(n) if n + 1 < len(table.order) else None
        before = table.edge(n - 1) if n else None
        key = table.order[n], id(behind), id(before)
        if key not in made:
            made[key] = _block_layer(table.block(n), behind, before, grids)
        layers.append(made[key])
    return [*layers, Layer(one, one, np.round(update / grid) * grid, four, pair, one, 1, 2)]


def _block_layer(
    block: BlockCosts, behind: BlockEdge | None, before: BlockEdge | None, grids: tuple[float, float]
) -> Layer:
    """Transitions from the input layout of the block behind to that of this one; without an edge there is one group."""
    entries = _entries(block, grids)
    groups = 1 if behind is None else behind.seconds.shape[1]
    choice, source = (rows.ravel() for rows in np.indices((len(entries), groups)))
    values = entries[choice]
    if behind is not None:
        values = values + _edge_entries(behind, grids)[block.layouts("outputs")[choice], source]
    allowed = np.flatnonzero(np.isfinite(values).all(axis=1))
    choice, source = choice[allowed], source[allowed]
    target = np.zeros_like(choice) if before is None else block.layouts("inputs")[choice]
    return Layer(
        source, target, values[allowed], START, END, choice, 1 if before is None else before.seconds.shape[1], 4
    )


def _entries(block: BlockCosts, grids: tuple[float, float]) -> Array:
    seconds, backward, exchange = (
        np.round(part / grids[0]) * grids[0] for part in (block.seconds, block.backward, block.exchange)
    )
    static, kept, late, hump = (
        np.round(part / grids[1]) * grids[1] for part in (block.static, block.kept, block.late, block.hump)
    )
    last = (static + late, static + kept, static + hump)
    return np.stack([seconds, seconds - backward + exchange, seconds + exchange, *last], axis=1)


def _edge_entries(edge: BlockEdge, grids: tuple[float, float]) -> Array:
    """(config, next config, entry)"""
    parts = (np.round(edge.seconds / grids[0]) * grids[0], np.round(edge.bytes / grids[1]) * grids[1])
    return np.repeat(np.stack(parts, axis=-1), 3, axis=-1)


def _grids(table: ChainTable) -> tuple[float, float]:
    seconds, size = [np.array([table.fixed_seconds])], [np.array([table.fixed_bytes, table.update_bytes])]
    for n in range(len(table.order)):
        block, edge = table.block(n), table.edge(n) if n + 1 < len(table.order) else None
        seconds += [block.seconds, block.backward, block.exchange]
        size += [block.static, block.kept, block.late, block.hump]
        if edge is not None:
            seconds.append(edge.seconds)
            size.append(edge.bytes)
    return exact_grid(seconds), exact_grid(size)
