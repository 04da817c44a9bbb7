"""Lightning strategy whose ranks train alone and exchange once in many steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real
from lightning_topt.communication.exchange_method import (
    DEFAULT_METHOD,
    ExchangeMethod,
    LocalMethod,
    read_method,
)
from lightning_topt.communication.local_sgd import TIMEOUT_SECONDS, OuterSteps
from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy
from lightning_topt.plugins.data_parallel_hooks import (
    DataParallelHooks,
    NodeShape,
    checked_ddp_options,
)
from lightning_topt.plugins.monitors import add_monitor
from lightning_topt.techniques.ddp_wrapper import names_to_ignore


class LocalStepsStrategy(DataParallelHooks):
    """Every rank makes some optimizer steps alone, then an outer step brings all together.

    No gradient is exchanged and there is no DistributedDataParallel: see `OuterSteps`. It is not
    the same training as ``ddp``: clipping, a GradScaler and the optimizer's state are each rank's
    own.

    Besides every so many steps there is an outer step before each validation, before a checkpoint
    is saved and at the end of the fit. So all ranks validate and save the same parameters. A
    checkpoint has the outer momentum and the residual of all ranks (redistributed on another number
    of ranks), and the optimizer state of rank 0, with which all go on.

    Args:
        method: an object such as ``LocalSteps(every=50)``, a name for its defaults, or a mapping
            such as ``{"method": "local_steps", "every": 50}``.
        timeout_seconds: for every wait on another rank.
        nodes, ranks_per_node: who shares a node (for a hierarchical method), where it is not what
            the Trainer has.
        uneven: as in `AutoParallelStrategy`.
        ddp_options: arguments of Lightning's `DDPStrategy`; those of `DistributedDataParallel` mean
            nothing here.

    Raises ValueError for wrong options and more than one optimizer; `PeerLostError` when a rank is
    gone; FloatingPointError for parameters that are not finite.
    """

    def __init__(
        self,
        method: ExchangeMethod | str | Mapping[str, Any] = "local_steps",
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        uneven: str | None = "stop",
        **ddp_options: Any,
    ) -> None:
        options = checked_ddp_options(ddp_options, strategy=type(self).__name__, wraps=False)
        super().__init__(options, uneven=uneven)
        self.method = _read_local_method(method)
        self.timeout_seconds = check_real(timeout_seconds, name="timeout_seconds", positive=True)
        self._nodes = NodeShape(nodes, ranks_per_node).checked()
        self._fitting = False  # parameters may differ between ranks

    @property
    def exchange(self) -> OuterSteps | None:
        """The outer steps of the last fit, None before the first one."""
        exchange = self._guard.exchange
        assert exchange is None or isinstance(exchange, OuterSteps)
        return exchange

    # ---- life cycle ------------------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        exchange = OuterSteps(
            module,
            self.method,
            ignored=names_to_ignore(module),
            topology=self._nodes.topology(self),
            timeout_seconds=self.timeout_seconds,
            watch=self.rank_watch.ranks,
        )
        self._guard.open(exchange)
        add_monitor(module.trainer)
        self._fitting = True

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                "local steps are steps of one optimizer, and configure_optimizers returned "
                f"{len(self.optimizers)}: use one with several parameter groups, or "
                'strategy="topt_compressed"'
            )

    @override
    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.sanity_checking:
            self._synchronize()
        super().on_validation_start()

    @override
    def on_train_end(self) -> None:
        self._synchronize()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fitting = False
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._fitting = False
        super().teardown()

    def _synchronize(self) -> None:
        if self._fitting and self.exchange is not None:
            self.exchange.synchronize()

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._fitting and self.exchange is not None:
            # In each of several micro-batches: the mean of what is a mean already, and the new
            # part, is the mean of both.
            self.exchange.average_gradients()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.exchange is not None
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.exchange.after_step()
        return output

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronize()
        return super().lightning_module_state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._guard.load_state(checkpoint)


def compressed_strategy(
    method: ExchangeMethod | str | Mapping[str, Any] = DEFAULT_METHOD, **options: Any
) -> CompressedDDPStrategy | LocalStepsStrategy:
    """Return the strategy for a method of either kind, for configurations.

    Args:
        method: as both strategies take it.
        options: those of the strategy that it is.
    """
    read = read_method(method)
    is_local = isinstance(read, LocalMethod)
    return (LocalStepsStrategy if is_local else CompressedDDPStrategy)(read, **options)


def _read_local_method(given: ExchangeMethod | str | Mapping[str, Any]) -> LocalMethod:
    method = read_method(
        {"method": "local_steps", **given} if isinstance(given, Mapping) else given
    )
    if not isinstance(method, LocalMethod):
        raise ValueError(
            f"{type(method).__name__} averages gradients in every step: give it to "
            "CompressedDDPStrategy, or choose a method such as LocalSteps(every=50)"
        )
    return method
