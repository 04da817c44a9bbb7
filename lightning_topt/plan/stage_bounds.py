"""Bounds of all plans of a pipeline at once, without a search: what no way to cut it takes less than.

The largest load is at least the mean over stages, S of them; the largest size at least any weighted mean. With weights that are
equal, or are as 1 / (microbatches in flight), sizes become sums over blocks, wherever these are.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.stage_table import StageBlock, StageTable, StageVariant


def least_priced(table: StageTable, prices: Array) -> Array:
    """Return a lower bound of seconds + price * bytes (price,) of all plans of `table`."""
    found = np.full(len(prices), -np.inf)
    for static, kept in _weights(table):
        total = table.fixed_seconds + prices * table.fixed_bytes
        for kind, count in enumerate(np.bincount(table.order)):
            if count:
                of_kind = [_priced(table, variant, kind, (static, kept), prices) for variant in table.variants]
                total = total + count * np.min(of_kind, axis=0)
        np.maximum(found, total, out=found)
    return found


def fewest_bytes(table: StageTable) -> float:
    """Return a lower bound of the bytes of all plans of `table`."""
    found = []
    for static, kept in _weights(table):
        counts = np.bincount(table.order)
        least = [
            min(_size(variant, kind, (static, kept)).min() for variant in table.variants) for kind in range(len(counts))
        ]
        found.append(float(counts @ np.array(least)))
    return table.fixed_bytes + max(found)


def _weights(table: StageTable) -> list[tuple[float, float]]:
    """Weights of static bytes and of those of a microbatch that sum to bytes of no more than the largest stage."""
    held = np.array([stage.in_flight for stage in table.stages])
    inverse = float((1 / held).sum())
    return [(1 / len(held), float(held.min()) / len(held)), (1 / float(held.max()) / inverse, 1 / inverse)]


def _priced(table: StageTable, variant: StageVariant, kind: int, weights: tuple[float, float], prices: Array) -> Array:
    block, count = variant.chain.blocks[kind], len(table.stages)
    allowed = np.isfinite(block.seconds)
    load = table.load_rate * block.seconds[allowed] + table.once_rate * block.once[allowed] + variant.load[kind]
    seconds = table.lead_rate * block.seconds[allowed] + variant.lead[kind] + load / count
    least = seconds + prices[:, None] * _size(variant, kind, weights)[allowed]
    return np.asarray(least.min(axis=1, initial=np.inf))


def _size(variant: StageVariant, kind: int, weights: tuple[float, float]) -> Array:
    block: StageBlock = variant.chain.blocks[kind]
    size: Array = weights[0] * (block.static + variant.static[kind]) + weights[1] * block.kept
    return size
