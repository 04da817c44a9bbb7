"""The Lightning strategy ``"topt_compressed"``: data parallelism for slow networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.bucket import ExchangeSettings
from lightning_topt.communication.exchange_method import (
    DEFAULT_METHOD,
    GRADIENT_DTYPES,
    ExchangeMethod,
    gradient_methods,
    method_classes,
    read_gradient_method,
)
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.plugins.data_parallel_hooks import (
    DataParallelHooks,
    NodeShape,
    checked_ddp_options,
)
from lightning_topt.plugins.monitors import add_monitor


class CompressedDDPStrategy(DataParallelHooks):
    """Distributed data parallelism whose gradients travel compressed.

    ``Trainer(strategy="topt_compressed")``

    A `CompressedExchange` is registered on DDP, on every device. What was not sent yet (the
    residual) is part of checkpoints and is redistributed when one is loaded on another number of
    ranks; such checkpoints load in plain ``ddp`` too. Bytes sent, exposed seconds and the norm of
    the residual are logged by an `ExchangeMonitor`.

    Args:
        method: how gradients travel: an object such as ``TopK(density=0.01)``, a name for its
            defaults, or a mapping such as ``{"method": "topk", "density": 0.01}``.
        nonfinite, timeout_seconds: as in `ExchangeSettings`; `nonfinite` None: "skip" with a
            GradScaler (precision ``16-mixed``), "error" otherwise.
        nodes, ranks_per_node: who shares a node, where it is not what the Trainer has as
            `num_nodes` and `devices`.
        uneven: as in `AutoParallelStrategy`.
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`,
            but for communication hooks.

    Raises ValueError for wrong options and ranks that differ in their options; `PeerLostError` when
    a rank is gone; FloatingPointError for gradients that are not finite.
    """

    def __init__(
        self,
        method: ExchangeMethod | str | Mapping[str, Any] = DEFAULT_METHOD,
        *,
        nonfinite: str | None = None,
        timeout_seconds: float = ExchangeSettings.timeout_seconds,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        uneven: str | None = "stop",
        **ddp_options: Any,
    ) -> None:
        refuse_method_options(ddp_options)
        options = checked_ddp_options(ddp_options, strategy=type(self).__name__)
        super().__init__(options, uneven=uneven)
        self.method = read_gradient_method(method)
        self.settings = ExchangeSettings(
            "error" if nonfinite is None else nonfinite, timeout_seconds
        )
        self._nonfinite = nonfinite
        self._nodes = NodeShape(nodes, ranks_per_node).checked()

    @property
    def exchange(self) -> CompressedExchange | None:
        """The exchange of the last fit, None before the first one."""
        exchange = self._guard.exchange
        assert exchange is None or isinstance(exchange, CompressedExchange)
        return exchange

    # ---- life cycle ------------------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        check_exchangeable(self.model)
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        # That of an earlier fit ends before a new one begins.
        self._guard.open(None)
        # On every device: torch runs hooks on gloo too, which Lightning drops silently.
        exchange = CompressedExchange(
            self.model,
            self.method,
            topology=self._nodes.topology(self),
            device=self.root_device,
            nonfinite=self._nonfinite_for_precision(),
            timeout_seconds=self.settings.timeout_seconds,
            watch=self.rank_watch.ranks,
        )
        self._guard.open(exchange)
        assert self.lightning_module is not None
        add_monitor(self.lightning_module.trainer)

    def _nonfinite_for_precision(self) -> str:
        scales = getattr(self.precision_plugin, "scaler", None) is not None
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
        # The default, of which it is known that transformers under Adam end worse.
        adam = [each for each in self.optimizers if any("betas" in g for g in each.param_groups)]
        if (
            adam
            and self.exchange is not None
            and is_worse_under_adam(self.method, self.exchange.topology)
        ):
            rank_zero_warn(
                f"{self.method.words} under {type(adam[0]).__name__} ends worse than whole "
                "gradients do on transformers: set method=TopK(density=None, bits=2), on a command "
                "line gradient_exchange=topk_few_bits (docs/concepts/compression_quality.md)"
            )
        if len(self.optimizers) > 1 and self.method.has_residual:
            rank_zero_warn(
                "gradients of several optimizers are exchanged together in every backward pass: "
                "what it sends for parameters whose gradients are then zeroed and not applied is "
                "lost (error_feedback=False holds nothing back)"
            )

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        return self._guard.step(step, self.precision_plugin)

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._guard.load_state(checkpoint)


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


def is_worse_under_adam(method: ExchangeMethod, topology: Topology) -> bool:
    """Return whether transformers under Adam are known to end worse: too little is sent in all."""
    if method.name != DEFAULT_METHOD:
        return False
    top_k: Any = method
    sent, enough = (each.on(topology).density for each in (top_k, replace(top_k, density=None)))
    return bool(sent < enough)


def check_exchangeable(model: nn.Module) -> None:
    """Raise ValueError for parameters whose gradients cannot be exchanged compressed."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"gradients of sharded parameters cannot be exchanged compressed, and {name} "
                "is sharded (by fully_shard "
                'or tensor parallelism): leave it whole, or take strategy="topt"'
            )
        if parameter.requires_grad and parameter.dtype not in GRADIENT_DTYPES:
            raise ValueError(
                "gradients of float32, bfloat16 and float16 parameters can be exchanged "
                f"compressed, and {name} is {parameter.dtype}: choose another precision, or "
                "Lightning's own ddp"
            )
