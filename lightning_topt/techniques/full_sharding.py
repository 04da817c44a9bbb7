"""Sharded gradients, and parameters, over all ranks (ZeRO levels 2 and 3), through torch's FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from typing_extensions import override

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT, shard_share
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.fsdp_blocks import shard_blocks
from lightning_topt.techniques.fsdp_costs import (
    ShardedBlock,
    add_fsdp_seconds,
    can_be_sharded,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.technique import (
    ALONE,
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_only_data_axes,
)


class FullSharding(Technique):
    """Gradients, and at level 3 parameters, are sharded along all data axes."""

    @property
    @override
    def name(self) -> str:
        return "full sharding"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        sharded = [Storage.zero(level, axes=len(mesh.axes), over=mesh.data_axes) for level in (2, 3)]
        return frozenset({"storage"}) if has_only_data_axes(mesh) and config.storage in sharded else frozenset()

    @override
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        return None

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        mesh = step.mesh
        if mesh.data_parallel_size == 1 or not can_be_sharded(step, block):
            return []
        # FSDP2's root is needed until the end of the step: releasing its parameters saves nothing.
        levels = (2,) if block.name == ROOT else (2, 3)
        return [OpConfig.zero(level, axes=len(mesh.axes), over=mesh.data_axes) for level in levels]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return bool(self.claims(config, step.mesh))

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        sharded = sharded_block(step, block, config, beside)
        yield from shard_lifetimes(sharded)
        yield from gathered_lifetimes(sharded)
        yield from gradient_lifetimes(sharded)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        yield from plan_lifetimes(step, blocks, axes=step.mesh.data_axes)

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        add_fsdp_seconds(seconds, sharded_block(step, block, config))

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return 0.0

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return shard_share(parameter, step.mesh.data_parallel_size)

    # ---- how it is applied -------------------------------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        return shard_blocks(model, blocks, mesh=model.device_mesh(inner=model.mesh.size)) if blocks else None


def sharded_block(step: TrainingStep, block: str, config: OpConfig, beside: Neighbours = ALONE) -> ShardedBlock:
    """Return `block` as FSDP2 shards it under `config`."""
    storage = config.storage
    return ShardedBlock(step, block, storage.level, storage.sharded_axes("gradients"), beside)
