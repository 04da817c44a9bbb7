"""Log metrics and the progress bar, where users look, say how much of training is waiting for data.
For any loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole

# where the Trainer logs nothing (log_every_n_steps=0) and only the progress bar shows it
DEFAULT_EVERY_N_STEPS = 50
_HOOKS = (
    "_on_before_fetch",
    "_on_after_fetch",
)  # which Lightning's training loop calls around each `next` of its loader


class DataWait(NamedTuple):
    """Batches trained on, seconds that this took, and seconds of them that the loop waited for its
    next batch.
    """

    batches: int
    seconds: float
    wait_seconds: float

    @property
    def fraction(self) -> float:
        """The fraction of the time that was waiting, 0 to 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    def plus(self, other: DataWait) -> DataWait:
        """Return the wait of both together."""
        return DataWait(
            self.batches + other.batches,
            self.seconds + other.seconds,
            self.wait_seconds + other.wait_seconds,
        )


class StallMonitor(pl.Callback):
    """Logs how long training waits for its next batch, every `every_n_steps` optimizer steps (None:
    when the Trainer logs).

    - ``stall/fraction``: of the time since the last report, 0 to 1; also in the progress bar, as
      ``stall``;
    - ``stall/wait_seconds`` and ``stall/batch_seconds``: means per batch since the last report.

    All are those of the logging rank (0). Validation, what happens between epochs and the start of
    an epoch's workers are in none of them; the wait for the workers' first batch is. On a CUDA
    device the loop runs ahead: there a wait counts only as far as the device had nothing left to
    do. `total` is that of the whole fit.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        self.every_n_steps = (
            None if every_n_steps is None else check_whole(every_n_steps, name="every_n_steps")
        )
        self.total = DataWait(0, 0.0, 0.0)
        self._idle: _DeviceIdle | None = None
        self._last_step, self._fetch_started = 0, 0.0
        self._since_report = DataWait(0, 0.0, 0.0)
        # when the clock of training last went on; None: it stands
        self._resumed: float | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.total = self._since_report = DataWait(0, 0.0, 0.0)
        self._last_step, self._resumed = trainer.global_step, None
        device = trainer.strategy.root_device
        self._idle = _DeviceIdle(device) if device.type == "cuda" else None
        loop: Any = trainer.fit_loop.epoch_loop
        for name, also in zip(_HOOKS, (self._before_fetch, self._after_fetch), strict=True):
            setattr(loop, name, _both(getattr(loop, name), also))

    def _before_fetch(self) -> None:
        self._fetch_started = time.perf_counter()
        if self._resumed is None:
            self._resumed = self._fetch_started
        if self._idle is not None:
            self._idle.mark_start()

    def _after_fetch(self) -> None:
        wait = time.perf_counter() - self._fetch_started
        if self._idle is not None:
            self._idle.mark_end(wait)
            wait = self._idle.settled_seconds()
        self._add(wait_seconds=wait)

    def _add(self, *, batches: int = 0, wait_seconds: float = 0.0) -> None:
        """Count, up to now."""
        now, seconds = time.perf_counter(), 0.0
        if self._resumed is not None:
            seconds, self._resumed = now - self._resumed, now
        self._since_report = self._since_report.plus(DataWait(batches, seconds, wait_seconds))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()

    def _stop_clock(self) -> None:
        """Until the next fetch."""
        self._add()
        self._resumed = None

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._add(batches=1)
        step, last = trainer.global_step, self._last_step
        if step == last:  # in the middle of an accumulated gradient
            return
        self._last_step = step
        logs_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        every = self.every_n_steps or logs_every or DEFAULT_EVERY_N_STEPS
        # Crossed, not reached: with several optimizers Lightning counts several steps per batch.
        if step // every > last // every:
            self._report(pl_module)

    def _report(self, pl_module: pl.LightningModule) -> None:
        since = self._take()
        pl_module.log("stall/fraction", since.fraction)
        pl_module.log("stall/wait_seconds", since.wait_seconds / since.batches)
        pl_module.log("stall/batch_seconds", since.seconds / since.batches)
        pl_module.log("stall", since.fraction, prog_bar=True, logger=False)

    def _take(self) -> DataWait:
        """Return what was counted since the last report, which moves to the total."""
        since, self._since_report = self._since_report, DataWait(0, 0.0, 0.0)
        self.total = self.total.plus(since)
        return since

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._idle is not None:
            torch.cuda.synchronize(self._idle.device)
            self._add(wait_seconds=self._idle.settled_seconds())
        self._take()
        self._remove(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._remove(trainer)

    def _remove(self, trainer: pl.Trainer) -> None:
        replaced: dict[str, Any] = trainer.fit_loop.epoch_loop.__dict__
        for name in _HOOKS:
            replaced.pop(name, None)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


class _DeviceIdle:
    """A `_DeviceIdle` says how long a CUDA device idles while the loop waits: an event on either
    side of the wait, read when both have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started: Any = None
        self._pending: list[tuple[Any, Any, float]] = []

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark_start(self) -> None:
        """Note that the loop begins to wait."""
        self._started = self._event()

    def mark_end(self, wait_seconds: float) -> None:
        """Note that the loop has its batch, after so long."""
        self._pending.append((self._started, self._event(), wait_seconds))

    def settled_seconds(self) -> float:
        """Return the idle seconds of the waits that the device has passed since the last call."""
        seconds = 0.0
        while self._pending and self._pending[0][1].query():
            start, end, wait = self._pending.pop(0)
            seconds += min(wait, start.elapsed_time(end) / 1e3)
        return seconds
