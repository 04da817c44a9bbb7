"""Hybrid sharding: shards along the last data axis (inside a node), whole copies of them along the
others (between nodes).

Parameters are gathered and gradients scattered inside the inner groups; between these only the
shards of gradients travel, in an all-reduce, once per step however many microbatches it has (Zhao
et al., arXiv 2304.11277, section 3.2.2; Zhang et al., "MiCS", arXiv 2205.00119).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.techniques.fsdp_blocks import shard_blocks, sharded_modules
from lightning_topt.techniques.fsdp_technique import FsdpTechnique
from lightning_topt.techniques.technique import Applied, ParallelModel, has_data_axes


class HybridSharding(FsdpTechnique):
    """Gradients, and at level 3 parameters, are sharded along the last of several data axes."""

    @property
    @override
    def name(self) -> str:
        return "hybrid sharding"

    @override
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        return mesh.data_axes[-1:] if has_data_axes(mesh) and len(mesh.data_axes) > 1 else ()

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        if not blocks:
            return None
        applied = shard_blocks(
            model,
            blocks,
            mesh=model.device_mesh(inner=model.mesh.ranks_along(self.axes(model.mesh))),
        )
        modules = sharded_modules(model, blocks)
        return replace(applied, no_sync=lambda: _within_groups(modules))


@contextmanager
def _within_groups(modules: list[nn.Module]) -> Generator[None, None, None]:
    """Gradients are scattered inside the inner groups and stay there; the next backward outside
    takes them along.
    """
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_all_reduce(True, recurse=False)
