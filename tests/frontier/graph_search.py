"""The frontier of a `CostTable`, operators joined in any way: the slow twin of `search_chain`.

Operators are decided one after another, on any graph. A group is a joint configuration of the
operators that are decided and still have an edge to one that is not (the separator). On a chain
that is one operator; branches, skips and rings have a few. When an operator's last edge is decided
it leaves the group, and of the plans that differ in it the best are kept: node, edge and branch
elimination (TensorOpt, arXiv 2004.10856, frontier tracking [recalled]) are that step with one, two
and several neighbours.

Where operators are joined in too many ways, edges are left out (`relax_table`), and the plans found
are repaired by single changes. `eliminate_block` makes a block of a chain of any graph.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts
from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.chain_search import Frontier, make_frontier
from lightning_topt.frontier.layer_search import Budget, search_layers, sweep
from lightning_topt.frontier.layers import (
    Layer,
    choices,
    exact_grid,
    without_dead_ends,
    without_dead_groups,
    without_dominated,
)
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2

_ENOUGH = 2**12  # transitions of a layer up to which no better order is sought
_PLANS = 128  # relaxed plans that are improved at a time
_ROUNDS = 20
_SECONDS, _BYTES = ("seconds", "backward", "exchange"), ("static", "kept", "late", "hump")


def search_frontier(
    table: CostTable,
    *,
    max_points: int = 2**20,
    max_branches: int = 2**16,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> Frontier:
    """Return every Pareto-minimal plan of `table` by memory ascending, as `search_chain` does.

    `max_branches` are the most joint configurations of operators that are distinguished at a time.
    A chain needs the product of two neighbours' numbers of configurations. Raises ValueError for
    limits that are not positive, and when an operator has no configuration or a cost of minus
    infinity.
    """
    if max_branches < 1:
        raise ValueError(f"max_branches must be at least 1, got {max_branches}")
    budget = Budget(max_points, max_seconds, max_bytes, epsilon)
    started = time.perf_counter()
    if any(len(operator.configs) == 0 for operator in table.operators):
        raise ValueError("an operator has no configuration")
    graph = TableGraph(table)
    order = graph.order(())
    if graph.most_transitions(order, ()) <= max_branches:
        chosen, error_bound = search_layers(table_layers(graph, order=order), budget)
    else:
        relaxed = relax_table(graph, max_branches)
        order = relaxed.graph.order(())
        chosen, error_bound = search_layers(table_layers(relaxed.graph, order=order), budget)
        chosen, error_bound = relaxed.repair(chosen[:, 1:-1], order, error_bound)
    names = tuple(graph.nodes)
    plans = chosen[:, [1 + order.index(name) for name in names]]
    frontier = make_frontier(
        *evaluate_all(table, plans), operators=names, configs=plans, error_bound=error_bound
    )
    return dataclasses.replace(frontier, search_seconds=time.perf_counter() - started)


def evaluate_all(table: CostTable, plans: Rows) -> tuple[Array, Array]:
    """Return (seconds (n,), bytes (n,)) of `plans` (n, operators).

    Added up in the order of `CostTable.evaluate`.
    """
    place = {operator.name: i for i, operator in enumerate(table.operators)}
    seconds, size = (
        np.tile(fixed, (len(plans), 1)) for fixed in (table.fixed_seconds, table.fixed_bytes)
    )
    for i, operator in enumerate(table.operators):
        seconds += operator.seconds[plans[:, i]]
        size += operator.bytes[plans[:, i]]
    for edge in table.edges:
        source, target = plans[:, place[edge.source]], plans[:, place[edge.target]]
        seconds += edge.seconds[source, target]
        size += edge.bytes[source, target]
    return seconds.max(axis=1), size.max(axis=1)


# ---- A table as layers.


class TableGraph:
    """A `CostTable` as a graph with one array of columns (paths, then moments), rounded to a grid
    on which sums are exact.

    `nodes`: name -> (config, column); `edges`: name -> other name -> (config, config of the other,
    column), from both sides. Raises ValueError for a cost of minus infinity.
    """

    def __init__(self, table: CostTable) -> None:
        items: list[OperatorCosts | EdgeCosts] = [*table.operators, *table.edges]
        grids = [
            exact_grid([*(item.seconds for item in items), table.fixed_seconds]),
            exact_grid([*(item.bytes for item in items), table.fixed_bytes]),
        ]
        self.kinds = np.repeat([0, 1], [len(table.fixed_seconds), len(table.fixed_bytes)])
        self._grid = np.array(grids)[self.kinds]
        self.fixed = self._join(table.fixed_seconds, table.fixed_bytes)
        self.nodes = {
            operator.name: self._join(operator.seconds, operator.bytes)
            for operator in table.operators
        }
        self.edges: dict[str, dict[str, Array]] = {name: {} for name in self.nodes}
        for edge in table.edges:
            costs = self._join(edge.seconds, edge.bytes)
            # parallel edges become one
            costs = costs + self.edges[edge.source].get(edge.target, 0.0)
            self.edges[edge.source][edge.target] = costs
            self.edges[edge.target][edge.source] = costs.swapaxes(0, 1)
        for source, target in {(edge.source, edge.target) for edge in table.edges}:
            self._separate(source, target)

    def _join(self, seconds: Array, size: Array) -> Array:
        costs = np.concatenate([seconds, size], axis=-1)
        if np.isneginf(costs).any():
            raise ValueError("a cost is minus infinity; forbid configurations with plus infinity")
        return np.asarray(np.round(costs / self._grid) * self._grid)

    def _separate(self, source: str, target: str) -> None:
        """Give an edge that costs ``f(source) + g(target)`` (zero, most often) to the two
        operators.
        """
        costs = self.edges[source].get(target)
        if costs is None or not np.isfinite(costs).all():
            return
        if (costs - costs[:, :1] - costs[:1] + costs[:1, :1] == 0).all():
            self.nodes[source] = self.nodes[source] + costs[:, 0]
            self.nodes[target] = self.nodes[target] + (costs[0] - costs[0, 0])
            del self.edges[source][target], self.edges[target][source]

    def separators(self, order: Sequence[str], kept: Collection[str]) -> list[tuple[str, ...]]:
        """Return the operators that the group after each of `order` joins; those of `kept` stay
        once decided.
        """
        place = {name: i for i, name in enumerate(order)}
        until = {
            name: max([place[other] for other in self.edges[name]], default=0) for name in order
        }
        active: tuple[str, ...] = ()
        found = []
        for i, name in enumerate(order):
            active = tuple(other for other in (*active, name) if until[other] > i or other in kept)
            found.append(active)
        return found

    def size(self, names: Collection[str]) -> int:
        """Return the number of joint configurations."""
        return math.prod(len(self.nodes[name]) for name in names)

    def most_transitions(self, order: Sequence[str], kept: Collection[str]) -> int:
        """Return the number of transitions of the largest layer in this order."""
        separators = [(), *self.separators(order, kept)]
        return max(
            (
                self.size(before) * len(self.nodes[name])
                for before, name in zip(separators, order, strict=False)
            ),
            default=1,
        )

    def order(self, kept: Collection[str]) -> list[str]:
        """Return the order of the table, or one with smaller groups where that has large ones."""
        given = list(self.nodes)
        if (most := self.most_transitions(given, kept)) <= _ENOUGH:
            return given
        found, active = [], set[str]()
        waiting = dict.fromkeys(given)
        while waiting:
            near = {
                other for name in active for other in self.edges[name] if other in waiting
            } or waiting
            after = {
                name: self._after(active, name, waiting, kept) for name in waiting if name in near
            }
            best = min(after, key=lambda name: self.size(after[name]))
            found.append(best)
            del waiting[best]
            active = after[best]
        return found if self.most_transitions(found, kept) < most else given

    def _after(
        self, active: set[str], name: str, waiting: Collection[str], kept: Collection[str]
    ) -> set[str]:
        left = {other for other in waiting if other != name}
        return {
            other
            for other in (*active, name)
            if other in kept or not left.isdisjoint(self.edges[other])
        }


def table_layers(
    graph: TableGraph, *, order: Sequence[str], kept: Sequence[str] = ()
) -> list[Layer]:
    """Return the start, one layer for each operator of `order`, and the end, which leaves (seconds,
    bytes) and one group.

    With `kept`, operators that stay in the group, the end is left out: groups and columns are then
    those of the table.
    """
    one, columns = np.zeros(1, np.intp), np.arange(len(graph.kinds))
    layers = [Layer(one, one, graph.fixed[None], graph.kinds, columns, one, 1, len(columns))]
    before: tuple[str, ...] = ()
    for name, after in zip(order, graph.separators(order, kept), strict=True):
        shape = *(len(graph.nodes[other]) for other in before), len(graph.nodes[name])
        assignment = dict(
            zip((*before, name), np.indices(shape).reshape(len(shape), -1), strict=True)
        )
        values = graph.nodes[name][assignment[name]]
        for other in before:
            if other in graph.edges[name]:
                values = values + graph.edges[name][other][assignment[name], assignment[other]]
        allowed = np.flatnonzero(np.isfinite(values).all(axis=1))
        source = _ravel([assignment[other][allowed] for other in before], shape[:-1], len(allowed))
        target = _ravel(
            [assignment[other][allowed] for other in after],
            [len(graph.nodes[o]) for o in after],
            len(allowed),
        )
        choice = assignment[name][allowed]
        layers.append(
            Layer(
                source,
                target,
                values[allowed],
                columns,
                columns,
                choice,
                graph.size(after),
                len(columns),
            )
        )
        before = after
    if not kept:
        layers.append(Layer(one, one, np.zeros((1, len(columns))), columns, graph.kinds, one, 1, 2))
    return layers


def _ravel(indices: Sequence[np.ndarray], shape: Sequence[int], count: int) -> np.ndarray:
    return (
        np.asarray(np.ravel_multi_index(tuple(indices), tuple(shape)))
        if len(shape)
        else np.zeros(count, np.intp)
    )


# ---- A table with fewer edges.
#
# An edge that is left out costs, for each configuration of one of its operators, the least over
# those of the other, column by column. So the relaxed frontier is below the true one everywhere,
# and what the repaired plans are above it at most bounds the error.


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A `graph` with fewer edges than `true`, and the way back."""

    true: TableGraph
    graph: TableGraph

    def repair(self, plans: Rows, order: list[str], error_bound: float) -> tuple[Rows, float]:
        """Return plans (n, N + 2) that are good in the true graph, and their error bound.

        `plans` (n, N) are the relaxed frontier, by operators in `order`, with its own
        `error_bound`; the columns added in front and behind keep the form of `search_layers`. No
        plan, and an infinite bound, when all that was tried is forbidden.
        """
        least = np.stack(_objectives(self.graph, plans, order), axis=1)
        found = _improve(self.true, plans, order)
        costs = np.stack(_objectives(self.true, found, order), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(
                costs[:, None] <= least, 1.0, np.where(least > 0, costs[:, None] / least, np.inf)
            )
        excess = (
            ratio.max(axis=2).min(axis=0).max(initial=1.0)
            if len(found)
            else np.inf
            if len(plans)
            else 1.0
        )
        return np.pad(found, ((0, 0), (1, 1))), float(excess * (1 + error_bound) - 1)


def relax_table(graph: TableGraph, max_branches: int) -> Relaxed:
    """Return `graph` without as many edges as it takes to have at most `max_branches` transitions
    in a layer.

    Edges that change least are left out first; a single operator with more configurations is the
    least there can be.
    """
    relaxed = copy.copy(graph)
    relaxed.nodes, relaxed.edges = (
        dict(graph.nodes),
        {name: dict(edges) for name, edges in graph.edges.items()},
    )
    pairs = [
        (a, b)
        for i, a in enumerate(graph.nodes)
        for b in list(graph.nodes)[i + 1 :]
        if b in graph.edges[a]
    ]
    spread = {
        pair: float(
            np.ptp(
                np.where(np.isfinite(c := graph.edges[pair[0]][pair[1]]), c, 0.0), axis=(0, 1)
            ).sum()
        )
        for pair in pairs
    }
    for a, b in sorted(pairs, key=lambda pair: spread[pair]):
        if relaxed.most_transitions(relaxed.order(()), ()) <= max_branches:
            break
        relaxed.nodes[a] = relaxed.nodes[a] + relaxed.edges[a].pop(b).min(axis=1)
        del relaxed.edges[b][a]
    return Relaxed(graph, relaxed)


def _objectives(graph: TableGraph, plans: Rows, order: list[str]) -> tuple[Array, Array]:
    totals = _totals(graph, plans, order)
    return totals[:, graph.kinds == 0].max(axis=1), totals[:, graph.kinds == 1].max(axis=1)


def _totals(graph: TableGraph, plans: Rows, order: list[str]) -> Array:
    """Return the totals (n, column)."""
    place = {name: i for i, name in enumerate(order)}
    totals = np.tile(graph.fixed, (len(plans), 1))
    for name, i in place.items():
        totals += graph.nodes[name][plans[:, i]]
        for other, costs in graph.edges[name].items():
            if place[other] > i:
                totals += costs[plans[:, i], plans[:, place[other]]]
    return totals


def _improve(graph: TableGraph, plans: Rows, order: list[str]) -> Rows:
    """The frontier of `plans` and of what changing one operator at a time makes of them; only
    allowed ones.
    """
    best = _best(graph, plans, order)
    for _ in range(_ROUNDS):
        found = [best]
        some = (
            best[np.unique(np.linspace(0, len(best) - 1, min(len(best), _PLANS)).astype(np.intp))]
            if len(best)
            else plans[:_PLANS]
        )
        for i, name in enumerate(order):
            changed = np.repeat(some, len(graph.nodes[name]), axis=0)
            changed[:, i] = np.tile(np.arange(len(graph.nodes[name])), len(some))
            found.append(_best(graph, changed, order))
        better = _best(graph, np.concatenate(found), order)
        if np.array_equal(better, best):
            break
        best = better
    return best


def _best(graph: TableGraph, plans: Rows, order: list[str]) -> Rows:
    seconds, size = _objectives(graph, plans, order)
    allowed = np.flatnonzero(np.isfinite(seconds) & np.isfinite(size))
    return np.asarray(plans[allowed[pareto_rows_2(size[allowed], seconds[allowed])]])


# ---- A block of a chain, of operators joined in any way.


def eliminate_block(
    table: CostTable, *, first: str, last: str, max_branches: int = 2**16
) -> BlockCosts:
    """Return a block for a `ChainTable` whose configurations are the plans in A[s][t].

    A[s][t] is a small frontier: the plans of the block in which its first operator has
    configuration s and its last one t, and which no other such plan beats in anything that the
    chain asks of a block. s are the block's `inputs`, t its `outputs`. ZeRO and recomputation do
    not show at the boundary, so many configurations of operators become few. `search_chain` joins
    blocks by V[n + 1][t] = union over s of V[n][s] * A[s][t].

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
