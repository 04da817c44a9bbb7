"""`SplitModel` finds splits of a model for a tensor axis, and the step of one rank under each.

Blocks of a group are split alike: one of them is searched, alone. All that is there once (the block
``""``, an embedding, a head that is a block of its own) is searched together. So a tensor may stay
split from one to the next; only what enters or leaves a repeated block is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import WAY_OUT, StepError
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.module_copy import contiguous_stride, empty_fake
from lightning_topt.graph.op_config import Placements, Replicate, Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.recording import changed
from lightning_topt.graph.repetition import Stack, find_stacks
from lightning_topt.graph.structures import tensors_in
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.layout import Layout, TensorAxes, with_layout
from lightning_topt.techniques.tensor_parallel.split_layouts import (
    BlockRule,
    SplitLayout,
    make_layout,
    rules_by_block,
)
from lightning_topt.techniques.tensor_parallel.split_mode import PLAIN, SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import check_split
from lightning_topt.techniques.tensor_parallel.split_prices import BlockSplit, SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import (
    ModelRegions,
    Point,
    choose_totals,
    model_split,
    search_totals,
)

# steps on slices by axes, placements and rules: their graphs, or why there is none
Captured = dict[Any, OpGraph | str]


@dataclass
class _SplitCache:
    # What a `SplitModel` has worked out so far. Keys by `id` keep their objects in the value.

    captured: Captured = field(default_factory=dict)
    # searches by prices
    prices: list[SplitPrices] = field(default_factory=list)
    totals: dict[int, tuple[SplitPrices, list[Point]]] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitModel:
    """A model whose step was captured unsharded as `graph`, under `trace`.

    The other arguments are what `capture` was given.
    """

    module: nn.Module
    batch: Any
    graph: OpGraph
    trace: FunctionTrace
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device | str = "cpu"
    _known: _SplitCache = field(default_factory=_SplitCache, compare=False, repr=False)

    @property
    def samples(self) -> int:
        """Samples of the step that was traced."""
        return self.graph.step.batch_sizes[1]

    def _totals(self, prices: SplitPrices) -> list[Point]:
        # The costs of the Pareto set, whose choices are the splits of each region
        if id(prices) not in self._known.totals:
            self._known.totals[id(prices)] = prices, search_totals(self._regions, prices)
        return self._known.totals[id(prices)][1]

    def candidates(self, prices: SplitPrices) -> list[BlockSplit]:
        """Return the few splits of the Pareto set that are tried, see `choose_totals`."""
        return [model_split(self._regions, total) for total in choose_totals(self._totals(prices))]

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

    def calls(self, split: SplitLayout) -> dict[str, int]:
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

    def local_graph(self, layout: SplitLayout, along: Sequence[Axis]) -> OpGraph | None:
        """Return the graph of a rank of the tensor axes `along`, captured once.

        None if the step cannot be captured.
        """
        key = (tuple(along), frozenset(layout.placements.items()), frozenset(layout.rules.items()))
        if key not in self.captured:
            axes = TensorAxes.of_mesh(Mesh(tuple(along)), rank=0)
            try:
                graph = self.capture_split(layout.placements, axes, layout.rules)
                self.captured[key] = graph
            except ValueError as error:  # code that cannot run on slices
                # without the advice to plan nothing
                reason = str(error).replace(WAY_OUT, "").strip().removesuffix(".")
                self.captured[key] = reason
        found = self.captured[key]
        return found if isinstance(found, OpGraph) else None

    def capture_split(
        self,
        placements: Mapping[str, Placements],
        axes: TensorAxes,
        rules: Mapping[str, BlockRule] = MappingProxyType({}),
    ) -> OpGraph:
        """Return the graph of the step that one rank of `axes` (without groups) runs.

        Blocks, names and the fingerprint are those of the unsharded step; parameters have local
        shapes. Collectives along the axes are kernels where they run, which `TrainingStep` prices
        (`shown_collective`). Layers that are split differently are all captured.

        Args:
            placements: of parameters by name; others are replicated
            axes: the tensor axes
            rules: of blocks

        Raises:
            ValueError: a parameter cannot be cut so; the split step makes something else than the
                unsharded one, since user code lost sight of a tensor (the message names the
                module); or as in `capture`
        """
        # placements of all parameters, and rules of the blocks, as in the run
        whole = (Replicate(),) * len(axes)
        placements = {
            name: placements.get(name, whole) for name, _ in self.module.named_parameters()
        }
        names = [block.name for block in self.graph.blocks]
        by_block = rules_by_block(rules, names, {*self._regions.repeated})
        run = _SplitRun(placements, axes, rules.get("", PLAIN), by_block)
        named = [(path, repr(replace(rule, block=""))) for path, rule in by_block.items()]
        try:
            graph = capture(
                self.module,
                self.batch,
                batch_scaling=self.graph.batch_scaling,
                adapt=run.of,
                like=self.graph,
                stacks=[
                    stack
                    for stack in self._stacks
                    if stack.is_alike(placements.items()) and stack.is_alike(named)
                ],
                forward_context=self.forward_context,
                device=self.device,
            )
        except StepError as error:  # of user code, which ran unsharded, or of a rule for splits
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise ValueError(
                f"module {run.under_way[-1] if run.under_way else ''!r} does not run with its "
                f"parameters split: {error.__cause__}; {_ADVICE}"
            ) from error.__cause__
        # the user must see the same shapes as without a split
        _check_results(run.results, self.trace.results())
        return changed(graph, whole_model=self.graph.fingerprint)

    @cached_property
    def _stacks(self) -> list[Stack]:
        # those of which the traced step had some layers alone
        called = {border.module for border in self.trace.borders}
        return [
            stack
            for stack in find_stacks(self.module)
            if called & {*map(stack.layer, stack.numbers)} == {*map(stack.layer, stack.kept)}
        ]

    def refusals(self, ranks: int) -> list[str]:
        """Return why steps of one of `ranks` ranks were not captured, a clause for each."""
        return [
            *dict.fromkeys(
                why
                for (of, *_), why in self.captured.items()
                if isinstance(why, str) and math.prod(axis.size for axis in of) == ranks
            )
        ]

    def why_whole(self, ranks: int) -> str:
        """Return why some step on slices over `ranks` ranks is not known, once it was looked for.

        It says which module or parameters, and why. Empty if all are known.
        """
        # a step was captured: then nothing is wrong
        sizes = (
            math.prod(axis.size for axis in along)
            for (along, *_), graph in self.captured.items()
            if isinstance(graph, OpGraph)
        )
        if (found := self.refusals(ranks)) or ranks in sizes:
            return "; ".join(found)
        # else the shapes, or the code
        uneven = [
            p for p in self.graph.parameters if p.shape and all(size % ranks for size in p.shape)
        ]
        if not uneven:
            return "no function of its code works on slices of its parameters"
        shown = f"{uneven[0].name!r} has the shape {list(uneven[0].shape)}"
        return f"no parameter can be cut into {ranks} slices where it is used ({shown})"

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks for which splits were looked for."""
        return [*dict.fromkeys(prices.group.size for prices in self._known.prices)]

    @property
    def captured(self) -> Captured:
        """All that `local_graph` captured; what another process has captured is added to it."""
        return self._known.captured

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


# ---- the step of one rank, captured --------------------------------------------------------------


_ADVICE = (
    "some code works on tensors beside torch's functions; keep the parameters of this module and "
    "of those around it whole"
)
Results = list[tuple[str, tuple[tuple[int, ...], ...]]]


class _SplitRun:
    # Splits copies of a module.
    # `results` has the calls of its modules in the last one, with the shapes seen by the user,
    # `under_way` those that have not ended.

    def __init__(
        self,
        placements: Mapping[str, Placements],
        axes: TensorAxes,
        rule: BlockRule,
        by_block: Mapping[str, BlockRule],
    ) -> None:
        self.placements, self.axes, self.rule, self.by_block = placements, axes, rule, by_block
        self.results: Results = []
        self.under_way: list[str] = []

    def of(self, module: nn.Module) -> SplitMode:
        # Split `module` and return the context around its forward.
        self.results, self.under_way, mode = [], [], SplitMode(self.axes, rule=self.rule)
        for name, parameter in module.named_parameters():
            _split(name, parameter, self.placements.get(name, ()), self.axes)
        for path, submodule in module.named_modules():
            if path:
                submodule.register_forward_pre_hook(partial(self._begin, path))
                submodule.register_forward_hook(partial(self._end, path))
            if path in self.by_block:  # as in the run
                rule = self.by_block[path]
                submodule.forward = partial(_run_block, mode, rule, submodule.forward)
        return mode

    def _begin(self, path: str, module: nn.Module, args: Any) -> None:
        self.under_way.append(path)

    def _end(self, path: str, module: nn.Module, args: Any, output: object) -> None:
        while self.under_way and self.under_way.pop() != path:
            pass
        self.results.append((path, tuple(tuple(tensor.shape) for tensor in tensors_in(output))))


def _run_block(
    mode: SplitMode, rule: BlockRule, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return mode.run_block(rule, forward, args, kwargs)


def _split(name: str, parameter: nn.Parameter, placements: Placements, axes: TensorAxes) -> None:
    # Give a fake parameter the shape of a slice, in a tenth of `split_parameters`' time
    if not any(isinstance(placement, Shard) for placement in placements):
        return
    check_split(name, tuple(parameter.shape), placements, axes)
    layout = Layout(tuple(parameter.shape), placements)
    # the memory is fake: a new tensor of the local shape is enough
    shape, mode = layout.local_shape(axes.sizes), getattr(parameter, "fake_mode")  # noqa: B009
    stride = contiguous_stride(shape)
    with torch.no_grad():
        parameter.data = empty_fake(mode, like=(shape, stride, parameter.dtype, parameter.device))
    with_layout(parameter, layout)


def _check_results(split: Results, whole: Results) -> None:
    # Raise ValueError for the first call of a module whose results differ in shape.
    # Calls count that both runs made.
    expected: dict[str, list[Any]] = {}
    for path, shapes in whole:
        expected.setdefault(path, []).append(shapes)
    for path, shapes in split:
        if expected.get(path) and shapes != (known := expected[path].pop(0)):
            raise ValueError(
                f"module {path!r} returns tensors of the shapes {list(shapes)} where its "
                f"parameters are split, and {list(known)} where they are whole; {_ADVICE}"
            )
