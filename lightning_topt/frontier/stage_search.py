"""The frontier of a pipeline: which blocks make which stage, under which configurations.

`search_stages` returns every plan of a `StageTable` (which says what costs) that no other beats.
Three steps, each in a section below:

1. All that a stage costs sums over its blocks (humps: the largest counts). So runs of neighbouring
   blocks that are equal, in whatever order, have one frontier (`RunStates`): it is that of one
   block less, and one more decision. It does not depend on the schedule, on sharding or on
   transfers, so all tables over one chain share it (`run_states`).
2. The cheapest way to cut the chain into stages that keep below a load and a size is one dynamic
   program over stages (`StageCuts.cheapest`).
3. The sum of leads and the largest load of a plan are searched with two limits. Below a size, lead
   only grows as loads are held below less. So of all plans that could take less than T seconds the
   loads are below T - (the least lead that is left): the cheapest plan below that load either takes
   less, or raises the least lead, until nothing is left (`fastest_below`). Then the size is held
   below that of the plan that was found. The search ends when nothing fits, or known plans beat
   all that fits.

Exact for the formula of the table, whatever schedule it is from; its twin in the tests tries all
cuts. With `epsilon` plans may be missing: for each there is one here, or a known one, that takes at
most 1 + epsilon times its seconds and bytes.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_topt.costs.chain_table import (
    COLUMNS,
    StageBlock,
    StageChain,
    StageExtras,
    StageLink,
    StageTable,
)
from lightning_topt.frontier.layers import exact_grid
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows

MAX_STATES = 2**12  # of a run; with more, the nearest ones are put together
_HALVINGS = 8  # of the range of loads in which the first plan is sought
_SMALL_CUTS = 2**12  # stages times states up to which compiled code is not worth loading
_SMALL_RUNS = 2**7  # runs up to which compiled code is not worth loading


@dataclass(frozen=True)
class StagePoint:
    """A plan: seconds of a step, and bytes at the peak.

    ``ends[s]`` is the block before which stage s ends; `configs` (block,) are indices.
    """

    step_seconds: float
    peak_bytes: float
    ends: tuple[int, ...]
    configs: tuple[int, ...]


@dataclass(frozen=True)
class StageFrontier:
    """Plans by memory ascending, and `error_bound` as in `Frontier`.

    Plans that known ones beat are left out.
    """

    points: tuple[StagePoint, ...]
    error_bound: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether no plan is missing."""
        return self.error_bound == 0.0


def search_stages(
    table: StageTable,
    *,
    known: Array | None = None,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
    between: tuple[float, float] = (0.0, np.inf),
) -> StageFrontier:
    """Return every plan of `table` that no other one beats, nor a known one.

    `known` plans are (n, [seconds, bytes]). Plans have bytes `between` two numbers; below the lower
    one there may be some, and others missing. After `max_seconds` of CPU time the plans found so
    far are returned, with the largest bytes first. What is left takes less memory than all of them,
    so nothing bounds by how much it is better: then `error_bound` is infinite.
    """
    deadline = time.thread_time() + max_seconds
    cuts, share = StageCuts(table, epsilon / 4), 1 + epsilon / 2  # (1 + e/4) (1 + e/2) < 1 + e
    beaten = _KnownPlans(table, known, share)
    found: list[Cut] = []
    least, size = (each - table.fixed_bytes for each in between)
    hint, is_done = 0.0, False
    # From the fastest plan on: each next one is the fastest of those that need less memory.
    while not is_done and time.thread_time() <= deadline:
        best = fastest_below(cuts, size=size, hint=hint, share=share)
        is_done = best is None
        if best is not None:
            hint, limit = best.load, beaten.size_below(best)
            if best.size < limit:
                found.append(best)
            size = min(best.size, limit) / share
            is_done = size <= least
    points = _frontier(cuts, found)
    error = cuts.error_bound if not epsilon else max(epsilon, (1 + cuts.error_bound) * share - 1)
    return StageFrontier(points, error if is_done else np.inf)


def fastest_below(
    cuts: StageCuts, *, size: float, hint: float = 0.0, share: float = 1.0
) -> Cut | None:
    """Return the plan of least seconds whose stages are below `size` bytes.

    It may take up to `share` times as long as the fastest one. `hint`: a load that it may have.
    """
    # The cheapest plan first, whatever its load; then those of less load that could be faster.
    first = cuts.cheapest(size=size)
    if first is None:
        return None
    best, least = _first_plan(cuts, first, size=size, hint=hint)
    limit = best.seconds / share - first.lead
    while limit > least and (cut := cuts.cheapest(size=size, load=limit)) is not None:
        best = min(best, cut, key=lambda each: each.seconds)
        # Plans of more load, below the last limit, have at least the lead of this one.
        limit = min(best.seconds / share - cut.lead, cut.load)
    return best


def _first_plan(cuts: StageCuts, first: Cut, *, size: float, hint: float) -> tuple[Cut, float]:
    # A plan with stages of about equal load, and a load at or below which there is none
    best, low, high = first, cuts.least_load() * (1 - 1e-12), first.load
    # Halve the range of loads, from the least that any plan may have to that of the first plan.
    for _ in range(_HALVINGS):
        if high - low <= 1e-3 * high:
            break
        middle = hint * (1 + 1e-9) if low < hint < high else (low + high) / 2
        hint = 0.0
        cut = cuts.cheapest(size=size, load=middle)
        if cut is None:
            low = middle
        else:
            best, high = min(best, cut, key=lambda each: each.seconds), min(cut.load, middle)
    return best, low


class _KnownPlans:
    """Plans that are known, without what all plans of a table pay."""

    def __init__(self, table: StageTable, known: Array | None, share: float) -> None:
        # as cuts count: without what all plans pay
        costs = (
            np.zeros((0, 2)) if known is None else known - [table.fixed_seconds, table.fixed_bytes]
        )
        # by seconds, each with the least bytes of all that are at least as fast
        costs = costs[np.argsort(costs[:, 0], kind="stable")]
        self._seconds, self._least = costs[:, 0], np.minimum.accumulate(costs[:, 1])
        self._share = share

    def size_below(self, cut: Cut) -> float:
        """Return the bytes below which no known plan beats those as fast as `cut`."""
        place = int(np.searchsorted(self._seconds, cut.seconds * self._share, side="right"))
        return float(self._least[place - 1]) if place else np.inf


def _frontier(cuts: StageCuts, found: Sequence[Cut]) -> tuple[StagePoint, ...]:
    # Sizes of what was found descend. Of plans as fast as a smaller one none is a point.
    table, points = cuts.table, list[StagePoint]()
    for cut in reversed(found):
        seconds, size = table.fixed_seconds + cut.seconds, table.fixed_bytes + cut.size
        if not points or seconds < points[-1].step_seconds:
            points.append(StagePoint(seconds, size, cut.ends, cuts.configs(cut)))
    return tuple(points)


# ---- Cutting a chain into stages.


@dataclass(frozen=True)
class Cut:
    """A plan of a table without what all plans pay.

    The sum of leads, the largest load and size; stages end before the blocks `ends` (stage,) and
    have `states` (stage,).
    """

    lead: float
    load: float
    size: float
    ends: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.lead + self.load


class StageCuts:
    """The ways to cut the chain of `table` into stages; `epsilon` as in `run_states`."""

    def __init__(self, table: StageTable, epsilon: float = 0.0) -> None:
        self.table, self._states = table, run_states(table.chain, epsilon)
        stages = table.stages
        # Stages that take the same besides, through the same link, have the same states: a group.
        kinds = [*dict.fromkeys((stage.extras, stage.link) for stage in stages)]
        groups = [
            stage_states(table, self._states, table.extras[extras], table.links[link])
            for extras, link in kinds
        ]
        self._groups = groups
        self._stages = np.array([kinds.index((stage.extras, stage.link)) for stage in stages])
        # The states of all groups one after the other: where those of each group begin, their
        # costs (7, n), and the classes of runs, of (group, N, N + 1) with their first states.
        self._starts = np.cumsum([0, *(len(group.state) for group in groups)])
        self._costs = np.ascontiguousarray(np.concatenate([g.costs for g in groups], axis=1))
        classes = np.cumsum([0, *(len(group.first) - 1 for group in groups)])
        self._of = np.stack(
            [np.where(g.of >= 0, g.of + c, -1) for g, c in zip(groups, classes, strict=False)]
        )
        ends = [g.first[1:] + start for g, start in zip(groups, self._starts, strict=False)]
        self._first = np.concatenate([[0], *ends]).astype(np.intp)
        # Microbatches of each stage, ([held, waiting, in update], time, stage), at each time that
        # may be the worst.
        most = max(len(stage.held) for stage in stages)
        held = [(*stage.held, *stage.held[:1] * (most - len(stage.held))) for stage in stages]
        rows = np.array(held, float).transpose(2, 1, 0)
        updates = np.array([[stage.in_update for stage in stages]] * most, float)
        self._held = np.ascontiguousarray(np.concatenate([rows, updates[None]]))

    def cheapest(self, *, size: float = np.inf, load: float = np.inf) -> Cut | None:
        """Return a plan with the least lead of all below `size` bytes and `load` seconds.

        Both hold for each of its stages. None where there is no such plan.
        """
        stages, blocks = len(self._stages), self._of.shape[1]
        # best[s, j]: least lead of s stages over the first j blocks; came and chosen lead there
        best = np.full((stages + 1, blocks + 1), np.inf)
        came, chosen = np.full((2, stages, blocks + 1), -1)
        find = _cheapest_cuts
        if "numba" in sys.modules or stages * self._costs.shape[1] > _SMALL_CUTS:
            find = importlib.import_module("lightning_topt.frontier.stage_kernels").cheapest_cuts
        limits = np.array([size, load])
        find(
            self._of, self._first, self._costs, self._stages, self._held, limits, best, came, chosen
        )
        if not np.isfinite(best[-1, -1]):
            return None
        # from the last stage to the first: where each begins, and which state it has
        end, ends, states = blocks, [], []
        for s in range(stages - 1, -1, -1):
            ends.append(end)
            states.append(int(chosen[s, end]))
            end = int(came[s, end])
        rows = np.array(states[::-1])
        sizes = _sizes(self._costs[:, rows], self._held)
        largest = float(self._costs[1, rows].max()), float(sizes.max())
        return Cut(float(best[-1, -1]), *largest, tuple(ends[::-1]), tuple(states[::-1]))

    def least_load(self) -> float:
        """Return seconds that the largest load of any plan is not below.

        They are the load of all blocks, divided evenly.
        """
        table = self.table
        least = np.array([_least_block_load(block, table) for block in table.chain.blocks])
        least += np.min([extras.load for extras in table.extras], axis=0)
        return float(least[[*table.order]].sum()) / len(table.stages)

    @property
    def error_bound(self) -> float:
        """The share by which any plan may be better than the states that are left."""
        return self._states.error_bound

    def configs(self, cut: Cut) -> tuple[int, ...]:
        """Return the configuration of each block."""
        order, first = self.table.order, 0
        runs, configs = runs_of(order), [0] * len(order)
        # a stage is a run that begins where the one before it ends
        for s, (end, place) in enumerate(zip(cut.ends, cut.states, strict=True)):
            group = self._groups[self._stages[s]]
            row = place - int(self._starts[self._stages[s]])
            # A run has decisions for each distinct block, which equal blocks take in any order.
            of_kind: dict[int, list[int]] = {}
            for kind, config in configs_of_run(
                self._states, runs, run=int(runs.of[first, end]), state=int(group.state[row])
            ):
                of_kind.setdefault(kind, []).append(config)
            for n in range(first, end):
                configs[n] = of_kind[order[n]].pop()
            first = end
        return tuple(configs)


def _sizes(costs: Array, held: Array) -> Array:
    # Bytes (n,) of stages; `held` ([held, waiting, in update], time, n)
    _, _, static, kept, hump, update, waiting = costs
    activations = (held[0] * kept + held[1] * waiting).max(axis=0)
    return np.asarray(static + np.maximum(activations + hump, held[2, 0] * kept + update))


def _least_block_load(block: StageBlock, table: StageTable) -> float:
    allowed = np.isfinite(block.seconds)
    loads = table.load_rate * block.seconds[allowed] + table.once_rate * block.once[allowed]
    return float(loads.min(initial=np.inf))


def _cheapest_cuts(
    of: Rows,
    first: Rows,
    costs: Array,
    stages: Rows,
    held: Array,
    limits: Array,
    best: Array,
    came: Rows,
    chosen: Rows,
) -> None:
    # Do `stage_kernels.cheapest_cuts` in arrays, which takes no time to load
    count, states = of.shape[1], costs.shape[1]
    some = np.flatnonzero(np.diff(first))
    best[0, 0] = 0.0
    picked: dict[tuple[int, bytes], Rows] = {}
    # per kind of stage: of each class the first state, which has the least lead, below both limits
    for s, group in enumerate(stages.tolist()):
        key = group, held[..., s].tobytes()
        if key not in picked:
            allowed = (costs[1] < limits[1]) & (_sizes(costs, held[..., s : s + 1]) < limits[0])
            place = np.where(allowed, np.arange(states), states)
            picked[key] = np.full(len(first), states)
            picked[key][some] = np.minimum.reduceat(place, first[some])
        place = picked[key][of[group]]  # -1 takes the last one: none
        # over all blocks before which the stage may begin
        total = best[s, :count, None] + np.append(costs[0], np.inf)[place]
        came[s], best[s + 1] = total.argmin(axis=0), total.min(axis=0)
        chosen[s] = place[came[s], np.arange(count + 1)]


# ---- The states that a stage may have.


@dataclass(frozen=True, eq=False)
class StageStates:
    """The states that a kind of stage may have: those of all classes of runs.

    Class c has the states ``first[c]`` to ``first[c + 1]``, by lead ascending. Their `costs` (7,
    n) are seconds of lead and load, and bytes: static, for each microbatch in flight, of the hump,
    of the update, for each microbatch that waits. They are `state` (n,) of their runs. ``of[i, j]``
    is the class of blocks i to j - 1, -1 where there is none.
    """

    of: Rows
    first: Rows
    costs: Array
    state: Rows


def stage_states(
    table: StageTable, states: RunStates, extras: StageExtras, link: StageLink
) -> StageStates:
    """Return the states of stages whose runs have `states`, and which receive through `link`."""
    # classes are runs that receive alike: each has the states of its run
    runs = runs_of(table.order)
    of, run_of, paid = _classes(table, runs, link)
    sizes = np.diff(states.first)[run_of]
    owner = np.repeat(np.arange(len(run_of)), sizes)
    begins = states.first[run_of] - (np.cumsum(sizes) - sizes)
    state = np.arange(len(owner)) + begins[owner]
    # what the run takes; what its blocks take besides; what every state of a class pays
    seconds, once, static, kept, hump = states.costs[state].T
    rows = np.stack([extras.lead, extras.load, extras.static, extras.update, extras.waiting])
    more = (rows[:, : runs.counts.shape[1]] @ runs.counts.T)[:, run_of[owner]]
    lead, load, floor, received, shared_load, shared_static, shared_update = paid[owner].T
    load = table.load_rate * seconds + table.once_rate * once + more[1] + load + shared_load
    costs = np.stack(
        [
            table.lead_rate * seconds + more[0] + lead,
            np.maximum(load, floor),  # that of the link
            static + more[2] + shared_static,
            kept + received,
            hump,
            more[3] + shared_update,
            more[4],
        ]
    )
    # by class, then by lead: the first state within the limits is the cheapest
    order = np.lexsort((costs[0], owner))
    first = np.searchsorted(owner[order], np.arange(len(run_of) + 1))
    return StageStates(of, first, np.ascontiguousarray(costs[:, order]), state[order])


def _classes(table: StageTable, runs: Runs, link: StageLink) -> tuple[Rows, Rows, Array]:
    """Return the classes of runs that receive alike.

    The class of all runs (N, N + 1), the run of each class, and what it pays besides (c, 7).
    """
    count = len(table.order)
    first, end = np.nonzero(runs.of >= 0)
    # a stage that begins at block n pays for what it receives; block 0 receives nothing
    pays = np.zeros((count, 4))
    pays[1:] = np.stack([link.lead, link.load, link.floor, link.kept], axis=1)[1:]
    shared = None if table.shared is None else table.shared[:, first, end]
    # One number for each distinct row, in the order of rows: numbers are compared much faster.
    key = runs.of[first, end]
    received = np.unique(pays, axis=0, return_inverse=True)[1].ravel()[first]
    for column in (received, *(() if shared is None else shared)):
        distinct, place = np.unique(column, return_inverse=True)
        key = key * len(distinct) + place
    _, rows, owner = np.unique(key, return_index=True, return_inverse=True)
    of = np.full(runs.of.shape, -1, np.intp)
    of[first, end] = owner
    more = np.zeros((3, len(rows))) if shared is None else shared[:, rows]
    return of, runs.of[first, end][rows], np.column_stack([pays[first[rows]], *more])


# ---- Runs of neighbouring blocks, and the configurations of them that may matter.


@dataclass(frozen=True, eq=False)
class Runs:
    """The distinct runs of a chain of N blocks.

    ``of[i, j]`` is that of blocks i to j - 1 (N, N + 1), -1 where j <= i. Run r is run
    ``shorter[r]`` (-1: nothing) and a block ``last[r]``, and has ``counts[r]`` of each distinct
    one.
    """

    of: Rows
    shorter: Rows
    last: Rows
    counts: Rows


@dataclass(frozen=True, eq=False)
class RunStates:
    """States of all runs one after the other, those of run r from ``first[r]`` on.

    A state has `costs` (n, 5), in the order of `COLUMNS`. It is the state `parent` (-1: nothing)
    of the shorter run and the configuration `config` of the last block. No plan is better than one
    of these by more than the share `error_bound` in every cost.
    """

    costs: Array
    first: Rows
    parent: Rows
    config: Rows
    error_bound: float


@lru_cache(maxsize=16)
def runs_of(order: tuple[int, ...]) -> Runs:
    """Return the distinct runs of a chain."""
    # A run is known by how many of each distinct block it has: differences of prefix sums.
    count, kinds = len(order), max(order) + 1
    sums = np.zeros((count + 1, kinds), np.intp)
    sums[1:] = np.cumsum(np.eye(kinds, dtype=np.intp)[list(order)], axis=0)
    of = np.full((count, count + 1), -1, np.intp)
    known: dict[bytes, int] = {}
    shorter, last, counts = [], [], []
    # by length, so that the run of one block less is known already
    for length in range(1, count + 1):
        for i, row in enumerate(sums[length:] - sums[: count + 1 - length]):
            key = row.tobytes()
            if key not in known:
                known[key] = len(known)
                shorter.append(of[i, i + length - 1])
                last.append(order[i + length - 1])
                counts.append(row)
            of[i, i + length] = known[key]
    return Runs(of, np.array(shorter), np.array(last), np.array(counts))


@lru_cache(maxsize=32)
def run_states(chain: StageChain, epsilon: float) -> RunStates:
    """Return the states of all runs of `chain`.

    Costs are rounded to grids on which their sums are exact. `epsilon`: states so near to others in
    all costs are put together.
    """
    # errors of single blocks multiply along a run: the longest one bounds the width of cells
    runs, blocks = runs_of(chain.order), _on_grids(chain)
    step = epsilon / (2 * int(runs.counts.sum(axis=1).max()))
    if "numba" in sys.modules or len(runs.last) > _SMALL_RUNS:
        found = importlib.import_module("lightning_topt.frontier.stage_kernels").states_of_runs(
            runs.shorter, runs.last, blocks, step, MAX_STATES
        )
        if found is not None:
            return RunStates(*found)
    return _run_states_in_arrays(runs, blocks, step, MAX_STATES)


def _run_states_in_arrays(runs: Runs, blocks: Sequence[Array], step: float, most: int) -> RunStates:
    # Do `stage_kernels.states_of_runs` in arrays, which takes no time to load
    error = 1.0
    costs: list[Array] = []
    parents: list[Rows] = []
    configs: list[Rows] = []
    first: list[int] = [0]
    errors: list[float] = []
    # states of a run: those of the run of one block less, each with every configuration of the last
    for shorter, last in zip(runs.shorter.tolist(), runs.last.tolist(), strict=True):
        before = np.zeros((1, len(COLUMNS))) if shorter < 0 else costs[shorter]
        made, parent, config = _extended(before, blocks[last])
        rows, more = _thinned(made, step, most)
        errors.append((1 + more) * (1.0 if shorter < 0 else errors[shorter]))
        error = max(error, errors[-1])
        costs.append(made[rows])
        # parents are rows among the states of all runs
        parents.append(parent[rows] + (first[shorter] if shorter >= 0 else -1))
        configs.append(config[rows])
        first.append(first[-1] + len(rows))
    parts = np.concatenate(costs), np.array(first), np.concatenate(parents), np.concatenate(configs)
    return RunStates(*parts, error - 1)


def _on_grids(chain: StageChain) -> list[Array]:
    # The costs (config, 5) of each distinct block
    blocks = [
        np.stack([getattr(block, name) for name in COLUMNS], axis=1) for block in chain.blocks
    ]
    # one grid for the two columns of seconds, one for the three of bytes
    each = [blocks[kind] for kind in chain.order]
    grids = np.repeat(
        [exact_grid([part[:, some] for part in each]) for some in (slice(2), slice(2, 5))], [2, 3]
    )
    return [np.round(block / grids) * grids for block in blocks]


def _extended(before: Array, block: Array) -> tuple[Array, Rows, Rows]:
    """Return the states of a run and one more block that no other one beats.

    With their parents and configurations.
    """
    allowed = np.flatnonzero(np.isfinite(block[:, 0]))
    # costs sum up, but of the humps the largest counts
    made = before[:, None] + block[allowed]
    made[..., 4] = np.maximum(before[:, None, 4], block[allowed, 4])
    made = made.reshape(-1, len(COLUMNS))
    rows = pareto_rows(made)
    return made[rows], rows // max(len(allowed), 1), allowed[rows % max(len(allowed), 1)]


def _thinned(costs: Array, step: float, most: int) -> tuple[Rows, float]:
    """Return one state of each cell of a logarithmic grid, and the width of its cells.

    Cells are `step` wide, or wider where there are too many states. All are kept where `step` is 0
    and they are not too many.
    """
    rows, width = np.arange(len(costs)), 0.0
    while (width < step and len(rows) > 2) or len(rows) > most:
        # wider cells, until few enough states are left
        width = max(step, 2 * width, 1e-6)
        cells = np.floor(np.log(np.maximum(costs, 1e-300)) / np.log1p(width))
        rows = np.sort(np.unique(cells, axis=0, return_index=True)[1])
    return rows, width


def configs_of_run(states: RunStates, runs: Runs, *, run: int, state: int) -> list[tuple[int, int]]:
    """Return the decisions of a state of a run: (distinct block, configuration) of its blocks."""
    # back from the last block, decision by decision
    found = []
    while state >= 0:
        found.append((int(runs.last[run]), int(states.config[state])))
        run, state = int(runs.shorter[run]), int(states.parent[state])
    return found
