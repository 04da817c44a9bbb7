"""A distinct block, once: its operators are eliminated to a matrix over the layouts of its
boundary, A[s][t].

A[s][t] is a small frontier: the plans of the block in which its first operator has configuration s
and its last one t and which no other such plan beats in anything that the chain asks of a block.
ZeRO and recomputation do not show at the boundary, so many configurations of operators become few.
`search_chain` joins blocks by V[n + 1][t] = union over s of V[n][s] * A[s][t].
"""

from __future__ import annotations

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts
from lightning_topt.costs.cost_table import Array, CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.layers import (
    choices,
    without_dead_ends,
    without_dead_groups,
    without_dominated,
)
from lightning_topt.frontier.pareto import Rows
from lightning_topt.frontier.sweep import sweep
from lightning_topt.frontier.table_layers import TableGraph, table_layers

_SECONDS, _BYTES = ("seconds", "backward", "exchange"), ("static", "kept", "late", "hump")


def eliminate_block(
    table: CostTable, *, first: str, last: str, max_branches: int = 2**16
) -> BlockCosts:
    """Return a block for a `ChainTable` whose configurations are the plans in A[s][t], with s as
    `inputs` and t as `outputs`.

    Args:
        table: the block's operators, any graph. The columns of seconds are (seconds, backward,
            exchange), those of bytes (static, kept, late, hump, ...) of `BlockCosts`; they add up
            over operators. Several humps are points in time inside the block, of which the largest
            counts.
        first: the operator whose configurations are the layouts of the block's input.
        last: the one whose configurations are those of its output; it may be the same.
        max_branches: as in `search_frontier`.

    ``configs[i]`` is a tuple of configuration indices in the order of ``table.operators``. Raises
    ValueError for other columns, for operators that do not exist or are joined in more than
    `max_branches` ways, and when all plans are forbidden.
    """
    if len(table.fixed_seconds) != len(_SECONDS) or len(table.fixed_bytes) < len(_BYTES):
        raise ValueError(
            f"a block's costs have the columns {_SECONDS} and {_BYTES} (or more humps)"
        )
    names = [operator.name for operator in table.operators]
    if missing := {first, last} - set(names):
        raise ValueError(f"the block has no operators {sorted(missing)}; it has {names}")
    kept = tuple(dict.fromkeys((first, last)))
    graph = TableGraph(_as_the_chain_adds(table))
    order = graph.order(kept)
    if (most := graph.most_transitions(order, kept)) > max_branches:
        raise ValueError(
            f"the block's operators are joined in {most} ways, max_branches is {max_branches}; "
            "raise it"
        )
    layers = without_dead_ends(table_layers(graph, order=order, kept=kept))
    if not all(len(layer.source) for layer in layers):
        raise ValueError("infinite costs forbid every plan of the block")
    layers = without_dead_groups(without_dominated(layers))
    swept = sweep(layers)
    assert swept is not None
    plans = choices(layers, swept[2])[:, [1 + order.index(name) for name in names]]
    costs = _costs(table, plans)
    seconds, backward, exchange, static, kept_bytes, late = costs[:, :6].T
    return BlockCosts(
        configs=tuple(map(tuple, plans.tolist())),
        seconds=seconds,
        backward=backward,
        exchange=exchange,
        static=static,
        kept=kept_bytes,
        late=late,
        hump=costs[:, 6:].max(axis=1),
        inputs=plans[:, names.index(first)],
        outputs=plans[:, names.index(last)],
    )


def _costs(table: CostTable, plans: Rows) -> Array:
    """Return the costs (n, column)."""
    place = {operator.name: i for i, operator in enumerate(table.operators)}
    total = np.tile(np.concatenate([table.fixed_seconds, table.fixed_bytes]), (len(plans), 1))
    for operator in table.operators:
        total += np.concatenate([operator.seconds, operator.bytes], axis=1)[
            plans[:, place[operator.name]]
        ]
    for edge in table.edges:
        pairs = plans[:, place[edge.source]], plans[:, place[edge.target]]
        total += np.concatenate([edge.seconds, edge.bytes], axis=2)[pairs]
    return total


def _as_the_chain_adds(table: CostTable) -> CostTable:
    """The same plans in columns in which less is better, whatever the rest of the chain is: those
    of `chain_layers`.
    """
    return CostTable(
        tuple(
            OperatorCosts(o.name, o.configs, *_entries(o.seconds, o.bytes)) for o in table.operators
        ),
        tuple(EdgeCosts(e.source, e.target, *_entries(e.seconds, e.bytes)) for e in table.edges),
        *_entries(table.fixed_seconds, table.fixed_bytes),
    )


def _entries(seconds: Array, size: Array) -> tuple[Array, Array]:
    total, backward, exchange = (seconds[..., i] for i in range(3))
    static, kept, late = (size[..., i : i + 1] for i in range(3))
    times = np.stack([total, total - backward + exchange, total + exchange], axis=-1)
    return times, np.concatenate([static + late, static + kept, static + size[..., 3:]], axis=-1)
