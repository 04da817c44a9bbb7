"""The frontier of a pipeline by trying every plan: what the search must find."""

from __future__ import annotations

import itertools
import math

from lightning_topt.costs.chain_table import StageTable


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
