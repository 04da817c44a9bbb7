"""`SplitModel` finds splits of a model for a tensor axis, and the step of one rank under each.

Blocks of a group are split alike: one of them is searched, alone. All that is there once (the block
``""``, an embedding, a head that is a block of its own) is searched together. So a tensor may stay
split from one to the next; only what enters or leaves a repeated block is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.capture import one_is_enough, repeated_layers
from lightning_topt.graph.errors import WAY_OUT
from lightning_topt.graph.fused_chains import fused
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.repetition import Stack
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_bounds import SplitRegion, bound_graph
from lightning_topt.techniques.tensor_parallel.split_capture import capture_split
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout, make_layout
from lightning_topt.techniques.tensor_parallel.split_prices import (
    PricedCall,
    SplitPrices,
    price_split,
    walk_split,
)
from lightning_topt.techniques.tensor_parallel.split_search import (
    ModelRegions,
    ModelSplit,
    Point,
    choose_totals,
    model_split,
    search_totals,
)


class Captured(NamedTuple):
    """Graphs of split steps by ranks and placements, and why some have none."""

    graphs: Mapping[Any, OpGraph | None]
    refusals: Mapping[Any, str]


@dataclass
class _SplitCache:
    """What a `SplitModel` has worked out so far. Keys by `id` keep their objects in the value."""

    # captures by axes, placements and rules
    graphs: dict[Any, OpGraph | None] = field(default_factory=dict)
    refusals: dict[Any, str] = field(default_factory=dict)
    # searches by prices
    prices: list[SplitPrices] = field(default_factory=list)
    totals: dict[int, tuple[SplitPrices, list[Point]]] = field(default_factory=dict)
    candidates: dict[int, tuple[SplitPrices, list[ModelSplit]]] = field(default_factory=dict)
    # bounds by split and prices; numbers of ranks that have some
    bounds: dict[tuple[int, int], tuple[ModelSplit, SplitPrices, OpGraph]] = field(
        default_factory=dict
    )
    bounded: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class SplitModel:
    """A model whose step was captured unsharded as `graph`, under `trace`.

    With `compiled` the graphs of split steps are as if they were compiled (`fused_chains`). The
    other arguments are what `capture` was given.
    """

    module: nn.Module
    batch: Any
    graph: OpGraph
    trace: FunctionTrace
    second_batch: Any | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device | str = "cpu"
    compiled: bool = False
    _known: _SplitCache = field(default_factory=_SplitCache, compare=False, repr=False)

    @property
    def samples(self) -> int:
        """Samples of the step that was traced."""
        return self.graph.step.batch_sizes[1]

    def splits(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the Pareto set of splits, fastest first."""
        return [model_split(self._regions, total) for total in self._totals(prices)]

    def _totals(self, prices: SplitPrices) -> list[Point]:
        # The costs of the Pareto set, whose choices are the splits of each region
        if id(prices) not in self._known.totals:
            self._known.totals[id(prices)] = prices, search_totals(self._regions, prices)
        return self._known.totals[id(prices)][1]

    def candidates(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the few of `splits` that are tried, see `choose_totals`."""
        if id(prices) not in self._known.candidates:
            chosen = choose_totals(self._totals(prices))
            self._known.candidates[id(prices)] = (
                prices,
                [model_split(self._regions, total) for total in chosen],
            )
        return self._known.candidates[id(prices)][1]

    def prices(
        self, cluster: Cluster, optimizer: OptimizerProfile, group: Group, batch_scale: float
    ) -> SplitPrices:
        """Return the prices of its calls, the same object for the same arguments.

        So what was found with them is known.
        """
        given = SplitPrices(cluster, optimizer, group, batch_scale)
        known = next((each for each in self._known.prices if each == given), None)
        if known is None:
            self._known.prices.append(known := given)
        return known

    def bound_graph(self, split: ModelSplit, prices: SplitPrices) -> OpGraph:
        """Return a graph whose costs are at most those of `local_graph`, without a capture.

        `prices` are those of its split.
        """
        self._known.bounded.add(prices.group.size)
        key = id(split), id(prices)
        if key not in self._known.bounds:
            self._known.bounds[key] = split, prices, self._bound_graph(split, prices)
        return self._known.bounds[key][2]

    def _bound_graph(self, split: ModelSplit, prices: SplitPrices) -> OpGraph:
        # walk the calls of each region once, with the prices of the search
        regions = []
        for blocks in self._regions.alike:
            calls, whole = self._regions.traced(blocks[0])
            walked = [*walk_split(calls, prices, split.placements, whole=whole)]
            is_known = all(placed.outcome is not None for placed in walked)
            regions.append(SplitRegion(blocks, walked if is_known else []))
        samples = prices.batch_scale * self.samples
        return bound_graph(
            self._priced, regions, split.placements, ranks=prices.group.size, samples=samples
        )

    def calls(self, split: ModelSplit | SplitLayout) -> dict[str, int]:
        """Return how often a forward calls torch functions, by part of the model that is split.

        ``""`` is all that is there once.
        """
        # parts of the model: repeated blocks, and all that is there once
        known = {"", *self._regions.repeated}
        parts = {block_of(name, known) for name in split.placements}
        return {
            block: len(self._regions.traced(region[0])[0])
            for region in self._regions.all
            if not parts.isdisjoint(region)
            for block in region
        }

    def local_graph(self, split: ModelSplit, ranks: int) -> OpGraph | None:
        """Return the graph of one of `ranks` ranks, captured once; None if it cannot be."""
        placements = {name: (placement,) for name, placement in split.placements.items()}
        return self.local_graph_of(SplitLayout(placements, {}), (Axis("tensor", ranks),))

    def local_graph_of(self, layout: SplitLayout, along: Sequence[Axis]) -> OpGraph | None:
        """Return the graph of a rank of the tensor axes `along`, captured once.

        None if the step cannot be captured.
        """
        key = (
            tuple(along),
            frozenset(layout.placements.items()),
            frozenset(layout.rules.items()),
        )
        if key not in self._known.graphs:
            axes = TensorAxes.of_mesh(Mesh(tuple(along)), rank=0)
            names = (name for name, _ in self.module.named_parameters())
            whole = (Replicate(),) * len(axes)
            placements = {name: layout.placements.get(name, whole) for name in names}
            try:
                graph = capture_split(
                    self.module,
                    self.batch,
                    like=self.graph,
                    trace=self.trace,
                    placements=placements,
                    axes=axes,
                    rules=layout.rules,
                    second_batch=self.second_batch,
                    forward_context=self.forward_context,
                    device=self.device,
                    one_recording=self._one_recording_suffices,
                    stacks=self._stacks,
                )
                self._known.graphs[key] = fused(graph) if self.compiled else graph
            except ValueError as error:  # code that cannot run on slices
                self._known.graphs[key] = None
                # without the advice to plan nothing
                reason = str(error).replace(WAY_OUT, "").strip().removesuffix(".")
                self._known.refusals[key] = reason
        return self._known.graphs[key]

    @cached_property
    def _priced(self) -> OpGraph:
        # The unsharded step as it is priced
        return fused(self.graph) if self.compiled else self.graph

    @cached_property
    def _one_recording_suffices(self) -> bool:
        return one_is_enough(
            self.module,
            self.batch,
            self.graph,
            forward_context=self.forward_context,
            device=self.device,
            stacks=self._stacks,
        )

    @cached_property
    def _stacks(self) -> tuple[Stack, ...]:
        return repeated_layers(
            self.module, self.batch, forward_context=self.forward_context, device=self.device
        )

    def refusals(self, ranks: int) -> list[str]:
        """Return why steps of one of `ranks` ranks were not captured, a clause for each."""
        return [
            *dict.fromkeys(
                why
                for (of, *_), why in self._known.refusals.items()
                if math.prod(axis.size for axis in of) == ranks
            )
        ]

    def why_whole(self, ranks: int) -> str:
        """Return why some step on slices over `ranks` ranks is not known, once it was looked for.

        It says which module or parameters, and why. Empty if all are known, or only bounds of their
        costs left them out.
        """
        # a step was captured, or left out by its bound: then nothing is wrong
        sizes = (
            math.prod(axis.size for axis in along)
            for (along, *_), graph in self._known.graphs.items()
            if graph is not None
        )
        if (found := self.refusals(ranks)) or ranks in self._known.bounded or ranks in sizes:
            return "; ".join(found)
        # else the shapes, or the code
        uneven = [
            p for p in self.graph.parameters if p.shape and all(size % ranks for size in p.shape)
        ]
        if not uneven:
            return "no function of its code works on slices of its parameters"
        shown = f"{uneven[0].name!r} has the shape {list(uneven[0].shape)}"
        return f"no parameter can be cut into {ranks} slices where it is used ({shown})"

    def priced_calls(self, split: ModelSplit, prices: SplitPrices) -> list[tuple[PricedCall, int]]:
        """Return every traced call under `split`, and how often its like runs in its group.

        Raises:
            ValueError: the search would not find this split
        """
        found: list[tuple[PricedCall, int]] = []
        for first, *others in self._regions.all:
            calls: list[PricedCall] = []
            traced, whole = self._regions.traced(first)
            if price_split(traced, prices, split.placements, whole=whole, priced=calls) is None:
                raise ValueError(
                    f"the placements in block {first!r} are none that the search of splits admits"
                )
            found += [(call, 1 + len(others)) for call in calls]
        return found

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks for which splits were looked for."""
        return [*dict.fromkeys(prices.group.size for prices in self._known.prices)]

    @property
    def captured(self) -> Captured:
        """All that `local_graph` captured, and why it did not.

        Another process can go on with it, see `take_over`.
        """
        return Captured(self._known.graphs, self._known.refusals)

    def take_over(self, captured: Captured) -> None:
        """Do not capture again what another process has captured."""
        self._known.graphs.update(captured.graphs)
        self._known.refusals.update(captured.refusals)

    def layout(self, name: str, prices: SplitPrices, along: Sequence[Axis]) -> SplitLayout:
        """Return the layout of this `name` (`LAYOUTS`), the one with the least state.

        `prices` are those of the axis of columns.

        Raises:
            ValueError: as in `make_layout`
        """
        # the placements along one axis, of the blocks that were traced
        least = min(self._totals(prices), key=lambda total: (total.state_bytes, total.seconds))
        found = model_split(self._regions, least)
        blocks = [block.name for block in self.graph.blocks]
        made = make_layout(
            name,
            self.trace,
            found.placements,
            axes=along,
            blocks=blocks,
            repeated=self._regions.repeated,
        )
        placements = dict(made.placements)
        for model, *others in self._regions.all[1:]:
            of_model = [each for each in placements.items() if each[0].startswith(f"{model}.")]
            # blocks that were not traced, if calls were left out, are placed as the first of them
            inside = tuple(f"{block}." for block in others)
            placements = {
                name: placed for name, placed in placements.items() if not name.startswith(inside)
            }
            placements |= {
                f"{block}{name.removeprefix(model)}": placed
                for block in others
                for name, placed in of_model
            }
        return SplitLayout(placements, made.rules, made.left)

    @cached_property
    def _regions(self) -> ModelRegions:
        return ModelRegions(self.graph, self.trace)
