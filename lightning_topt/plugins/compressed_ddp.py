"""The Lightning strategy ``"topt_compressed"``: data parallelism for slow networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.bucket import ExchangeSettings
from lightning_topt.communication.exchange_method import ExchangeMethod
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.method_registry import (
    DEFAULT_METHOD,
    gradient_methods,
    method_classes,
    read_gradient_method,
)
from lightning_topt.communication.topology import Topology
from lightning_topt.plugins.ddp_base import checked_ddp_options, refuse_momentum
from lightning_topt.plugins.exchange_steps import ExchangeSteps
from lightning_topt.plugins.monitors import add_monitor
from lightning_topt.plugins.register import register_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CompressedDDPStrategy(ExchangeSteps):
    """Distributed data parallelism whose gradients travel compressed.

    ``Trainer(strategy="topt_compressed")``

    A `CompressedExchange` is registered on DDP, on every device. What was not sent yet (the
    residual) is part of checkpoints and is redistributed when one is loaded on another number of
    ranks; such checkpoints load in plain ``ddp`` too. Bytes sent, exposed seconds and the norm of
    the residual are logged by an `ExchangeMonitor`.

    Args:
        method: how gradients travel: an object such as ``TopK(density=0.01)``, a name for its
            defaults, or a mapping such as ``{"method": "topk", "density": 0.01}``.
        nonfinite, timeout_seconds, debug: as in `ExchangeSettings`; `nonfinite` None: "skip" with a
            GradScaler (precision ``16-mixed``), "error" otherwise.
        nodes, ranks_per_node: who shares a node, where it is not what the Trainer has as
            `num_nodes` and `devices`.
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`,
            but for communication hooks.

    Raises ValueError for wrong options, for an optimizer with momentum where the method has it, for
    ranks that differ in their options; `PeerLostError` when a rank is gone; FloatingPointError for
    gradients that are not finite.
    """

    def __init__(
        self,
        method: ExchangeMethod | str | Mapping[str, Any] = DEFAULT_METHOD,
        *,
        nonfinite: str | None = None,
        timeout_seconds: float = ExchangeSettings.timeout_seconds,
        debug: bool = ExchangeSettings.debug,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        **ddp_options: Any,
    ) -> None:
        refuse_method_options(ddp_options)
        super().__init__(**checked_ddp_options(ddp_options, strategy=type(self).__name__))
        self.method = read_gradient_method(method)
        self.settings = ExchangeSettings(
            "error" if nonfinite is None else nonfinite, timeout_seconds, debug
        )
        # Who shares a node, for methods that exchange between nodes.
        for name, size in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if size is not None:
                check_whole(size, name=name)
        self._nonfinite, self._nodes, self._ranks_per_node = nonfinite, nodes, ranks_per_node

    # ---- life cycle ------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            add_monitor(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"gradients of sharded parameters cannot be exchanged compressed, and {name} "
                    "is sharded (by fully_shard "
                    'or tensor parallelism): leave it whole, or take strategy="topt"'
                )
            if parameter.requires_grad and parameter.dtype not in DTYPES:
                raise ValueError(
                    "gradients of float32, bfloat16 and float16 parameters can be exchanged "
                    f"compressed, and {name} is {parameter.dtype}: choose another precision, or "
                    "Lightning's own ddp"
                )
        return super()._setup_model(model)

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only and drops them silently elsewhere; torch runs them
        # on gloo too.
        assert isinstance(self.model, DistributedDataParallel)
        # That of an earlier fit ends before a new one begins.
        self._open_exchange(None)
        topology = make_topology(
            nodes=self._nodes, ranks_per_node=self._ranks_per_node, rank=self.global_rank,
            trainer_nodes=self.num_nodes, world_size=self.world_size,
        )  # fmt: skip
        exchange = CompressedExchange(
            self.method,
            topology=topology,
            device=self.root_device,
            nonfinite=self._nonfinite_for_precision(),
            timeout_seconds=self.settings.timeout_seconds,
            debug=self.settings.debug,
        )
        exchange.register(self.model)
        self._open_exchange(exchange)

    def _nonfinite_for_precision(self) -> str:
        scales = self._scaler is not None
        if self._nonfinite == "skip" and not scales:
            raise ValueError(
                'nonfinite="skip" makes gradients NaN so that a GradScaler skips the step; '
                "precision "
                f"{self.precision_plugin.precision} has none and would train on NaN: leave it out, "
                'or use precision="16-mixed"'
            )
        return self._nonfinite or ("skip" if scales else "error")

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.method.gives_signs and trainer.gradient_clip_val:
            raise ValueError(
                f"{type(self.method).__name__} gives the optimizer signs, of which clipping would "
                "only make smaller steps: leave gradient_clip_val out"
            )
        if self.method.has_momentum:
            refuse_momentum(self.optimizers)
        if len(self.optimizers) > 1 and self.method.has_residual:
            rank_zero_warn(
                "gradients of several optimizers are exchanged together in every backward pass: "
                "what it sends for parameters whose gradients are then zeroed and not applied is "
                "lost (error_feedback=False holds nothing back)"
            )

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        checkpoint = dict(checkpoint)  # hooks may keep theirs
        self._save_exchange(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._load_exchange(checkpoint)

    # ---- registration ----------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(
            "topt_compressed",
            cls,
            registry=strategy_registry,
            description="Data parallelism with compressed gradients",
        )


def refuse_method_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option of a method among those of the strategy.

    The message says where it belongs.
    """
    for kind in (method_classes()[name] for name in (DEFAULT_METHOD, *gradient_methods())):
        for name in [field.name for field in fields(kind) if field.name in options]:
            raise TypeError(
                f"{name} is an option of a method of exchange: give it to that, as in "
                f"CompressedDDPStrategy({kind.__name__}({name}={options[name]!r}))"
            )


def make_topology(
    *, nodes: int | None, ranks_per_node: int | None, rank: int, trainer_nodes: int, world_size: int
) -> Topology:
    """Return the topology that is given, or that of the Trainer.

    Where one of its two numbers is missing it follows from the other.

    Raises ValueError where it has not `world_size` ranks.
    """
    given = f"nodes={nodes} and ranks_per_node={ranks_per_node}"
    if nodes is None and ranks_per_node is None:
        nodes = trainer_nodes
    # One of the two numbers follows from the other.
    ranks_per_node = ranks_per_node or world_size // (nodes or 1)
    nodes = nodes or world_size // ranks_per_node
    if nodes * ranks_per_node != world_size:
        raise ValueError(
            f"the world size is {world_size}, which is not nodes x ranks_per_node: {given}; give "
            "numbers that fit, or neither, for those of the Trainer"
        )
    return Topology(nodes, ranks_per_node, rank)
