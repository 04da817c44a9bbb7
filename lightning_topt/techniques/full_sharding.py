"""Sharded gradients, and parameters, over all ranks (ZeRO levels 2 and 3), through torch's FSDP2."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.techniques.fsdp_blocks import shard_blocks
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique, has_only_data_axes


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

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        return shard_blocks(model, blocks, mesh=model.device_mesh(inner=model.mesh.size)) if blocks else None
