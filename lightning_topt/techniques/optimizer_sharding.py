"""Sharded optimizer states (ZeRO level 1): whole gradients, averaged as in data parallelism; each rank updates its share.

Parameters are divided whole, largest first; a rank's step updates its own and sends them to the others (`ParallelStep`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.ownership import assign_owners
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique, has_only_data_axes


class OptimizerSharding(Technique):
    """The optimizer state is sharded along all data axes."""

    @property
    @override
    def name(self) -> str:
        return "sharded optimizer state"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        sharded = Storage.zero(1, axes=len(mesh.axes), over=mesh.data_axes)
        return frozenset({"storage"}) if has_only_data_axes(mesh) and config.storage == sharded else frozenset()

    @override
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        return None

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        names = {
            name: parameter
            for block in model.blocks_of(self)
            for name, parameter in model.parameters[block].items()
            if parameter.requires_grad
        }
        if not names:
            return None
        once = {parameter: name for name, parameter in reversed(names.items())}
        owner = assign_owners({name: p.numel() for p, name in once.items()}, model.mesh.size)
        owners: dict[Tensor, int] = {parameter: owner[name] for parameter, name in once.items()}
        return Applied(undo=lambda: None, attach=lambda optimizer: _share_step(optimizer, owners))


def _share_step(optimizer: Optimizer, owners: Mapping[Tensor, int]) -> ParallelStep | None:
    pieces = [
        Piece(index, 0, num_rows(parameter), owners[parameter])
        for index, parameter in enumerate(parameters_of(optimizer))
        if parameter in owners
    ]
    return install_parallel_step(optimizer, pieces=pieces) if pieces else None
