"""Log metrics and the progress bar, where users look, say what the exchange of gradients costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.hook import ExchangeStatistics

# where the Trainer logs nothing (log_every_n_steps=0) and only the progress bar shows them
DEFAULT_EVERY_N_STEPS = 50


class ExchangeMonitor(pl.Callback):
    """Logs what `CompressedDDPStrategy` exchanged, every `every_n_steps` optimizer steps (None:
    when the Trainer logs).

    The strategy adds one by itself; give the Trainer your own to change `every_n_steps`. Each
    report also comes once after the second step, the first that compresses. All values are those of
    the logging rank (0); bytes and seconds are means per step since the last report:

    - ``exchange/bytes_per_step`` and ``exchange/dense_bytes_per_step``: sent, and what DDP's
      all-reduce would have sent;
    - ``exchange/exposed_seconds``: how long the step waited for the network after its backward
      pass;
    - ``exchange/residual_norm`` (a pass over the residual, so not computed every step) and
      ``exchange/density``: now;
    - more of some methods, such as ``exchange/lost_share`` of `BoundedLoss`.

    In the progress bar: ``compression`` (dense bytes / bytes sent) and ``exposed_ms``.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            check_whole(every_n_steps, name="every_n_steps")
        self.every_n_steps = every_n_steps
        self._last_step = self._batches = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not hasattr(trainer.strategy, "exchange_statistics"):
            raise TypeError(
                f"{type(trainer.strategy).__name__} exchanges no gradients of ours: leave "
                "ExchangeMonitor out"
            )
        self._last_step, self._batches = trainer.global_step, 0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step, last = trainer.global_step, self._last_step
        if step == last:  # in the middle of an accumulated gradient
            return
        self._last_step = step
        logs_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        every = self.every_n_steps or logs_every or DEFAULT_EVERY_N_STEPS
        # Crossed, not reached: with several optimizers Lightning counts several steps per batch.
        due, self._batches = step // every > last // every, self._batches + 1
        if not due and self._batches > 2:
            return
        statistics = trainer.strategy.exchange_statistics()  # type: ignore[attr-defined]
        if statistics is None or not statistics.steps or not (due or self._batches == 2):
            return  # the dense first step is not counted into the report on the second
        for name, value in log_metrics(statistics).items():
            pl_module.log(name, value)
        for name, value in progress_metrics(statistics).items():
            pl_module.log(name, value, prog_bar=True, logger=False)


def log_metrics(statistics: ExchangeStatistics) -> Mapping[str, float]:
    """Return the names and values for the logger."""
    return {
        "exchange/bytes_per_step": statistics.bytes_sent / statistics.steps,
        "exchange/dense_bytes_per_step": statistics.dense_bytes / statistics.steps,
        "exchange/exposed_seconds": statistics.exposed_seconds / statistics.steps,
        "exchange/residual_norm": statistics.residual_norm,
        "exchange/density": statistics.density,
        **{f"exchange/{name}": value for name, value in statistics.details.items()},
    }


def progress_metrics(statistics: ExchangeStatistics) -> Mapping[str, float]:
    """Return the names and values for the progress bar."""
    sent = (
        {"compression": statistics.dense_bytes / statistics.bytes_sent}
        if statistics.bytes_sent
        else {}
    )
    return {**sent, "exposed_ms": 1e3 * statistics.exposed_seconds / statistics.steps}


def add_monitor(trainer: pl.Trainer) -> None:
    """Give `trainer` an `ExchangeMonitor` if it has none: after the user's callbacks, before those
    that show and save.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.barebones or any(isinstance(callback, ExchangeMonitor) for callback in callbacks):
        return
    readers = [
        index
        for index, callback in enumerate(callbacks)
        if isinstance(callback, ProgressBar | Checkpoint)
    ]
    callbacks.insert(readers[0] if readers else len(callbacks), ExchangeMonitor())
