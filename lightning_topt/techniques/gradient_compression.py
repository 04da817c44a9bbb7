"""The plan's gradient exchange: whole gradients travel compressed, or over the levels of the network, as DDP's hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique, has_whole_gradients


class GradientCompression(Technique):
    """Of plans that have a `gradient_exchange`; it outlives `undo`, for checkpoints, until it is closed."""

    @property
    @override
    def name(self) -> str:
        return "gradient exchange"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        return frozenset()

    @override
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        if exchange is None:
            return
        if not any(has_whole_gradients(config) for config in configs.values()):
            raise ValueError("gradient_exchange: needs whole gradients (ZeRO levels 0 and 1), and this plan shards all")
        if mesh.size == 1:
            raise ValueError("gradient_exchange: a single rank exchanges nothing; leave it out")

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        if model.exchange is None:
            return None
        if not isinstance(model.root, DistributedDataParallel):
            raise ValueError("gradient_exchange: no trained parameter of this model has whole gradients; leave it out")
        options = replace(model.exchange, nonfinite=model.options.nonfinite)
        exchange = CompressedExchange(options, topology=model.options.topology, device=model.device)
        exchange.register(model.root)
        return Applied(undo=lambda: None, exchange=exchange)
