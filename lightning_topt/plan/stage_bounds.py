"""Bounds of all plans of many pipelines at once, without a search: what no way to cut any of them
takes less than.

The largest load is at least the mean over stages, S of them; the largest size at least any weighted
mean. With weights that are equal, or are as 1 / (microbatches in flight), sizes become sums over
blocks, wherever these are. Stages receive what crosses the boundary where that is least. Costs are
those of `stage_table`, which need not be made for pipelines that these bounds rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import (
    PipelineShape,
    boundaries_of,
    fixed_costs,
    parts_of,
    transfer_seconds,
)

_ROOM = 2**20  # numbers in an array, about
_CONFIGS, _WAYS = 2, 2  # at most, of a block; of weights


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Lower bounds of n pipelines: `least` (n, price) of seconds + price * bytes at `prices`, and
    the `fewest` bytes (n,).
    """

    prices: Array
    least: Array
    fewest: Array

    def may_gain(self, index: int, known: KnownPlans) -> bool:
        """Return whether a plan of pipeline `index` may be one that no known plan beats; False is
        certain.
        """
        return known.may_gain_above(float(self.fewest[index]), self.prices, self.least[index])


def bounds_of(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    prices: Array,
    *,
    recomputes: Sequence[bool] = (False, True),
) -> StageBounds:
    """Return the bounds of the plans of `shapes`; `recomputes` as in `stage_table`."""
    least, fewest = np.full((len(shapes), len(prices)), -np.inf), np.zeros(len(shapes))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(_nodes(blocks, shape), []).append(index)
    most = max(_ROOM // (_WAYS * (max(blocks.kinds) + 1) * _CONFIGS * len(prices)), 1)
    for nodes, rows in alike.items():
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            several = [shapes[index] for index in some]
            least[some], fewest[some] = _of_alike(blocks, several, nodes, prices, tuple(recomputes))
    return StageBounds(prices, least, fewest)


def _nodes(blocks: StageBlocks, shape: PipelineShape) -> frozenset[tuple[int, ...]]:
    """The kinds of nodes of the stages of a shape."""
    cluster = blocks.step.cluster
    if not cluster.nodes:
        return frozenset([()])
    return frozenset(shape.kinds_of([s], cluster) for s in range(shape.num_stages))


def _of_alike(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    nodes: frozenset[tuple[int, ...]],
    prices: Array,
    recomputes: tuple[bool, ...],
) -> tuple[Array, Array]:
    """Bounds (shape, price) and (shape,) of shapes whose stages are on the same kinds of nodes."""
    counts = np.bincount(blocks.kinds)
    held = _weights(shapes)[..., None, None]  # (static or kept, shape, way, kind, config)
    least: list[Array] = []
    fewest: list[Array] = []
    rates = np.array(
        [(s.rates.lead, s.rates.load, s.num_stages, s.stages_per_rank) for s in shapes]
    ).T[..., None]
    saved = np.array([shape.rates.weights for shape in shapes])[:, None]
    for kinds in nodes:
        seconds, kept, weights, own = _parts(blocks.on(kinds), shapes, recomputes)
        weights = np.minimum(saved * weights, rates[0] * seconds.min(axis=2))  # (shape, kind)
        load = weights + rates[3] * own[:, 0]
        times = (rates[0] + rates[1] / rates[2])[..., None] * seconds + (load / rates[2] - weights)[
            ..., None
        ]
        sizes = (
            held[0] * (rates[3] * own[:, 1])[:, None, :, None] + held[1] * kept[:, None]
        )  # (shape, way, kind, config)
        priced = times[:, None, ..., None] + prices * sizes[..., None]
        least.append(priced.min(axis=3))
        fewest.append(np.where(np.isfinite(seconds)[:, None], sizes, np.inf).min(axis=3))
    fixed = np.array([fixed_costs(blocks, shape) for shape in shapes])
    seconds, received = np.array([_crossing(blocks, shape) for shape in shapes]).T
    received = held[1, ..., 0, 0] * received[:, None]  # (shape, way)
    priced = np.einsum("k,nwkp->nwp", counts, np.min(least, axis=0)) + prices * received[..., None]
    total = (fixed[:, 0] + seconds)[:, None] + prices * fixed[:, 1:] + priced.max(axis=1)
    return total, fixed[:, 1] + (np.min(fewest, axis=0) @ counts + received).max(axis=1)


def _crossing(blocks: StageBlocks, shape: PipelineShape) -> tuple[float, float]:
    """Seconds that all plans of a shape take at least for what stages send, and bytes that all
    stages together receive of a microbatch at least.
    """
    rates, least, received = (
        shape.rates,
        0.0,
        float(np.round(blocks.crossing_bytes(shape.samples)[0, 1:].min())),
    )
    sent = 0
    for (kinds, link), count in boundaries_of(shape, blocks.step.cluster).items():
        round_trip = transfer_seconds(blocks.on(kinds), shape)[link].sum(axis=0)
        least += count * float(np.round(round_trip[1:].min(), 9))
        sent += count * (link != "none")
    return (rates.lead + rates.sent_load / shape.num_stages) * least, sent * received


def _parts(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], recomputes: tuple[bool, ...]
) -> tuple[Array, Array, Array, Array]:
    """Seconds and bytes kept (shape, kind, config), seconds of gradients of parameters (shape,
    kind), and what comes once per step (shape, [seconds, static, update], kind), as in `parts_of`.
    """
    known: dict[object, tuple[Array, ...]] = {}
    found = []
    for shape in shapes:
        key = shape.samples, shape.splits_backward, shape.data, shape.tensor, shape.level
        if key not in known:
            chain, weights, own = parts_of(blocks, shape, recomputes)
            filled = (
                np.array([_filled(getattr(block, name), _CONFIGS) for block in chain.blocks])
                for name in ("seconds", "kept")
            )
            known[key] = *filled, weights, own
        found.append(known[key])
    seconds, kept, weights, own = (np.array(each) for each in zip(*found, strict=True))
    return seconds, kept, weights, own


def _weights(shapes: Sequence[PipelineShape]) -> Array:
    """Weights ([static, kept], shape, way) of bytes that sum to those of no more than the largest
    stage.
    """
    return np.array([_weights_of(shape.rates.held) for shape in shapes]).transpose(1, 0, 2)


@lru_cache(maxsize=2**14)
def _weights_of(held: tuple[int, ...]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Those of a pipeline whose stages hold so many microbatches: [static, kept], way."""
    counts = np.array(held, float)
    inverse = float((1 / counts).sum())
    static, kept = (
        (1 / len(held), 1 / counts.max() / inverse),
        (counts.min() / len(held), 1 / inverse),
    )
    return static, kept


def _filled(values: Array, count: int) -> Array:
    """The values of the configurations of a block, the last one again up to `count`."""
    return values[np.minimum(np.arange(count), len(values) - 1)]
