"""Several meshes, one frontier: for each number of devices, which mesh and which plan of it.

What is known from one mesh spares work on the others, exactly: uniform plans of all meshes are known first; a mesh whose prices
(`prices`) show that none of its plans can become better than known ones is dropped whole; in the others partial plans are
dropped by the same test against the plans of all meshes. One union at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.frontier.chain_layers import chain_layers
from lightning_topt.frontier.frontier import FrontierPoint
from lightning_topt.frontier.frontier_search import block_names, make_budget, reduce_layers, search_reduced
from lightning_topt.frontier.layers import Layer, choices
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2
from lightning_topt.frontier.prices import ELSEWHERE, Known, Prices, make_prices
from lightning_topt.frontier.wide import Budget

_STEPS = 16  # of the prices of a mesh
_SMALL = 2**15  # numbers of all meshes up to which prices are not worth loading compiled code


@dataclass(frozen=True, eq=False)
class MeshFrontier:
    """Points by memory ascending, each with the label of its mesh; `error_bound` as in `Frontier`.

    `searched` are the labels of the meshes that could not be dropped whole.
    """

    points: tuple[tuple[Any, FrontierPoint], ...]
    searched: tuple[Any, ...]
    error_bound: float
    search_seconds: float

    @property
    def exact(self) -> bool:
        """Whether no plan of any mesh is missing."""
        return self.error_bound == 0.0


@dataclass(eq=False)
class _Mesh:
    label: Any
    table: ChainTable
    layers: list[Layer]
    priced: tuple[Prices, Known] | None = None

    def gain(self, known: Array) -> float:
        """Return by how much its plans could beat the known ones."""
        if self.priced is None or not len(known):
            return np.inf
        return self.priced[0].gain(Known(known, np.zeros((len(known), 0), np.intp)))

    def search(self, budget: Budget, known: Array) -> tuple[Rows, float]:
        """Return the plans (n, block) that none of the known ones beats, and the error bound."""
        priced = None
        if self.priced is not None:
            elsewhere = np.full((len(known), len(self.layers)), ELSEWHERE, np.int32)
            priced = self.priced[0], self.priced[1].joined(known, elsewhere)
        deadline = time.thread_time() + budget.max_seconds
        plans, bound = search_reduced(self.layers, budget, deadline=deadline, priced=priced)
        return self.configs(plans), bound

    def configs(self, plans: Rows) -> Rows:
        """Return the configuration of each block (n, block) in plans given as transitions (n, N)."""
        return choices(self.layers, plans)[:, -2:0:-1]


class _Union:
    """The best plans of all meshes so far."""

    def __init__(self) -> None:
        self.costs = np.zeros((0, 2))
        self.plans: list[tuple[_Mesh, Rows]] = []

    def add(self, mesh: _Mesh, plans: Rows) -> None:
        """Take in plans (n, block) of a mesh."""
        costs = np.concatenate([self.costs, np.stack(mesh.table.evaluate(plans), axis=1)])
        allowed = np.flatnonzero(np.isfinite(costs).all(axis=1))
        rows = allowed[pareto_rows_2(costs[allowed, 0], costs[allowed, 1])]
        everything = [*self.plans, *((mesh, plan) for plan in plans)]
        self.costs, self.plans = costs[rows], [everything[row] for row in rows]


def search_meshes(
    candidates: Iterable[tuple[Any, Callable[[], ChainTable]]],
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> MeshFrontier:
    """Return every plan of any mesh that no other plan of any mesh beats; of plans with equal costs one is kept.

    Args:
        candidates: (label, function that makes its table); each table is made once.
        max_points, max_seconds, max_bytes, epsilon: as in `search_frontier`; the seconds are for all meshes together.
    """
    budget = make_budget(max_points, 1, max_seconds, max_bytes, epsilon)
    started = time.perf_counter()
    union, meshes = _Union(), []
    for label, make in candidates:
        table = make()
        layers = reduce_layers(chain_layers(table))
        if all(len(layer.source) for layer in layers):
            mesh = _Mesh(label, table, layers)
            union.add(mesh, _uniform(table))
            meshes.append(mesh)
    numbers = sum(layer.values.size for mesh in meshes for layer in mesh.layers)
    for mesh in meshes if len(meshes) > 1 and numbers > _SMALL else []:
        mesh.priced = make_prices(mesh.layers, steps=_STEPS)
        union.add(mesh, mesh.configs(mesh.priced[1].plans))
    searched, error_bound = _search(meshes, union, budget, time.thread_time())
    points = []
    for (seconds, size), (mesh, plan) in zip(union.costs[::-1].tolist(), union.plans[::-1], strict=True):
        choice = dict(zip(block_names(mesh.table), plan.tolist(), strict=True))
        points.append((mesh.label, FrontierPoint(seconds, size, choice)))
    return MeshFrontier(tuple(points), tuple(searched), error_bound, time.perf_counter() - started)


def _search(meshes: Sequence[_Mesh], union: _Union, budget: Budget, started: float) -> tuple[list[Any], float]:
    """Search those that may be needed, the most promising ones first; their labels and the error bound."""
    searched: list[Any] = []
    error_bound = budget.epsilon
    for mesh in sorted(meshes, key=lambda mesh: -mesh.gain(union.costs)):
        if (gain := mesh.gain(union.costs)) <= budget.epsilon:
            continue
        left = started + budget.max_seconds - time.thread_time()
        if left <= 0 and searched:
            error_bound = max(error_bound, gain)
            continue
        searched.append(mesh.label)
        allowed = Budget(budget.max_points, 1, max(left, 1e-3), budget.max_bytes, budget.epsilon)
        plans, bound = mesh.search(allowed, union.costs)
        error_bound = max(error_bound, bound)
        union.add(mesh, plans)
    return searched, error_bound


def _uniform(table: ChainTable) -> Rows:
    """Return (n, block): the first configuration of every block, the second, and so on; blocks with fewer take their last."""
    counts = np.array([len(table.block(n).configs) for n in range(len(table.order))], np.intp)
    return np.minimum(np.arange(counts.max(initial=1))[:, None], counts - 1)
