"""Hybrid sharding: ZeRO levels 2 and 3 along the last data axis, copies along the others (FSDP2 on a mesh of two axes).

Zhang et al., "MiCS", arXiv 2205.00119; Zhao et al., "PyTorch FSDP", arXiv 2304.11277, section 3.2.2: gathers stay inside the
group, and only the shards of gradients are summed between groups.
"""

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
    add_fsdp_seconds,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.full_sharding import sharded_block
from lightning_topt.techniques.technique import BlockSeconds, Neighbours, Technique


class HybridSharding(Technique):
    """Gradients, optimizer state and (level 3) parameters sharded along the last of several data axes."""

    @override
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        inner = mesh.data_axes[-1:]
        return config.storage.level >= 2 and config.storage.sharded_axes("gradients") == inner != mesh.data_axes

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        mesh = step.mesh
        if len(mesh.data_axes) < 2 or not step.optimizer.elementwise or step.exchange is not None:
            return []
        levels = (2,) if block.name == ROOT else (2, 3)
        return [OpConfig.zero(level, axes=len(mesh.axes), over=mesh.data_axes[-1:]) for level in levels]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        sharded = sharded_block(step, block, config, beside)
        yield from shard_lifetimes(sharded)
        yield from gathered_lifetimes(sharded)
        yield from gradient_lifetimes(sharded)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        yield from plan_lifetimes(step, blocks, axes=step.mesh.data_axes[-1:])

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        outer = step.mesh.data_axes[:-1]
        add_fsdp_seconds(seconds, sharded_block(step, block, config), replicated=outer)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return 0.0

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return shard_share(parameter, step.mesh.ranks_along(step.mesh.data_axes[-1:]))
