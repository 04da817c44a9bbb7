"""CostTable -> layers: operators are decided one after another, on any graph.

A group is a joint configuration of the operators that are decided and still have an edge to one
that is not (the separator). On a chain that is one operator; branches, skips and rings have a few.
When an operator's last edge is decided it leaves the group, and of the plans that differ in it the
best are kept: node, edge and branch elimination (TensorOpt, arXiv 2004.10856, frontier tracking
[recalled]) are that step with one, two and several neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.layers import Layer, exact_grid
from lightning_topt.frontier.pareto import Array

_ENOUGH = 2**12  # transitions of a layer up to which no better order is sought


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
