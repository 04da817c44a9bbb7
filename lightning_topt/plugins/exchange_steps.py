"""Loss scaling, error translation and checkpointing for a compressed gradient exchange."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.rank_watch import PeerLostError, is_of_collective
from lightning_topt.plugins.ddp_base import (
    CHECKPOINT_KEY,
    EXCHANGE_KEY,
    NamesLostRanks,
    name_own_strategy,
)


class ExchangeSteps(NamesLostRanks):
    """A strategy with a `CompressedExchange`: errors, loss scale and checkpoints.

    Errors are raised by their true name; the exchange knows the loss scale and the skipped steps of
    a GradScaler, and is part of checkpoints. The exchange stays open after a fit, for checkpoints,
    until the next fit or the end of the process.
    """

    exchange: CompressedExchange | None = None

    def _open_exchange(self, exchange: CompressedExchange | None) -> None:
        """Take `exchange` in place of the last one."""
        self._close_exchange()
        self.exchange = exchange
        if exchange is not None:
            atexit.register(exchange.end)

    def _close_exchange(self, *, alone: bool = False) -> None:
        """Close the exchange; other ranks need not do so where this one does it `alone`."""
        if self.exchange is not None:
            atexit.unregister(self.exchange.end)
            if alone:
                self.exchange.end()
            else:
                self.exchange.close()
            self.exchange = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._give_up_exchange(exception)
        self._close_exchange(alone=True)
        super().on_exception(exception)
        name_own_strategy(exception, type(self).__name__)

    def _give_up_exchange(self, error: BaseException) -> None:
        """Tell ranks that wait in the exchange that this one does not come.

        Its collective call elsewhere has failed.
        """
        if (
            self.exchange is not None
            and is_of_collective(error)
            and not isinstance(error, PeerLostError)
        ):
            with suppress(RuntimeError):
                self.exchange.monitor.sign_in()

    @override
    def teardown(self) -> None:
        if self._start_method != "popen":  # such ranks end without running what `atexit` holds
            self._close_exchange()
        super().teardown()

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def _scaler(self) -> Any:
        """The GradScaler of precision ``16-mixed``, None for all others."""
        return getattr(self.precision_plugin, "scaler", None)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        # DDP hands out the buckets of unused parameters in its forward pass
        with self._own_errors():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.exchange is not None and self._scaler is not None:
            self.exchange.loss_scale = self._scaler.get_scale()
        with self._own_errors():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    def _own_errors(self) -> Generator[None, None, None]:
        """Raise the error of the hook that autograd and DDP may have wrapped in their own."""
        try:
            yield
        except Exception as error:
            # What the hook has raised in its thread or in backward.
            reason = None if self.exchange is None else self.exchange.error
            # Another collective failed: somebody is lost.
            if reason is None and is_of_collective(error) and not isinstance(error, PeerLostError):
                self._give_up_exchange(error)
                reason = None if self._watch is None else self._watch.diagnose(error)
            if reason is None or error is reason:
                raise
            raise reason from error

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # A scaler lowers its scale exactly when it has skipped the step.
        scales = self.exchange is not None and self._scaler is not None
        if (
            scales
            and self.exchange is not None
            and self._scaler.get_scale() < self.exchange.loss_scale
        ):
            self.exchange.step_skipped()
        return output

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the last call; None without an exchange."""
        return None if self.exchange is None else self.exchange.statistics(reset=True)

    # ---- checkpoints -----------------------------------------------------------------------------

    def _saves_exchange(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether `checkpoint` is to have the exchange's state.

        It has that with the optimizers', and while the ranks are together.
        """
        module = self.lightning_module
        return (
            self.exchange is not None
            and module is not None
            and "optimizer_states" in checkpoint
            # After an exception the other ranks may be anywhere: a collective call could wait for
            # them.
            and not module.trainer.interrupted
        )

    def _save_exchange(self, checkpoint: dict[str, Any]) -> None:
        """Put the exchange's state into a checkpoint that is to have it. A collective call."""
        if self._saves_exchange(checkpoint):
            assert self.exchange is not None
            checkpoint.setdefault(CHECKPOINT_KEY, {})[EXCHANGE_KEY] = self.exchange.state_dict()

    def _load_exchange(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(EXCHANGE_KEY)
        if state is None:
            return
        # What was held back under another method means nothing to this one.
        method = None if self.exchange is None else self.exchange.method.name
        if self.exchange is not None and state["method"] == method:
            self.exchange.load_state_dict(state)
            return
        now = "an all-reduce" if method is None else f"method={method!r}"
        rank_zero_warn(
            f"the checkpoint's gradients were exchanged by method={state['method']!r}; {now} "
            "starts without what that held back"
        )
