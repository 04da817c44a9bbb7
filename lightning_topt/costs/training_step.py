"""One step of one rank on given machines: all that the costs of a plan depend on besides the plan.

step = TrainingStep(graph, cluster, optimizer, mesh, batch_size=8)
step.compute["layers.0"]                                  # seconds (direction, segment)
step.collective_seconds("all_reduce", nbytes, axes=[0])
activation_lifetimes(step, "layers.0", config)            # bytes over the phases of the step
temporary_bytes(step, shares)                             # of the optimizer's update
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod, Work
from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import (
    Collective,
    ExchangeModel,
    Group,
    check_world_size,
    estimate_collective_seconds,
    estimate_outer_seconds,
    estimate_wait_seconds,
    make_exchange_model,
)
from lightning_topt.costs.compute import (
    RECOMPUTED_LAUNCHES,
    KernelKey,
    estimate_pass_seconds,
    launches_of_step,
)
from lightning_topt.costs.lifetimes import Lifetime, Phases, phases_of
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.segments import (
    Segments,
    blocks_gathered_once,
    blocks_reduced_last,
    locate,
    passes_of,
    structures_of,
    tied_blocks,
)
from lightning_topt.costs.sizes import ROOT, SMALLEST_BYTES, gradient_bytes, kernels_bytes
from lightning_topt.graph.kernels import shown_collective
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Placements
from lightning_topt.graph.op_graph import Kernel, OpGraph, Parameter

# What a call of a torch function on split tensors takes in Python, with its part of backward: a
# step of a GPT with 12 layers, 262 calls, took 15 ms more of a CPU core's time, without its
# collectives.
SPLIT_CALL_SECONDS = 5e-5
# The same in launches of kernels, beside those of the call itself, where the host runs ahead: the
# host of an H100 took 91 to 105 ms for a step of such a GPT, whether it was split 2 or 8 times.
SPLIT_CALL_LAUNCHES = 8.0
# that the ranks of a tensor group exchange of each: random states, what is in a batch
MICROBATCH_NOTE_BYTES = 12_000
Shares = Mapping[Parameter, float]  # of a parameter that one rank updates


class CompiledCost(NamedTuple):
    """What compiled code of a block takes, beside eager mode.

    Attributes:
        forward, backward: its seconds, relative to those of eager mode.
        kept_bytes: that it keeps more for the backward pass.
        seconds: of its compilation, a step's share.
    """

    forward: float = 1.0
    backward: float = 1.0
    kept_bytes: float = 0.0
    seconds: float = 0.0


EAGER = CompiledCost()


@dataclass(frozen=True)
class TrainingStep:
    """One training step of one rank.

    Args:
        graph: the step, captured.
        cluster: the machines.
        optimizer: from `read_optimizer`.
        mesh: the ranks.
        batch_size: samples per rank (not the global batch).
        kernel_seconds: measured seconds of kernels at ``graph.batch_size`` (`measure_kernels`);
            they beat the formulas.
        exchange: how gradients that are whole travel; None: by an all-reduce.
        returns_memory: the run gives freed memory back at once, as under a memory limit on CPUs
            (`execution.memory`), and pays `Device.page_fault_seconds_per_byte` for what it takes
            anew.
        split: where parameters are along the tensor axes of `mesh`, by block and name in the block;
            `graph` is then the step of a rank that holds slices of them.
        num_microbatches: batches of `batch_size` samples that run one after the other, forward and
            backward, in a step; their gradients are exchanged once. Each comes from another rank of
            a tensor group, which broadcasts it.
        joined_bytes: bytes of parameters that a rank does not hold, but needs for an evaluation.
        computes: other entries of the configurations of blocks along these axes (`OpConfig`), by
            block.
        split_calls: calls of torch functions in the forward of blocks whose parameters are split.
        gradient_views: gradients are views of DDP's buckets, which saves a copy of them; else they
            are tensors of their own.
        float32_gathers: see `ParallelPlan`.
        local_steps: data ranks train alone, and meet as it says once in many steps, of which a step
            has its share; None: gradients are averaged in every step.
        offloads: shards may be offloaded (`Storage`).
        compiled: what blocks cost that may be compiled, at ``graph.batch_size``.

    Raises ValueError for more ranks than the cluster has devices, a batch smaller than one sample
    or of a size that the graph says nothing about, and an exchange that these ranks cannot have.
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    mesh: Mesh
    batch_size: float
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    exchange: GradientMethod | None = None
    returns_memory: bool = False
    split: Mapping[str, tuple[tuple[str, Placements], ...]] = field(default_factory=dict)
    num_microbatches: int = 1
    joined_bytes: float = 0.0
    computes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split_calls: int = 0
    gradient_views: bool = False
    float32_gathers: bool = False
    local_steps: LocalMethod | None = None
    offloads: bool = False
    compiled: Mapping[str, CompiledCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_world_size(self.cluster, world_size=self.mesh.size)
        if self.batch_size < 1:
            raise ValueError(
                f"batch_size is the number of samples per rank, at least 1; got {self.batch_size}"
            )
        if not self.graph.batch_scaling and self.batch_size != self.graph.batch_size:
            raise ValueError(
                f"the step was captured for batches of {self.graph.batch_size} sample(s) and how "
                f"it grows with them is unknown, so {self.batch_size} per rank cannot be "
                "estimated; capture it with batch_scaling=True"
            )
        _ = self.exchange_model  # raises

    @cached_property
    def exchange_model(self) -> ExchangeModel | None:
        """The costs of `exchange`; None for an all-reduce."""
        if self.exchange is None:
            return None
        # only data ranks exchange gradients
        ranks, stride = self.mesh.data_parallel_size, self.mesh.stride(self.mesh.data_axes)
        return make_exchange_model(
            self.exchange, graph=self.graph, cluster=self.cluster, world_size=ranks, stride=stride
        )

    @cached_property
    def outer_work(self) -> Work:
        """The work of one outer step of `local_steps`."""
        return self.outer_work_of(sum(p.numel for p in self.graph.parameters if p.trainable))

    def outer_work_of(self, trained: int) -> Work:
        """Return the work of one outer step of so many trained parameters, and of all buffers."""
        assert self.local_steps is not None
        work = self.local_steps.work(trained, self.mesh.data_parallel_size)
        # running statistics become their mean over ranks
        buffers = ("world", "all_reduce", float(self.graph.buffer_bytes))
        return replace(work, collectives=(*work.collectives, buffers))

    @cached_property
    def outer_seconds(self) -> float:
        """A step's share of an outer step; 0 without `local_steps`."""
        if self.local_steps is None:
            return 0.0
        return self.outer_step_seconds(self.outer_work) / self.local_steps.every

    def outer_step_seconds(self, work: Work) -> float:
        """Return the seconds of one outer step of the data ranks, of that work."""
        group = Group(self.mesh.data_parallel_size, self.mesh.stride(self.mesh.data_axes))
        return estimate_outer_seconds(work, cluster=self.cluster, group=group)

    def parameters(self, block: str) -> list[Parameter]:
        """Return the parameters of `block`."""
        return self._parameters[block]

    @cached_property
    def _parameters(self) -> dict[str, list[Parameter]]:
        found: dict[str, list[Parameter]] = {block.name: [] for block in self.graph.blocks}
        for parameter in self.graph.parameters:
            found[parameter.block].append(parameter)
        return found

    @cached_property
    def segments(self) -> Segments:
        """The segments where operators run and parameters are used."""
        return locate(self.graph)

    @cached_property
    def reduced_last(self) -> frozenset[str]:
        """Blocks, beside the root, whose inputs need no gradient.

        What waits for that gradient waits until backward is over.
        """
        return blocks_reduced_last(self.graph) - {ROOT}

    @property
    def gathered_once(self) -> frozenset[str]:
        """Blocks that are not gathered in backward, since no gradient comes to them."""
        return blocks_gathered_once(self.graph)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Blocks that share a parameter with another block."""
        return tied_blocks(self.graph)

    @cached_property
    def alike(self) -> dict[str, int]:
        """A number for each block; equal for blocks that cost the same wherever they stand."""
        return number_alike_blocks(self)

    @cached_property
    def phases(self) -> Phases:
        """The phases of the step."""
        return phases_of(self.segments.count)

    def on(self, mesh: Mesh) -> TrainingStep:
        """Return the same step on another mesh of as many ranks.

        What does not depend on the mesh is not worked out again.
        """
        other = replace(self, mesh=mesh)
        for name in (
            "segments",
            "reduced_last",
            "tied",
            "alike",
            "phases",
            "compute",
            "recomputed",
            "_parameters",
        ):
            other.__dict__[name] = getattr(self, name)
        return other

    def with_batch_size(self, samples: float) -> TrainingStep:
        """Return the same step with so many samples per rank.

        What does not depend on them is not worked out again.
        """
        # those of `on` but for compute and alike, which depend on samples
        other = replace(self, batch_size=samples)
        for name in ("segments", "reduced_last", "tied", "phases", "_parameters"):
            other.__dict__[name] = getattr(self, name)
        return other

    @property
    def narrow(self) -> frozenset[str]:
        """The parameters that are gathered in 16 bits where they are in shards."""
        return frozenset() if self.float32_gathers else self.graph.narrow_parameters

    @property
    def on_gloo(self) -> bool:
        """Whether ranks communicate through gloo."""
        return self.cluster.backend == "gloo"

    # ---- seconds

    @cached_property
    def compute(self) -> dict[str, Array]:
        """Seconds of each block's kernels (direction, segment): forward, backward."""
        times = {block.name: np.zeros((2, self.segments.count)) for block in self.graph.blocks}
        passes = passes_of(self.graph)
        # repeated blocks share their kernels: each set is estimated once
        for kernels, places in zip(passes.kernels, passes.places, strict=True):
            seconds = self._pass_seconds(kernels)
            for block, direction, segment in places:
                times[block][direction, segment] = seconds
        return times

    @cached_property
    def recomputed(self) -> dict[str, float]:
        """Seconds of each block's forward kernels where they are run again in backward."""
        times = {block: float(passes[0].sum()) for block, passes in self.compute.items()}
        if self.cluster.device.launch_seconds == 0:  # the host costs nothing of its own
            return times
        times = dict.fromkeys(times, 0.0)
        passes = passes_of(self.graph)
        for kernels, places in zip(passes.kernels, passes.places, strict=True):
            forward = [block for block, direction, _ in places if direction == 0]
            if forward:
                seconds = self._pass_seconds(kernels, launches=RECOMPUTED_LAUNCHES)
                for block in forward:
                    times[block] += seconds
        return times

    def copied_seconds(self, block: str) -> float:
        """Return what the host adds to the backward of `block` by copying its gradients.

        One by one, into DDP's buckets and, where they are no views, out of them: on an H100 a step
        had two launches more for each parameter than kernels.
        """
        if self.cluster.device.launch_seconds == 0:
            return 0.0
        copies = sum(p.trainable for p in self.parameters(block)) * (2 - self.gradient_views)
        passes = passes_of(self.graph)
        for kernels, places in zip(passes.kernels, passes.places, strict=True):
            if any(name == block and direction == 1 for name, direction, _ in places):
                with_copies = self._pass_seconds(kernels, more_launches=copies)
                return with_copies - self._pass_seconds(kernels)
        return copies * self.cluster.device.launch_seconds

    def _pass_seconds(
        self, kernels: Sequence[Kernel], *, launches: float = 1.0, more_launches: float = 0.0
    ) -> float:
        # collectives along tensor axes are kernels of the graph too
        communication = [kernel for kernel in kernels if shown_collective(kernel) is not None]
        computation = (
            [kernel for kernel in kernels if shown_collective(kernel) is None]
            if communication
            else kernels
        )
        calls: list[float] = []  # seconds of each call of a collective
        for kernel in communication:
            shown = self.shown(kernel)
            assert shown is not None
            op, size, axis = shown
            calls += [self.collective_seconds(op, size, axes=[axis])] * kernel.count
        seconds = estimate_pass_seconds(
            computation,
            collectives=calls,
            launches=launches,
            more_launches=more_launches,
            batch_size=self.batch_size,
            device=self.cluster.device,
            measured=self.kernel_seconds,
            measured_batch_size=self.graph.batch_size,
        )
        return seconds + self.taken_seconds(kernels_bytes(kernels, batch_size=self.batch_size))

    def shown(self, kernel: Kernel) -> tuple[str, float, int] | None:
        """Return the op, the bytes of the whole tensor and the mesh axis of one call.

        Of a collective along a tensor axis; None for other kernels.
        """
        found = shown_collective(kernel)
        if found is None:
            return None
        op, size, axis = found[0], kernel.bytes.at(self.batch_size), self.mesh.tensor_axes[found[1]]
        # What one rank gives to an all-to-all is its slice of the whole.
        return op, size * self.mesh.shape[axis] if op == "all_to_all" else size, axis

    def taken_seconds(self, size: float) -> float:
        """Return the seconds to take `size` bytes anew from the operating system.

        0 where freed memory is kept.
        """
        return (
            size * self.cluster.device.page_fault_seconds_per_byte if self.returns_memory else 0.0
        )

    def copy_seconds(self, size: float) -> float:
        """Return the seconds to copy `size` bytes on the device: read and written."""
        return 2 * size / self.cluster.device.memory_bandwidth

    def collective_seconds(self, op: str, size: float, *, axes: Iterable[int]) -> float:
        """Return the seconds of `op` on a tensor of `size` bytes.

        By the groups along `axes` (indices) of the mesh.
        """
        axes = tuple(axes)
        if self.mesh.ranks_along(axes) == 1:
            return 0.0
        group = Group(self.mesh.ranks_along(axes), self.mesh.stride(axes))
        return estimate_collective_seconds(self.cluster, op=op, size=size, group=group)

    def collective(self, during: str, op: str, size: float, *, axes: Iterable[int]) -> Collective:
        """Return `op` on a tensor of `size` bytes by the groups along `axes` (indices) of the mesh.

        See `Collective`.
        """
        axes = tuple(axes)
        group = Group(self.mesh.ranks_along(axes), self.mesh.stride(axes)) if axes else Group(1)
        return Collective(during, op, size, group)

    def seconds_of(self, collectives: Iterable[Collective]) -> float:
        """Return the seconds of `collectives` one after another."""
        return sum(
            estimate_collective_seconds(self.cluster, op=c.op, size=c.size, group=c.group)
            for c in collectives
        )

    def waits_of(self, collectives: Iterable[Collective]) -> float:
        """Return the part of `seconds_of` that is waiting for other ranks."""
        # nobody waits for a collective of nothing: it is left out
        sent = (each for each in collectives if each.size > 0)
        return sum(
            estimate_wait_seconds(self.cluster, op=each.op, group=each.group) for each in sent
        )

    def update_seconds(self, parameter: Parameter, *, share: float = 1.0) -> float:
        """Return the seconds of the optimizer on a share of one parameter."""
        device = self.cluster.device
        return self.optimizer.update_seconds(
            parameter.name, numel=parameter.numel, device=device, share=share
        )

    @cached_property
    def sent_seconds(self) -> float:
        """Seconds to send what a step needs.

        Rank 0's buffers to all ranks, microbatches to the ranks of a tensor group.
        """
        if self.local_steps is not None:  # buffers travel with the outer step
            return 0.0
        count, buffers = self.num_microbatches, self.graph.buffer_bytes
        everyone = range(len(self.mesh.axes))
        if count == 1:  # only buffers
            return self.collective_seconds("broadcast", buffers, axes=self.mesh.data_axes)
        # microbatches: the batches themselves, and notes about them in two exchanges
        along, batch = self.mesh.tensor_axes, self.graph.input_bytes.at(self.batch_size)
        batches = count * self.collective_seconds("broadcast", batch, axes=along)
        notes = 2 * self.collective_seconds("all_gather", count * MICROBATCH_NOTE_BYTES, axes=along)
        return batches + notes + self.collective_seconds("broadcast", buffers, axes=everyone)

    @cached_property
    def host_seconds(self) -> float:
        """Seconds that a step waits for Python, which splits every call.

        Beside their kernels on CPUs, where they are counted for microbatches, which pay it several
        times. On accelerators the host splits calls and launches kernels while the device runs;
        counted is what that takes longer than the device.
        """
        kernels = sum(float(times.sum()) for times in self.compute.values())
        launch = self.cluster.device.launch_seconds
        if launch and self.split_calls:
            count = launches_of_step(self.graph)
            host = (count + self.split_calls * SPLIT_CALL_LAUNCHES) * launch
            return self.num_microbatches * max(host - kernels, 0.0)
        if self.num_microbatches == 1:
            return 0.0
        beside = 0.0 if self.on_gloo else kernels
        return self.num_microbatches * max(self.split_calls * SPLIT_CALL_SECONDS - beside, 0.0)

    @cached_property
    def accumulation_seconds(self) -> float:
        """Seconds to add up the gradients of microbatches.

        Read twice and written for each but the first, scaled once. Each takes the memory of its own
        anew.
        """
        if self.num_microbatches == 1:
            return 0.0
        size, count = sum(map(gradient_bytes, self.graph.parameters)), self.num_microbatches
        faults = count * size * self.cluster.device.page_fault_seconds_per_byte
        return (1.5 * (count - 1) + 1) * self.copy_seconds(size) + faults


def number_alike_blocks(step: TrainingStep) -> dict[str, int]:
    """Return equal numbers for blocks that cost the same.

    They have one segment each, and equal parameters, updates, activations and kernels.
    """
    numbers: dict[Hashable, int] = {}
    return {
        block.name: numbers.setdefault(_signature(step, block.name), len(numbers))
        for block in step.graph.blocks
    }


def _signature(step: TrainingStep, block: str) -> Hashable:
    # blocks of several segments are like no other
    structure = structures_of(step.graph).get(block)
    if structure is None:
        return block
    first, kinds = step.segments.of_block[block][0], step.optimizer.kinds
    updates = tuple([kinds.get(parameter.name, -1) for parameter in step.parameters(block)])
    # to nanoseconds: sums of equal kernels may differ in their last bits
    seconds = tuple(round(float(direction[first]), 9) for direction in step.compute[block])
    work = step.exchange_model.work[block] if step.exchange_model is not None else None
    calls = step.graph.calls_of(block)
    passes = block in step.reduced_last, block in step.gathered_once, calls
    return structure, updates, seconds, work, step.compiled.get(block), *passes


# ---- Memory of a block and of the update


def activation_lifetimes(step: TrainingStep, block: str, config: OpConfig) -> Iterator[Lifetime]:
    """Yield the activations of every segment of `block`.

    Recomputed ones keep their output only and are made again in backward (Chen et al., arXiv
    1604.06174). Of parameters that are gathered in 16 bits autocast makes no copies.
    """
    phases, batch_size, recompute = step.phases, step.batch_size, config.recompute
    narrow = step.narrow and config.storage.sharded_axes("gradients")
    graph = step.graph
    # of compiled code, in the first segment
    more = step.compiled.get(block, EAGER).kept_bytes if config.compile else 0.0
    timeline = graph.gathered_timelines[config.storage.level] if narrow else graph.timeline
    for k in step.segments.every.get(block, ()):
        segment = timeline[k]
        kept, output = segment.kept_bytes.at(batch_size), segment.output_bytes.at(batch_size)
        kept, more = max(kept + more, output), 0.0
        forward, backward = (
            segment.forward_peak_bytes.at(batch_size),
            segment.backward_peak_bytes.at(batch_size),
        )
        during = kept + backward
        # while it recomputes, the gradient of its output is alive, which is as large as the output
        if recompute:
            during = max(during, output + forward)
        between = output if recompute else kept
        # while it runs forward, from there to its backward, while it runs backward
        yield Lifetime("activations", forward, ("forward", k), ("forward", k))
        yield Lifetime(
            "activations", between, phases.after(("forward", k)), phases.before(("backward", k))
        )
        yield Lifetime("activations", during, ("backward", k), ("backward", k))


def temporary_bytes(step: TrainingStep, shares: Shares) -> tuple[float, float]:
    """Return the bytes of the optimizer's temporaries for these parameters.

    Of the largest of them, for a for-loop; and of all, for foreach.
    """
    # a for-loop has one parameter's at a time, foreach those of all
    largest, together = 0.0, 0.0
    for parameter, share in shares.items():
        update = step.optimizer.updates.get(parameter.name)
        if update is not None and update.temporaries_add:
            together += update.temporary_bytes * share
        elif update is not None:
            largest = max(largest, update.temporary_bytes * share)
    return largest, together


def temporaries_seconds(step: TrainingStep, shares: Shares) -> float:
    """Return the seconds to take the temporaries of these parameters anew."""
    updates = (
        (step.optimizer.updates.get(parameter.name), share) for parameter, share in shares.items()
    )
    sizes = [update.temporary_bytes * share for update, share in updates if update is not None]
    return step.taken_seconds(sum(size for size in sizes if size >= SMALLEST_BYTES))
