"""Splits of a whole model: the Pareto set out of those of its regions, and the few of it that are
worth a closer look.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.op_config import Placement, Placements
from lightning_topt.techniques.tensor_parallel.model_regions import ModelRegions
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import Point, pareto, search_splits
from lightning_topt.techniques.tensor_parallel.split_walk import BlockSplit

_CLOSE = 0.02
BlockPlacements = Mapping[str, tuple[tuple[str, Placements], ...]]


@dataclass(frozen=True)
class ModelSplit:
    """Placements of a model's parameters along a tensor axis, those that are split by their full
    names; what a step of it is expected to take on one rank, and bytes as in `BlockSplit`.
    """

    placements: Mapping[str, Placement]
    seconds: float
    state_bytes: float
    activation_bytes: float

    def by_block(self, blocks: Sequence[str]) -> BlockPlacements:
        """Return the placements as `OpConfig` has them, along this one axis: by block, and name in
        the block.
        """
        found: dict[str, list[tuple[str, Placements]]] = {block: [] for block in blocks}
        for name, placement in self.placements.items():
            block = block_of(name, found)
            found[block].append((name.removeprefix(f"{block}."), (placement,)))
        return {block: tuple(placed) for block, placed in found.items()}


def search_totals(regions: ModelRegions, prices: SplitPrices) -> list[Point]:
    """Return the costs of the Pareto set, fastest first, whose choices are the splits of each
    region.
    """
    totals = [Point(0.0, 0.0, 0.0, ())]
    for region in regions.all:
        calls, whole = regions.traced(region[0])
        found = search_splits(calls, prices, whole=whole)
        totals = pareto(
            _with_region(t, split, len(region)) for t, split in itertools.product(totals, found)
        )
    return totals


def model_split(regions: ModelRegions, total: Point) -> ModelSplit:
    """Return the split of all blocks that `total` has chosen."""
    placements: dict[str, Placement] = {}
    for region, split in zip(regions.all, total.chosen, strict=True):
        for block in region:
            own = split.placements.items()
            placements |= {
                f"{block}{name.removeprefix(region[0])}": placement for name, placement in own
            }
    return ModelSplit(placements, *total[:3])


def choose_totals(totals: Sequence[Point]) -> list[Point]:
    """Return of `totals`, fastest first, the fastest that splits anything, the one with the least
    state, and the one with the fewest bytes in all; not one that is close (2 %) to an earlier one
    of these in all of that.
    """
    found = [total for total in totals if any(split.placements for split in total.chosen)]
    if not found:
        return []
    chosen = (
        found[0],
        min(found, key=lambda split: (split.state_bytes, split.seconds)),
        min(found, key=lambda split: (split.state_bytes + split.activation_bytes, split.seconds)),
    )
    kept: list[Point] = []
    for split in chosen:
        if not any(_is_close(split, other) for other in kept):
            kept.append(split)
    return kept


def _is_close(split: Point, other: Point) -> bool:
    pairs = (
        (getattr(split, name), getattr(other, name))
        for name in ("seconds", "state_bytes", "activation_bytes")
    )
    return all(abs(a - b) <= _CLOSE * max(a, b) for a, b in pairs)


def _with_region(total: Point, split: BlockSplit, times: int) -> Point:
    """Return `total` with one more region, of so many blocks."""
    return Point(
        total.seconds + times * split.seconds,
        total.state_bytes + times * split.state_bytes,
        total.activation_bytes + times * split.activation_bytes,
        (*total.chosen, split),
    )
