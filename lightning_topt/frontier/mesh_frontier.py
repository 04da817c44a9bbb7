"""Several meshes, one frontier: for each number of devices, which mesh and which plan of it.

The mesh is a decision like any other, the first one (`mesh_layers`), so all meshes are searched at
once: a mesh whose prices (`prices`) show that none of its plans can become better than known ones
of any mesh is dropped whole, and in the others partial plans are by the same test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.frontier.frontier import FrontierPoint
from lightning_topt.frontier.frontier_search import (
    block_names,
    make_budget,
    reduce_layers,
    search_reduced,
)
from lightning_topt.frontier.layers import Layer, apply, choices
from lightning_topt.frontier.mesh_layers import blocks_of, mesh_layers
from lightning_topt.frontier.pareto import Rows, pareto_rows_2
from lightning_topt.frontier.prices import Bounds, Known, Prices, improve, make_prices

_STEPS, _GAPS = 16, 8  # for the prices of all meshes, and for the plans known first
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


def search_meshes(
    candidates: Iterable[tuple[Any, Callable[[], ChainTable]]],
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> MeshFrontier:
    """Return every plan of any mesh that no other plan of any mesh beats; of plans with equal costs
    one is kept.

    Args:
        candidates: (label, function that makes its table); each table is made once.
        max_points, max_seconds, max_bytes, epsilon: as in `search_frontier`; the seconds are for
            all meshes together.
    """
    budget = make_budget(max_points, 1, max_seconds, max_bytes, epsilon)
    started, deadline = time.perf_counter(), time.thread_time() + max_seconds
    made = [(label, make()) for label, make in candidates]
    layers = reduce_layers(mesh_layers([table for _, table in made])) if made else []
    if not layers or not all(len(layer.source) for layer in layers):
        return MeshFrontier((), (), epsilon, time.perf_counter() - started)
    priced, meshes = None, layers[0].choice
    if sum(layer.values.size for layer in layers) > _SMALL:
        prices, known = make_prices(layers, steps=_STEPS)
        priced = prices, improve(layers, known, gaps=_GAPS)
        meshes = _hopeful(layers[0], priced, epsilon)
    plans, error_bound = search_reduced(layers, budget, deadline=deadline, priced=priced)
    searched = tuple(made[mesh][0] for mesh in meshes.tolist())
    points = _points(made, choices(layers, plans))
    return MeshFrontier(points, searched, max(error_bound, epsilon), time.perf_counter() - started)


def _hopeful(layer: Layer, priced: tuple[Prices, Known], epsilon: float) -> Rows:
    """The meshes of which some plan may be better than the known ones."""
    prices, known = priced
    states = apply(layer, np.zeros((len(layer.source), 2)), np.arange(len(layer.source)))
    return layer.choice[Bounds(prices, known, epsilon).gains(1, states, layer.target) > 0]


def _points(
    made: Sequence[tuple[Any, ChainTable]], decided: Rows
) -> tuple[tuple[Any, FrontierPoint], ...]:
    """The plans that no other of `decided` (n, N) beats, with what their tables say that they
    cost.
    """
    costs, configs = (
        np.empty((len(decided), 2)),
        np.zeros((len(decided), decided.shape[1]), np.intp),
    )
    names = {mesh: block_names(made[mesh][1]) for mesh in np.unique(decided[:, 0]).tolist()}
    for mesh in names:
        rows, table = np.flatnonzero(decided[:, 0] == mesh), made[mesh][1]
        plans = blocks_of(table, decided[rows])
        costs[rows], configs[rows, : plans.shape[1]] = (
            np.stack(table.evaluate(plans), axis=1),
            plans,
        )
    best = pareto_rows_2(costs[:, 1], costs[:, 0])
    chosen = zip(
        decided[best, 0].tolist(), costs[best].tolist(), configs[best].tolist(), strict=True
    )
    return tuple(
        (made[mesh][0], FrontierPoint(seconds, size, dict(zip(names[mesh], plan, strict=False))))
        for mesh, (seconds, size), plan in chosen
    )
