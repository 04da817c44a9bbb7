"""Seconds of one training step as paths: chains of work of which the slowest decides.

Symbols: k segment of the forward pass (backward runs from the last to 0), e overlap of the cluster. The exchange of a
block is cut in two: the share 1 - e stands in the way of computation (foreground), the share e runs beside it on the
network, one exchange after another (background).

    equation                                                              function
    backward path k   sum(backward_t + foreground_t for t >= k)           backward_seconds
                      + sum(background of exchanges ready at t <= k)
    compute path      sum of all backward and foreground                  backward_seconds
    network path      sum of all background + the first backward          backward_seconds (gathers precede it: ZeRO 3)
    forward           all forward + foreground, or all background         forward_seconds
                      + the last forward (gathers run ahead)
    update            optimizer over owned elements + broadcasts          Step.update_seconds
    compressed        the exchange's worker, divided as above, and its    _reduce_seconds, `exchange`
                      work on the device, which is all foreground

A path of the step is a forward part, a backward part and the update; the backward paths are exact for one network that
serves exchanges in the order in which they become ready (the tests simulate it). Under gloo FSDP2's exchanges block:
e = 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import estimate_collective_seconds
from lightning_topt.costs.compute import KernelKey, estimate_kernels_seconds
from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.exchange import ExchangeModel
from lightning_topt.costs.groups import Group
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.page_faults import SMALLEST_BYTES, gathered_bytes, kernels_bytes, reduced_bytes
from lightning_topt.costs.segments import Segments, locate
from lightning_topt.costs.sizes import ROOT, gloo_workspace, gradient_bytes, padded_bytes, parameter_bytes, shard_share
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph, Parameter

_SMALL_BYTES = 1 << 20  # parameters below it are broadcast together (optim.gather)

Path = tuple[str, str, int]  # forward part, backward part, segment of a backward path


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block under one configuration; `forward` and `backward` by segment (segment,).

    Exchanges are split into foreground (in the way) and background (beside computation); `reduce` is that of gradients,
    which starts after the backward of segment `ready`. `update` is the optimizer step and what follows it.
    """

    forward: Array
    backward: Array
    recompute: float
    ready: int
    gather_foreground: tuple[float, float]  # in forward, in backward
    gather_background: tuple[float, float]
    reduce_foreground: float
    reduce_background: float
    update: float
    broadcast: float


@dataclass(frozen=True)
class StepTime:
    """What the seconds of every block depend on. `kernel_seconds` are measurements at ``graph.batch_size``.

    `exchange` is that of gradients in the replicated family; None: an all-reduce. `returns_memory`: freed memory goes back to
    the operating system and is taken anew (`page_faults`).
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    family: str
    batch_size: float
    world_size: int
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    exchange: ExchangeModel | None = None
    returns_memory: bool = False

    @cached_property
    def segments(self) -> Segments:
        """Where operators run and parameters are used."""
        return locate(self.graph)

    @cached_property
    def compute(self) -> dict[str, Array]:
        """Seconds of each block's kernels (direction, segment): forward, backward."""
        times = {block.name: np.zeros((2, self.segments.count)) for block in self.graph.blocks}
        for op in self.graph.ops:
            for index, kernels in enumerate((op.forward, op.backward)):
                seconds = estimate_kernels_seconds(
                    kernels,
                    batch_size=self.batch_size,
                    device=self.cluster.device,
                    measured=self.kernel_seconds,
                    measured_batch_size=self.graph.batch_size,
                )
                seconds += self.cluster.device.framework_seconds * sum(kernel.count for kernel in kernels)
                seconds += self.taken_seconds(kernels_bytes(kernels, batch_size=self.batch_size))
                times[op.block][index, self.segments.of_op[op.name]] += seconds
        return times

    def taken_seconds(self, size: float) -> float:
        """Seconds to take `size` bytes anew from the operating system; 0 where freed memory is kept."""
        return size * self.cluster.device.page_fault_seconds_per_byte if self.returns_memory else 0.0

    @property
    def overlap(self) -> float:
        """Share of an exchange that runs beside computation."""
        blocking = self.family == "sharded" and self.cluster.backend == "gloo"
        return 0.0 if blocking or self.world_size == 1 else self.cluster.overlap

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The paths of a step."""
        if self.overlap == 0:
            return (("compute", "compute", 0),)
        ready = sorted({self.ready(block.name) for block in self.graph.blocks})
        backward = [("compute", 0), *(("path", k) for k in ready)]
        if self.family == "replicated":
            return tuple(("compute", kind, k) for kind, k in backward)
        backward.append(("network", 0))
        return tuple((forward, kind, k) for forward in ("compute", "network") for kind, k in backward)

    def ready(self, block: str) -> int:
        """The segment after whose backward the gradients of `block` are complete."""
        if self.family == "sharded" and block == ROOT:
            return 0
        spans = [self.segments.of_parameter[p.name][0] for p in self.graph.block_parameters(block) if p.trainable]
        return min(spans, default=0)

    def collective_seconds(self, op: str, size: float) -> float:
        """Seconds of `op` on a tensor of `size` bytes over the ranks of the step."""
        return estimate_collective_seconds(self.cluster, op=op, size=size, group=Group(self.world_size))

    @property
    def buffers_seconds(self) -> float:
        """Seconds to send rank 0's buffers to all ranks, before each forward."""
        return self.collective_seconds("broadcast", self.graph.buffer_bytes)

    def copy_seconds(self, size: float) -> float:
        """Seconds to copy `size` bytes on the device: read and written."""
        return 2 * size / self.cluster.device.memory_bandwidth

    def update_seconds(self, parameter: Parameter, *, share: float = 1.0) -> float:
        """Seconds of the optimizer on a share of one parameter."""
        device = self.cluster.device
        return self.optimizer.update_seconds(parameter.name, numel=parameter.numel, device=device, share=share)

    @cached_property
    def seconds_per_owned_element(self) -> float:
        """Average seconds to update an element, for what a rank owns under ZeRO 1."""
        trainable = [p for p in self.graph.parameters if p.trainable]
        elements = sum(p.numel for p in trainable)
        return sum(self.update_seconds(p) for p in trainable) / elements if elements else 0.0


def estimate_block_time(step: StepTime, *, block: str, config: OpConfig) -> BlockTime:
    """Seconds of `block` under `config`.

    The update of a stage-1 block is not in it: it depends on what else the busiest rank owns (`owned`).
    """
    stage = config.storage.level
    forward, backward = step.compute[block]
    recompute = forward.sum() if config.recompute else 0.0
    parameters = step.graph.block_parameters(block)
    if step.family == "replicated":
        gathers, copy = (0.0, 0.0), 0.0
        reduce, on_device = _reduce_seconds(step, block, parameters)
        update = 0.0 if stage else sum(step.update_seconds(p) for p in parameters)
    else:
        gathers, reduce, copy = _sharded_seconds(step, parameters, stage)
        on_device = 0.0
        update = sum(step.update_seconds(p, share=shard_share(p, step.world_size)) for p in parameters)
        update += step.cluster.device.sharded_call_seconds * sum(step.optimizer.calls(p.name) for p in parameters)
    update += _temporaries_seconds(step, parameters, stage)
    on_device += step.copy_seconds(sum(map(gradient_bytes, parameters)))  # into DDP's bucket, or the flat buffer
    # Nothing runs beside the root's gather, which comes first.
    beside = (0.0 if block == ROOT else step.overlap), step.overlap
    return BlockTime(
        forward=forward,
        backward=backward + forward if config.recompute else backward,
        recompute=float(recompute),
        ready=step.ready(block),
        gather_foreground=(
            (1 - beside[0]) * gathers[0] + (copy if gathers[0] else 0.0),
            (1 - beside[1]) * gathers[1] + (copy if gathers[1] else 0.0),
        ),
        gather_background=(beside[0] * gathers[0], beside[1] * gathers[1]),
        reduce_foreground=(1 - step.overlap) * reduce + on_device,
        reduce_background=step.overlap * reduce,
        update=float(update),
        broadcast=_broadcast_seconds(step, parameters) if stage == 1 else 0.0,
    )


def path_seconds(step: StepTime, time: BlockTime) -> Array:
    """What the block adds to each of ``step.paths`` (path,)."""
    return np.array(
        [
            forward_seconds(time, kind=forward)
            + backward_seconds(time, kind=backward, k=k)
            + time.update
            + time.broadcast
            for forward, backward, k in step.paths
        ]
    )


def forward_seconds(time: BlockTime, *, kind: str) -> float:
    """The block's part of a forward path, ``"compute"`` or ``"network"``."""
    if kind == "compute":
        return float(time.forward.sum()) + time.gather_foreground[0]
    return time.gather_background[0] + float(time.forward[-1:].sum())


def backward_seconds(time: BlockTime, *, kind: str, k: int) -> float:
    """The block's part of a backward path: ``"compute"``, ``"network"``, or ``"path"`` `k`."""
    foreground = time.gather_foreground[1] + time.reduce_foreground
    if kind == "compute":
        return float(time.backward.sum()) + foreground
    if kind == "network":
        return time.gather_background[1] + time.reduce_background + float(time.backward[-1:].sum())
    before = float(time.backward[k:].sum()) + (foreground if time.ready >= k else 0.0)
    return before + (time.reduce_background if time.ready <= k else 0.0)


def _reduce_seconds(step: StepTime, block: str, parameters: list[Parameter]) -> tuple[float, float]:
    """Seconds of the exchange of gradients: (of which a share runs beside computation, in the way of it)."""
    if step.exchange is not None:
        return step.exchange.worker_seconds(block), step.exchange.device_seconds(block)
    return step.collective_seconds("all_reduce", sum(map(gradient_bytes, parameters))), 0.0


def _sharded_seconds(
    step: StepTime, parameters: list[Parameter], stage: int
) -> tuple[tuple[float, float], float, float]:
    """((all_gather in forward, in backward), reduce_scatter, copy out of a flat buffer)."""
    flat = sum(padded_bytes(p, step.world_size) for p in parameters)
    gather = step.collective_seconds("all_gather", flat)
    trainable = [p for p in parameters if p.trainable]
    reduce = step.collective_seconds("reduce_scatter", sum(padded_bytes(p, step.world_size) for p in trainable))
    whole, reduced = sum(map(parameter_bytes, parameters)), sum(padded_bytes(p, step.world_size) for p in trainable)
    pieces = gloo_workspace(reduced, world_size=step.world_size) if step.cluster.backend == "gloo" else 0.0
    taken = reduced_bytes(flat=reduced, shards=reduced / step.world_size, workspace=pieces)
    out = step.copy_seconds(flat) + step.taken_seconds(gathered_bytes(flat=flat, whole=whole))
    return (gather, gather if stage == 3 else 0.0), reduce + step.taken_seconds(taken), out


def _temporaries_seconds(step: StepTime, parameters: list[Parameter], stage: int) -> float:
    """Seconds to take the optimizer's temporaries anew; of a block of stage 1, an even share of them."""
    updates = [(step.optimizer.updates.get(p.name), p) for p in parameters]
    whole = 1.0 if stage == 0 else 1 / step.world_size
    sizes = [
        update.temporary_bytes * (whole if stage < 2 else shard_share(p, step.world_size))
        for update, p in updates
        if update is not None
    ]
    return step.taken_seconds(sum(size for size in sizes if size >= SMALLEST_BYTES))


def _broadcast_seconds(step: StepTime, parameters: list[Parameter]) -> float:
    """Owners send what they updated: large parameters one by one, small ones together."""
    sizes = [parameter_bytes(p) for p in parameters if p.trainable]
    parts = [size for size in sizes if size >= _SMALL_BYTES] + [sum(size for size in sizes if size < _SMALL_BYTES)]
    return sum(step.collective_seconds("broadcast", size) for size in parts)
