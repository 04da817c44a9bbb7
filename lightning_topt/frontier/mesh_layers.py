"""Chains of several meshes -> layers of one network: its first decision is the mesh, its groups are
those of all chains side by side, and the ways through it meet again after the last block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.frontier.chain_layers import (
    chain_layers,
    column_count,
    exact_grids,
    waiting_layer,
)
from lightning_topt.frontier.layers import Layer
from lightning_topt.frontier.pareto import Rows


def mesh_layers(tables: Sequence[ChainTable]) -> list[Layer]:
    """Return the layers of `tables`, of which there is at least one; the first layer decides which
    table a plan is of.

    Chains with fewer blocks than others wait behind that: `blocks_of` leaves that out.
    """
    columns = max(map(column_count, tables))
    grids = np.max([exact_grids(table) for table in tables], axis=0)
    chains = [chain_layers(table, grids=(grids[0], grids[1]), columns=columns) for table in tables]
    depth = max(map(len, chains))
    waiting = waiting_layer(columns)
    chains = [
        [chain[0], *itertools.repeat(waiting, depth - len(chain)), *chain[1:]] for chain in chains
    ]
    made: dict[tuple[int, ...], Layer] = {}
    before, layers = [1] * len(tables), []
    for n, beside in enumerate(zip(*chains, strict=True)):
        key = tuple(map(id, beside))
        if key not in made:
            made[key] = _joined(beside, before, n, depth)
        layers.append(made[key])
        before = [layer.groups for layer in beside]
    return layers


def blocks_of(table: ChainTable, decided: Rows) -> Rows:
    """Return the configurations (n, block) of plans of `table` from what all layers decide (n,
    N).
    """
    return decided[:, -2 : -2 - len(table.order) : -1]


def _joined(beside: Sequence[Layer], before: Sequence[int], n: int, depth: int) -> Layer:
    """The layers of all tables at place `n` of `depth` as one."""
    counts = [len(layer.source) for layer in beside]
    table = np.repeat(np.arange(len(beside)), counts)
    source = np.concatenate([layer.source for layer in beside])
    target = np.concatenate([layer.target for layer in beside])
    first, last = n == 0, n + 1 == depth
    groups = [layer.groups for layer in beside]
    return Layer(
        source if first else source + _starts(before)[table],
        target if last else target + _starts(groups)[table],
        np.concatenate([layer.values for layer in beside]),
        beside[0].start,
        beside[0].end,
        table if first else np.concatenate([layer.choice for layer in beside]),
        1 if last else sum(groups),
        beside[0].columns,
    )


def _starts(counts: Sequence[int]) -> Rows:
    return np.cumsum([0, *counts[:-1]])
