"""Modules traced on fake tensors, and their steps split on a rank that is looked at only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import call_training_step, capture
from lightning_topt.graph.mesh_axes import Axis
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace, TracedCall
from lightning_topt.techniques.tensor_parallel.layout import Layout, TensorAxes, with_layout
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor
from lightning_topt.techniques.tensor_parallel.split_prices import (
    BlockSplit,
    SplitPrices,
    stays_whole,
)

DEVICE = Device(
    "accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
FAST = Cluster("fast", DEVICE, devices_per_node=64, num_nodes=1, intra=Link(1e-7, 1e11))


class Step(nn.Module):
    """A training step around any module: the mean square of what it makes of the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner(batch).square().mean()


class LlamaBlock(nn.Module):
    """Queries, keys, values in own matrices, fewer heads of the latter, and a gated MLP."""

    def __init__(self, width: int = 64, heads: int = 8, groups: int = 4, hidden: int = 96) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, time, self.heads, self.size).transpose(1, 2)
        k, v = (
            m(y).view(batch, time, self.groups, self.size).transpose(1, 2) for m in (self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def trace(module: nn.Module, batch: Any, **given: Any) -> tuple[FunctionTrace, OpGraph]:
    """Return the calls of one step, and its graph; `given` are more arguments of `capture`."""
    found = FunctionTrace()
    return found, capture(module, batch, adapt=found.of, batch_scaling=False, **given)


def along(ranks: int) -> tuple[Axis, ...]:
    """Return the one tensor axis of so many ranks."""
    return (Axis("tensor", ranks),)


def prices(module: nn.Module, ranks: int, *, cluster: Cluster = FAST) -> SplitPrices:
    """Return the prices of splits over neighbours, trained by Adam."""
    adam = torch.optim.Adam(module.parameters())
    return SplitPrices(
        cluster, read_optimizer([adam], named_parameters=module.named_parameters()), Group(ranks)
    )


class CollectiveCall(NamedTuple):
    """One call of `op`; `size` in bytes of the larger of what is given and what is got."""

    op: str
    size: int


def run(
    module: nn.Module, batch: Any, placements: Mapping[str, Placement], ranks: int
) -> list[CollectiveCall]:
    """Return the collective calls of one step, forward and backward, in their order."""
    copied, mode = fake_copy(module)
    calls: list[CollectiveCall] = []
    axes = TensorAxes(("tensor",), (ranks,), (0,), (None,))

    def note(self: TensorAxes, op: str, axis: int, whole: Tensor) -> None:
        calls.append(CollectiveCall(op, whole.nbytes))

    with mode, mock.patch.object(TensorAxes, "note", note):
        for name, placement in placements.items():
            parameter, layout = (
                copied.get_parameter(name),
                Layout(tuple(copied.get_parameter(name).shape), (placement,)),
            )
            parameter.data = SplitTensor(layout, axes).own(parameter.data)
            with_layout(parameter, layout)
        with SplitMode(axes):
            loss = call_training_step(copied, batch)
        loss.backward()
    return calls


def price_split(
    calls: Sequence[TracedCall],
    costs: SplitPrices,
    placements: Mapping[str, Placement],
    *,
    whole: Collection[int] = (),
    collectives: list[tuple[str, float]] | None = None,
) -> BlockSplit | None:
    """Return what a step of `calls` takes, one after another; None if it is not admitted.

    `collectives` gets those of the step.
    """
    state = activations = seconds = 0.0
    where: dict[int, Placement] = {}
    parameters, moved, saved = set[int](), set[Any](), set[Any]()
    for call in calls:
        for ref in call.inputs:
            where.setdefault(ref.number, placements.get(ref.parameter or "", Replicate()))
            if ref.parameter is not None and ref.number not in parameters:
                parameters.add(ref.number)
                ranks = costs.group.size if isinstance(where[ref.number], Shard) else 1
                state += costs.parameter_bytes(ref) / ranks
        outcome = costs.outcome(call, [where[ref.number] for ref in call.inputs])
        if outcome is None or not stays_whole(call, outcome, whole):
            return None
        seconds += outcome.seconds
        found = [*outcome.collectives]
        # a move, and what is saved, counts once; a parameter moves at every use
        for move in outcome.moves:
            ref = call.inputs[move.operand]
            key = ref.number, move.target, move.enters
            if ref.parameter is not None or key not in moved:
                moved.add(key)
                seconds += move.seconds
                found += move.collectives
        for each in outcome.saved:
            if each.memory is None or each[:2] not in saved:
                saved.add(each[:2])
                activations += each.bytes
        where |= {ref.number: p for ref, p in zip(call.outputs, outcome.outputs, strict=True)}
        if collectives is not None:
            collectives += found
    return BlockSplit(dict(placements), seconds, state, activations)
