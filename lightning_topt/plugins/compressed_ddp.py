"""The Lightning strategy ``"topt_compressed"``: data parallelism for slow networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.options import READ_BY, ExchangeOptions, LinkCosts
from lightning_topt.communication.topology import Topology
from lightning_topt.plugins.ddp_parts import (
    checked_ddp_options,
    refuse_momentum,
    register_names,
)
from lightning_topt.plugins.exchange_monitor import add_monitor
from lightning_topt.plugins.exchange_steps import ExchangeSteps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CompressedDDPStrategy(ExchangeSteps):
    """Distributed data parallelism whose gradients travel compressed: ``Trainer(strategy="topt_compressed")``.

    A `CompressedExchange` is registered on DDP, on every device. What was not sent yet (the residual) is part of checkpoints
    and is redistributed when one is loaded on another number of ranks; such checkpoints load in plain ``ddp`` too. Bytes sent,
    exposed seconds and the norm of the residual are logged by an `ExchangeMonitor`.

    Args:
        method, density, hierarchical, selection, value_dtype, error_feedback, momentum, warmup_steps, dense_steps, exempt,
            rank, timeout_seconds, debug: as in `ExchangeOptions`.
        link: `LinkCosts`, or a mapping of its fields: a bucket is sent whole where that is quicker.
        nonfinite: as in `ExchangeOptions`; None: "skip" with a GradScaler (precision ``16-mixed``), "error" otherwise.
        nodes, ranks_per_node: who shares a node, where it is not what the Trainer has as `num_nodes` and `devices`.
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`, but for communication hooks.

    Raises ValueError for wrong options, for an optimizer with momentum where the exchange has it (`momentum`), for ranks that
    differ in their options; `PeerLostError` when a rank is gone; FloatingPointError for gradients that are not finite.
    """

    def __init__(
        self,
        *,
        method: str = ExchangeOptions.method,
        density: float = ExchangeOptions.density,
        hierarchical: bool | None = ExchangeOptions.hierarchical,
        selection: str = ExchangeOptions.selection,
        value_dtype: str = ExchangeOptions.value_dtype,
        error_feedback: bool = ExchangeOptions.error_feedback,
        momentum: float = ExchangeOptions.momentum,
        warmup_steps: int = ExchangeOptions.warmup_steps,
        dense_steps: int = ExchangeOptions.dense_steps,
        exempt: Sequence[str] = ExchangeOptions.exempt,
        link: LinkCosts | Mapping[str, float] | None = ExchangeOptions.link,
        rank: int = ExchangeOptions.rank,
        nonfinite: str | None = None,
        timeout_seconds: float = ExchangeOptions.timeout_seconds,
        debug: bool = ExchangeOptions.debug,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__(
            **{"gradient_as_bucket_view": True, **checked_ddp_options(ddp_options, strategy=type(self).__name__)}
        )
        self.options = ExchangeOptions(
            method=method,
            density=density,
            hierarchical=hierarchical,
            selection=selection,
            value_dtype=value_dtype,
            error_feedback=error_feedback,
            momentum=momentum,
            warmup_steps=warmup_steps,
            dense_steps=dense_steps,
            exempt=exempt,  # type: ignore[arg-type]  # checked and made a tuple there
            link=read_link(link),
            rank=rank,
            nonfinite="error" if nonfinite is None else nonfinite,
            timeout_seconds=timeout_seconds,
            debug=debug,
        )
        for name, size in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if size is not None:
                check_whole(size, name=name)
        self._nonfinite, self._nodes, self._ranks_per_node = nonfinite, nodes, ranks_per_node

    # ---- life cycle -----------------------------------------------------------------------------------------------

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
                    f"gradients of sharded parameters cannot be exchanged compressed, and {name} is sharded (by fully_shard "
                    'or tensor parallelism): leave it whole, or take strategy="topt"'
                )
            if parameter.requires_grad and parameter.dtype not in DTYPES:
                raise ValueError(
                    f"gradients of float32, bfloat16 and float16 parameters can be exchanged compressed, and {name} is "
                    f"{parameter.dtype}: choose another precision, or Lightning's own ddp"
                )
        return super()._setup_model(model)

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only and drops them silently elsewhere; torch runs them on gloo too.
        assert isinstance(self.model, DistributedDataParallel)
        self._open_exchange(None)
        topology = make_topology(
            nodes=self._nodes, ranks_per_node=self._ranks_per_node, rank=self.global_rank, trainer_nodes=self.num_nodes,
            world_size=self.world_size,
        )  # fmt: skip
        exchange = CompressedExchange(self._options_for_precision(), topology=topology, device=self.root_device)
        exchange.register(self.model)
        self._open_exchange(exchange)

    def _options_for_precision(self) -> ExchangeOptions:
        scales = self._scaler is not None
        if self._nonfinite == "skip" and not scales:
            raise ValueError(
                'nonfinite="skip" makes gradients NaN so that a GradScaler skips the step; precision '
                f'{self.precision_plugin.precision} has none and would train on NaN: leave it out, or use precision="16-mixed"'
            )
        return replace(self.options, nonfinite=self._nonfinite or ("skip" if scales else "error"))

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.options.momentum:
            refuse_momentum(self.optimizers)
        holds_back = self.options.error_feedback and self.options.method in READ_BY["error_feedback"]
        if len(self.optimizers) > 1 and holds_back:
            rank_zero_warn(
                "gradients of several optimizers are exchanged together in every backward pass: what it sends for parameters "
                "whose gradients are then zeroed and not applied is lost (error_feedback=False holds nothing back)"
            )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        checkpoint = dict(checkpoint)  # hooks may keep theirs
        self._save_exchange(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._load_exchange(checkpoint)

    # ---- registration ---------------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(
            "topt_compressed", cls, registry=strategy_registry, description="Data parallelism with compressed gradients"
        )


def read_link(link: LinkCosts | Mapping[str, float] | None) -> LinkCosts | None:
    """`LinkCosts` from a mapping of its fields. Raises ValueError that names the entries."""
    if not isinstance(link, Mapping):
        return link
    if set(link) != {"latency_seconds", "bandwidth"}:
        raise ValueError(f"link has the entries latency_seconds and bandwidth; got {sorted(map(str, link))}")
    return LinkCosts(**link)


def make_topology(
    *, nodes: int | None, ranks_per_node: int | None, rank: int, trainer_nodes: int, world_size: int
) -> Topology:
    """Return the topology given, completed where one of its two numbers is missing; the Trainer's where both are.

    Raises ValueError where it has not `world_size` ranks.
    """
    given = f"nodes={nodes} and ranks_per_node={ranks_per_node}"
    if nodes is None and ranks_per_node is None:
        nodes = trainer_nodes
    ranks_per_node = ranks_per_node or world_size // (nodes or 1)
    nodes = nodes or world_size // ranks_per_node
    if nodes * ranks_per_node != world_size:
        raise ValueError(
            f"the world size is {world_size}, which is not nodes x ranks_per_node: {given}; give numbers that fit, or "
            "neither, for those of the Trainer"
        )
    return Topology(nodes, ranks_per_node, rank)
