"""`SplitModel` finds splits of a whole model for a tensor axis, and the step of one rank under each of them.

Blocks of a group are split alike: one of them is searched, alone. All that is there once (the block ``""``, an embedding, a
head that is a block of its own) is searched together, so a tensor may be left split from one to the next; only what enters or
leaves a repeated block is whole.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Placements, Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_capture import capture_split
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import BlockSplit, Point, pareto, search_splits
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes

_CLOSE = 0.02
BlockPlacements = Mapping[str, tuple[tuple[str, Placements], ...]]


@dataclass(frozen=True)
class ModelSplit:
    """Placements of a model's parameters along a tensor axis, those that are split by their full names; what a step of it is
    expected to take on one rank, and bytes as in `BlockSplit`.
    """

    placements: Mapping[str, Placement]
    seconds: float
    state_bytes: float
    activation_bytes: float

    def by_block(self, blocks: Sequence[str]) -> BlockPlacements:
        """Return the placements as `OpConfig` has them, along this one axis: by block, and name in the block."""
        found: dict[str, list[tuple[str, Placements]]] = {block: [] for block in blocks}
        for name, placement in self.placements.items():
            block = block_of(name, blocks)
            found[block].append((name.removeprefix(f"{block}."), (placement,)))
        return {block: tuple(placed) for block, placed in found.items()}


@dataclass(frozen=True)
class SplitModel:
    """A model whose step was captured whole as `graph`, under `trace`; the rest is what `capture` was given."""

    module: nn.Module
    batch: Any
    graph: OpGraph
    trace: FunctionTrace
    second_batch: Any | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device | str = "cpu"
    _graphs: dict[Any, OpGraph | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def samples(self) -> int:
        """Samples of the step that was traced."""
        return self.graph.step.batch_sizes[1]

    def splits(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the Pareto set of splits, fastest first."""
        totals = [Point(0.0, 0.0, 0.0, {})]
        for region in self._regions:
            found = search_splits(
                self.trace.calls_of(region[0], self._repeated),
                prices,
                whole=self.trace.whole_at(region[0], self._repeated),
            )
            totals = pareto(_with_region(total, split, region) for total, split in itertools.product(totals, found))
        return [ModelSplit(total.chosen, *total[:3]) for total in totals]

    def candidates(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the fastest split of `splits`, the one with the least state, and the one with the fewest bytes in all; not one
        that splits nothing, nor one that is close (2 %) to an earlier one of these in all of that.
        """
        found = [split for split in self.splits(prices) if split.placements]
        if not found:
            return []
        chosen = (
            found[0],
            min(found, key=lambda split: (split.state_bytes, split.seconds)),
            min(found, key=lambda split: (split.state_bytes + split.activation_bytes, split.seconds)),
        )
        kept: list[ModelSplit] = []
        for split in chosen:
            if not any(_is_close(split, other) for other in kept):
                kept.append(split)
        return kept

    def calls(self, split: ModelSplit) -> int:
        """Return how often a forward calls torch functions in the parts of the model in which `split` splits parameters."""
        parts = {block_of(name, {"", *self._repeated}) for name in split.placements}
        return sum(
            len(region) * len(self.trace.calls_of(region[0], self._repeated))
            for region in self._regions
            if not parts.isdisjoint(region)
        )

    @property
    def local_graphs(self) -> list[OpGraph | None]:
        """All that `local_graph` returned."""
        return [*self._graphs.values()]

    def local_graph(self, split: ModelSplit, ranks: int) -> OpGraph | None:
        """Return the graph of one of `ranks` ranks, captured once; None where the split step cannot be captured."""
        key = ranks, tuple(split.placements.items())
        if key not in self._graphs:
            axes = TensorAxes.of_mesh(Mesh((Axis("tensor", ranks),)), rank=0)
            names = (name for name, _ in self.module.named_parameters())
            placements = {name: (split.placements.get(name, Replicate()),) for name in names}
            try:
                self._graphs[key] = capture_split(
                    self.module,
                    self.batch,
                    like=self.graph,
                    trace=self.trace,
                    placements=placements,
                    axes=axes,
                    second_batch=self.second_batch,
                    forward_context=self.forward_context,
                    device=self.device,
                )
            except ValueError:  # code that cannot run on slices
                self._graphs[key] = None
        return self._graphs[key]

    @cached_property
    def _repeated(self) -> list[str]:
        groups = Counter(block.group for block in self.graph.blocks)
        return [block.name for block in self.graph.blocks if groups[block.group] > 1]

    @cached_property
    def _regions(self) -> list[list[str]]:
        """Blocks that are split alike, the one that is searched first: all that is there once, then every group."""
        groups: dict[int, list[str]] = {}
        for block in self.graph.blocks:
            if block.name in self._repeated:
                groups.setdefault(block.group, []).append(block.name)
        return [[""], *groups.values()]


def _is_close(split: ModelSplit, other: ModelSplit) -> bool:
    pairs = ((getattr(split, name), getattr(other, name)) for name in ("seconds", "state_bytes", "activation_bytes"))
    return all(abs(a - b) <= _CLOSE * max(a, b) for a, b in pairs)


def _with_region(total: Point, split: BlockSplit, region: Sequence[str]) -> Point:
    """Return `total` with one more region, of blocks like the first of `region`."""
    model, times = region[0], len(region)
    placements = {
        f"{block}{name.removeprefix(model)}": placement
        for block in region
        for name, placement in split.placements.items()
    }
    return Point(
        total.seconds + times * split.seconds,
        total.state_bytes + times * split.state_bytes,
        total.activation_bytes + times * split.activation_bytes,
        {**total.chosen, **placements},
    )
