"""A relaxed table has fewer edges, for operators that are joined in too many ways; its plans are
repaired by single changes.

An edge that is left out costs, for each configuration of one of its operators, the least over those
of the other, column by column. So the relaxed frontier is below the true one everywhere, and what
the repaired plans are above it at most is an honest error bound.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2
from lightning_topt.frontier.table_layers import TableGraph

_PLANS = 128  # improved at a time
_ROUNDS = 20


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
