"""A lower bound of the costs of a rank's split step, from the graph of the unsharded step.

A subject of its own: what no plan can gain with a split need not be captured. An operator is looked
at with the traced calls that ran in it (see [Note: bounds of a split step]):

    all its calls work on full tensors      its kernels and tensors as they are
    one of them works on slices             at 1 / P, as if all of them did
    it runs otherwise on slices             nothing
    no call is known                        nothing

[Note: bounds of a split step] On slices a function runs the kernels that it ran on full tensors, on
at least 1 / P of the elements, and what they make lives as long. Exceptions are kinds with a way of
their own to run (`Kind.run`), and copies. A slice may not need a copy: it may lie in one piece
where the full tensor did not. Of a full tensor of which a call takes a slice, that may be all that
stays, and gradients are summed slice by slice then. Collectives are those of the run
(`walk_split`). Those of what is there once count where the first operator of the block "" runs: in
the last backward they hide the most of the exchange of gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.compute import kernel_dtype
from lightning_topt.graph.kernels import SEEN
from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.graph.op_graph import Kernel, Op, OpGraph, Parameter
from lightning_topt.graph.step_memory import NOTHING, Amount, StepPart, StepTensor, segments
from lightning_topt.techniques.tensor_parallel.function_trace import TracedCall
from lightning_topt.techniques.tensor_parallel.layout import Layout
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.split_prices import Collective, PlacedCall, given

_COPIES = {
    "aten.clone.default",
    "aten.copy_.default",
    "aten._to_copy.default",
    "aten._reshape_copy.default",
}
# kinds whose `run` calls the function itself, with other numbers
_SAME = {"attention", "reshape", "squeeze", "expand", "split"}
_UNKNOWN: dict[str, Any] = {"args": [], "kwargs": {}}  # arguments of kernels that are not run
Added = tuple[tuple[Kernel, ...], tuple[Kernel, ...]]  # forward, backward


@dataclass(frozen=True)
class SplitRegion:
    """Calls of a block, or of all that is there once (the block ``""``), as they are split.

    `blocks` are those that are split alike, the one that was traced first.
    """

    blocks: Sequence[str]
    calls: Sequence[PlacedCall]

    def shares(self, ranks: int) -> dict[str, float]:
        """Return the share that a rank has at least of each operator, by name."""
        found: dict[str, float] = {}
        for placed in self.calls:
            is_cut = any(ref.memory in self._cut for ref in placed.call.outputs)
            share = min(_share_of(placed, ranks), 1 / ranks if is_cut else 1.0)
            for name in placed.call.ops:
                found[name] = min(found.get(name, 1.0), share)
        return found

    @cached_property
    def _cut(self) -> set[int]:
        # The memory of replicated tensors of which a call takes a slice
        return {
            ref.memory
            for placed in self.calls
            for ref, before, after in zip(
                placed.call.inputs, placed.placements, _places(placed), strict=True
            )
            if isinstance(after, Shard) and not isinstance(before, Shard)
        }

    @property
    def cuts_others(self) -> bool:
        """True if it takes slices of tensors that were made elsewhere."""
        return not self._cut <= {ref.memory for placed in self.calls for ref in placed.call.outputs}

    def added(self, ranks: int, samples: float) -> Added:
        """Return what one of its blocks runs besides: collectives, and copies that are summed.

        Copies of what is there once are left out: it may run in several passes.
        """
        forward: Counter[tuple[Collective, bool]] = Counter()
        backward: Counter[tuple[Collective, bool]] = Counter()
        is_block = self.blocks[0] != ""
        # collectives inside calls, then those of moves
        own = {ref.number for placed in self.calls for ref in placed.call.outputs}
        for placed in self.calls:
            assert placed.outcome is not None
            is_copied = is_block and _runs_as_on_whole(placed.call)
            forward.update((each, is_copied) for each in placed.outcome.collectives)
            # what was made elsewhere may have been moved elsewhere
            for move in (
                move for move in placed.moves if placed.call.inputs[move.operand].number in own
            ):
                # else nothing travels forward
                brings = isinstance(placed.placements[move.operand], Shard)
                forward.update((each, False) for each in move.collectives[:brings])
                backward.update((each, is_block) for each in move.collectives[brings:])
        return _kernels(forward, ranks, samples), _kernels(backward, ranks, samples)


def bound_graph(
    graph: OpGraph,
    regions: Sequence[SplitRegion],
    placements: Mapping[str, Placement],
    *,
    ranks: int,
    samples: float,
) -> OpGraph:
    """Return a graph that costs at most the step of one of `ranks` ranks.

    Parameters have their local shapes. The graph can be priced, not measured: it lists no tensors.

    Args:
        graph: of the unsharded step
        regions: the first is what is there once
        placements: of the split parameters by name
        ranks: along the axis
        samples: with whose prices calls were walked; collectives grow with the batch
    """
    # workspaces count for operators that run as they are
    bound = _BoundGraph(graph, ranks, regions, samples)
    step, shares = graph.step, bound.shares
    owners = (graph.ops[step.order[position]].name for position, _ in step.workspaces)
    workspaces = (
        each for each, name in zip(step.workspaces, owners, strict=True) if shares[name] == 1
    )
    part = StepPart(bound.tensor_shares(), tuple(workspaces))
    found = replace(
        graph,
        ops=bound.ops(),
        step=replace(step, tensors=(), calls=(), workspaces=()),
        parameters=tuple(_local(parameter, placements, ranks) for parameter in graph.parameters),
        whole_model=graph.fingerprint,
    )
    found.__dict__["timeline"] = segments(
        step, [block.name for block in graph.blocks], casts=graph.casts_of_parameters, part=part
    )
    return found


@dataclass
class _BoundGraph:
    """The shares of one split step, and the parts of its graph."""

    graph: OpGraph
    ranks: int
    regions: Sequence[SplitRegion]
    samples: float
    _scaled: dict[tuple[int, float], tuple[Kernel, ...]] = field(default_factory=dict)

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of every operator of the graph."""
        # an operator has the share of the like one in the block that was traced
        regions = [region.shares(self.ranks) for region in self.regions]
        traced = {
            block: number for number, region in enumerate(self.regions) for block in region.blocks
        }
        most = 1 / self.ranks if any(region.cuts_others for region in self.regions) else 1.0
        found = {}
        for op in self.graph.ops:
            number = traced.get(op.block, 0)
            first = self.regions[number].blocks[0]
            name = f"{first}{op.name.removeprefix(op.block)}" if first else op.name
            found[op.name] = min(regions[number].get(name, 0.0), most)
        return found

    def ops(self) -> tuple[Op, ...]:
        """Return all operators; the first of each block also has what the block runs besides."""
        added = [(region.blocks, region.added(self.ranks, self.samples)) for region in self.regions]
        left = {block: kernels for blocks, kernels in added for block in blocks}
        return tuple(self._op(op, *left.pop(op.block, ((), ()))) for op in self.graph.ops)

    def _op(self, op: Op, forward: tuple[Kernel, ...], backward: tuple[Kernel, ...]) -> Op:
        share = self.shares[op.name]
        if share == 1 and not (forward or backward):
            return op
        kernels = (
            (*self._kernels(op.forward, share), *forward),
            (*self._kernels(op.backward, share), *backward),
        )
        names = op.name, op.kind, op.module, op.block
        return Op(*names, op.parameters, op.outputs, *kernels, op.saved_bytes, op.stack)

    def _kernels(self, kernels: tuple[Kernel, ...], share: float) -> tuple[Kernel, ...]:
        # The kernels of a rank; the same ones for equal blocks, as in the full graph
        if share == 1:
            return kernels
        # kernels of equal blocks are the same objects
        key = id(kernels), share
        if key not in self._scaled:
            self._scaled[key] = tuple(
                _scaled(each, share) for each in kernels if share and each.name not in _COPIES
            )
        return self._scaled[key]

    def tensor_shares(self) -> NDArray[np.float64]:
        """Return the share of the bytes of all tensors (tensor,) that a rank has."""
        copies = {
            op.name
            for op in self.graph.ops
            if self.shares[op.name] < 1
            and any(kernel.name in _COPIES for kernel in (*op.forward, *op.backward))
        }
        return np.array(
            [self._tensor_share(tensor, copies) for tensor in self.graph.step.tensors], float
        )

    def _tensor_share(self, tensor: StepTensor, copies: Collection[str]) -> float:
        share = self.shares[tensor.producer]
        if share == 1:
            return share
        saves_otherwise = tensor.saved_by is not None and not self.shares[tensor.saved_by]
        return 0.0 if saves_otherwise or tensor.producer in copies else share


def _places(placed: PlacedCall) -> list[Placement]:
    # Where the arguments are when the call runs
    assert placed.outcome is not None
    found = [*placed.placements]
    for move in placed.outcome.moves:
        found[move.operand] = move.target
    return found


def _share_of(placed: PlacedCall, ranks: int) -> float:
    assert placed.outcome is not None
    if not any(isinstance(place, Shard) for place in (*_places(placed), *placed.outcome.outputs)):
        return 1.0
    return 1 / ranks if _runs_as_on_whole(placed.call) else 0.0


def _runs_as_on_whole(call: TracedCall) -> bool:
    kind = KINDS.get(call.func)
    if kind is None or (kind.name == "attention" and given(call, 4, "dropout_p", 0.0)):
        return False
    return kind.run is None or kind.name in _SAME


def _kernels(
    counts: Mapping[tuple[Collective, bool], int], ranks: int, samples: float
) -> tuple[Kernel, ...]:
    found = []
    for ((op, size), is_copied), count in counts.items():
        # As `show_collective` lets a capture see them: an all-to-all with what one rank gives.
        each = size / samples
        shown = Amount(0.0, each / ranks if op == "all_to_all" else each)
        found.append(Kernel(SEEN, {"args": [{}, op, 0], "kwargs": {}}, NOTHING, shown, count))
        if is_copied and op == "all_reduce":
            copied = Amount(0.0, 2 * each), count, Amount(0.0, each)
            found.append(Kernel("aten.clone.default", _UNKNOWN, NOTHING, *copied))
    return tuple(found)


def _scaled(kernel: Kernel, share: float) -> Kernel:
    # The kernel on a share of its elements; its arguments are unknown but for the dtype
    amounts = {
        name: _part(getattr(kernel, name), share) for name in ("flops", "bytes", "allocated")
    }
    return replace(
        kernel,
        arguments={**_UNKNOWN, "args": [kernel_dtype(kernel)]},
        **amounts,  # type: ignore[arg-type]
    )


def _part(amount: Amount, share: float) -> Amount:
    return Amount(amount.fixed * share, amount.per_sample * share)


def _local(parameter: Parameter, placements: Mapping[str, Placement], ranks: int) -> Parameter:
    placement = placements.get(parameter.name)
    if not isinstance(placement, Shard):
        return parameter
    return replace(parameter, shape=Layout(parameter.shape, (placement,)).local_shape((ranks,)))
