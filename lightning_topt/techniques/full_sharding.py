"""Sharded gradients, and parameters, over all ranks (ZeRO levels 2 and 3), through torch's
FSDP2.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.techniques.fsdp_blocks import shard_blocks
from lightning_topt.techniques.fsdp_technique import FsdpTechnique
from lightning_topt.techniques.technique import Applied, ParallelModel, has_data_axes


class FullSharding(FsdpTechnique):
    """Gradients, and at level 3 parameters, are sharded along all data axes."""

    @property
    @override
    def name(self) -> str:
        return "full sharding"

    @override
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        return mesh.data_axes if has_data_axes(mesh) else ()

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        return (
            shard_blocks(model, blocks, mesh=model.device_mesh(inner=model.mesh.data_parallel_size))
            if blocks
            else None
        )
