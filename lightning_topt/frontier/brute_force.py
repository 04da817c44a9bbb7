"""The frontier by trying every plan: what `search_frontier` must find, in the fewest words. Read this first.

A plan takes one configuration of every operator. Its cost vectors add up; the slowest path is its step time, the
worst moment its peak memory. The frontier has every plan that no other plan beats: none is at most as slow *and* needs
at most as much memory, unless it is the same in both.
"""

from __future__ import annotations

import itertools
import math

from lightning_topt.costs.cost_table import CostTable
from lightning_topt.frontier.frontier import FrontierPoint


def brute_force_frontier(table: CostTable) -> list[FrontierPoint]:
    """All Pareto-minimal plans of `table` by memory ascending, one for each pair of costs; time is exponential.

    Plans with an infinite cost (forbidden configurations or pairs) are left out.
    """
    names = [operator.name for operator in table.operators]
    plans = []
    for indices in itertools.product(*(range(len(operator.configs)) for operator in table.operators)):
        step_seconds, peak_bytes = table.evaluate(indices)
        if math.isfinite(step_seconds) and math.isfinite(peak_bytes):
            plans.append(FrontierPoint(step_seconds, peak_bytes, dict(zip(names, indices, strict=True))))

    plans.sort(key=lambda plan: (plan.peak_bytes, plan.step_seconds))
    frontier: list[FrontierPoint] = []
    for plan in plans:  # every earlier plan needs at most as much memory, so this one has to be faster than all of them
        if not frontier or plan.step_seconds < frontier[-1].step_seconds:
            frontier.append(plan)
    return frontier
