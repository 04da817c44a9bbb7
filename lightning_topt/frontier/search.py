"""search_frontier: CostTable -> Frontier, exact on every graph: by elimination, and by conditioning where that ends."""

from __future__ import annotations

import dataclasses
import time
from typing import TypeVar

import numpy as np

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.columns import exact_grid
from lightning_topt.frontier.elimination import Graph, Grid, Limits, eliminate
from lightning_topt.frontier.fold import combine
from lightning_topt.frontier.frontier import Decided, Frontier, constant, decide, reduce
from lightning_topt.frontier.pareto import Array, Rows

Costs = TypeVar("Costs", OperatorCosts, EdgeCosts)


def search_frontier(table: CostTable, *, max_points: int = 20_000, max_branches: int = 4096) -> Frontier:
    """Every Pareto-minimal plan of `table`: (step_seconds, peak_bytes, choice), by memory ascending.

    The result has one path and one moment: the largest ones, fixed costs included, as `CostTable.evaluate` gives them;
    of plans with equal costs one is kept. Costs are rounded by about an ulp of the total during the search. It is empty
    when the infinite costs forbid every plan. A search that would hold more than `max_points` partial plans
    gives some up and says so: ``exact`` is False and ``error_bound`` holds (see `Frontier`). Where no elimination
    applies, up to `max_branches` smaller searches replace one.

    Raises ValueError when that is not enough, or when an operator has no configuration or a cost of minus infinity.
    """
    started = time.perf_counter()
    if max_points < 1 or max_branches < 1:
        raise ValueError(f"max_points and max_branches must be at least 1, got {max_points} and {max_branches}")
    if any(len(operator.configs) == 0 for operator in table.operators):
        raise ValueError("an operator has no configuration")
    rounded = _without_separable_edges(_round(table))
    limits = _limits(rounded, max_points, max_branches)
    joined = {name for edge in rounded.edges for name in (edge.source, edge.target)}
    frontiers = {operator.name: _node(operator) for operator in rounded.operators}
    free = [frontier for name, frontier in frontiers.items() if name not in joined]
    parts = [*eliminate(_graph(rounded, frontiers, joined, limits), limits=limits), *free]
    parts.append(constant(rounded.fixed_seconds, rounded.fixed_bytes))
    scales = {"seconds_scale": limits.seconds_scale, "bytes_scale": limits.bytes_scale}
    found = limits.apply(_evaluate(table, combine(parts, max_points=max_points, **scales)))
    return dataclasses.replace(found, search_seconds=time.perf_counter() - started)


def _round(table: CostTable) -> CostTable:
    """All costs on grids on which sums are exact, so that plans that cost the same are found to."""
    items: list[OperatorCosts | EdgeCosts] = [*table.operators, *table.edges]
    seconds_grid = exact_grid([*(item.seconds for item in items), table.fixed_seconds])
    bytes_grid = exact_grid([*(item.bytes for item in items), table.fixed_bytes])
    return CostTable(
        tuple(_rounded(operator, seconds_grid, bytes_grid) for operator in table.operators),
        tuple(_rounded(edge, seconds_grid, bytes_grid) for edge in table.edges),
        np.round(table.fixed_seconds / seconds_grid) * seconds_grid,
        np.round(table.fixed_bytes / bytes_grid) * bytes_grid,
    )


def _rounded(item: Costs, seconds_grid: float, bytes_grid: float) -> Costs:
    if np.isneginf(item.seconds).any() or np.isneginf(item.bytes).any():
        raise ValueError("a cost is minus infinity; forbid configurations with plus infinity")
    seconds, size = np.round(item.seconds / seconds_grid), np.round(item.bytes / bytes_grid)
    return dataclasses.replace(item, seconds=seconds * seconds_grid, bytes=size * bytes_grid)


def _without_separable_edges(table: CostTable) -> CostTable:
    """Without edges that cost ``f(source) + g(target)`` (zero, most often): their costs go to the two operators."""
    operators = {operator.name: operator for operator in table.operators}
    edges = []
    for edge in table.edges:
        if _separable(edge.seconds) and _separable(edge.bytes):
            seconds, size = edge.seconds, edge.bytes
            operators[edge.source] = _plus(operators[edge.source], seconds[:, 0], size[:, 0])
            operators[edge.target] = _plus(operators[edge.target], seconds[0] - seconds[0, 0], size[0] - size[0, 0])
        else:
            edges.append(edge)
    return dataclasses.replace(table, operators=tuple(operators.values()), edges=tuple(edges))


def _plus(operator: OperatorCosts, seconds: Array, size: Array) -> OperatorCosts:
    return dataclasses.replace(operator, seconds=operator.seconds + seconds, bytes=operator.bytes + size)


def _separable(costs: Array) -> bool:
    return bool(np.isfinite(costs).all() and (costs - costs[:, :1] - costs[:1] + costs[:1, :1] == 0).all())


def _node(operator: OperatorCosts) -> Frontier:
    frontier = decide(operator.name, operator.seconds, operator.bytes)
    return frontier.take(np.flatnonzero(np.isfinite(frontier.costs).all(axis=1)))


def _graph(table: CostTable, frontiers: dict[str, Frontier], joined: set[str], limits: Limits) -> Graph:
    cells = {}
    for operator in table.operators:
        if operator.name in joined:
            allowed = frontiers[operator.name]
            configs = allowed.choices()[operator.name]
            cells[operator.name] = [allowed.take(np.flatnonzero(configs == c)) for c in range(len(operator.configs))]
    graph = Graph(cells)
    for edge in table.edges:
        graph.join(edge.source, edge.target, _edge_grid(edge), limits=limits)
    return graph


def _edge_grid(edge: EdgeCosts) -> Grid:
    allowed = np.isfinite(np.concatenate([edge.seconds, edge.bytes], axis=2)).all(axis=2)
    return [
        [constant(*costs).take(np.flatnonzero([yes])) for *costs, yes in zip(*of_source, strict=True)]
        for of_source in zip(edge.seconds, edge.bytes, allowed, strict=True)
    ]


def _limits(table: CostTable, max_points: int, max_branches: int) -> Limits:
    """`Limits` with lower bounds of every plan's step seconds and peak bytes as scales."""
    seconds, size = table.fixed_seconds.copy(), table.fixed_bytes.copy()
    for operator in table.operators:
        seconds += operator.seconds.min(axis=0, initial=np.inf)
        size += operator.bytes.min(axis=0, initial=np.inf)
    for edge in table.edges:
        seconds += edge.seconds.min(axis=(0, 1), initial=np.inf)
        size += edge.bytes.min(axis=(0, 1), initial=np.inf)
    return Limits(max_points, max_branches, float(seconds.max()), float(size.max()))


def _evaluate(table: CostTable, frontier: Frontier) -> Frontier:
    """The points of `frontier` with the costs `CostTable.evaluate` gives them, reduced."""
    choices = frontier.choices()
    nothing = np.zeros(len(frontier), np.intp)  # an empty frontier decides nothing
    rows: dict[str, Rows] = {operator.name: choices.get(operator.name, nothing) for operator in table.operators}
    seconds = np.tile(table.fixed_seconds, (len(frontier), 1))
    size = np.tile(table.fixed_bytes, (len(frontier), 1))
    for operator in table.operators:
        seconds += operator.seconds[rows[operator.name]]
        size += operator.bytes[rows[operator.name]]
    for edge in table.edges:
        seconds += edge.seconds[rows[edge.source], rows[edge.target]]
        size += edge.bytes[rows[edge.source], rows[edge.target]]
    configs = np.stack(list(rows.values()), axis=1) if rows else np.zeros((len(frontier), 0), np.intp)
    return reduce(
        Frontier(
            seconds.max(axis=1, keepdims=True),
            size.max(axis=1, keepdims=True),
            Decided(tuple(rows), configs),
            frontier.error_bound,
        )
    )
