"""Hybrid sharding: shards along the last data axis (inside a node), whole copies of them along the others (between nodes).

Parameters are gathered and gradients scattered inside the inner groups; between these only the shards of gradients travel, in
an all-reduce, once per step however many microbatches it has (Zhao et al., arXiv 2304.11277, section 3.2.2; Zhang et al.,
"MiCS", arXiv 2205.00119).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT, shard_share
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.fsdp_blocks import shard_blocks, sharded_modules
from lightning_topt.techniques.fsdp_costs import (
    add_fsdp_seconds,
    can_be_sharded,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.full_sharding import sharded_block
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_only_data_axes,
)


class HybridSharding(Technique):
    """Gradients, and at level 3 parameters, are sharded along the last of several data axes."""

    @property
    @override
    def name(self) -> str:
        return "hybrid sharding"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        if not has_only_data_axes(mesh) or len(mesh.axes) < 2:
            return frozenset()
        sharded = [Storage.zero(level, axes=len(mesh.axes), over=mesh.data_axes[-1:]) for level in (2, 3)]
        return frozenset({"storage"}) if config.storage in sharded else frozenset()

    @override
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        return None

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        mesh = step.mesh
        if len(mesh.data_axes) < 2 or not can_be_sharded(step, block):
            return []
        levels = (2,) if block.name == ROOT else (2, 3)
        return [OpConfig.zero(level, axes=len(mesh.axes), over=mesh.data_axes[-1:]) for level in levels]

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

    # ---- how it is applied -------------------------------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        if not blocks:
            return None
        applied = shard_blocks(model, blocks, mesh=model.device_mesh(inner=model.mesh.shape[-1]))
        modules = sharded_modules(model, blocks)
        return replace(applied, no_sync=lambda: _within_groups(modules))


@contextmanager
def _within_groups(modules: list[nn.Module]) -> Generator[None, None, None]:
    """Gradients are scattered inside the inner groups and stay there; the next backward outside takes them along."""
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_all_reduce(True, recurse=False)
