"""A training step as a chain of blocks that a pipeline shares out: what each takes on one
microbatch, and once per step.

The chain has the named blocks in the order of forward. What is outside of them (the block ``""``)
belongs to the block before it, or to the first one: its time, its activations, and those of its
parameters that it reads there. A parameter that several blocks read is kept by every stage that has
one of them (`shared`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.crossings import Crossings, chain_of, find_crossings, uses_of_parameters
from lightning_topt.costs.stage_table import StageChain
from lightning_topt.costs.training_step import SPLIT_CALL_SECONDS, TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_graph import Amount, Parameter
from lightning_topt.plan.block_passes import (
    Passes,
    sizes_of_segments,
    stage_block,
    waiting_gradients,
    weight_shares,
)
from lightning_topt.plan.step_once import Once, exchange_seconds, parameter_costs, shared_costs

_GRAIN = 1e-9  # seconds and bytes of equal blocks are equal to this
# What a backward in two parts takes besides: of operators with parameters, and of its seconds on a
# CPU. That of Transformer layers of width 64 to 512 took 2.4 to 1.06 times as long in two parts.
SPLIT_BACKWARD_SECONDS = 1.1e-4
SPLIT_BACKWARD_SHARE = 0.05


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The chain of blocks of `step`, whatever its data axes and batch are; `every` is the one of
    all kinds of nodes where this is the one of some.

    Where `step` is that of a rank with slices, `whole` is the chain with nothing split, and `calls`
    are those of torch functions in the forward of each block whose parameters are split.
    """

    step: TrainingStep
    every: StageBlocks | None = None
    whole: StageBlocks | None = None
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensor(self) -> int:
        """The ranks that hold slices of one copy of the parameters."""
        return self.step.mesh.ranks_along(self.step.mesh.tensor_axes)

    def on(self, kinds: tuple[int, ...]) -> StageBlocks:
        """Return the chain on the slowest devices of these kinds of nodes (`Cluster.nodes`); the
        same where all are equal.
        """
        if not self.step.cluster.nodes:
            return self
        if kinds not in self._on_kinds:
            step = replace(self.step, cluster=self.step.cluster.of_kinds(kinds))
            other = StageBlocks(step, self, self.whole, self.calls)
            for name in (
                "names",
                "crossings",
                "_own_crossings",
                "uses",
                "owned",
                "_weight_shares",
                "_waiting",
            ):
                other.__dict__[name] = getattr(self, name)
            self._on_kinds[kinds] = other
        return self._on_kinds[kinds]

    def of_slices(
        self, step: TrainingStep, *, calls: Mapping[str, int], same_operators: bool = False
    ) -> StageBlocks:
        """Return the chain of the `step` of a rank with slices, this being the whole one; `calls`
        are its.

        With `same_operators` the graphs differ in costs and sizes of parameters alone
        (`SplitModel.bound_graph`).
        """
        found = StageBlocks(step, whole=self, calls=calls)
        if same_operators:
            for name in ("names", "_own_crossings", "uses", "_waiting"):
                found.__dict__[name] = getattr(self, name)
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The blocks in the order of forward."""
        return chain_of(self.step.graph)

    @cached_property
    def crossings(self) -> Crossings:
        """The tensors that cross each boundary; those in slices are sent whole, by each of the
        ranks.
        """
        own = self._own_crossings
        return own if self.whole is None else replace(self.whole.crossings, places=own.places)

    def gathered_bytes(self, samples: float) -> Array:
        """Return the bytes (block,) of the tensors that are in slices before they cross the
        boundary before each block.
        """
        if self.whole is None:
            return np.zeros(len(self.names))
        whole, own = (
            np.array([amount.at(samples) for amount in crossings.forward])
            for crossings in (self.whole.crossings, self._own_crossings)
        )
        return np.asarray(np.maximum(whole - own, 0.0) * self.tensor / (self.tensor - 1))

    def passes(self, samples: float) -> Passes:
        """Return the passes of a microbatch of so many samples. Raises ValueError for one that the
        graph says nothing about.
        """
        if samples not in self._passes:
            self._passes[samples] = self._of_samples(samples)
        return self._passes[samples]

    def once(self, mesh: Mesh, level: int, *, crosses_nodes: bool = True) -> Once:
        """Return what a step takes besides on the data ranks of `mesh`, at ZeRO level 0 or 1;
        stages that share a parameter are on several nodes, or all on one.
        """
        key = mesh, level, crosses_nodes
        if key not in self._once:
            self._once[key] = self._of_mesh(replace(self.step, mesh=mesh), level, crosses_nodes)
        return self._once[key]

    def crossing_bytes(self, samples: float) -> Array:
        """Return the bytes (2, block) of a microbatch that cross the boundary before each block,
        and come back as gradients.
        """
        if samples not in self._crossing_bytes:
            sides: tuple[Sequence[Amount], ...] = self.crossings.forward, self.crossings.backward
            self._crossing_bytes[samples] = np.array(
                [[amount.at(samples) for amount in side] for side in sides]
            )
        return self._crossing_bytes[samples]

    def chain(self, samples: float, *, recomputes: tuple[bool, ...], parts: int = 1) -> StageChain:
        """Return the passes as a chain: configuration 0 does not recompute, 1 does. Blocks that can
        have `recomputes`; their backwards are in so many `parts`, one or two.
        """
        key = samples, recomputes, parts
        if key not in self._chains:
            passes = self.passes(samples)
            passes = (
                replace(passes, backward=passes.backward + passes.split) if parts > 1 else passes
            )
            first = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
            able = {block.name for block in self.step.graph.blocks if block.recomputable}
            blocks = tuple(
                stage_block(passes, n, recomputes if self.names[n] in able else (False,))
                for n in first
            )
            self._chains[key] = StageChain(blocks, self.kinds)
        return self._chains[key]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, from 0 in order; equal for blocks that take the same on any mesh
        and microbatch.
        """
        if self.every is not None:
            return self.every.kinds
        known: dict[object, int] = {}
        count, step = len(self.step.cluster.nodes), self.step
        # Ranks of a stage are neighbours, and so are the kinds of their nodes.
        several = [tuple(range(a, b)) for a, b in itertools.combinations(range(count + 1), 2)]
        of_kinds = [self.on(kinds).passes(step.batch_size) for kinds in several or [()]]
        rows = [
            (each.forward, each.backward, each.kept, each.hump, each.recomputed_kept)
            for each in of_kinds
        ]
        times = np.stack([*itertools.chain.from_iterable(rows)], axis=1)
        found = []
        for n, name in enumerate(self.names):
            owned = tuple(
                (p.shape, p.dtype, p.trainable, step.optimizer.updates.get(p.name))
                for p in self.owned[n]
            )
            measured = tuple(step.optimizer.seconds_per_element.get(p.name) for p in self.owned[n])
            recomputable = next(
                block.recomputable for block in step.graph.blocks if block.name == name
            )
            key = owned, measured, recomputable, tuple(np.round(times[n] / _GRAIN).tolist())
            found.append(known.setdefault(key, len(known)))
        return tuple(found)

    @cached_property
    def transfers(self) -> dict[tuple[float, int], dict[str, Array]]:
        """Seconds to send microbatches, as far as they were asked for (`transfer_seconds`): by
        samples and ranks of a stage.
        """
        return {}

    # ---- parts -----------------------------------------------------------------------------------

    @cached_property
    def _on_kinds(self) -> dict[tuple[int, ...], StageBlocks]:
        return {}

    @cached_property
    def _passes(self) -> dict[float, Passes]:
        return {}

    @cached_property
    def _crossing_bytes(self) -> dict[float, Array]:
        return {}

    @cached_property
    def _once(self) -> dict[tuple[Mesh, int, bool], Once]:
        return {}

    @cached_property
    def _chains(self) -> dict[tuple[float, tuple[bool, ...], int], StageChain]:
        return {}

    @cached_property
    def _own_crossings(self) -> Crossings:
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

    def _of_samples(self, samples: float) -> Passes:
        step, places = self.step.with_batch_size(samples), list(self.crossings.places)
        rows = np.zeros((4, len(self.names)))
        recomputed = np.zeros((2, len(self.names)))
        compute = np.sum([*step.compute.values()], axis=0)
        sizes, is_block = sizes_of_segments(step.graph)
        kept, output, forward, backward = sizes[..., 0] + sizes[..., 1] * samples
        between, hump = np.where(is_block, output, kept), np.maximum(backward, forward - kept)
        sums = *((rows[n], compute[n]) for n in (0, 1)), (rows[2], kept), (recomputed[0], between)
        for total, values in sums:
            np.add.at(total, places, values)
        again = np.where(
            is_block, np.maximum(hump + kept - between, forward), hump
        )  # what is outside of all blocks runs once
        for most, values in ((rows[3], hump), (recomputed[1], again)):
            np.maximum.at(most, places, values)
        rows[:2] += self._host_seconds(rows[0] + rows[1])
        waiting = np.array([amount.at(samples) for amount, _ in self._waiting])
        weights, split = rows[1] * self._weight_shares, self._split_seconds(rows[1])
        return Passes(
            rows[0],
            rows[1],
            weights,
            rows[2],
            rows[3],
            recomputed[0],
            recomputed[1],
            waiting,
            split,
        )

    def _split_seconds(self, kernels: Array) -> Array:
        """Seconds (block,) that backwards of `kernels` seconds take besides where gradients of
        parameters come later.
        """
        host = SPLIT_BACKWARD_SECONDS * np.array([count for _, count in self._waiting], float)
        return (
            host + SPLIT_BACKWARD_SHARE * kernels
            if self.step.on_gloo
            else np.maximum(host - kernels, 0.0)
        )

    @cached_property
    def _waiting(self) -> list[tuple[Amount, int]]:
        """The gradients that arrive at operators of each block with parameters and an input that
        gets a gradient, and how many operators these are.
        """
        return waiting_gradients(self.step, self.crossings.places, len(self.names))

    def _host_seconds(self, kernels: Array) -> Array:
        """Seconds (block,) of either pass that Python takes, which splits every call, beside
        kernels of `kernels` seconds.

        But on CPUs these run at the same time.
        """
        taken = SPLIT_CALL_SECONDS * np.array(
            [self.calls.get(name, 0) for name in self.names], float
        )
        return taken / 2 if self.step.on_gloo else np.maximum(taken - kernels, 0.0) / 2

    @cached_property
    def _weight_shares(self) -> Array:
        """The share of the backward (block,) of gradients of parameters: half of that of operators
        that have parameters.
        """
        return weight_shares(self.step, self.crossings.places, len(self.names))

    def _of_mesh(self, step: TrainingStep, level: int, crosses_nodes: bool) -> Once:
        ranks, found = step.mesh.data_parallel_size, {}
        for kind in dict.fromkeys(self.kinds):  # equal blocks have equal parameters
            owned = self.owned[self.kinds.index(kind)]
            costs = (
                np.sum([parameter_costs(p, step, level) for p in owned], axis=0)
                if owned
                else np.zeros(3)
            )
            found[kind] = costs + np.array([exchange_seconds(step, owned, level, ranks), 0.0, 0.0])
        costs = np.array([found[kind] for kind in self.kinds]).T
        return Once(
            costs[0],
            costs[1],
            costs[2],
            shared_costs(step, self.uses, len(self.names), level, crosses_nodes=crosses_nodes),
        )
