"""Sharded gradients (ZeRO level 2) and parameters (level 3) over all data axes, through torch's FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from typing_extensions import override

from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT, shard_share
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.fsdp_costs import (
    ShardedBlock,
    add_fsdp_seconds,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.technique import ALONE, BlockSeconds, Neighbours, Technique


class FullSharding(Technique):
    """Gradients, optimizer state and (level 3) parameters sharded over all data axes."""

    @override
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        return config.storage.level >= 2 and config.storage.sharded_axes("gradients") == mesh.data_axes

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        mesh = step.mesh
        if mesh.data_parallel_size == 1 or not step.optimizer.elementwise or step.exchange is not None:
            return []
        # FSDP2's root is needed until the end of the step: releasing its parameters saves nothing.
        levels = (2,) if block.name == ROOT else (2, 3)
        return [OpConfig.zero(level, axes=len(mesh.axes), over=mesh.data_axes) for level in levels]

    # ---- what it costs ----------------------------------------------------------------------------------------------

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


def sharded_block(step: TrainingStep, block: str, config: OpConfig, beside: Neighbours = ALONE) -> ShardedBlock:
    """Return `block` as FSDP2 shards it under `config`."""
    storage = config.storage
    return ShardedBlock(step, block, storage.level, storage.sharded_axes("gradients"), beside)
