"""The gradient exchange of a strategy: open and closed, loss scale, errors, state in checkpoints.

A strategy has an `ExchangeGuard`, to which its hooks delegate:

    training_step, backward     in `errors`: what the exchange has raised keeps its true name
    backward                    `begin_backward`: the exchange knows the loss scale
    optimizer_step              in `step`: it knows of steps that a GradScaler has skipped
    save_checkpoint             `add_state`: residuals are part of checkpoints
    on_exception                `close`, by this rank alone
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn

from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.rank_watch import PeerLostError, is_of_collective
from lightning_topt.communication.topology import at_exit
from lightning_topt.plugins.lost_ranks import LostRankWatch

if TYPE_CHECKING:
    from lightning_topt.communication.local_sgd import OuterSteps


# In checkpoints: what is ours, and of that the exchange's state.
CHECKPOINT_KEY, EXCHANGE_KEY = "lightning_topt", "gradient_exchange"


def scaler_of(precision: Precision) -> Any:
    """Return the GradScaler of precision ``16-mixed``, None for all others."""
    return getattr(precision, "scaler", None)


class ExchangeGuard:
    """Looks after a strategy's `exchange`, None where DDP's own all-reduce averages gradients.

    It stays open after a fit, for checkpoints, until the next fit or the end of the process.
    """

    def __init__(self, rank_watch: LostRankWatch) -> None:
        self.exchange: CompressedExchange | OuterSteps | None = None
        self._call_off: Callable[[], None] | None = None
        self._rank_watch = rank_watch

    def open(self, exchange: CompressedExchange | OuterSteps | None) -> None:
        """Take `exchange` in place of the last one."""
        self.close()
        self.exchange = exchange
        if exchange is not None:
            self._call_off = at_exit(exchange.end)

    def close(self, *, alone: bool = False) -> None:
        """End the exchange; other ranks need not do so where this one does it `alone`."""
        if self.exchange is not None:
            if self._call_off is not None:
                self._call_off()
                self._call_off = None
            if alone:
                self.exchange.end()
            else:
                self.exchange.close()
            self.exchange = None

    def statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the last call; None without an exchange."""
        return None if self.exchange is None else self.exchange.statistics(reset=True)

    # ---- steps -----------------------------------------------------------------------------------

    @contextmanager
    def errors(self) -> Generator[None, None, None]:
        """Raise the error of the hook that autograd and DDP may have wrapped in their own.

        DDP hands out the buckets of unused parameters in its forward pass already.
        """
        try:
            yield
        except Exception as error:
            # What the hook has raised in its thread or in backward.
            reason = None if self.exchange is None else self.exchange.error
            # Another collective failed: somebody is lost.
            if reason is None and is_of_collective(error) and not isinstance(error, PeerLostError):
                reason = self._rank_watch.diagnose(error)
            if reason is None or error is reason:
                raise
            raise reason from error

    def begin_backward(self, precision: Precision) -> None:
        """Tell the exchange by what `precision` has scaled the loss."""
        scaler = scaler_of(precision)
        if self.exchange is not None and scaler is not None:
            self.exchange.loss_scale = scaler.get_scale()

    def step(self, step: Callable[[], Any], precision: Precision) -> Any:
        """Return what an optimizer's `step` returns; tell the exchange where it was skipped.

        A scaler lowers its scale exactly then.
        """
        output = step()
        exchange, scaler = self.exchange, scaler_of(precision)
        if exchange is not None and scaler is not None and scaler.get_scale() < exchange.loss_scale:
            exchange.step_skipped()
        return output

    # ---- checkpoints -----------------------------------------------------------------------------

    def saves_state(self, checkpoint: Mapping[str, Any], module: pl.LightningModule | None) -> bool:
        """Return whether `checkpoint` is to have the exchange's state.

        It has that with the optimizers', and while the ranks are together.
        """
        return (
            self.exchange is not None
            and module is not None
            and "optimizer_states" in checkpoint
            # After an exception the other ranks may be anywhere: a collective call could wait for
            # them.
            and not module.trainer.interrupted
        )

    def add_state(self, checkpoint: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Put the exchange's state into a checkpoint that is to have it. A collective call."""
        if self.saves_state(checkpoint, module):
            assert self.exchange is not None
            checkpoint.setdefault(CHECKPOINT_KEY, {})[EXCHANGE_KEY] = self.exchange.state_dict()

    def load_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the exchange what `checkpoint` has of it."""
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(EXCHANGE_KEY)
        if state is None:
            return
        # The residuals of another method mean nothing to this one.
        method = None if self.exchange is None else self.exchange.method.name
        if self.exchange is not None and state["method"] == method:
            self.exchange.load_state_dict(state)
            if self.exchange.trains_alone:
                rank_zero_warn(
                    "topt: ranks that train alone have optimizers of their own, and the checkpoint "
                    "has that of rank 0: all go on with it"
                )
            return
        now = "an all-reduce" if method is None else f"method={method!r}"
        rank_zero_warn(
            f"the checkpoint's gradients were exchanged by method={state['method']!r}; {now} "
            "starts without what that held back"
        )
