"""Prices of traced calls whose arguments are split along a tensor axis.

`decide` says what the run would do, so the price is that of the run.

    computation   max(flops / F, bytes / M) + o on local shapes, forward; backward the same for
                  every gradient (see `compute`)
    collectives   those of `moves`, forward and backward, by `estimate_collective_seconds`
    activations   what autograd saved, in the share that is local
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch.utils.flop_counter import conv_flop_count, sdpa_flop_count

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.graph.op_config import Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel.function_trace import Ref, TracedCall
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, Layout
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.reductions import NORM
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Argument,
    CallDecision,
    call_of,
    decide,
)
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout


@dataclass(frozen=True)
class BlockSplit:
    """Placements of split parameters by name, and what a step takes on one rank.

    Of a block, or of all blocks together.

    Args:
        placements: of parameters that are split
        seconds: of forward and backward
        state_bytes: parameters with gradients and optimizer state
        activation_bytes: kept for backward
    """

    placements: Mapping[str, Placement]
    seconds: float
    state_bytes: float
    activation_bytes: float

    @property
    def layout(self) -> SplitLayout:
        """The placements along the one axis, with the tensors between layers unsharded."""
        return SplitLayout({name: (each,) for name, each in self.placements.items()}, {})


def stays_whole(call: TracedCall, outcome: CallOutcome, whole: Collection[int]) -> bool:
    """Return whether no result of a call that has to be replicated is split."""
    places = zip(call.outputs, outcome.outputs, strict=True)
    return not any(isinstance(place, Shard) and ref.number in whole for ref, place in places)


Collective = tuple[str, float]  # op, bytes of the full tensor


class Move(NamedTuple):
    """Brings an argument to `target`; it then serves all calls that want this tensor there."""

    operand: int
    target: Placement
    enters: bool
    collectives: tuple[Collective, ...]
    seconds: float


class Saved(NamedTuple):
    """Bytes that autograd keeps of `memory` (None: of its own), all of it or a slice."""

    memory: int | None
    is_slice: bool
    bytes: float


class CallOutcome(NamedTuple):
    """What a call does.

    Args:
        outputs: placements of its results
        moves: of its arguments
        seconds: without the moves
        collectives: without the moves
        saved: for backward
    """

    outputs: tuple[Placement, ...]
    moves: tuple[Move, ...]
    seconds: float
    collectives: tuple[Collective, ...]
    saved: tuple[Saved, ...]


@dataclass(frozen=True)
class SplitPrices:
    """Prices along one tensor axis, whose groups are `group`.

    They are for `batch_scale` times the samples of the trace.
    """

    cluster: Cluster
    optimizer: OptimizerProfile
    group: Group
    batch_scale: float = 1.0
    _known: dict[Any, CallOutcome | None] = field(default_factory=dict, compare=False, repr=False)

    def outcome(self, call: TracedCall, placements: Sequence[Placement]) -> CallOutcome | None:
        """Return what `call` does with its arguments at `placements`.

        None if it cannot run so, or would move a parameter.
        """
        key = id(call), *placements
        if key not in self._known:
            self._known[key] = self._outcome(call, placements)
        return self._known[key]

    def parameter_bytes(self, parameter: Ref) -> float:
        """Return the bytes of an unsharded parameter with its gradient and optimizer state."""
        assert parameter.parameter is not None
        return parameter.nbytes * (1 + parameter.needs_grad) + self.optimizer.state_bytes(
            parameter.parameter
        )

    def collective_seconds(self, collectives: Sequence[Collective]) -> float:
        """Return the seconds of `collectives`, one after another."""
        return sum(
            estimate_collective_seconds(self.cluster, op=op, size=size, group=self.group)
            for op, size in collectives
        )

    def _outcome(self, call: TracedCall, placements: Sequence[Placement]) -> CallOutcome | None:
        known = [
            Argument(
                Layout(ref.shape, (placement,)),
                ref.needs_grad,
                ref.parameter is not None,
                ref.is_mask,
            )
            for ref, placement in zip(call.inputs, placements, strict=True)
        ]
        # the decision of the run
        kind, sizes = KINDS.get(call.func), (self.group.size,)
        try:
            made = call_of(call.func, call.args, call.kwargs, known, of=Ref)
            decision = decide(kind, made, known, sizes, in_place=call.in_place)
        except ValueError:
            return None
        # no parameter travels; a norm may take slices of its few numbers
        inputs = [along[0] for along in decision.inputs]
        for ref, before, after in zip(call.inputs, placements, inputs, strict=True):
            takes_slice = kind is NORM and before == REPLICATE
            if ref.parameter is not None and before != after and not takes_slice:
                return None
        # its price
        outputs, summed = self._outputs(call, decision)
        inside, extra = INSIDE.get(kind.name if kind else "", _nothing)(call, inputs)
        collectives = *summed, *((op, size * self.batch_scale) for op, size in inside)
        return CallOutcome(
            outputs,
            tuple(self._moves(call, placements, decision)),
            self._compute_seconds(call, inputs, outputs, extra)
            + self.collective_seconds(collectives),
            collectives,
            tuple(self._saved(call, inputs, outputs)),
        )

    def _outputs(
        self, call: TracedCall, decision: CallDecision
    ) -> tuple[tuple[Placement, ...], list[Collective]]:
        # no row: replicated arguments, and so results
        if not decision.outputs:
            return (REPLICATE,) * len(call.outputs), []
        placed: list[Placement] = []
        sums: list[Collective] = []
        for index, ref in enumerate(call.outputs):
            (placement,) = decision.outputs[min(index, len(decision.outputs) - 1)]
            if isinstance(placement, Partial):
                sums.append(("all_reduce", self._bytes(ref)))
                placement = REPLICATE
            placed.append(placement)
        return tuple(placed), sums

    def _moves(
        self, call: TracedCall, placements: Sequence[Placement], decision: CallDecision
    ) -> Iterator[Move]:
        for index, (ref, before) in enumerate(zip(call.inputs, placements, strict=True)):
            ((after,), (enters,)) = decision.inputs[index], decision.enters[index]
            has_gradient = ref.needs_grad and call.with_grad
            if index == decision.added or (before == after and not (enters and has_gradient)):
                continue
            size = self._bytes(ref)
            # from a slice: gathered or exchanged; from the full tensor: sliced, or just used
            if isinstance(before, Shard):
                forward = "all_to_all" if isinstance(after, Shard) else "all_gather"
                backward = (
                    "all_to_all"
                    if isinstance(after, Shard)
                    else "reduce_scatter"
                    if enters
                    else None
                )
            else:
                forward, backward = None, "all_gather" if isinstance(after, Shard) else "all_reduce"
            ops = [op for op in (forward, backward if has_gradient else None) if op is not None]
            collectives = tuple((op, size) for op in ops)
            yield Move(index, after, enters, collectives, self.collective_seconds(collectives))

    def _bytes(self, ref: Ref) -> float:
        return ref.nbytes * (1.0 if ref.parameter is not None else self.batch_scale)

    # ---- computation -----------------------------------------------------------------------------

    def _compute_seconds(
        self,
        call: TracedCall,
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        extra: float,
    ) -> float:
        if call.is_view:
            return 0.0
        device, ranks = self.cluster.device, self.group.size
        # forward: the larger of arithmetic and memory traffic, on local shapes
        places = zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
        traffic = sum(
            self._bytes(ref) / (ranks if isinstance(place, Shard) else 1) for ref, place in places
        )
        traffic += extra * self.batch_scale
        flops = (
            flops_of(call)
            * self.batch_scale
            / (ranks if any(isinstance(p, Shard) for p in inputs) else 1)
        )
        rate = device.flops_of(str(call.outputs[0].dtype).removeprefix("torch."))
        seconds = max(flops / rate, traffic / device.memory_bandwidth) + device.op_overhead_seconds
        # backward: of a product once per gradient, else once
        gradients = sum(ref.needs_grad for ref in call.inputs) if call.with_grad else 0
        if not gradients:
            return seconds
        products = gradients if flops else 1
        backward = max(flops * products / rate, traffic * products / device.memory_bandwidth)
        return seconds + backward + products * device.op_overhead_seconds

    def _saved(
        self, call: TracedCall, inputs: Sequence[Placement], outputs: Sequence[Placement]
    ) -> Iterator[Saved]:
        # parameters are state, not activations
        parameters = {ref.memory for ref in call.inputs if ref.parameter is not None}
        places = {ref.memory: place for ref, place in zip(call.outputs, outputs, strict=True)}
        places |= {ref.memory: place for ref, place in zip(call.inputs, inputs, strict=True)}
        of_own = isinstance(outputs[0], Shard)
        for memory, size in call.saved:
            if memory not in parameters:
                is_slice = of_own if memory is None else isinstance(places[memory], Shard)
                yield Saved(
                    memory, is_slice, size * self.batch_scale / (self.group.size if is_slice else 1)
                )


def flops_of(call: TracedCall) -> float:
    """Return the FLOPs of a product, forward, on full tensors; 0 for anything else."""
    name = kind.name if (kind := KINDS.get(call.func)) else ""
    shapes, out = [ref.shape for ref in call.inputs], call.outputs[0].shape
    # (..., inner) times (inner, columns)
    if name in ("linear", "matmul", "addmm"):
        left = shapes[1] if name == "addmm" else shapes[0]
        return 2.0 * math.prod(out) * left[-1]
    if name == "einsum":
        terms = call.args[0].replace(" ", "").partition("->")[0].split(",")
        sizes = {
            letter: size
            for term, shape in zip(terms, shapes, strict=False)
            for letter, size in zip(term, shape, strict=False)
        }
        return 2.0 * math.prod(sizes.values())
    # (batch, head, step, channel); grouped heads count as many as queries have
    if name == "attention":
        *_, heads, steps, _ = shapes[0]
        batch = math.prod(shapes[0][:-3])
        query = batch, heads, steps, shapes[0][-1]
        key, value = ((batch, heads, *shape[-2:]) for shape in shapes[1:3])
        return float(sdpa_flop_count(query, key, value))
    if call.func in CONVOLUTIONS:
        return float(conv_flop_count(list(shapes[0]), list(shapes[1]), list(out)))
    return 0.0


CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
Inside = tuple[list[Collective], float]


def _nothing(call: TracedCall, inputs: Sequence[Placement]) -> Inside:
    return [], 0.0


def _loss(call: TracedCall, inputs: Sequence[Placement]) -> Inside:
    # Split by classes: three sums of a number per sample
    if inputs[0] != Shard(1):
        return [], 0.0
    logits = call.inputs[0]
    return [("all_reduce", float(logits.shape[0] * logits.dtype.itemsize))] * 3, 0.0


def _norm(call: TracedCall, inputs: Sequence[Placement]) -> Inside:
    # Split by features: sums of one or two numbers per row
    x, is_centered = call.inputs[0], call.func.__name__ == "layer_norm"
    if not isinstance(inputs[0], Shard) or inputs[0].dim != len(x.shape) - 1:
        return [], 0.0
    size = float(math.prod(x.shape[:-1]) * max(x.dtype.itemsize, 4))
    forward = [size] * (1 + is_centered)
    backward = [size * (1 + is_centered)] if call.with_grad else []
    return [("all_reduce", each) for each in (*forward, *backward)], 0.0


def _dropout(call: TracedCall, inputs: Sequence[Placement]) -> Inside:
    # Ranks draw the numbers of the full tensor: they are made, dropped, and a slice is copied
    p, training = call.get(1, "p", 0.5), call.get(2, "training", True)
    is_split = isinstance(inputs[0], Shard) and training and p
    return [], 3.0 * call.outputs[0].nbytes if is_split else 0.0


def _attention(call: TracedCall, inputs: Sequence[Placement]) -> Inside:
    # With dropout the scores are made step by step, and the numbers of all of them are drawn
    if not isinstance(inputs[0], Shard) or not call.get(4, "dropout_p", 0.0):
        return [], 0.0
    query, key = call.inputs[:2]
    return [], 5.0 * math.prod(query.shape[:-1]) * key.shape[-2] * query.dtype.itemsize


# What kinds with a `run` of their own add if they are split, by the name of the kind: collectives,
# bytes of traffic.
INSIDE: dict[str, Callable[[TracedCall, Sequence[Placement]], Inside]] = {
    "cross entropy": _loss,
    "norm": _norm,
    "dropout": _dropout,
    "attention": _attention,
}
