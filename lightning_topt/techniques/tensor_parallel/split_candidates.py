"""`SplitModel` finds splits of a whole model for a tensor axis, and the step of one rank under each
of them.

Blocks of a group are split alike: one of them is searched, alone. All that is there once (the block
``""``, an embedding, a head that is a block of its own) is searched together, so a tensor may be
left split from one to the next; only what enters or leaves a repeated block is whole.
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
from lightning_topt.graph.capture import is_told_by_one
from lightning_topt.graph.errors import WAY_OUT
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.joint_candidates import find_joint
from lightning_topt.techniques.tensor_parallel.joint_run import JointRefusal
from lightning_topt.techniques.tensor_parallel.model_regions import ModelRegions
from lightning_topt.techniques.tensor_parallel.model_splits import (
    ModelSplit,
    choose_totals,
    model_split,
    search_totals,
)
from lightning_topt.techniques.tensor_parallel.split_bounds import SplitRegion, bound_graph
from lightning_topt.techniques.tensor_parallel.split_capture import capture_split
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout, make_layout
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import Point
from lightning_topt.techniques.tensor_parallel.split_walk import PricedCall, price_split, walk_split
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes


class Captured(NamedTuple):
    """Graphs of split steps by ranks and placements, and why some have none."""

    graphs: Mapping[Any, OpGraph | None]
    refusals: Mapping[Any, str]


@dataclass(frozen=True)
class SplitModel:
    """A model whose step was captured whole as `graph`, under `trace`; the rest is what `capture`
    was given.
    """

    module: nn.Module
    batch: Any
    graph: OpGraph
    trace: FunctionTrace
    second_batch: Any | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device | str = "cpu"
    _graphs: dict[Any, OpGraph | None] = field(default_factory=dict, compare=False, repr=False)
    _refusals: dict[Any, str] = field(default_factory=dict, compare=False, repr=False)
    _bounded: set[int] = field(default_factory=set, compare=False, repr=False)
    _prices: list[SplitPrices] = field(default_factory=list, compare=False, repr=False)
    _candidates: dict[int, tuple[SplitPrices, list[ModelSplit]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _found: dict[int, tuple[SplitPrices, list[Point]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _bounds: dict[tuple[int, int], tuple[ModelSplit, SplitPrices, OpGraph]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _not_joint: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def samples(self) -> int:
        """Samples of the step that was traced."""
        return self.graph.step.batch_sizes[1]

    def splits(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the Pareto set of splits, fastest first."""
        return [model_split(self._regions, total) for total in self._totals(prices)]

    def _totals(self, prices: SplitPrices) -> list[Point]:
        """The costs of the Pareto set, whose choices are the splits of each region."""
        if id(prices) not in self._found:
            self._found[id(prices)] = prices, search_totals(self._regions, prices)
        return self._found[id(prices)][1]

    def candidates(self, prices: SplitPrices) -> list[ModelSplit]:
        """Return the fastest split of `splits`, the one with the least state, and the one with the
        fewest bytes in all; not one that splits nothing, nor one that is close (2 %) to an earlier
        one of these in all of that.
        """
        if id(prices) not in self._candidates:
            chosen = choose_totals(self._totals(prices))
            self._candidates[id(prices)] = (
                prices,
                [model_split(self._regions, total) for total in chosen],
            )
        return self._candidates[id(prices)][1]

    def prices(
        self, cluster: Cluster, optimizer: OptimizerProfile, group: Group, batch_scale: float
    ) -> SplitPrices:
        """Return the prices of its calls, the same object for the same arguments: what was found
        with them is known.
        """
        given = SplitPrices(cluster, optimizer, group, batch_scale)
        known = next((each for each in self._prices if each == given), None)
        if known is None:
            self._prices.append(known := given)
        return known

    def bound_graph(self, split: ModelSplit, prices: SplitPrices) -> OpGraph:
        """Return a graph whose costs are at most those of `local_graph`, without a capture;
        `prices` are those of its split.
        """
        self._bounded.add(prices.group.size)
        key = id(split), id(prices)
        if key not in self._bounds:
            self._bounds[key] = split, prices, self._bound_graph(split, prices)
        return self._bounds[key][2]

    def _bound_graph(self, split: ModelSplit, prices: SplitPrices) -> OpGraph:
        regions = []
        for blocks in self._regions.alike:
            calls, whole = self._regions.traced(blocks[0])
            walked = [*walk_split(calls, prices, split.placements, whole=whole)]
            is_known = all(placed.outcome is not None for placed in walked)
            regions.append(SplitRegion(blocks, walked if is_known else []))
        samples = prices.batch_scale * self.samples
        return bound_graph(
            self.graph, regions, split.placements, ranks=prices.group.size, samples=samples
        )

    def calls(self, split: ModelSplit) -> dict[str, int]:
        """Return how often a forward calls torch functions in each part of the model in which
        `split` splits parameters; ``""`` is all that is there once.
        """
        known = {"", *self._regions.repeated}
        parts = {block_of(name, known) for name in split.placements}
        return {
            block: len(self._regions.traced(region[0])[0])
            for region in self._regions.all
            if not parts.isdisjoint(region)
            for block in region
        }

    def local_graph(self, split: ModelSplit, ranks: int) -> OpGraph | None:
        """Return the graph of one of `ranks` ranks, captured once; None where the split step cannot
        be captured.
        """
        placements = {name: (placement,) for name, placement in split.placements.items()}
        return self.local_graph_of(SplitLayout(placements, {}), (Axis("tensor", ranks),))

    def local_graph_of(self, layout: SplitLayout, along: Sequence[Axis]) -> OpGraph | None:
        """Return the graph of a rank of the tensor axes `along`, captured once; None where the step
        cannot be captured.
        """
        key = (
            tuple(along),
            frozenset(layout.placements.items()),
            frozenset(layout.rules.items()),
            layout.joint,
        )
        if key not in self._graphs:
            axes = TensorAxes.of_mesh(Mesh(tuple(along)), rank=0)
            names, whole = (
                (name for name, _ in self.module.named_parameters()),
                (Replicate(),) * len(axes),
            )
            placements = {name: layout.placements.get(name, whole) for name in names}
            try:
                self._graphs[key] = capture_split(
                    self.module,
                    self.batch,
                    like=self.graph,
                    trace=self.trace,
                    placements=placements,
                    axes=axes,
                    rules=layout.rules,
                    joint=layout.joint,
                    second_batch=self.second_batch,
                    forward_context=self.forward_context,
                    device=self.device,
                    one_recording=self._is_told_by_one,
                )
            except ValueError as error:  # code that cannot run on slices
                self._graphs[key], self._refusals[key] = None, _without_way_out(error)
                if isinstance(error, JointRefusal):
                    alike = next(
                        (region for region in self._regions.all if error.module in region),
                        [error.module],
                    )
                    self._not_joint.update(alike)
        return self._graphs[key]

    @cached_property
    def _is_told_by_one(self) -> bool:
        return is_told_by_one(
            self.module,
            self.batch,
            self.graph,
            forward_context=self.forward_context,
            device=self.device,
        )

    def joint_layout(self, split: ModelSplit, prices: SplitPrices) -> SplitLayout | None:
        """Return `split` as far as its parameters are in modules that may run the batches of all
        ranks, but for those that were found not to; None where none is.
        """
        first, last = self.graph.step.batch_sizes
        samples = self.trace.first_samples or first, last
        kept, joint = find_joint(
            self.trace, split.placements, prices, regions=self._regions.all, samples=samples
        )
        left = tuple(each for each in joint if each.module not in self._not_joint)
        own = {n: (p,) for n, p in kept.items() if any(each.holds(n) for each in left)}
        return SplitLayout(own, {}, joint=left) if own else None

    def refusals(self, ranks: int) -> list[str]:
        """Return why no step of one of `ranks` ranks was captured, a clause for each split that was
        left out.
        """
        return [
            *dict.fromkeys(
                why
                for (of, *_), why in self._refusals.items()
                if math.prod(axis.size for axis in of) == ranks
            )
        ]

    def why_whole(self, ranks: int) -> str:
        """Return why some step on slices over `ranks` ranks is not known, once it was looked for:
        which module or parameters, and why. Empty where all are, or bounds of their costs alone
        left them out.
        """
        sizes = (
            math.prod(axis.size for axis in along)
            for (along, *_), graph in self._graphs.items()
            if graph is not None
        )
        if (found := self.refusals(ranks)) or ranks in self._bounded or ranks in sizes:
            return "; ".join(found)
        uneven = [
            p for p in self.graph.parameters if p.shape and all(size % ranks for size in p.shape)
        ]
        if not uneven:
            return "no function of its code works on slices of its parameters"
        shown = f"{uneven[0].name!r} has the shape {list(uneven[0].shape)}"
        return f"no parameter can be cut into {ranks} slices where it is used ({shown})"

    def priced_calls(self, split: ModelSplit, prices: SplitPrices) -> list[tuple[PricedCall, int]]:
        """Return every traced call under `split`, and how often its like runs in all blocks of its
        group.

        Raises ValueError for a split that the search would not find.
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
        return [*dict.fromkeys(prices.group.size for prices in self._prices)]

    @property
    def captured(self) -> Captured:
        """All that `local_graph` captured, and why it did not: for another process that goes on
        with it.
        """
        return Captured(self._graphs, self._refusals)

    def take_over(self, captured: Captured) -> None:
        """Do not capture again what another process has captured."""
        self._graphs.update(captured.graphs)
        self._refusals.update(captured.refusals)

    def layout(self, name: str, prices: SplitPrices, along: Sequence[Axis]) -> SplitLayout:
        """Return the layout of this `name` (`LAYOUTS`): that with the least state, `prices` being
        those of the axis of columns.

        Raises ValueError as `make_layout`.
        """
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
            # which were not traced, where calls were left out
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


def _without_way_out(error: ValueError) -> str:
    """The message, without the advice to plan nothing."""
    return str(error).replace(WAY_OUT, "").strip().removesuffix(".")
