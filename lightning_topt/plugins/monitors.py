"""Callbacks that measure a fit.

StepMonitor      seconds and peak bytes of steady steps, in `measurement` after the fit
ExchangeMonitor  bytes and seconds of the exchange of gradients, in the logs
StallMonitor     how long training waits for data, in the logs; for any loader
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.collectives import synchronize, values_of_group

if TYPE_CHECKING:
    from lightning_topt.execution.memory import MemoryMeter

# where the Trainer logs nothing (log_every_n_steps=0) and only the progress bar shows them
DEFAULT_EVERY_N_STEPS = 50
_HOOKS = (
    "_on_before_fetch",
    "_on_after_fetch",
)  # which Lightning's training loop calls around each `next` of its loader


@dataclass(frozen=True)
class StepMeasurement:
    """Steady steps of one fit.

    `median_step_seconds` is that of the slowest rank; `peak_bytes_per_rank` (in rank order) are
    above the idle rank, with None where the platform cannot say. `steps` counts the optimizer steps
    measured on this rank.
    """

    steps: int
    median_step_seconds: float | None
    peak_bytes_per_rank: tuple[int | None, ...]


class StepMonitor(pl.Callback):
    """Times optimizer steps, and takes the peak memory of all.

    It logs when the Trainer does, each of the logging rank (0):

    - ``topt/step_seconds``: the mean of the steps since the last report;
    - ``topt/predicted_step_seconds``: the prediction of the plan that runs, where it is of steps
      with as many batches;
    - ``topt/peak_bytes``: above the idle rank, so far, where the platform can say.

    After a fit they are in `measurement`; the first `warmup_steps` are not timed. A step is the
    time between `on_train_batch_start` and `on_train_batch_end`, summed over the batches of an
    accumulated gradient: forward, backward, exchange and update, with the device idle at both ends;
    not the wait for data, logging of other callbacks, or validation. Peak bytes are those of such
    spans, from the very first step on (DDP holds its buckets twice at the start of the second).
    See `MemoryMeter` for what counts.
    """

    def __init__(self, *, warmup_steps: int = 5) -> None:
        check_whole(warmup_steps, name="warmup_steps (the first builds optimizer state)")
        self.warmup_steps = warmup_steps
        self.measurement: StepMeasurement | None = None
        self._meter: MemoryMeter | None = None
        self._reset(global_step=0)

    def _reset(self, *, global_step: int) -> None:
        self._step_seconds: list[float] = []
        self._peak_bytes: int | None = None
        self._steps_done, self._global_step = 0, global_step
        self._started, self._seconds = 0.0, 0.0
        self._since_report: list[float] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # The process group is up, data sets are loaded, and the module is not on its device yet:
        # the idle rank.
        if stage == "fit":
            # strategies add the other monitor alone, which needs nothing of it
            from lightning_topt.execution.memory import MemoryMeter, warm_up  # noqa: PLC0415

            self._meter = MemoryMeter(trainer.strategy.root_device)
            warm_up(trainer.strategy.root_device)
            self._meter.mark_base(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset(global_step=trainer.global_step)
        # A strategy that has applied a plan knows its idle rank better.
        self._meter = getattr(trainer.strategy, "memory_meter", None) or self._meter

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._meter is not None
        # Peak and time are of the step alone, with an idle device at both ends.
        self._meter.reset_peak()
        synchronize(trainer.strategy.root_device)
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self._meter is not None
        synchronize(trainer.strategy.root_device)
        self._seconds += time.perf_counter() - self._started
        # The first steps build state and buckets.
        steady = self._steps_done >= self.warmup_steps
        peak = self._meter.peak_bytes()
        if peak is not None:
            self._peak_bytes = max(peak, self._peak_bytes or 0)
        last = self._global_step
        if trainer.global_step > last:  # not in the middle of an accumulated gradient
            self._global_step = trainer.global_step
            self._steps_done += 1
            self._since_report.append(self._seconds)
            if _is_due(trainer, last, every=None):
                self._report(trainer, pl_module)
            if steady:
                self._step_seconds.append(self._seconds)
            self._seconds = 0.0

    def _report(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("topt/step_seconds", statistics.mean(self._since_report))
        self._since_report.clear()
        plan: Any = getattr(trainer.strategy, "parallel_plan", None)
        has_predicted = plan is not None and plan.predicted is not None
        if has_predicted and plan.accumulate == trainer.accumulate_grad_batches:
            pl_module.log("topt/predicted_step_seconds", plan.predicted.step_seconds)
        if self._peak_bytes is not None:
            pl_module.log("topt/peak_bytes", float(self._peak_bytes))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = statistics.median(self._step_seconds or [0.0]), self._peak_bytes
        ranks = values_of_group(own) if dist.is_initialized() else [own]
        medians, peaks = zip(*ranks, strict=True)
        self.measurement = StepMeasurement(
            steps=len(self._step_seconds),
            median_step_seconds=max(medians) or None,
            peak_bytes_per_rank=peaks,
        )


# ---- the exchange of gradients -------------------------------------------------------------------


class ExchangeMonitor(pl.Callback):
    """Logs what `CompressedDDPStrategy` exchanged.

    It does so every `every_n_steps` optimizer steps (None: when the Trainer logs). The strategy
    adds one by itself; give the Trainer your own to change `every_n_steps`. Each report also comes
    once after the second step, the first that compresses. All values are those of the logging rank
    (0); bytes and seconds are means per step since the last report:

    - ``topt/exchange_bytes_per_step``: sent;
    - ``topt/exchange_dense_bytes_per_step``: what DDP's all-reduce would have sent;
    - ``topt/exchange_exposed_seconds``: how long the step waited for the network after its
      backward pass;
    - ``topt/exchange_residual_norm`` (a pass over the residual, so not computed every step) and
      ``topt/exchange_density``: now;
    - more of some methods, such as ``topt/exchange_lost_share`` of `BoundedLoss`.

    In the progress bar: ``compression`` (dense bytes / bytes sent) and ``exposed_ms``.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            check_whole(every_n_steps, name="every_n_steps")
        self.every_n_steps = every_n_steps
        self._last_step = self._batches = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Any strategy of ours that exchanges gradients.
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
        due, self._batches = _is_due(trainer, last, every=self.every_n_steps), self._batches + 1
        if not due and self._batches > 2:
            return
        # of the steps since the last report, which begin anew
        seen = trainer.strategy.exchange_statistics()  # type: ignore[attr-defined]
        if seen is None or not seen.steps or not (due or self._batches == 2):
            return  # the dense first step is not counted into the report on the second
        logged = {
            "bytes_per_step": seen.bytes_sent / seen.steps,
            "dense_bytes_per_step": seen.dense_bytes / seen.steps,
            "exposed_seconds": seen.exposed_seconds / seen.steps,
            "residual_norm": seen.residual_norm,
            "density": seen.density,
            **seen.details,
        }
        pl_module.log_dict({f"topt/exchange_{name}": value for name, value in logged.items()})
        shown = {"exposed_ms": 1e3 * logged["exposed_seconds"]}
        if seen.bytes_sent:
            shown["compression"] = seen.dense_bytes / seen.bytes_sent
        pl_module.log_dict(shown, prog_bar=True, logger=False)


def _is_due(trainer: pl.Trainer, last: int, *, every: int | None) -> bool:
    # Whether a report is due after this step; `last` is the step before. None: with the logs
    logs_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    every = every or logs_every or DEFAULT_EVERY_N_STEPS
    # Crossed, not reached: with several optimizers Lightning counts several steps per batch.
    return trainer.global_step // every > last // every


def add_monitor(trainer: pl.Trainer) -> None:
    """Give `trainer` an `ExchangeMonitor` if it has none."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.barebones or any(isinstance(callback, ExchangeMonitor) for callback in callbacks):
        return
    # before the callbacks that show and save what is logged
    readers = (i for i, each in enumerate(callbacks) if isinstance(each, ProgressBar | Checkpoint))
    callbacks.insert(next(readers, len(callbacks)), ExchangeMonitor())


# ---- waiting for data ----------------------------------------------------------------------------


class DataWait(NamedTuple):
    """How many batches were trained on, and how long that took.

    `wait_seconds` of these `seconds` the loop waited for its next batch.
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
    """Logs how long training waits for its next batch.

    It does so every `every_n_steps` optimizer steps (None: when the Trainer logs).

    - ``topt/data_wait_share``: of the time since the last report, 0 to 1; also in the progress
      bar, as ``stall``;
    - ``topt/data_wait_seconds`` and ``topt/data_batch_seconds``: means per batch since the last
      report.

    All are those of the logging rank (0). Validation, what happens between epochs and the start of
    an epoch's workers are in none of them; the wait for the workers' first batch is. On a CUDA
    device the loop runs ahead: there a wait counts only as far as the device had nothing left to
    do. `total` is the wait of the entire fit.
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
        # Lightning calls these two around each fetch of the training loop.
        loop: Any = trainer.fit_loop.epoch_loop
        for name, also in zip(_HOOKS, (self._before_fetch, self._after_fetch), strict=True):
            setattr(loop, name, _both(getattr(loop, name), also))

    def _before_fetch(self) -> None:
        self._fetch_started = time.perf_counter()
        # The first fetch after a pause starts the clock.
        if self._resumed is None:
            self._resumed = self._fetch_started
        if self._idle is not None:
            self._idle.mark_start()

    def _after_fetch(self) -> None:
        # On a GPU only as far as the device was idle.
        wait = time.perf_counter() - self._fetch_started
        if self._idle is not None:
            self._idle.mark_end(wait)
            wait = self._idle.settled_seconds()
        self._add(wait_seconds=wait)

    def _add(self, *, batches: int = 0, wait_seconds: float = 0.0) -> None:
        # Count, up to now
        # Time since the clock went on, or since the last count.
        now, seconds = time.perf_counter(), 0.0
        if self._resumed is not None:
            seconds, self._resumed = now - self._resumed, now
        self._since_report = self._since_report.plus(DataWait(batches, seconds, wait_seconds))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The clock stands until the next fetch.
        self._add()
        self._resumed = None

    on_train_epoch_end = on_validation_start

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
        if _is_due(trainer, last, every=self.every_n_steps):
            self._report(pl_module)

    def _report(self, pl_module: pl.LightningModule) -> None:
        since = self._take()
        pl_module.log("topt/data_wait_share", since.fraction)
        pl_module.log("topt/data_wait_seconds", since.wait_seconds / since.batches)
        pl_module.log("topt/data_batch_seconds", since.seconds / since.batches)
        pl_module.log("stall", since.fraction, prog_bar=True, logger=False)

    def _take(self) -> DataWait:
        # What was counted since the last report, which moves to the total
        since, self._since_report = self._since_report, DataWait(0, 0.0, 0.0)
        self.total = self.total.plus(since)
        return since

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._idle is not None:
            # The last events.
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
    """How long a CUDA device idles while the loop waits.

    An event on either side of the wait is read when the device has passed both.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started: Any = None
        self._pending: list[tuple[Any, Any, float]] = []

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
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
        # Events complete in order.
        while self._pending and self._pending[0][1].query():
            start, end, wait = self._pending.pop(0)
            seconds += min(wait, start.elapsed_time(end) / 1e3)
        return seconds
