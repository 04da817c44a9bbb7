"""`search_frontier` and `search_chain` turn costs into a Frontier: every plan that no other plan
beats in both time and memory.

Both make layers (`layers`), take out what no best plan needs, and walk over what is left: by NumPy
where that is little, else compiled (`wide`). Points have the costs that the table's own `evaluate`
gives their plans.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.costs.cost_table import CostTable
from lightning_topt.frontier.chain_layers import chain_layers
from lightning_topt.frontier.columns import raises, reduce_columns
from lightning_topt.frontier.frontier import Frontier, make_frontier
from lightning_topt.frontier.layers import (
    Layer,
    choices,
    without_dead_ends,
    without_dead_groups,
    without_dominated,
)
from lightning_topt.frontier.pareto import Array, Rows
from lightning_topt.frontier.prices import Known, Prices
from lightning_topt.frontier.relaxed import relax_table
from lightning_topt.frontier.sweep import sweep
from lightning_topt.frontier.table_layers import TableGraph, table_layers
from lightning_topt.frontier.wide import Budget, search_wide

_SMALL = 2**19  # work up to which NumPy alone is used


def search_frontier(
    table: CostTable,
    *,
    max_points: int = 2**20,
    max_branches: int = 2**16,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> Frontier:
    """Return every Pareto-minimal plan of `table`: (step_seconds, peak_bytes, choice), by memory
    ascending.

    Of plans with equal costs one is kept. Costs are rounded by about an ulp of the total during the
    search. The frontier is empty when infinite costs forbid every plan.

    Args:
        table: operators and edges, any graph.
        max_points: most partial plans that are kept at a time.
        max_branches: most joint configurations of operators that are told apart at a time; a chain
            needs the product of two neighbours' numbers of configurations.
        max_seconds: CPU time of this thread after which the search stops, about.
        max_bytes: memory that the search may take, about.
        epsilon: plans may be left out that are better by less than this share in one of both costs.

    A search that is not allowed what it needs returns the best plans it knows: ``exact`` is False
    then, and ``error_bound`` holds (see `Frontier`). Raises ValueError for limits that are not
    positive, and when an operator has no configuration or a cost of minus infinity.
    """
    budget = make_budget(max_points, max_branches, max_seconds, max_bytes, epsilon)
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
    where = [1 + order.index(name) for name in names]
    return _finish(table, chosen[:, where], names, error_bound, started)


def search_chain(
    table: ChainTable,
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> Frontier:
    """Return every Pareto-minimal plan of a chain of blocks, with `search_frontier`'s meaning and
    limits.

    Partial plans have at most five columns whatever the number of blocks (`chain_layers`).
    """
    budget = make_budget(max_points, 1, max_seconds, max_bytes, epsilon)
    started = time.perf_counter()
    chosen, error_bound = search_layers(chain_layers(table), budget)
    return _finish(table, chosen[:, -2:0:-1], block_names(table), error_bound, started)


def block_names(table: ChainTable) -> tuple[str, ...]:
    """Return the names of the blocks of a chain, numbers where it has none."""
    return table.names or tuple(str(n) for n in range(len(table.order)))


def make_budget(
    max_points: int, max_branches: int, max_seconds: float, max_bytes: float, epsilon: float
) -> Budget:
    """Return a checked `Budget`. Raises ValueError."""
    if not (max_points >= 1 and max_branches >= 1 and max_seconds > 0 and max_bytes > 0):
        raise ValueError(
            "max_points and max_branches must be at least 1 and max_seconds and max_bytes "
            f"positive, got {max_points}, "
            f"{max_branches}, {max_seconds} and {max_bytes}"
        )
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon is a share from 0 to below 1, got {epsilon}")
    return Budget(max_points, max_branches, max_seconds, max_bytes, epsilon)


def search_layers(layers: Sequence[Layer], budget: Budget) -> tuple[Rows, float]:
    """Return what the best plans choose in each layer (n, N), and the error bound."""
    deadline = time.thread_time() + budget.max_seconds
    layers = reduce_layers(layers)
    if not all(len(layer.source) for layer in layers):
        return np.zeros((0, len(layers)), np.intp), 0.0
    plans, error_bound = search_reduced(layers, budget, deadline=deadline)
    return choices(layers, plans), error_bound


def reduce_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without what no best plan needs; all are empty when there is no plan."""
    layers = without_dead_ends(layers)
    if not all(len(layer.source) for layer in layers):
        return layers
    layers = without_dead_groups(without_dominated(layers))
    return without_dominated(reduce_columns(layers))


def search_reduced(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    deadline: float,
    priced: tuple[Prices, Known] | None = None,
) -> tuple[Rows, float]:
    """Return the transitions of the best plans (n, N), and the error bound; `priced` as in
    `search_wide`.
    """
    lifts = raises(layers)
    if priced is None and budget.epsilon == 0:
        swept = sweep(layers, lifts=lifts, work=min(_SMALL, budget.max_points))
        if swept is not None:
            return swept[2], 0.0
    return search_wide(layers, lifts=lifts, budget=budget, deadline=deadline, priced=priced)


def _finish(
    table: CostTable | ChainTable,
    plans: Rows,
    names: tuple[str, ...],
    error_bound: float,
    started: float,
) -> Frontier:
    seconds, size = (
        evaluate_all(table, plans) if isinstance(table, CostTable) else table.evaluate(plans)
    )
    frontier = make_frontier(seconds, size, operators=names, configs=plans, error_bound=error_bound)
    return dataclasses.replace(frontier, search_seconds=time.perf_counter() - started)


def evaluate_all(table: CostTable, plans: Rows) -> tuple[Array, Array]:
    """Return (seconds (n,), bytes (n,)) of `plans` (n, operators), added up in the order of
    `CostTable.evaluate`.
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
