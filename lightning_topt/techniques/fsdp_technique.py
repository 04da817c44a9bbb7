"""Techniques that shard gradients, and parameters, along some data axes through torch's FSDP2 have
this in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence

from typing_extensions import override

from lightning_topt.costs.communication import Collective
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT, shard_share
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.fsdp_costs import (
    ShardedBlock,
    add_fsdp_seconds,
    can_be_sharded,
    fsdp_collectives,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.technique import ALONE, BlockSeconds, Neighbours, Technique


class FsdpTechnique(Technique):
    """ZeRO levels 2 and 3 along `axes` of a mesh, and copies along its other data axes."""

    @abstractmethod
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the indices of the axes that tensors are sharded along; none where the technique
        does not suit the mesh.
        """

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        axes = self.axes(mesh)
        sharded = (
            [Storage.zero(level, axes=len(mesh.axes), over=axes) for level in (2, 3)]
            if axes
            else []
        )
        return frozenset({"storage"}) if config.storage in sharded else frozenset()

    # ---- what is legal ---------------------------------------------------------------------------

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        mesh, axes = step.mesh, self.axes(step.mesh)
        if not axes or mesh.data_parallel_size == 1 or not can_be_sharded(step, block):
            return []
        # FSDP2's root is needed until the end of the step: releasing its parameters saves nothing.
        levels = (2,) if block.name == ROOT else (2, 3)
        return [OpConfig.zero(level, axes=len(mesh.axes), over=axes) for level in levels]

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return bool(self.claims(config, step.mesh))

    @override
    def collectives(self, step: TrainingStep, block: str, config: OpConfig) -> Iterator[Collective]:
        return fsdp_collectives(self._sharded(step, block, config, ALONE))

    @override
    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        sharded = self._sharded(step, block, config, beside)
        yield from shard_lifetimes(sharded)
        yield from gathered_lifetimes(sharded)
        yield from gradient_lifetimes(sharded)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        yield from plan_lifetimes(step, blocks, axes=self.axes(step.mesh))

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        add_fsdp_seconds(seconds, self._sharded(step, block, config, ALONE))

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return shard_share(parameter, step.mesh.ranks_along(self.axes(step.mesh)))

    def _sharded(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> ShardedBlock:
        return ShardedBlock(step, block, config.storage.level, self.axes(step.mesh), beside)
