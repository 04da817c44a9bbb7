"""The frontier by trying every plan: what the searches must find. Read this first.

A plan takes one configuration of every operator (or block). In a `CostTable` cost vectors add up;
the slowest path is its step time, the worst moment its peak memory; a `ChainTable` runs its blocks.
The frontier has every plan that no other plan beats: none is at most as slow *and* needs at most as
much memory, unless it is the same in both.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.costs.cost_table import CostTable
from lightning_topt.costs.stage_table import StageTable
from lightning_topt.frontier.chain_search import FrontierPoint


def brute_force_frontier(table: CostTable | ChainTable) -> list[FrontierPoint]:
    """Return all Pareto-minimal plans of `table` by memory ascending, one for each pair of costs;
    time is exponential.

    Plans with an infinite cost (forbidden configurations or pairs) are left out.
    """
    if isinstance(table, CostTable):
        names = [operator.name for operator in table.operators]
        counts = [len(operator.configs) for operator in table.operators]
    else:
        names = list(table.names) or [str(n) for n in range(len(table.order))]
        counts = [len(table.block(n).configs) for n in range(len(table.order))]
    plans = []
    for indices in itertools.product(*map(range, counts)):
        step_seconds, peak_bytes = _evaluate(table, indices)
        if math.isfinite(step_seconds) and math.isfinite(peak_bytes):
            plans.append(
                FrontierPoint(step_seconds, peak_bytes, dict(zip(names, indices, strict=True)))
            )

    plans.sort(key=lambda plan: (plan.peak_bytes, plan.step_seconds))
    frontier: list[FrontierPoint] = []
    # every earlier plan needs at most as much memory, so this one has to be faster than all of them
    for plan in plans:
        if not frontier or plan.step_seconds < frontier[-1].step_seconds:
            frontier.append(plan)
    return frontier


def _evaluate(table: CostTable | ChainTable, indices: tuple[int, ...]) -> tuple[float, float]:
    if isinstance(table, CostTable):
        return table.evaluate(indices)
    seconds, size = table.evaluate(np.array([indices], np.intp).reshape(1, -1))
    return float(seconds[0]), float(size[0])


def brute_force_stages(table: StageTable) -> list[tuple[float, float]]:
    """Return (step_seconds, peak_bytes) of the Pareto-minimal plans of `table` by memory ascending:
    all ways to cut it, all variants of stages, all configurations of blocks.
    """
    count, chain = len(table.order), table.variants[0].chain
    costs = []
    for inner in itertools.combinations(range(1, count), len(table.stages) - 1):
        for variants in itertools.product(*(stage.variants for stage in table.stages)):
            for configs in itertools.product(
                *(range(len(chain.blocks[kind].configs)) for kind in table.order)
            ):
                costs.append(table.evaluate((*inner, count), variants, configs))
    best: list[tuple[float, float]] = []
    for seconds, size in sorted(costs, key=lambda each: each[::-1]):
        if math.isfinite(seconds) and (not best or seconds < best[-1][0]):
            best.append((seconds, size))
    return best
