"""A training step as a chain of blocks that the stages of a pipeline share.

The chain has the named blocks in the order of forward. What is outside of them (the block ``""``)
belongs to the block before it, or to the first one: its time, its activations, and those of its
parameters that it reads there. Every stage with a reader of a parameter keeps it (`shared`).

    blocks = StageBlocks(step)
    blocks.passes(samples)      what one microbatch takes in each block: seconds and bytes (block,)
    blocks.once(mesh, level)    what comes once per step: exchange, update, parameters, their state
    blocks.crossing_bytes(...)  what is sent over the boundary before each block

`EqualShares` is what a rank takes at least where several share all of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics import once_per_object
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.chain_table import Array, StageBlock, StageChain
from lightning_topt.costs.communication import ring_seconds
from lightning_topt.costs.segments import (
    BoundaryBytes,
    chain_of,
    find_crossings,
    spec_bytes,
    uses_of_parameters,
)
from lightning_topt.costs.sizes import ROOT, gradient_bytes, parameter_bytes
from lightning_topt.costs.training_step import SPLIT_CALL_SECONDS, TrainingStep, temporaries_seconds
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_graph import Amount, OpGraph, Parameter
from lightning_topt.graph.step_flow import LEAST_SHARED_BYTES

# what of a chain follows from the graph and its segments alone
_OF_THE_GRAPH = (
    "names",
    "crossings",
    "_own_crossings",
    "uses",
    "owned",
    "_weight_shares",
    "_waiting",
)
_GRAIN = 1e-9  # seconds and bytes of equal blocks are equal to this
# What a backward in two parts takes besides: of operators with parameters, and of its seconds on a
# CPU. That of Transformer layers of width 64 to 512 took 2.4 to 1.06 times as long in two parts.
SPLIT_BACKWARD_SECONDS = 1.1e-4
SPLIT_BACKWARD_SHARE = 0.05


@dataclass(eq=False, repr=False)
class StageBlocks:
    """The chain of blocks of `step`, whatever its data axes and batch are.

    What was worked out is kept: a search asks the same of thousands of pipelines.

    Args:
        step: the step of one rank.
        whole: where `step` is that of a rank with slices, the unsplit chain.
        calls: the calls of torch functions in the forward of each block whose parameters are split.
    """

    step: TrainingStep
    whole: StageBlocks | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    # seconds to send microbatches, kept by `stage_tables.transfer_seconds`: by samples and ranks of
    # a stage, then by link
    transfers: dict[tuple[float, int], dict[str, Array]] = field(default_factory=dict, init=False)
    # what was worked out before, by the arguments of the methods below
    _passes: dict[float, Passes] = field(default_factory=dict, init=False)
    _crossing_bytes: dict[float, Array] = field(default_factory=dict, init=False)
    _once: dict[tuple[Mesh, int, bool, GradientMethod | None], Once] = field(
        default_factory=dict, init=False
    )
    _chains: dict[tuple[float, tuple[bool, ...], int, int], StageChain] = field(
        default_factory=dict, init=False
    )

    @property
    def tensor(self) -> int:
        """The ranks that hold slices of one copy of the parameters."""
        return self.step.mesh.ranks_along(self.step.mesh.tensor_axes)

    def of_slices(self, step: TrainingStep, *, calls: Mapping[str, int]) -> StageBlocks:
        """Return the chain of the `step` of a rank with slices; this is the unsplit one.

        `calls` are those of the split step.
        """
        return StageBlocks(step, whole=self, calls=calls)

    def _take(self, other: StageBlocks, *names: str) -> None:
        # Take results of `other` by name, which are the same for this chain
        for name in names:
            setattr(self, name, getattr(other, name))

    # ---- the chain: what follows from the graph

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The blocks in the order of forward."""
        return chain_of(self.step.graph)

    @cached_property
    def crossings(self) -> BoundaryBytes:
        """The tensors that cross each boundary.

        Those in slices are sent unsharded, by each of the ranks.
        """
        own = self._own_crossings
        return own if self.whole is None else replace(self.whole.crossings, places=own.places)

    def gathered_bytes(self, samples: float) -> Array:
        """Return the bytes (block,) of slices that are gathered to cross a boundary."""
        if self.whole is None:
            return np.zeros(len(self.names))
        whole, own = (
            np.array([amount.at(samples) for amount in crossings.forward])
            for crossings in (self.whole.crossings, self._own_crossings)
        )
        # a rank lacks (t - 1) / t of what t ranks gather
        return np.asarray(np.maximum(whole - own, 0.0) * self.tensor / (self.tensor - 1))

    def passes(self, samples: float) -> Passes:
        """Return the passes of a microbatch of so many samples.

        Raises:
            ValueError: the graph says nothing about so many samples.
        """
        if samples not in self._passes:
            self._passes[samples] = self._of_samples(samples)
        return self._passes[samples]

    def once(
        self,
        mesh: Mesh,
        level: int,
        *,
        crosses_nodes: bool = True,
        exchange: GradientMethod | None = None,
    ) -> Once:
        """Return what a step on the data ranks of `mesh` takes besides its passes.

        The ZeRO `level` is 0 or 1. Gradients travel by `exchange`; None: an all-reduce.

        With `crosses_nodes`, stages that share a parameter are on several nodes; else all are on
        one.
        """
        key = mesh, level, crosses_nodes, exchange
        if key not in self._once:
            step = replace(self.step, mesh=mesh, exchange=exchange)
            self._once[key] = self._of_mesh(step, level, crosses_nodes)
        return self._once[key]

    def crossing_bytes(self, samples: float) -> Array:
        """Return the bytes (2, block) of a microbatch that cross the boundary before each block.

        The second row are those that come back as gradients.
        """
        if samples not in self._crossing_bytes:
            sides: tuple[Sequence[Amount], ...] = self.crossings.forward, self.crossings.backward
            self._crossing_bytes[samples] = np.array(
                [[amount.at(samples) for amount in side] for side in sides]
            )
        return self._crossing_bytes[samples]

    def chain(
        self, samples: float, *, recomputes: tuple[bool, ...], parts: int = 1, cast_copies: int = 1
    ) -> StageChain:
        """Return the passes as a chain: configuration 0 does not recompute, 1 does.

        Blocks that can recompute have the configurations in `recomputes`; backward has one or two
        `parts`. Microbatches share `cast_copies` of each block's 16-bit casts of parameters; 0:
        they do not share them.
        """
        key = samples, recomputes, parts, cast_copies
        if key not in self._chains:
            passes = self.passes(samples)
            if parts > 1:
                passes = replace(passes, backward=passes.backward + passes.split)
            # equal blocks are one entry of the chain
            first = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
            able = {block.name for block in self.step.graph.blocks if block.recomputable}
            blocks = tuple(
                _stage_block(
                    passes,
                    n,
                    recomputes if self.names[n] in able else (False,),
                    cast_copies=cast_copies,
                )
                for n in first
            )
            self._chains[key] = StageChain(blocks, self.kinds)
        return self._chains[key]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, from 0 in order.

        It is equal for blocks that take the same on any mesh and microbatch.
        """
        known: dict[object, int] = {}
        step = self.step
        able = {block.name: block.recomputable for block in step.graph.blocks}
        passes = self.passes(step.batch_size)
        rows = passes.forward, passes.backward, passes.kept, passes.hump, passes.recomputed_kept
        # (block, 5)
        times = np.stack(rows, axis=1)
        found = []
        for n, name in enumerate(self.names):
            owned = tuple(
                (p.shape, p.dtype, p.trainable, step.optimizer.updates.get(p.name))
                for p in self.owned[n]
            )
            # equal in parameters and their updates, in recomputation, and in what passes take
            measured = tuple(step.optimizer.seconds_per_element.get(p.name) for p in self.owned[n])
            key = owned, measured, able[name], tuple(np.round(times[n] / _GRAIN).tolist())
            found.append(known.setdefault(key, len(known)))
        return tuple(found)

    @cached_property
    def _own_crossings(self) -> BoundaryBytes:
        return find_crossings(self.step.graph, self.step.segments)

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """The places of the blocks that read each parameter."""
        return uses_of_parameters(self.step.graph, self.step.segments, self.crossings.places)

    @cached_property
    def owned(self) -> list[list[Parameter]]:
        """The parameters that each block is the first to read."""
        found: list[list[Parameter]] = [[] for _ in self.names]
        for parameter in self.step.graph.parameters:
            found[self.uses[parameter.name][0]].append(parameter)
        return found

    # ---- one microbatch

    def _of_samples(self, samples: float) -> Passes:
        step, places = self.step.with_batch_size(samples), list(self.crossings.places)
        # of each block, summed or maximised over its segments
        rows = np.zeros((5, len(self.names)))  # forward, backward, kept, hump, casts
        recomputed = np.zeros((2, len(self.names)))  # kept, hump
        # of each segment: seconds (direction, segment), and bytes
        compute = np.sum([*step.compute.values()], axis=0)
        sizes, is_block = _sizes_of_segments(step.graph)
        # linear in the samples
        kept, output, forward, backward, casts = sizes[..., 0] + sizes[..., 1] * samples
        casts = np.where(casts >= LEAST_SHARED_BYTES, casts, 0.0)
        between, hump = np.where(is_block, output, kept), np.maximum(backward, forward - kept)
        sums = *((rows[n], compute[n]) for n in (0, 1)), (rows[2], kept), (recomputed[0], between)
        sums = *sums, (rows[4], casts)
        for total, values in sums:
            np.add.at(total, places, values)
        # what is outside of all blocks is never recomputed
        again = np.where(is_block, np.maximum(hump + kept - between, forward), hump)
        for most, values in ((rows[3], hump), (recomputed[1], again)):
            np.maximum.at(most, places, values)
        # Python that splits calls, per pass: on CPUs it shares the cores with kernels, beside a
        # GPU it runs at the same time.
        kernels = rows[0] + rows[1]
        taken = SPLIT_CALL_SECONDS * np.array(
            [self.calls.get(name, 0) for name in self.names], float
        )
        rows[:2] += taken / 2 if self.step.on_gloo else np.maximum(taken - kernels, 0.0) / 2
        # gradients of parameters, where these have passes of their own
        waiting = np.array([amount.at(samples) for amount, _ in self._waiting])
        return Passes(
            forward=rows[0],
            backward=rows[1],
            weights=rows[1] * self._weight_shares,
            kept=rows[2],
            hump=rows[3],
            casts=rows[4],
            recomputed_kept=recomputed[0],
            recomputed_hump=recomputed[1],
            waiting=waiting,
            split=self._split_seconds(rows[1]),
        )

    def _split_seconds(self, kernels: Array) -> Array:
        # The seconds (block,) that backward in two parts takes besides its kernels
        host = SPLIT_BACKWARD_SECONDS * np.array([count for _, count in self._waiting], float)
        return (
            host + SPLIT_BACKWARD_SHARE * kernels
            if self.step.on_gloo
            else np.maximum(host - kernels, 0.0)
        )

    @cached_property
    def _waiting(self) -> list[tuple[Amount, int]]:
        """Gradients that wait for the second part of backward, and for how many operators.

        They arrive at operators with parameters and an input that gets a gradient.
        """
        graph, found = self.step.graph, [(Amount(), 0)] * len(self.names)
        places, of_op = self.crossings.places, self.step.segments.of_op
        inner = {
            edge.target
            for edge in graph.edges
            if edge.tensor.dtype.startswith(("float", "bfloat", "complex"))
        }
        trained = {name for p in graph.parameters if p.trainable for name in (p.name, *p.aliases)}
        for op in graph.ops:
            # the output is as large as its gradient, which waits
            if op.name in inner and trained.intersection(op.parameters):
                amount, count = found[n := places[of_op[op.name]]]
                sizes = (spec_bytes(spec, graph.batch_size) for spec in op.outputs)
                found[n] = sum(sizes, start=amount), count + 1
        return found

    @cached_property
    def _weight_shares(self) -> Array:
        """The share of backward (block,) that is gradients of parameters.

        By the flops, half of backward of operators with parameters.
        """
        graph, places, of_op = self.step.graph, self.crossings.places, self.step.segments.of_op
        flops = np.zeros((2, len(self.names)))  # of gradients of parameters, of all
        for op in graph.ops:
            backward = sum(
                kernel.count * max(kernel.flops.at(graph.batch_size), 0.0) for kernel in op.backward
            )
            flops[:, places[of_op[op.name]]] += (
                np.array([0.5 * bool(op.parameters), 1.0]) * backward
            )
        shares = np.zeros(len(self.names))
        return np.asarray(np.divide(flops[0], flops[1], out=shares, where=flops[1] > 0))

    # ---- once per step

    def _of_mesh(self, step: TrainingStep, level: int, crosses_nodes: bool) -> Once:
        ranks, found = step.mesh.data_parallel_size, {}
        for kind in dict.fromkeys(self.kinds):  # equal blocks have equal parameters
            owned = self.owned[self.kinds.index(kind)]
            costs = (
                np.sum([_parameter_costs(p, step, level) for p in owned], axis=0)
                if owned
                else np.zeros(3)
            )
            found[kind] = costs + _exchange_costs(step, owned, level, ranks)
        costs = np.array([found[kind] for kind in self.kinds]).T
        return Once(
            costs[0],
            costs[1],
            costs[2],
            _shared_costs(step, self.uses, len(self.names), level, crosses_nodes=crosses_nodes),
        )


# ---- a lower bound for slices


@dataclass(eq=False, repr=False)
class EqualShares(StageBlocks):
    """The chain `base` where each of `parts` ranks has an equal part of all that is not sent.

    No way to split its tensors takes less, wherever these are between blocks.
    """

    base: Any = None
    parts: int = 1

    @classmethod
    def of(cls, base: StageBlocks, parts: int) -> EqualShares:
        """Return the shares of `parts` ranks of the unsplit chain `base`."""
        found = cls(base.step, base=base, parts=parts)
        found._take(base, *_OF_THE_GRAPH, "kinds")
        return found

    def passes(self, samples: float) -> Passes:
        """Return the passes of a microbatch of so many samples."""
        known = self.base.passes(samples)
        return Passes(*(getattr(known, each.name) / self.parts for each in fields(Passes)))

    def once(self, mesh: Mesh, level: int, **options: Any) -> Once:
        """Return what a step on the data ranks of `mesh` takes besides its passes."""
        known = self.base.once(mesh, level, **options)
        return Once(
            known.seconds / self.parts,
            known.static / self.parts,
            known.update / self.parts,
            None if known.shared is None else known.shared / self.parts,
        )


# ---- one microbatch


@dataclass(frozen=True, eq=False)
class Passes:
    """One microbatch in each block (block,).

    Args:
        forward, backward: seconds.
        weights: seconds of backward for gradients of parameters.
        kept: bytes from forward to backward.
        hump: bytes, the most above these while the block runs.
        casts: of `kept`: parameters in 16 bits. Microbatches of a synchronous pipeline share them.
        recomputed_kept, recomputed_hump: the same with recomputation.
        waiting: bytes of gradients that are kept besides where gradients of parameters come later.
        split: seconds that a backward in two parts takes besides.
    """

    forward: Array
    backward: Array
    weights: Array
    kept: Array
    hump: Array
    casts: Array
    recomputed_kept: Array
    recomputed_hump: Array
    waiting: Array
    split: Array


@once_per_object
def _sizes_of_segments(graph: OpGraph) -> tuple[Array, NDArray[np.bool_]]:
    """Return bytes of segments ([5], segment, [fixed, per sample]), and which are blocks'.

    The five are bytes kept, those of the output, the peaks of forward and of backward, and casts.
    """
    names = (
        *("kept_bytes", "output_bytes", "forward_peak_bytes"),
        "backward_peak_bytes",
        "cast_bytes",
    )
    amounts = [[getattr(segment, name) for segment in graph.timeline] for name in names]
    sizes = np.array(
        [[(amount.fixed, amount.per_sample) for amount in each] for each in amounts], float
    )
    return sizes, np.array([segment.block != ROOT for segment in graph.timeline])


def _stage_block(
    passes: Passes, n: int, recomputes: Sequence[bool], *, cast_copies: int
) -> StageBlock:
    """Return what block `n` takes: without recomputation, then with it, if it can.

    Without, it takes endless time where it has to recompute.
    """
    seconds = passes.forward[n] + passes.backward[n]
    # seconds, bytes kept and those of the hump, and what all microbatches share
    shared = passes.casts[n] if cast_copies else 0.0
    plain = seconds, passes.kept[n] - shared, passes.hump[n], cast_copies * shared
    # forward once more, before its backward
    again = seconds + passes.forward[n], passes.recomputed_kept[n], passes.recomputed_hump[n], 0.0
    several = [
        plain if False in recomputes else (np.inf, 0.0, 0.0, 0.0),
        *([again] if True in recomputes else []),
    ]
    time, kept, hump, static = np.maximum(np.array(several).T, 0.0)
    nothing = np.zeros(len(several))
    return StageBlock(
        tuple(range(len(several))),
        np.round(time, 9),
        nothing,
        np.round(static),
        np.round(kept),
        np.round(hump),
    )


# ---- once per step


@dataclass(frozen=True, eq=False)
class Once:
    """What each block (block,) takes once per step, at one ZeRO level.

    Args:
        seconds: exchange of its gradients and its update.
        static: bytes of parameters, gradients and optimizer states.
        update: bytes that the optimizer takes while it steps.
        shared: (2, first block, end), of seconds and static bytes as in `StageTable`.
    """

    seconds: Array
    static: Array
    update: Array
    shared: Array | None


def _parameter_costs(parameter: Parameter, step: TrainingStep, level: int) -> Array:
    # Seconds of the update, static bytes and those of temporaries of one parameter
    # at level 1 data ranks share state and update evenly
    ranks = step.mesh.data_parallel_size if level else 1
    seconds = step.update_seconds(parameter) / ranks + temporaries_seconds(
        step, {parameter: 1 / ranks}
    )
    state = step.optimizer.state_bytes(parameter.name) / ranks if parameter.trainable else 0.0
    update = step.optimizer.updates.get(parameter.name)
    temporaries = (
        update.temporary_bytes / ranks if update is not None and update.temporaries_add else 0.0
    )
    return np.array(
        [seconds, parameter_bytes(parameter) + gradient_bytes(parameter) + state, temporaries]
    )


def _exchange_costs(
    step: TrainingStep, parameters: Sequence[Parameter], level: int, ranks: int
) -> Array:
    """Return seconds to average gradients and, at level 1, to send updated parameters.

    Then what the exchange keeps between steps and the buffers it takes, in bytes, and 0.
    """
    if ranks == 1:
        return np.zeros(3)
    size, model = sum(map(gradient_bytes, parameters)), step.exchange_model
    collectives = ["broadcast"] if level else []
    seconds, kept = (0.0, 0.0) if model is None else model.costs_of(parameters)
    if model is None:
        collectives.append("all_reduce")
    seconds += sum(
        step.collective_seconds(op, size, axes=step.mesh.data_axes) for op in collectives
    )
    return np.array([seconds, kept, 0.0])


def _shared_costs(
    step: TrainingStep,
    uses: Mapping[str, Sequence[int]],
    count: int,
    level: int,
    *,
    crosses_nodes: bool,
) -> Array | None:
    """Return `Once.shared` of a chain of `count` blocks.

    Stages that have a reader of a parameter, but not all, sum its gradient with the others. Those
    without its first reader keep and update it as well. `uses` are the places of the readers of
    each parameter.
    """
    shared = [p for p in step.graph.parameters if len(uses[p.name]) > 1]
    if not shared:
        return None
    # all stages from block `first` to `end` - 1
    first, end = np.meshgrid(np.arange(count), np.arange(count + 1), indexing="ij")
    found = np.zeros((2, count, count + 1))
    for parameter in shared:
        places = np.array(uses[parameter.name])
        # (first, end): how many readers the stage has
        inside = ((places[:, None, None] >= first) & (places[:, None, None] < end)).sum(axis=0)
        some, copied = (inside > 0) & (inside < len(places)), (inside > 0) & (places[0] < first)
        size = gradient_bytes(parameter)
        link = (crosses_nodes and step.cluster.inter) or step.cluster.intra
        # between two stages at a time, over the slower link that there may be
        found[0] += some * ring_seconds("all_reduce", size=size, ranks=2, link=link)
        seconds, static, _ = _parameter_costs(parameter, step, level)
        found[:2] += copied * np.array([seconds, static])[:, None, None]
    return found
