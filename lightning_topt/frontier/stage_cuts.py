"""The cheapest way to cut a chain into stages, each of which keeps below a load and a size: one
dynamic program over stages.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_topt.costs.stage_table import StageBlock, StageTable
from lightning_topt.frontier.pareto import Array, Rows
from lightning_topt.frontier.stage_states import (
    StageStates,
    configs_of_run,
    run_states,
    runs_of,
    stage_states,
)

_SMALL = 2**12  # stages times states up to which compiled code is not worth loading


@dataclass(frozen=True)
class Cut:
    """A plan of a table without what all plans pay: the sum of leads, the largest load and size;
    `states` (stage,) of stages that end before the blocks `ends`.
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


@dataclass(frozen=True, eq=False)
class StageCuts:
    """The plans of `table`; `epsilon` as in `stage_states`."""

    table: StageTable
    epsilon: float = 0.0

    def cheapest(self, *, size: float = np.inf, load: float = np.inf) -> Cut | None:
        """Return a plan with the least lead of all whose stages are below `size` bytes and `load`
        seconds, if there is one.
        """
        stages, blocks = len(self._stages), self._of.shape[1]
        best = np.full((stages + 1, blocks + 1), np.inf)
        came, chosen = np.full((2, stages, blocks + 1), -1)
        find = _cheapest_cuts
        if "numba" in sys.modules or stages * self._costs.shape[1] > _SMALL:
            find = importlib.import_module("lightning_topt.frontier.stage_kernels").cheapest_cuts
        limits = np.array([size, load])
        find(
            self._of, self._first, self._costs, self._stages, self._held, limits, best, came, chosen
        )
        if not np.isfinite(best[-1, -1]):
            return None
        end, ends, states = blocks, [], []
        for s in range(stages - 1, -1, -1):
            ends.append(end)
            states.append(int(chosen[s, end]))
            end = int(came[s, end])
        rows = np.array(states[::-1])
        sizes = _sizes(self._costs[:, rows], self._held)
        largest = float(self._costs[1, rows].max()), float(sizes.max())
        return Cut(float(best[-1, -1]), *largest, tuple(ends[::-1]), tuple(states[::-1]))

    @cached_property
    def least_load(self) -> float:
        """Seconds that the largest load of any plan is not below: that of all blocks, divided
        evenly.
        """
        table, order = self.table, list(self.table.order)
        of_block = [
            np.array([_least(block, table) for block in variant.chain.blocks]) + variant.load
            for variant in table.variants
        ]
        return float(np.min(of_block, axis=0)[order].sum()) / len(table.stages)

    @property
    def error_bound(self) -> float:
        """The share by which any plan may be better than the states that are left."""
        return max(group.error_bound for group in self._groups)

    def decisions(self, cut: Cut) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the variant of each stage and the configuration of each block."""
        runs, variants, configs, first = (
            runs_of(self.table.order),
            [],
            [0] * len(self.table.order),
            0,
        )
        for s, (end, place) in enumerate(zip(cut.ends, cut.states, strict=True)):
            group = self._groups[self._stages[s]]
            row = place - int(self._starts[self._stages[s]])
            variant = int(group.variant[row])
            states = run_states(self.table.variants[variant].chain, self.epsilon)
            of_kind: dict[int, list[int]] = {}
            for kind, config in configs_of_run(
                states, runs, run=int(runs.of[first, end]), state=int(group.state[row])
            ):
                of_kind.setdefault(kind, []).append(config)
            for n in range(first, end):
                configs[n] = of_kind[self.table.order[n]].pop()
            variants.append(variant)
            first = end
        return tuple(variants), tuple(configs)

    # ---- arrays ----------------------------------------------------------------------------------

    @cached_property
    def _kinds(self) -> list[tuple[tuple[int, ...], int]]:
        return [*dict.fromkeys((stage.variants, stage.link) for stage in self.table.stages)]

    @cached_property
    def _groups(self) -> list[StageStates]:
        return [stage_states(self.table, *kind, epsilon=self.epsilon) for kind in self._kinds]

    @cached_property
    def _stages(self) -> Rows:
        return np.array(
            [self._kinds.index((stage.variants, stage.link)) for stage in self.table.stages]
        )

    @cached_property
    def _held(self) -> Array:
        """Microbatches that are held, and that wait, at each time that may be the worst, and those
        that are held in the update ([held, waiting, in update], time, stage).
        """
        stages, most = self.table.stages, max(len(stage.held) for stage in self.table.stages)
        held = [(*stage.held, *stage.held[:1] * (most - len(stage.held))) for stage in stages]
        rows = np.array(held, float).transpose(2, 1, 0)
        updates = np.array([[stage.in_update for stage in stages]] * most, float)
        return np.ascontiguousarray(np.concatenate([rows, updates[None]]))

    @cached_property
    def _starts(self) -> Rows:
        """The places where the states of each group begin among all."""
        return np.cumsum([0, *(len(group.state) for group in self._groups)])

    @cached_property
    def _of(self) -> Rows:
        classes = np.cumsum([0, *(len(group.first) - 1 for group in self._groups)])
        return np.stack(
            [np.where(g.of >= 0, g.of + c, -1) for g, c in zip(self._groups, classes, strict=False)]
        )

    @cached_property
    def _first(self) -> Rows:
        ends = [
            group.first[1:] + start
            for group, start in zip(self._groups, self._starts, strict=False)
        ]
        return np.concatenate([[0], *ends]).astype(np.intp)

    @cached_property
    def _costs(self) -> Array:
        return np.ascontiguousarray(np.concatenate([group.costs for group in self._groups], axis=1))


def _sizes(costs: Array, held: Array) -> Array:
    """Bytes (n,) of stages; `held` ([held, waiting, in update], time, n)."""
    _, _, static, kept, hump, update, waiting = costs
    activations = (held[0] * kept + held[1] * waiting).max(axis=0)
    return np.asarray(static + np.maximum(activations + hump, held[2, 0] * kept + update))


def _least(block: StageBlock, table: StageTable) -> float:
    """The least seconds of load of a block."""
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
    came: Any,
    chosen: Any,
) -> None:
    """Do `stage_kernels.cheapest_cuts` in arrays, which takes no time to load."""
    count, states = of.shape[1], costs.shape[1]
    some = np.flatnonzero(np.diff(first))
    best[0, 0] = 0.0
    picked: dict[tuple[int, bytes], Rows] = {}
    for s, group in enumerate(stages.tolist()):
        key = group, held[..., s].tobytes()
        if key not in picked:
            allowed = (costs[1] < limits[1]) & (_sizes(costs, held[..., s : s + 1]) < limits[0])
            place = np.where(allowed, np.arange(states), states)
            picked[key] = np.full(len(first), states)
            picked[key][some] = np.minimum.reduceat(place, first[some])
        place = picked[key][of[group]]  # -1 takes the last one: none
        total = best[s, :count, None] + np.append(costs[0], np.inf)[place]
        came[s], best[s + 1] = total.argmin(axis=0), total.min(axis=0)
        chosen[s] = place[came[s], np.arange(count + 1)]
