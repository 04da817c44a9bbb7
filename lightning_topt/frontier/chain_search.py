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
and the largest of x, z and L + update_bytes. F counts from the start of the step and not from C,
which makes more plans comparable. Columns that never decide are left out (`layers`), as z is where
forward takes the same as backward.

The layers of all meshes are searched at once, side by side. A mesh whose prices (`prices`) show
that none of its plans can become better than known ones of any mesh is dropped whole.

Of the partial plans of a group a search keeps those that no other one beats in every column: by
NumPy where that is little (`sweep`), else compiled (`search_wide`), pruned by prices, and bounded
in points, seconds and memory. With several columns nearly every partial plan is minimal. So
compiled sweeps keep at most `cap` of them, those that could gain most. The plans that a sweep finds
narrow the next, wider one; the first that gives none up is exact. A search that ends before has
missed at most what the partial plans that it gave up could gain.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier.layers import (
    Layer,
    apply,
    choices,
    column_lifts,
    exact_grid,
    reduce_layers,
)
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows, pareto_rows_2
from lightning_topt.frontier.prices import Bounds, Known, Prices, layer_kernels, make_prices

C, F, L, X, Z = range(5)
START, END = np.array([C, F, C, L, X, L, Z, L]), np.array([C, F, F, L, X, X, Z, Z])
_FINAL = np.array([0, 0, 1, 1, 1])  # what becomes of the columns: seconds, bytes
_COLUMNS = len(_FINAL)
_STEPS = 16  # for the prices of all meshes
_UNPRICED = 2**15  # numbers of all meshes up to which prices are not worth loading compiled code
_SMALL = 2**19  # work up to which NumPy alone is used
_PER_GROUP = 2**11  # what NumPy's calls for one group cost, in numbers
_PER_COLUMNS = 16  # what comparing more than two columns costs, in passes over them
_FIRST_CAP, _KNOWN_CAP = 512, 2**15  # partial plans of the first sweep, of one with known plans
_WIDER = 16  # how much wider the next sweep is
_CHUNK = 2**18  # candidates held at once
# with more columns than this, where few are beaten, each is compared with this many blocks only
_COMPARED = (4, 6)


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
    stated then.
    """

    points: tuple[FrontierPoint, ...]
    error_bound: float

    @property
    def exact(self) -> bool:
        """Whether each plan is here, or is beaten or equalled in both costs by one that is."""
        return self.error_bound == 0.0


def search_chain(table: ChainTable, **limits: Any) -> Frontier:
    """Return every Pareto-minimal plan of a chain of blocks, by memory ascending.

    Of plans with equal costs one is kept. Costs are rounded by about an ulp of the total. The
    frontier is empty when infinite costs forbid every plan.

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
    """
    budget = Budget(max_points, max_seconds, max_bytes, epsilon)
    deadline = time.thread_time() + max_seconds
    made = [(label, make()) for label, make in candidates]
    layers = reduce_layers(_mesh_layers([table for _, table in made])) if made else []
    # no mesh, or a layer that no plan can pass
    if not layers or not all(len(layer.source) for layer in layers):
        return Frontier((), epsilon)
    # prices drop whole meshes, where there are several and enough to search
    is_large = len(made) > 1 and sum(layer.values.size for layer in layers) > _UNPRICED
    priced = make_prices(layers, steps=_STEPS) if is_large else None
    # small searches need neither prices nor compiled code
    lifts, swept = column_lifts(layers), None
    if priced is None and epsilon == 0:
        swept = sweep(layers, lifts=lifts, work=min(_SMALL, max_points))
    if swept is not None:
        costs, plans, error_bound = *swept, 0.0
    else:
        costs, plans, error_bound = search_wide(
            layers, lifts=lifts, budget=budget, deadline=deadline, priced=priced
        )
    points = _mesh_points(made, costs, choices(layers, plans))
    return Frontier(points, max(error_bound, epsilon))


def _mesh_points(
    made: Sequence[tuple[Any, ChainTable]], costs: Array, decided: Rows
) -> tuple[FrontierPoint, ...]:
    # The plans that no other of `decided` (n, N) beats; their costs are (n, [seconds, bytes])
    best, points = pareto_rows_2(costs[:, 1], costs[:, 0]), []
    for (seconds, size), plan in zip(costs[best].tolist(), decided[best].tolist(), strict=True):
        label, table = made[plan[0]]
        names = table.names or tuple(map(str, range(len(table.order))))
        # layers go from the last block to the first, and end with one that decides nothing
        configs = plan[-2 : -2 - len(table.order) : -1]
        choice = dict(zip(names, configs, strict=True))
        points.append(FrontierPoint(seconds, size, choice, label))
    return tuple(points)


# ---- Layers of one chain.


def chain_layers(table: ChainTable, *, grids: tuple[float, float]) -> list[Layer]:
    """Return the start, one layer for each block from the last to the first, and the end.

    Costs are rounded to `grids` (seconds, bytes), those that all tables need which are searched
    together. Equal blocks share one layer.
    """
    # what every plan has: before the first block, and in the update
    fixed = np.array([[table.fixed_seconds, table.fixed_bytes]])[:, _FINAL]
    update = np.where(np.arange(_COLUMNS) == L, table.update_bytes, 0.0)[None]
    grid = np.array(grids)[_FINAL]
    one, own = np.zeros(1, np.intp), np.arange(_COLUMNS)
    # the start: what every plan pays
    layers = [Layer(one, one, np.round(fixed / grid) * grid, _FINAL, own, one, 1, _COLUMNS)]
    # equal blocks are one layer, whose work is done once
    made = [_block_layer(block, grids) for block in table.blocks]
    layers += [made[kind] for kind in reversed(table.order)]
    # the end: seconds, and the largest of the peaks and of the level in the update
    return [*layers, Layer(one, one, np.round(update / grid) * grid, own, _FINAL, one, 1, 2)]


def _block_layer(block: BlockCosts, grids: tuple[float, float]) -> Layer:
    # A transition for each allowed configuration of a block
    values = _entries(block, grids)
    # forbidden configurations are infinite
    choice = np.flatnonzero(np.isfinite(values).all(axis=1))
    one = np.zeros_like(choice)
    return Layer(one, one, values[choice], START, END, choice, 1, _COLUMNS)


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

    Chains with fewer blocks than others wait behind that.
    """
    grids = np.max([_exact_grids(table) for table in tables], axis=0)
    chains = [chain_layers(table, grids=(grids[0], grids[1])) for table in tables]
    depth = max(map(len, chains))
    # decides nothing and changes no column, between boundaries with one group
    one = np.zeros(1, np.intp)
    waiting = Layer(one, one, np.zeros((1, len(START))), START, END, one, 1, _COLUMNS)
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


class Budget(NamedTuple):
    """What a search may take, and what it may miss.

    It may hold `max_points` partial plans and `max_bytes` at one time, and take `max_seconds`. It
    may miss plans that are less than the share `epsilon` better.
    """

    max_points: int
    max_seconds: float
    max_bytes: float
    epsilon: float = 0.0


# ---- By NumPy: layer after layer all partial plans, without those that others beat.


def sweep(
    layers: Sequence[Layer], *, lifts: Sequence[Array], work: float
) -> tuple[Array, Rows] | None:
    """Return costs (n, 2) and transitions (n, N) of the best plans.

    None where that takes more than `work`, which counts the numbers computed, with a charge for
    every group of a layer. `lifts` are those of `layers.column_lifts`.
    """
    work -= sum(_PER_GROUP * layer.groups + layer.values.size for layer in layers)
    # before the first layer: one state of no seconds and no bytes
    states, group, back = np.zeros((1, 2)), np.zeros(1, np.intp), []
    for n, layer in enumerate(layers):
        # how many states come of it, before any is made
        counts = np.bincount(group, minlength=int(layer.source.max(initial=0)) + 1)
        work -= (
            int(counts[layer.source].sum())
            * len(layer.start)
            * (1 if layer.columns == 2 else _PER_COLUMNS)
        )
        if work < 0:
            return None
        # States (parent) with each transition (via) from their groups.
        order = np.argsort(layer.source, kind="stable")
        first = np.searchsorted(layer.source[order], group)
        count = np.searchsorted(layer.source[order], group, side="right") - first
        parent = np.repeat(np.arange(len(group)), count)
        within = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
        via = order[first[parent] + within]
        # raised where that decides nothing, so that more states can be compared
        after = _lifted(apply(layer, states[parent], via), lifts[n + 1])
        kept = _minimal_by_group(after, layer.target[via])
        states, group = after[kept], layer.target[via[kept]]
        back.append((parent[kept], via[kept]))
    return states, _follow(back, np.arange(len(states)))


def _lifted(states: Array, lift: Array) -> Array:
    # The columns (n, c), each at least the others plus what `lift` (c, c) says
    raised = states
    for a, b in np.argwhere(np.isfinite(lift)):
        raised = states.copy() if raised is states else raised
        np.maximum(raised[:, a], states[:, b] + lift[a, b], out=raised[:, a])
    return raised


def _minimal_by_group(states: Array, group: Rows) -> Rows:
    order = np.argsort(group, kind="stable")
    kept = []
    for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        some = states[rows]
        kept.append(
            rows[
                pareto_rows_2(some[:, 1], some[:, 0]) if states.shape[1] == 2 else pareto_rows(some)
            ]
        )
    return np.concatenate(kept) if len(order) else order


def _follow(back: Sequence[tuple[Rows, Rows]], rows: Rows) -> Rows:
    # The transitions (n, N) that led to the states `rows` (n,), by back-pointers
    plans = np.empty((len(rows), len(back)), np.intp)
    # from the last layer back to the first
    for n in range(len(back) - 1, -1, -1):
        parent, via = back[n]
        plans[:, n] = via[rows]
        rows = parent[rows].astype(np.intp)
    return plans


# ---- Compiled: sweeps that grow wider, pruned by prices.


class GiveUpError(Exception):
    """A sweep ran out of time."""


def search_wide(
    layers: Sequence[Layer],
    *,
    lifts: Sequence[Array],
    budget: Budget,
    deadline: float,
    priced: tuple[Prices, Known] | None = None,
) -> tuple[Array, Rows, float]:
    """Return costs (n, 2) and transitions (n, N) of the best plans, and the error bound.

    Args:
        layers: each has transitions.
        lifts: those of `layers.column_lifts`.
        budget: what the search may take.
        deadline: a time of `time.thread_time`.
        priced: prices of these layers and good known plans. With them, all that may be better is
            searched at once, as far as three quarters of the time allow.
    """
    columns = max(2, *(layer.columns for layer in layers))
    per_state = 8 * len(layers) + 64 * columns  # back-pointers of all layers, columns of one
    most = int(max(1, min(budget.max_points, budget.max_bytes / per_state)))
    prepared = [_prepare(layer, lift) for layer, lift in zip(layers, lifts[1:], strict=True)]
    prices, known = make_prices(layers) if priced is None else priced
    missed, is_last = prices.gain(known), False
    # nearly all at once where plans of several meshes are known
    cap = _FIRST_CAP if priced is None else _KNOWN_CAP
    # sweeps, each wider than the last
    while missed > budget.epsilon and not is_last:
        cap, began = min(cap, most), time.thread_time()
        try:
            known, dropped = _sweep_with_cap(
                prepared, prices, known, cap=cap, epsilon=budget.epsilon, deadline=deadline
            )
            missed = min(missed, dropped)
        except GiveUpError:
            is_last = True
        now = time.thread_time()
        wider = min(_WIDER, (deadline - now) / (now - began))  # as far as there is time for
        is_last |= cap == most or wider < 2
        missed, cap = min(missed, prices.gain(known)), int(cap * wider)
    return known.costs, known.plans, max(missed, 0.0)


def _sweep_with_cap(
    prepared: Sequence[KernelLayer],
    prices: Prices,
    known: Known,
    *,
    cap: int,
    epsilon: float,
    deadline: float,
) -> tuple[Known, float]:
    """Return known plans with those found, and what others could gain at most.

    Layer by layer, with at most `cap` partial plans at a time. Raises GiveUpError at the deadline.
    """
    bounds, zero = Bounds(prices, known, epsilon), np.zeros(1, np.int32)
    states, back, dropped = States(np.zeros((1, 2)), np.array([0, 1]), zero, zero), [], 0.0
    for n, layer in enumerate(prepared, 1):
        is_last = n == len(prepared)
        states = _extended(states, layer, _NONE if is_last else bounds.at(n), deadline=deadline)
        # give up those that could gain least
        if len(states.costs) > cap and not is_last:
            gains = bounds.gains(n, states.costs, states.group)
            rank = np.argsort(gains)
            # the best of those that are given up bounds what may be missed
            dropped = max(dropped, float(gains[rank[-cap - 1]]))
            rows = np.sort(rank[-cap:])
            states = states.take(rows, np.diff(np.searchsorted(rows, states.first), prepend=0))
        back.append((states.parent, layer.order[states.via]))
    # what was dropped counts beside plans that are better by `epsilon` already
    missed = epsilon + (1 + epsilon) * dropped
    return known.merged(states.costs, _follow(back, np.arange(len(states.costs)))), missed


# ---- One layer more: of every group the partial plans that may matter.


@dataclass(frozen=True, eq=False)
class States:
    """Partial plans of a boundary, sorted by group.

    `costs` are (n, c), ``first`` (G + 1,) says where each group begins. They come from `parent`
    (n,), the state before the last layer, through its transition `via` (n,).
    """

    costs: Array
    first: Rows
    parent: NDArray[Any]
    via: NDArray[Any]

    @property
    def group(self) -> Rows:
        """The group (n,) of every state."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def take(self, rows: Rows, counts: Rows) -> States:
        """Return these rows only, of which the groups have ``counts[1:]``."""
        return States(self.costs[rows], np.cumsum(counts), self.parent[rows], self.via[rows])


class KernelLayer(NamedTuple):
    """A layer for the kernels: its transitions in their order, the arrays that they take."""

    order: Rows
    arrays: tuple[NDArray[Any], ...]
    columns: int


def _extended(
    states: States, layer: KernelLayer, bounds: tuple[Array, Array, Array], *, deadline: float
) -> States:
    """Take one layer between any boundaries, in chunks of transitions.

    What drops more comes first: with few columns most partial plans are beaten by others, with
    many columns most show by their prices that they are hopeless. Raises GiveUpError at the
    deadline.
    """
    begin, source = layer.arrays[:2]
    # with few columns comparing drops more, with many prices do
    priced_first = bounds if layer.columns > _COMPARED[0] else _NONE
    counts, found = np.cumsum(np.diff(states.first)[source]), None
    for some in np.split(np.arange(len(source)), np.flatnonzero(np.diff(counts // _CHUNK)) + 1):
        room = _room(int(counts[some[-1]] - (counts[some[0] - 1] if some[0] else 0)), layer.columns)
        first, ends = np.empty(len(begin), np.int64), np.array([some[0], some[-1] + 1])
        size = layer_kernels().extend(
            states.costs, states.first, layer.arrays, priced_first, ends, first, *room
        )
        after, parent, via = (part[:size] for part in room)
        more = _minimal(States(after, first, parent, via))
        found = more if found is None else _minimal(_joined(found, more))
        if time.thread_time() > deadline:
            raise GiveUpError
    assert found is not None
    return found if priced_first is bounds else _hopeful(found, bounds)


_NONE = np.zeros((0, 1)), np.zeros((0, 1)), np.zeros((0, 1))  # bounds that keep all


def _minimal(states: States) -> States:
    # The states that no other of their group beats, by bytes if these are two columns
    costs, first = states.costs, states.first
    if costs.shape[1] == 2:
        rows = [
            a + pareto_rows_2(costs[a:b, 1], costs[a:b, 0]) for a, b in itertools.pairwise(first)
        ]
        return states.take(np.concatenate(rows), np.array([0, *map(len, rows)]))
    size = int(np.diff(first).max())
    # the least of each block of 16 states (`layer_kernels.BLOCK`)
    held, floor = np.empty((size, costs.shape[1])), np.empty((size // 16 + 1, costs.shape[1]))
    kept, counts = np.empty(len(costs), np.int64), np.zeros(len(first), np.int64)
    most = _COMPARED[1] if costs.shape[1] > _COMPARED[0] else len(costs)
    layer_kernels().minimal(costs, first, _who_beats_first(states), held, floor, kept, counts, most)
    return states.take(kept[: counts.sum()], counts)


def _who_beats_first(states: States) -> Rows:
    """Return an order of the states, group after group.

    States that beat others come before them.
    """
    columns = np.ascontiguousarray(states.costs.T)
    if not columns.size:
        return np.zeros(0, np.intp)
    least, spread = columns.min(axis=1, keepdims=True), np.ptp(columns, axis=1)
    # all columns together are less than one group
    share = 0.5 / len(columns) / np.where(spread > 0, spread, 1.0)
    if len(columns) <= _COMPARED[0]:
        # those like one another come together, so most blocks of them are ruled out at once
        share[1:] *= 0.01
    return np.argsort(states.group + share @ (columns - least))


def _hopeful(states: States, bounds: tuple[Array, Array, Array]) -> States:
    # The states that `bounds` do not show to become no better than known plans
    if not len(bounds[2]):
        return states
    kept, counts = np.empty(len(states.costs), np.int64), np.zeros(len(states.first), np.int64)
    layer_kernels().hopeful(states.costs, states.first, *bounds, kept, counts)
    return states.take(kept[: counts.sum()], counts)


def _prepare(layer: Layer, lift: Array) -> KernelLayer:
    # Transitions by target
    order = np.argsort(layer.target, kind="stable")
    begin = np.searchsorted(layer.target[order], np.arange(layer.groups + 1))
    pairs = np.argwhere(np.isfinite(lift))
    arrays = (
        begin,
        layer.source[order],
        layer.values[order],
        layer.start,
        layer.end,
        pairs,
        lift[tuple(pairs.T)],
    )
    made = (
        np.ascontiguousarray(a, np.float64 if a.dtype.kind == "f" else np.int64) for a in arrays
    )
    return KernelLayer(order, tuple(made), layer.columns)


def _room(size: int, columns: int) -> list[NDArray[Any]]:
    return [np.empty((size, columns)), np.empty(size, np.int32), np.empty(size, np.int32)]


def _joined(left: States, right: States) -> States:
    # both are sorted by group, and a stable sort keeps that
    order = np.argsort(np.concatenate([left.group, right.group]), kind="stable")
    costs, parent, via = (
        np.concatenate([getattr(side, name) for side in (left, right)])[order]
        for name in ("costs", "parent", "via")
    )
    return States(costs, left.first + right.first, parent, via)
