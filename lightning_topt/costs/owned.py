"""What the busiest rank owns under ZeRO 1, as columns that add over blocks.

Parameters of stage-1 blocks go whole to ranks by longest processing time first (`graph.ownership`), so the busiest
rank's share depends on which blocks take part. With parameters 1, 2, ... in that order (largest first), sizes s, T the
set that takes part and N ranks, a parameter goes to the rank with the least load, which is at most the average so far:

    busiest(T) <= max over j in T of  sum(s_i for i < j in T) / N + s_j           (Graham 1969, section 2)

Each j is one column that adds over blocks. A few columns with the largest excess over the average are kept as they are,
and all others are replaced by the average plus their largest excess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.graph.op_graph import OpGraph, Parameter
from lightning_topt.graph.ownership import assign_owners

_MAX_EXACT_COLUMNS = 3


@dataclass(frozen=True)
class OwnedBound:
    """An upper bound on the elements that the busiest rank owns: max over columns of ``fixed + sum of blocks``.

    `blocks` (column,) by block name for a block of stage 1, `fixed` (column,) for every plan.
    """

    blocks: dict[str, Array]
    fixed: Array


def busiest_load(graph: OpGraph, *, blocks: Iterable[str], world_size: int, loads: Mapping[str, float]) -> float:
    """The largest sum of `loads` (by parameter name) over what one rank owns, when `blocks` are of stage 1."""
    chosen = set(blocks)
    sizes = {p.name: p.numel for p in graph.parameters if p.trainable and p.block in chosen}
    totals = [0.0] * world_size
    for name, rank in assign_owners(sizes, world_size).items():
        totals[rank] += loads[name]
    return max(totals)


def bound_owned_elements(graph: OpGraph, *, world_size: int, any_owned: bool = True) -> OwnedBound:
    """The columns described above, at most four; one of zeros when no block may be of stage 1."""
    trainable = [p for p in graph.parameters if p.trainable and any_owned and world_size > 1]
    order = sorted(trainable, key=lambda p: (-p.numel, p.name))
    excess = {p.name: _excess(p, order[index:], world_size) for index, p in enumerate(order)}
    by_excess = sorted((p for p in order if excess[p.name] > 0), key=lambda p: -excess[p.name])
    exact, rest = by_excess[:_MAX_EXACT_COLUMNS], by_excess[_MAX_EXACT_COLUMNS:]
    blocks = {block.name: np.zeros(len(exact) + 1) for block in graph.blocks}
    for column, last in enumerate(exact):
        for parameter in order[: order.index(last)]:
            blocks[parameter.block][column] += parameter.numel / world_size
        blocks[last.block][column] += last.numel
    for parameter in order:
        blocks[parameter.block][-1] += parameter.numel / world_size
    fixed = np.zeros(len(exact) + 1)
    fixed[-1] = max((excess[p.name] for p in rest), default=0.0)
    return OwnedBound(blocks, fixed)


def _excess(parameter: Parameter, from_here: list[Parameter], world_size: int) -> float:
    """How far the column of `parameter` exceeds the average of any T that holds its block."""
    return parameter.numel - sum(p.numel for p in from_here if p.block == parameter.block) / world_size
