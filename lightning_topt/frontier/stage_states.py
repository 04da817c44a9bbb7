"""Stages of a chain before it is cut: for every run of neighbouring blocks the configurations that
may matter.

All that a stage costs sums over its blocks (humps: the largest counts), so runs with equal blocks,
in whatever order, have one frontier (`RunStates`): it is that of one block less, and one more
decision. It does not depend on the schedule, on sharding or on transfers, so all tables over one
chain share it (`run_states`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_topt.costs.stage_table import COLUMNS, StageChain, StageTable, StageVariant
from lightning_topt.frontier.layers import exact_grid
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_of_few, unique_rows

MAX_STATES = 2**12  # of a run; with more, the nearest ones are put together
_SMALL = 2**7  # runs up to which compiled code is not worth loading


@dataclass(frozen=True, eq=False)
class Runs:
    """The distinct runs of a chain of N blocks: ``of[i, j]`` is that of blocks i to j - 1 (N, N +
    1), -1 where j <= i.

    Run r is run ``shorter[r]`` (-1: nothing) and a block ``last[r]``, and has ``counts[r]`` of each
    distinct one.
    """

    of: Rows
    shorter: Rows
    last: Rows
    counts: Rows


@dataclass(frozen=True, eq=False)
class RunStates:
    """States of all runs one after the other, those of run r from ``first[r]`` to ``first[r + 1]``:
    `costs` (n, 5), in the order of `COLUMNS`, of a state `parent` (-1: nothing) of the shorter run
    and the configuration `config` of the last block.

    No plan is better than one of these by more than the share `error_bound` in every cost.
    """

    costs: Array
    first: Rows
    parent: Rows
    config: Rows
    error_bound: float


@lru_cache(maxsize=16)
def runs_of(order: tuple[int, ...]) -> Runs:
    """Return the distinct runs of a chain."""
    count, kinds = len(order), max(order) + 1
    sums = np.zeros((count + 1, kinds), np.intp)
    sums[1:] = np.cumsum(np.eye(kinds, dtype=np.intp)[list(order)], axis=0)
    of = np.full((count, count + 1), -1, np.intp)
    known: dict[bytes, int] = {}
    shorter, last, counts = [], [], []
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
    """Return the states of all runs of `chain`; `epsilon`: states so near to others in all costs
    are put together.

    Costs are rounded to grids on which their sums are exact.
    """
    runs, blocks = runs_of(chain.order), _on_grids(chain)
    step = epsilon / (2 * int(runs.counts.sum(axis=1).max()))
    if "numba" in sys.modules or len(runs.last) > _SMALL:
        found = importlib.import_module("lightning_topt.frontier.run_kernels").states_of_runs(
            runs.shorter, runs.last, blocks, step, MAX_STATES
        )
        if found is not None:
            return RunStates(*found)
    return _one_by_one(runs, blocks, step, MAX_STATES)


def _one_by_one(runs: Runs, blocks: Sequence[Array], step: float, most: int) -> RunStates:
    """Do `run_kernels.states_of_runs` in arrays, which takes no time to load."""
    error = 1.0
    costs: list[Array] = []
    parents: list[Rows] = []
    configs: list[Rows] = []
    first: list[int] = [0]
    errors: list[float] = []
    for shorter, last in zip(runs.shorter.tolist(), runs.last.tolist(), strict=True):
        before = np.zeros((1, len(COLUMNS))) if shorter < 0 else costs[shorter]
        made, parent, config = _extended(before, blocks[last])
        rows, more = _thinned(made, step, most)
        errors.append((1 + more) * (1.0 if shorter < 0 else errors[shorter]))
        error = max(error, errors[-1])
        costs.append(made[rows])
        parents.append(parent[rows] + (first[shorter] if shorter >= 0 else -1))
        configs.append(config[rows])
        first.append(first[-1] + len(rows))
    parts = np.concatenate(costs), np.array(first), np.concatenate(parents), np.concatenate(configs)
    return RunStates(*parts, error - 1)


def _on_grids(chain: StageChain) -> list[Array]:
    """The costs (config, 5) of each distinct block."""
    blocks = [
        np.stack([getattr(block, name) for name in COLUMNS], axis=1) for block in chain.blocks
    ]
    each = [blocks[kind] for kind in chain.order]
    grids = np.repeat(
        [exact_grid([part[:, some] for part in each]) for some in (slice(2), slice(2, 5))], [2, 3]
    )
    return [np.round(block / grids) * grids for block in blocks]


def _extended(before: Array, block: Array) -> tuple[Array, Rows, Rows]:
    """The states of a run and one more block that no other one beats, their parents and
    configurations.
    """
    allowed = np.flatnonzero(np.isfinite(block[:, 0]))
    made = before[:, None] + block[allowed]
    made[..., 4] = np.maximum(before[:, None, 4], block[allowed, 4])
    made = made.reshape(-1, len(COLUMNS))
    rows = pareto_rows_of_few(made)
    return made[rows], rows // max(len(allowed), 1), allowed[rows % max(len(allowed), 1)]


def _thinned(costs: Array, step: float, most: int) -> tuple[Rows, float]:
    """One of all states in each cell of a logarithmic grid, whose cells are `step` wide, or wider
    where there are too many; and the width. All, where `step` is 0 and they are not too many.
    """
    rows, width = np.arange(len(costs)), 0.0
    while (width < step and len(rows) > 2) or len(rows) > most:
        width = max(step, 2 * width, 1e-6)
        cells = np.floor(np.log(np.maximum(costs, 1e-300)) / np.log1p(width))
        rows = np.sort(unique_rows(cells))
    return rows, width


def configs_of_run(states: RunStates, runs: Runs, *, run: int, state: int) -> list[tuple[int, int]]:
    """Return the decisions of a state of a run: (distinct block, configuration) of each of its
    blocks.
    """
    found = []
    while state >= 0:
        found.append((int(runs.last[run]), int(states.config[state])))
        run, state = int(runs.shorter[run]), int(states.parent[state])
    return found


@dataclass(frozen=True, eq=False)
class StageStates:
    """The states that a kind of stage may have: those of all classes of runs, by lead ascending in
    each.

    Class c has the states ``first[c]`` to ``first[c + 1]``. Their `costs` (7, n) are seconds of
    lead and load, static bytes, those for each microbatch in flight, of the hump, of the update,
    and of each microbatch that waits; they are `state` (n,) of `variant` (n,). ``of[i, j]`` is the
    class of blocks i to j - 1, -1 where there is none.
    """

    of: Rows
    first: Rows
    costs: Array
    variant: Rows
    state: Rows
    error_bound: float


def stage_states(
    table: StageTable, variants: tuple[int, ...], link: int, *, epsilon: float = 0.0
) -> StageStates:
    """Return the states of stages that take one of `variants` and receive through `link`."""
    runs = runs_of(table.order)
    of, run_of, extras = _classes(table, runs, link)
    parts = [_of_variant(table, variant, run_of, epsilon) for variant in variants]
    owner, costs, state = (
        np.concatenate(each) for each in zip(*(part[0] for part in parts), strict=True)
    )
    variant = np.repeat(variants, [len(part[0][0]) for part in parts])
    lead, load, floor, kept, shared_load, shared_static = extras[owner].T
    costs[:, :4] += np.stack([lead, load + shared_load, shared_static, kept], axis=1)
    costs[:, 1] = np.maximum(costs[:, 1], floor)
    order = np.lexsort((costs[:, 0], owner))
    first = np.searchsorted(owner[order], np.arange(len(run_of) + 1))
    ordered = np.ascontiguousarray(costs[order].T)
    error = max(part[1] for part in parts)
    return StageStates(of, first, ordered, variant[order], state[order], error)


def _classes(table: StageTable, runs: Runs, link: int) -> tuple[Rows, Rows, Array]:
    """Runs that receive alike: the class of all of them (N, N + 1), the run of each class, and what
    it pays besides (c, 6).
    """
    count = len(table.order)
    first, end = np.nonzero(runs.of >= 0)
    pays = np.zeros((count, 4))
    pays[1:] = np.stack(
        [getattr(table.links[link], name) for name in ("lead", "load", "floor", "kept")], axis=1
    )[1:]
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
    more = np.zeros((2, len(rows))) if shared is None else shared[:, rows]
    return of, runs.of[first, end][rows], np.column_stack([pays[first[rows]], *more])


def _of_variant(
    table: StageTable, index: int, run_of: Rows, epsilon: float
) -> tuple[tuple[Rows, Array, Rows], float]:
    """Class, costs and number of the states of all classes under one variant; and their error."""
    variant, runs = table.variants[index], runs_of(table.order)
    states = run_states(variant.chain, epsilon)
    sizes = np.diff(states.first)[run_of]
    owner = np.repeat(np.arange(len(run_of)), sizes)
    state = (
        np.arange(len(owner))
        - np.repeat(np.cumsum(sizes) - sizes, sizes)
        + states.first[run_of][owner]
    )
    seconds, once, static, kept, hump = states.costs[state].T
    more = _constants(variant, runs)[:, run_of[owner]]
    lead = table.lead_rate * seconds + more[0]
    load = table.load_rate * seconds + table.once_rate * once + more[1]
    costs = np.stack([lead, load, static + more[2], kept, hump, more[3], more[4]], axis=1)
    return (owner, costs, state), states.error_bound


def _constants(variant: StageVariant, runs: Runs) -> Array:
    """Lead, load, static bytes, those of the update and of what waits (5, run) that a variant adds
    to its runs.
    """
    rows = variant.lead, variant.load, variant.static, variant.update, variant.waiting
    return np.stack(rows)[:, : runs.counts.shape[1]] @ runs.counts.T
