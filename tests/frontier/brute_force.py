"""The frontier of a pipeline by trying every plan: what the search must find."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from lightning_topt.costs.chain_table import COLUMNS, StageKind, StageTable


def brute_force_stages(table: StageTable) -> list[tuple[float, float]]:
    """Return (step_seconds, peak_bytes) of the Pareto-minimal plans of `table` by memory ascending:
    all ways to cut it, all configurations of blocks.
    """
    count, chain = len(table.order), table.chain
    costs = []
    for inner in itertools.combinations(range(1, count), len(table.stages) - 1):
        for configs in itertools.product(
            *(range(len(chain.blocks[kind].configs)) for kind in table.order)
        ):
            costs.append(stage_costs(table, (*inner, count), configs))
    best: list[tuple[float, float]] = []
    for seconds, size in sorted(costs, key=lambda each: each[::-1]):
        if math.isfinite(seconds) and (not best or seconds < best[-1][0]):
            best.append((seconds, size))
    return best


def stage_costs(
    table: StageTable, ends: Sequence[int], configs: Sequence[int]
) -> tuple[float, float]:
    """Return (step_seconds, peak_bytes) of one plan.

    `ends` (stage,) say before which block each stage ends, `configs` (block,) are indices.
    """
    # leads of stages add up; load and bytes are those of the worst stage
    lead, load, size, first = 0.0, 0.0, 0.0, 0
    for stage, end in zip(table.stages, ends, strict=True):
        own = costs_of_one(table, stage, first, configs[first:end])
        lead, load, size, first = lead + own[0], max(load, own[1]), max(size, own[2]), end
    return table.fixed_seconds + (lead + load), table.fixed_bytes + size


def costs_of_one(
    table: StageTable, stage: StageKind, first: int, configs: Sequence[int]
) -> tuple[float, float, float]:
    """Return seconds of lead and load, and bytes, of one stage that begins with block `first`."""
    # the distinct block, and its row of costs, for each block of the stage
    kinds, extras = table.order[first : first + len(configs)], table.extras[stage.extras]
    blocks = [table.chain.blocks[kind] for kind in kinds]
    rows = [
        [float(getattr(block, name)[c]) for name in COLUMNS]
        for block, c in zip(blocks, configs, strict=True)
    ]
    *sums, humps = zip(*rows, strict=True)
    seconds, once, static, kept = map(sum, sums)
    # Nothing of infinity, of a configuration that is forbidden, would be no number.
    lead = (table.lead_rate * seconds if table.lead_rate else 0.0) + sum(
        float(extras.lead[kind]) for kind in kinds
    )
    load = (
        table.load_rate * seconds
        + table.once_rate * once
        + sum(float(extras.load[kind]) for kind in kinds)
    )
    static += sum(float(extras.static[kind]) for kind in kinds)
    # bytes while the optimizer steps, and between the two parts of a backward
    update, waiting = (
        sum(float(each[kind]) for kind in kinds) for each in (extras.update, extras.waiting)
    )
    if table.shared is not None:  # what blocks of the stage pay together
        together = table.shared[:, first, first + len(kinds)]
        load, static, update = np.array([load, static, update]) + together
    if first:  # what the stage receives
        link = table.links[stage.link]
        lead, kept = lead + float(link.lead[first]), kept + float(link.kept[first])
        load = max(load + float(link.load[first]), float(link.floor[first]))
    # bytes at the worst moment: of a pass, or while the optimizer steps
    held = max(count * kept + late * waiting for count, late in stage.held)
    size = static + max(held + max(humps), stage.in_update * kept + update)
    return float(lead), float(load), float(size)
