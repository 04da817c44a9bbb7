"""The frontier of a chain of blocks, on one mesh or on several: plans that no other plan beats.

    frontier = search_chain(table)                    # a `ChainTable`
    found = search_meshes([(mesh, make_table), ...])  # the mesh is a decision like any other

Blocks are folded from the last to the first, the order of the backward pass. Five columns sum up
the blocks folded so far, whatever their number. With the names of `BlockCosts`:

    C  computation        C' = C + seconds
    F  network finishes   F' = max(F - backward, C) + seconds + exchange
    L  level              L' = L + static + late
    x  peak of backward   x' = max(x + kept, L + hump) + static
    z  peak of forward    z' = max(z + held, L + forward_hump) + static

C and F start from fixed_seconds, L, x and z from fixed_bytes; the step takes F (never less than C),
and the largest of x, z and L + update_bytes. z is left out where forward takes the same as
backward. F counts from the start of the step and not from C, which makes more plans comparable.

The layers of all meshes are searched at once, side by side. A mesh whose prices (`prices`) show
that none of its plans can become better than known ones of any mesh is dropped whole.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier.layer_search import Budget, search_reduced
from lightning_topt.frontier.layers import Layer, apply, choices, exact_grid, reduce_layers
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2
from lightning_topt.frontier.prices import Bounds, improve, make_prices

C, F, L, X, Z = range(5)
START, END = np.array([C, F, C, L, X, L, Z, L]), np.array([C, F, F, L, X, X, Z, Z])
_FINAL = np.array([0, 0, 1, 1, 1])  # what becomes of the columns: seconds, bytes
_STEPS, _GAPS = 16, 8  # for the prices of all meshes, and for the plans known first
_UNPRICED = 2**15  # numbers of all meshes up to which prices are not worth loading compiled code


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier.

    `choice` maps every block to the index of its configuration, `label` is that of its mesh.
    """

    step_seconds: float
    peak_bytes: float
    choice: dict[str, int]
    label: Any = ""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Plans by memory ascending.

    `error_bound` is what a search may have missed: for every plan y there is a point x here with
    ``x <= (1 + error_bound) * y`` in step seconds and in peak bytes. It is 0 for a complete search.
    It is infinite where one was given up and plans may cost nothing: no relative error can be
    stated then. `search_seconds` is its wall-clock time. `searched` are the labels of the meshes
    that could not be dropped whole.
    """

    points: tuple[FrontierPoint, ...]
    error_bound: float
    search_seconds: float
    searched: tuple[Any, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether each plan is here, or is beaten or equalled in both costs by one that is."""
        return self.error_bound == 0.0


def search_chain(table: ChainTable, **limits: Any) -> Frontier:
    """Return every Pareto-minimal plan of a chain of blocks, by memory ascending.

    Of plans with equal costs one is kept. Costs are rounded by about an ulp of the total during
    the search; points have the costs that ``table.evaluate`` gives their plans. The frontier is
    empty when infinite costs forbid every plan.

    A search that is not allowed what it needs returns the best plans it knows: ``exact`` is False
    then, and ``error_bound`` holds (see `Frontier`). `limits` are those of `search_meshes`.
    """
    return search_meshes([("", lambda: table)], **limits)


def search_meshes(
    candidates: Iterable[tuple[Any, Callable[[], ChainTable]]],
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> Frontier:
    """Return every plan of any mesh that no other plan of any mesh beats.

    Of plans with equal costs one is kept; the limits are for all meshes together.

    Args:
        candidates: (label, function that makes its table); each table is made once.
        max_points: most partial plans that are kept at a time.
        max_seconds: CPU time of this thread after which the search stops, about.
        max_bytes: memory that the search may take, about.
        epsilon: plans may be left out that are better by less than this share in one of both costs.

    Raises:
        ValueError: for limits that are not positive.
    """
    budget = Budget(max_points, max_seconds, max_bytes, epsilon)
    started, deadline = time.perf_counter(), time.thread_time() + max_seconds
    made = [(label, make()) for label, make in candidates]
    layers = reduce_layers(_mesh_layers([table for _, table in made])) if made else []
    # no mesh, or a layer that no plan can pass
    if not layers or not all(len(layer.source) for layer in layers):
        return Frontier((), epsilon, time.perf_counter() - started)
    # drop whole meshes, where there are several and enough to search
    priced, meshes = None, layers[0].choice
    if len(made) > 1 and sum(layer.values.size for layer in layers) > _UNPRICED:
        prices, known = make_prices(layers, steps=_STEPS)
        known = improve(layers, known, gaps=_GAPS)
        priced = prices, known
        # Only meshes of which some plan may be better than the known ones.
        first = layers[0]
        states = apply(first, np.zeros((len(first.source), 2)), np.arange(len(first.source)))
        meshes = first.choice[Bounds(prices, known, epsilon).gains(1, states, first.target) > 0]
    plans, error_bound = search_reduced(layers, budget, deadline=deadline, priced=priced)
    searched = tuple(made[mesh][0] for mesh in meshes.tolist())
    points = _mesh_points(made, choices(layers, plans))
    return Frontier(points, max(error_bound, epsilon), time.perf_counter() - started, searched)


def _mesh_points(
    made: Sequence[tuple[Any, ChainTable]], decided: Rows
) -> tuple[FrontierPoint, ...]:
    # The plans that no other of `decided` (n, N) beats, with the costs of their tables
    # chains of fewer blocks leave the columns behind theirs at 0
    costs = np.empty((len(decided), 2))
    configs = np.zeros((len(decided), decided.shape[1]), np.intp)
    names = {mesh: _names_of(made[mesh][1]) for mesh in np.unique(decided[:, 0]).tolist()}
    for mesh in names:
        # the costs of the meshes' own tables, mesh by mesh: the search has them rounded
        rows, table = np.flatnonzero(decided[:, 0] == mesh), made[mesh][1]
        plans = _blocks_of(table, decided[rows])
        costs[rows] = np.stack(table.evaluate(plans), axis=1)
        configs[rows, : plans.shape[1]] = plans
    best = pareto_rows_2(costs[:, 1], costs[:, 0])
    chosen = zip(
        decided[best, 0].tolist(), costs[best].tolist(), configs[best].tolist(), strict=True
    )
    return tuple(
        FrontierPoint(seconds, size, dict(zip(names[mesh], plan, strict=False)), made[mesh][0])
        for mesh, (seconds, size), plan in chosen
    )


def _names_of(table: ChainTable) -> tuple[str, ...]:
    # The names of the blocks of a chain, numbers where it has none
    return table.names or tuple(str(n) for n in range(len(table.order)))


def _blocks_of(table: ChainTable, decided: Rows) -> Rows:
    # The configurations (n, block) of plans from what all layers decide (n, N)
    # layers go from the last block to the first, and end with one that decides nothing
    return decided[:, -2 : -2 - len(table.order) : -1]


# ---- Layers of one chain.


def chain_layers(table: ChainTable, *, grids: tuple[float, float], columns: int) -> list[Layer]:
    """Return the start, one layer for each block from the last to the first, and the end.

    Costs are rounded to `grids` (seconds, bytes). Equal blocks share one layer. `grids` and the
    number of `columns` are those that all tables need which are searched together.
    """
    count = columns
    # what every plan has: before the first block, and in the update
    fixed = np.array([[table.fixed_seconds] * 2 + [table.fixed_bytes] * (count - 2)])
    update = np.where(np.arange(count) == L, table.update_bytes, 0.0)[None]
    grid = np.array(grids)[_FINAL[:count]]
    one, final, own = np.zeros(1, np.intp), _FINAL[:count], np.arange(count)
    # the start: what every plan pays
    layers = [Layer(one, one, np.round(fixed / grid) * grid, final, own, one, 1, count)]
    # equal blocks are one layer, whose work is done once
    made = [_block_layer(block, grids, count) for block in table.blocks]
    layers += [made[kind] for kind in reversed(table.order)]
    # the end: seconds, and the largest of the peaks and of the level in the update
    return [*layers, Layer(one, one, np.round(update / grid) * grid, own, final, one, 1, 2)]


def column_count(table: ChainTable) -> int:
    """Return how many of the five columns the chain needs.

    z only where forward takes other bytes than backward.
    """
    return 5 if any(block.splits_forward for block in table.blocks) else 4


def _block_layer(block: BlockCosts, grids: tuple[float, float], columns: int) -> Layer:
    # A transition for each allowed configuration of a block
    values = _entries(block, grids)
    # forbidden configurations are infinite
    choice = np.flatnonzero(np.isfinite(values).all(axis=1))
    one = np.zeros_like(choice)
    # without z, entries that end in it are left out
    used = np.flatnonzero(columns > END)
    return Layer(one, one, values[choice][:, used], START[used], END[used], choice, 1, columns)


def _entries(block: BlockCosts, grids: tuple[float, float]) -> Array:
    # The entries (config, entry) of a block, in the order of `START` and `END`
    # on grids, so that sums are exact in whatever order
    seconds, backward, exchange = (
        np.round(part / grids[0]) * grids[0]
        for part in (block.seconds, block.backward, block.exchange)
    )
    static, late, *peaks = (
        np.round(block.cost(name) / grids[1]) * grids[1]
        for name in ("static", "late", "kept", "hump", "held", "forward_hump")
    )
    last = (static + late, *(static + peak for peak in peaks))
    # from C to C, F to F, C to F; L to L, x to x, L to x, z to z, L to z
    return np.stack([seconds, seconds - backward + exchange, seconds + exchange, *last], axis=1)


def _exact_grids(table: ChainTable) -> tuple[float, float]:
    # Grids of seconds and bytes on which all sums of the chain are exact
    seconds, size = (
        [np.array([table.fixed_seconds])],
        [np.array([table.fixed_bytes, table.update_bytes])],
    )
    for index, count in Counter(table.order).items():
        block = table.blocks[index]
        seconds += [count * part for part in (block.seconds, block.backward, block.exchange)]
        size += [
            count * block.cost(name)
            for name in ("static", "kept", "late", "hump", "held", "forward_hump")
        ]
    return exact_grid(seconds), exact_grid(size)


# ---- Layers of several meshes side by side: the first decision is the mesh, the groups are those
# of all chains, and the ways through them meet again after the last block.


def _mesh_layers(tables: Sequence[ChainTable]) -> list[Layer]:
    """Return the layers of `tables`, at least one; the first decides which table a plan is of.

    Chains with fewer blocks than others wait behind that: `_blocks_of` leaves that out.
    """
    columns = max(map(column_count, tables))
    grids = np.max([_exact_grids(table) for table in tables], axis=0)
    chains = [chain_layers(table, grids=(grids[0], grids[1]), columns=columns) for table in tables]
    depth = max(map(len, chains))
    # decides nothing and changes no column, between boundaries with one group
    one, used = np.zeros(1, np.intp), np.flatnonzero(columns > END)
    waiting = Layer(one, one, np.zeros((1, len(used))), START[used], END[used], one, 1, columns)
    chains = [
        [chain[0], *itertools.repeat(waiting, depth - len(chain)), *chain[1:]] for chain in chains
    ]
    made: dict[tuple[int, ...], Layer] = {}
    layers = []
    for n, beside in enumerate(zip(*chains, strict=True)):
        key = tuple(map(id, beside))
        # places at which all chains have equal layers are made once
        if key not in made:
            made[key] = _side_by_side(beside, is_first=n == 0, is_last=n + 1 == depth)
        layers.append(made[key])
    return layers


def _side_by_side(beside: Sequence[Layer], *, is_first: bool, is_last: bool) -> Layer:
    # The layers of all tables at one place as one; each table is a group
    table = np.repeat(np.arange(len(beside)), [len(layer.source) for layer in beside])
    return Layer(
        # one group before the first layer and after the last
        np.zeros_like(table) if is_first else table,
        np.zeros_like(table) if is_last else table,
        np.concatenate([layer.values for layer in beside]),
        beside[0].start,
        beside[0].end,
        table if is_first else np.concatenate([layer.choice for layer in beside]),
        1 if is_last else len(beside),
        beside[0].columns,
    )
