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
backward. Edges add to C and F, or to L, x and z. F counts from the start of the step and not from
C, which makes more plans comparable.

The layers of all meshes are searched at once, side by side. A mesh whose prices (`prices`) show
that none of its plans can become better than known ones of any mesh is dropped whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, BlockEdge, ChainTable
from lightning_topt.frontier.layer_search import Budget, search_layers, search_reduced
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

    `choice` maps every block (or operator) to the index of its configuration.
    """

    step_seconds: float
    peak_bytes: float
    choice: dict[str, int]


@dataclass(frozen=True, eq=False)
class Frontier:
    """Plans by memory ascending.

    `seconds` (n,), `bytes` (n,), and `configs` (n, operators) of `operators` (or blocks).

    `error_bound` is what a search may have missed: for every plan y there is a point x here with
    ``x <= (1 + error_bound) * y`` in step seconds and in peak bytes. It is 0 for a complete search.
    It is infinite where one was given up and plans may cost nothing: no relative error can be
    stated then. `search_seconds` is its wall-clock time.
    """

    seconds: Array
    bytes: Array
    operators: tuple[str, ...]
    configs: Rows
    error_bound: float = 0.0
    search_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def exact(self) -> bool:
        """Whether no plan is missing.

        Each is here, or is beaten or equalled in both costs by one that is.
        """
        return self.error_bound == 0.0

    @cached_property
    def points(self) -> list[FrontierPoint]:
        """The points with their decisions, in order."""
        rows = zip(self.seconds.tolist(), self.bytes.tolist(), self.configs.tolist(), strict=True)
        return [
            FrontierPoint(t, size, dict(zip(self.operators, row, strict=True)))
            for t, size, row in rows
        ]


@dataclass(frozen=True, eq=False)
class MeshFrontier:
    """Points by memory ascending, each with the label of its mesh.

    `error_bound` and `search_seconds` are as in `Frontier`; `searched` are the labels of the
    meshes that could not be dropped whole.
    """

    points: tuple[tuple[Any, FrontierPoint], ...]
    searched: tuple[Any, ...]
    error_bound: float
    search_seconds: float

    @property
    def exact(self) -> bool:
        """Whether no plan of any mesh is missing."""
        return self.error_bound == 0.0


def search_chain(
    table: ChainTable,
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> Frontier:
    """Return every Pareto-minimal plan of a chain of blocks, by memory ascending.

    Of plans with equal costs one is kept. Costs are rounded by about an ulp of the total during
    the search; points have the costs that ``table.evaluate`` gives their plans. The frontier is
    empty when infinite costs forbid every plan.

    A search that is not allowed what it needs returns the best plans it knows: ``exact`` is False
    then, and ``error_bound`` holds (see `Frontier`).

    Args:
        table: blocks, their configurations and what crosses between them.
        max_points: most partial plans that are kept at a time.
        max_seconds: CPU time of this thread after which the search stops, about.
        max_bytes: memory that the search may take, about.
        epsilon: plans may be left out that are better by less than this share in one of both costs.

    Raises:
        ValueError: for limits that are not positive.
    """
    budget = Budget(max_points, max_seconds, max_bytes, epsilon)
    started = time.perf_counter()
    decided, error_bound = search_layers(chain_layers(table), budget)
    plans = _blocks_of(table, decided)
    frontier = make_frontier(
        *table.evaluate(plans), operators=_names_of(table), configs=plans, error_bound=error_bound
    )
    return dataclasses.replace(frontier, search_seconds=time.perf_counter() - started)


def make_frontier(
    seconds: Array, size: Array, *, operators: tuple[str, ...], configs: Rows, error_bound: float
) -> Frontier:
    """Return the frontier of these plans; of plans with equal costs one is kept."""
    rows = pareto_rows_2(size, seconds)
    return Frontier(seconds[rows], size[rows], operators, configs[rows], error_bound)


def search_meshes(
    candidates: Iterable[tuple[Any, Callable[[], ChainTable]]],
    *,
    max_points: int = 2**20,
    max_seconds: float = 10.0,
    max_bytes: float = 2.0**29,
    epsilon: float = 0.0,
) -> MeshFrontier:
    """Return every plan of any mesh that no other plan of any mesh beats.

    Of plans with equal costs one is kept. Limits are as in `search_chain`; the seconds are for all
    meshes together.

    Args:
        candidates: (label, function that makes its table); each table is made once.
        max_points: most partial plans that are kept at a time.
        max_seconds: CPU time of this thread after which the search stops, about.
        max_bytes: memory that the search may take, about.
        epsilon: plans may be left out that are better by less than this share in one of both costs.
    """
    budget = Budget(max_points, max_seconds, max_bytes, epsilon)
    started, deadline = time.perf_counter(), time.thread_time() + max_seconds
    made = [(label, make()) for label, make in candidates]
    layers = reduce_layers(_mesh_layers([table for _, table in made])) if made else []
    # no mesh, or a layer that no plan can pass
    if not layers or not all(len(layer.source) for layer in layers):
        return MeshFrontier((), (), epsilon, time.perf_counter() - started)
    # drop whole meshes, where there is enough to search
    priced, meshes = None, layers[0].choice
    if sum(layer.values.size for layer in layers) > _UNPRICED:
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
    return MeshFrontier(points, searched, max(error_bound, epsilon), time.perf_counter() - started)


def _mesh_points(
    made: Sequence[tuple[Any, ChainTable]], decided: Rows
) -> tuple[tuple[Any, FrontierPoint], ...]:
    """Return the plans that no other of `decided` (n, N) beats, with the costs of their tables."""
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
        (made[mesh][0], FrontierPoint(seconds, size, dict(zip(names[mesh], plan, strict=False))))
        for mesh, (seconds, size), plan in chosen
    )


def _names_of(table: ChainTable) -> tuple[str, ...]:
    """Return the names of the blocks of a chain, numbers where it has none."""
    return table.names or tuple(str(n) for n in range(len(table.order)))


def _blocks_of(table: ChainTable, decided: Rows) -> Rows:
    """Return the configurations (n, block) of plans from what all layers decide (n, N)."""
    # layers go from the last block to the first, and end with one that decides nothing
    return decided[:, -2 : -2 - len(table.order) : -1]


# ---- Layers of one chain.


def chain_layers(
    table: ChainTable, *, grids: tuple[float, float] | None = None, columns: int | None = None
) -> list[Layer]:
    """Return the start, one layer for each block from the last to the first, and the end.

    Costs are rounded to `grids` (seconds, bytes). Equal blocks between equal edges share one layer.
    `grids` and the number of `columns` are by default those that the table needs; beside other
    tables they are those that all of them need.
    """
    grids = _exact_grids(table) if grids is None else grids
    count = column_count(table) if columns is None else columns
    # what every plan has: before the first block, and in the update
    fixed = np.array([[table.fixed_seconds] * 2 + [table.fixed_bytes] * (count - 2)])
    update = np.where(np.arange(count) == L, table.update_bytes, 0.0)[None]
    grid = np.array(grids)[_FINAL[:count]]
    one, final, own = np.zeros(1, np.intp), _FINAL[:count], np.arange(count)
    # the start: what every plan pays
    layers = [Layer(one, one, np.round(fixed / grid) * grid, final, own, one, 1, count)]
    made: dict[tuple[int, int, int], Layer] = {}
    for n in range(len(table.order) - 1, -1, -1):
        behind = table.edge(n) if n + 1 < len(table.order) else None
        # equal blocks between the same edges are one layer, whose work is done once
        before = table.edge(n - 1) if n else None
        key = table.order[n], id(behind), id(before)
        if key not in made:
            made[key] = _block_layer(table.block(n), behind, before, grids, count)
        layers.append(made[key])
    # the end: seconds, and the largest of the peaks and of the level in the update
    return [*layers, Layer(one, one, np.round(update / grid) * grid, own, final, one, 1, 2)]


def column_count(table: ChainTable) -> int:
    """Return how many of the five columns the chain needs.

    z only where forward takes other bytes than backward.
    """
    return 5 if any(block.splits_forward for block in table.blocks) else 4


def _block_layer(
    block: BlockCosts,
    behind: BlockEdge | None,
    before: BlockEdge | None,
    grids: tuple[float, float],
    columns: int,
) -> Layer:
    """Return transitions from the input layout of the block behind to that of this one.

    Without an edge there is one group.
    """
    entries = _entries(block, grids)
    # a transition for each configuration and each layout of the block behind
    groups = 1 if behind is None else behind.seconds.shape[1]
    choice, source = (rows.ravel() for rows in np.indices((len(entries), groups)))
    values = entries[choice]
    if behind is not None:
        parts = (
            np.round(behind.seconds / grids[0]) * grids[0],
            np.round(behind.bytes / grids[1]) * grids[1],
        )
        # (config, next config, entry)
        between = np.repeat(np.stack(parts, axis=-1), [3, len(END) - 3], axis=-1)
        values = values + between[block.layouts("outputs")[choice], source]
    # forbidden configurations and pairs are infinite
    allowed = np.flatnonzero(np.isfinite(values).all(axis=1))
    choice, source = choice[allowed], source[allowed]
    target = np.zeros_like(choice) if before is None else block.layouts("inputs")[choice]
    # without z, entries that end in it are left out
    used = np.flatnonzero(columns > END)
    groups = 1 if before is None else before.seconds.shape[1]
    return Layer(
        source, target, values[allowed][:, used], START[used], END[used], choice, groups, columns
    )


def _entries(block: BlockCosts, grids: tuple[float, float]) -> Array:
    """Return the entries (config, entry) of a block, in the order of `START` and `END`."""
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
    """Return grids of seconds and bytes on which all sums of the chain are exact."""
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
    for edge in table.edges:
        if edge is not None:
            seconds.append(edge.seconds)
            size.append(edge.bytes)
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
    before, layers = [1] * len(tables), []
    for n, beside in enumerate(zip(*chains, strict=True)):
        key = tuple(map(id, beside))
        # places at which all chains have equal layers are made once
        if key not in made:
            made[key] = _side_by_side(beside, before, n, depth)
        layers.append(made[key])
        before = [layer.groups for layer in beside]
    return layers


def _side_by_side(beside: Sequence[Layer], before: Sequence[int], n: int, depth: int) -> Layer:
    """Return the layers of all tables at place `n` of `depth` as one."""
    counts = [len(layer.source) for layer in beside]
    table = np.repeat(np.arange(len(beside)), counts)
    source = np.concatenate([layer.source for layer in beside])
    target = np.concatenate([layer.target for layer in beside])
    first, last = n == 0, n + 1 == depth
    groups = [layer.groups for layer in beside]
    return Layer(
        # one group before the first layer and after the last; in between all side by side
        source if first else source + _starts(before)[table],
        target if last else target + _starts(groups)[table],
        np.concatenate([layer.values for layer in beside]),
        beside[0].start,
        beside[0].end,
        table if first else np.concatenate([layer.choice for layer in beside]),
        1 if last else sum(groups),
        beside[0].columns,
    )


def _starts(counts: Sequence[int]) -> Rows:
    return np.cumsum([0, *counts[:-1]])
