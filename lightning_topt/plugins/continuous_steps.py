"""Steps under a plan without flush: an asynchronous pipeline.

In iteration i of Lightning's loop a stage runs forward of batch i, and backward of the batch whose
gradients have arrived; with these the optimizer steps, if they complete an update.

    iteration        0    1    2    3    4
    forward          b0   b1   b2   b3   b4
    backward         -    -    b0   b1   b2      of the first of three stages

What the step of a batch returned and logged travels back with its gradients. Each rank logs it
then, and its samples count for the means of the epoch. Before the loop validates, saves or ends an
epoch, the pipeline is drained: all batches in flight come back (`is_end`, `next_end`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.value_exchange import pack_value, unpack_value
from lightning_topt.execution.pipeline.continuous_run import BackwardResult, ContinuousRun
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_layout import parameters_in
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_run import Step
from lightning_topt.plugins.stage_steps import (
    Gradients,
    LoggedCall,
    MetricChanges,
    StageRunner,
    StageSteps,
    StepRecord,
    apply_metric_changes,
    loss_in,
    recorded_calls,
    replay,
    takes_index,
    with_gradients,
)
from lightning_topt.weight_prediction import TwoVersions

PIPELINE_KEY = "pipeline"  # in checkpoints, of what is ours: the state of the pipeline


class ContinuousRunner(StageRunner):
    """Runs batches through stages without flush. Its own gradients are clipped."""

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._batches_in_flight: dict[int, Any] = {}
        self._records_here: dict[int, StepRecord] = {}  # by minibatch, on the last stage
        self._traced_calls: list[LoggedCall] = []  # of a step that was traced
        self._returned: BackwardResult | None = None  # of the minibatch whose update is to come
        self._updated = True
        self._modules = list(steps.module.modules())
        self._modes: list[tuple[nn.Module, bool]] = []

    @property
    def _run(self) -> ContinuousRun:
        return self.engine.continuous

    @property
    def _start(self) -> int:
        # The first updates of the fit that wait for their gradients
        rule = self.engine.plan.weight_prediction
        return rule.synchronous_updates if isinstance(rule, TwoVersions) else 0

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on `batch`, for the engine to trace. A collective call."""
        self._traced_calls.clear()
        own = _MinibatchStep(
            self._steps, None, 0 if takes_index(self._module) else None, self._traced_calls
        )
        return Example(own.loss, (self._steps.agreed(batch),))

    # ---- the loop around it ----------------------------------------------------------------------

    @override
    def begin_training(self, trainer: pl.Trainer) -> None:
        """Let the loop of a fit drain the pipeline where it has to, and wait nowhere else."""
        loop = trainer.fit_loop.epoch_loop
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        broadcast, callback = loop._broadcast_sigterm_tensor, _DrainFirst(self)

        def broadcast_when_drained() -> None:
            # In each iteration it would make ranks wait for one another.
            if self._run.is_drained:
                broadcast()

        loop._broadcast_sigterm_tensor = broadcast_when_drained  # type: ignore[method-assign]
        self._undo.callback(loop.__dict__.pop, "_broadcast_sigterm_tensor", None)
        callbacks.insert(0, callback)
        self._undo.callback(lambda: callbacks.remove(callback) if callback in callbacks else None)

    # ---- training --------------------------------------------------------------------------------

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Run this rank's passes of an iteration.

        Returns:
            The output of the step of the batch that came back. Its loss brings all gradients that
            the next update has so far; it is NaN while no batch has come back.
        """
        args = (*args, *kwargs.values())
        # The update before this step was left out.
        if self._returned is not None:
            raise RuntimeError(
                f"{type(self._module).__name__}.optimizer_step did not step, and the stages of "
                "this pipeline update as they go: call optimizer.step(closure=optimizer_closure) "
                "in it, or choose another schedule"
            )
        trainer, each = self._module.trainer, self._module.trainer.accumulate_grad_batches
        # Batches are compared when the pipeline is drained: that waits for the other stages.
        batch = (
            self._steps.agreed(args[0])
            if self._run.is_drained or self._steps.batches_differ
            else args[0]
        )
        self._modes = [(part, part.training) for part in self._modules]
        self._drop_used_gradients()
        # The run has to know how many batches are left before it is drained.
        index, end = self._run.minibatches, next_end(trainer, start=self._start)
        self._batches_in_flight[index] = batch
        own = _MinibatchStep(self._steps, (batch,), args[1] if len(args) > 1 else None)

        def payload() -> tuple[bytes, Tensor]:
            self._records_here[index] = record = own.record()
            return pack_value(record, device=self._steps.device)

        self._returned = self._run.advance(
            own.microbatch,
            own.loss,
            weight=1 / each,
            completes=exchanges,
            accumulate=each,
            remaining=end.batches,
            last_completes=end.updates,
            payload=payload,
            meets=self._steps.batches_differ,
        )
        record = self._log_returned(self._returned)
        if record is None:
            self._log_nothing_yet()
        nothing = torch.full((), torch.nan, device=self._steps.device)
        output = nothing if record is None else record.output
        # They have the scale of the update: `weight` above.
        gradients = self._collected_gradients()
        return with_gradients(output, gradients, factor=None, device=nothing.device)

    @contextmanager
    @override
    def block_backward_sync(self, of_ddp: AbstractContextManager[None]) -> Generator[None]:
        yield
        # An older batch may complete an update now.
        self._update(self._module.trainer.optimizers[0])

    @override
    def update(
        self, step: Callable[[], Any], optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Any:
        # Forward and backward of different batches; the update belongs to the latter. Lightning's
        # `step` belongs to the batch that has just come, and is not called.
        output = closure()
        self._update(optimizer)
        return output

    def _update(self, optimizer: Optimizer) -> None:
        # Step with the gradients that came back last, if they complete an update
        result, self._returned = self._returned, None
        if result is None or not result.completes:
            optimizer.__dict__["_opt_called"] = True  # schedulers step all the same, and would warn
            return
        self._returned = result  # clipping asks for it
        self._steps.precision._after_closure(self._module, optimizer)
        self._returned = None
        with self._run.update(result):
            optimizer.step()
        self._updated = True

    @override
    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients of the update by their norm over all stages, as far as known."""
        assert self._returned is not None, "gradients are clipped before the update"
        return self._run.clip_norm(self._returned, max_norm, parameters=parameters)

    @override
    def drain(self) -> None:
        """Bring all back that is in flight."""
        self.bring_back()
        self.engine.synchronize()

    def bring_back(self) -> None:
        """Wait for all minibatches in flight, with their updates, and log what their steps did.

        A collective call.
        """
        if self._run.is_drained:
            return
        # Stages are at different batches.
        if self._module.trainer.interrupted:
            raise RuntimeError(
                "minibatches were under way in the pipeline when the fit was interrupted, so that "
                "stages have updates of different batches: go on from the last checkpoint"
            )
        (optimizer,) = self._module.trainer.optimizers
        # In the middle of a callback, with gradients as in a step.
        with self._as_in_training(), torch.inference_mode(False), torch.enable_grad():
            self._drop_used_gradients()
            for result in self._run.drain():
                self._returned = result
                self._log_returned(result)
                self._update(optimizer)
                # before the next backward pass, which is run when the loop goes on
                self._drop_used_gradients()

    def _log_returned(self, result: BackwardResult) -> StepRecord | None:
        # Log on this rank what the step of the batch that came back has logged; return it
        if result.minibatch is None:
            return None
        batch, own = (
            self._batches_in_flight.pop(result.minibatch),
            self._records_here.pop(result.minibatch, None),
        )
        if own is None:
            assert result.payload is not None
            record: StepRecord = unpack_value(*result.payload, device=self._steps.device)
            apply_metric_changes(self._module, record.counted)
        else:
            record = own
        with _as_training_step(self._module, batch):
            replay(self._module, record.calls)
        return record

    def _log_nothing_yet(self) -> None:
        # Let callbacks find NaN under the names that steps log, until a batch has come back
        known = self._module.trainer._logger_connector._callback_metrics
        for call in self._traced_calls:
            options = call.keywords
            if call.method != "log" or options.get("on_step") is False:
                continue
            forked = (f"{call.name}_step",) if options.get("on_epoch") else ()
            for name in (call.name, *forked):
                known.setdefault(name, torch.full((), torch.nan, device=self._steps.device))

    # ---- state -----------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {PIPELINE_KEY: self._run.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get(PIPELINE_KEY) is None:
            return
        plan, before = self.engine.plan, ParallelPlan.from_dict(state["plan"])
        # It belongs to the stages and the rule of weights.
        if (len(before.stages), before.prediction) == (len(plan.stages), plan.prediction):
            self._run.load_state_dict(state[PIPELINE_KEY])

    # ---- gradients -------------------------------------------------------------------------------

    def _drop_used_gradients(self) -> None:
        if self._updated:
            for parameter in parameters_in(self._modules):
                parameter.grad = None
        self._updated = False

    def _collected_gradients(self) -> Gradients:
        # Return the gradients that the next update has so far, and take them off.
        # Lightning clears those that are in place before its backward.
        found: Gradients = {}
        for parameter in parameters_in(self._modules):
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
        return found

    @contextmanager
    def _as_in_training(self) -> Generator[None]:
        # Let the loop and the modules be as in the last step.
        # Recomputation runs modules again, and hooks may log.
        trainer, before = (self._module.trainer, [(part, part.training) for part, _ in self._modes])
        stage, trainer.training = trainer.state.stage, True
        for part, mode in self._modes:
            part.training = mode
        try:
            yield
        finally:
            trainer.state.stage = stage
            for part, mode in before:
                part.training = mode


class _DrainFirst(pl.Callback):
    """Drains the pipeline before other callbacks run, so they never see minibatches in flight."""

    def __init__(self, runner: ContinuousRunner) -> None:
        self._runner = runner

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if is_end(trainer, start=self._runner._start):
            self._runner.bring_back()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runner.bring_back()

    on_train_epoch_end = on_validation_start


@dataclass
class _MinibatchStep:
    """The passes of one minibatch on this rank; without one, only copies are traced."""

    steps: StageSteps
    microbatch: Any
    batch_idx: int | None
    traced_calls: list[LoggedCall] | None = None  # where the engine's copies log to
    found: tuple[Any, tuple[LoggedCall, ...]] = (None, ())

    def __post_init__(self) -> None:
        self._counting = MetricChanges.begin(self.steps.module)

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        # Return the loss of the minibatch; the engine also calls it with copies, to trace them.
        if self.microbatch is None or microbatch is not self.microbatch:
            with recorded_calls(model, self.traced_calls):
                return loss_in(self.steps.step("training_step", model, microbatch, self.batch_idx))
        output, calls = self.steps.recorded_step("training_step", microbatch, self.batch_idx)
        self.found = map_tensors(output, Tensor.detach), calls
        return loss_in(output)

    def record(self) -> StepRecord:
        # Return the record of the step, on the last stage.
        output, calls = self.found
        return StepRecord(output, calls, self._counting.since(self.steps.module))


@contextmanager
def _as_training_step(module: pl.LightningModule, batch: Any) -> Generator[None]:
    # Let what is logged count as logged in `training_step` with this `batch`
    trainer, fx = module.trainer, module._current_fx_name
    connector, stage = trainer._logger_connector, trainer.state.stage
    results = trainer.fit_loop.epoch_loop._results
    before = results.batch, results.batch_size, connector._first_loop_iter, connector._current_fx
    trainer.training, module._current_fx_name = True, "training_step"
    results.batch, results.batch_size = batch, None
    # nothing of the epoch is over yet
    connector._first_loop_iter, connector._current_fx = False, "training_step"
    try:
        yield
    finally:
        trainer.state.stage, module._current_fx_name = stage, fx
        results.batch, results.batch_size, connector._first_loop_iter, connector._current_fx = (
            before
        )


# ---- where the loop needs a drained pipeline -----------------------------------------------------


def is_end(trainer: pl.Trainer, *, start: int) -> bool:
    """Return whether the loop validates, saves or ends its epoch after the present batch.

    So it is after each of the first `start` updates, which wait for their gradients.

    Asked where callbacks hear of the end of the batch. Validation and saving that depend on
    later callbacks are not seen.
    """
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    saves = any(trainer.global_step % every == 0 for every in _saving_intervals(trainer))
    # by batches: stages have made different numbers of updates
    waits = _is_in_start(trainer, start) and _batches_to_updates(trainer, 1) == 0
    return waits or loop._is_training_done or loop._should_check_val_fx(fetcher) or saves


def _is_in_start(trainer: pl.Trainer, start: int) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return loop.total_batch_idx < start * trainer.accumulate_grad_batches


def _batches_to_updates(trainer: pl.Trainer, count: int) -> int:
    # How many batches come after this one until so many updates have all of theirs
    each = trainer.accumulate_grad_batches
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready  # with this one
    return count * each - 1 - (ready - 1) % each


def _saving_intervals(trainer: pl.Trainer) -> Iterator[int]:
    for callback in trainer.checkpoint_callbacks:
        every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
        if every >= 1 and getattr(callback, "_last_global_step_saved", None) != trainer.global_step:
            yield every


class NextEnd(NamedTuple):
    """How many `batches` come after this one before the pipeline is drained.

    None where nothing tells. `updates`: whether an update follows the last of them.
    """

    batches: int | None
    updates: bool


def next_end(trainer: pl.Trainer, *, start: int) -> NextEnd:
    """Return where the loop next needs a drained pipeline. Asked during `training_step`."""
    # The nearest of all reasons to drain.
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches = max(min(_batches_left(trainer, start), default=math.inf), 0)
    if not math.isfinite(batches):
        return NextEnd(None, updates=True)
    last = progress.current.ready + int(batches)
    is_last_of_epoch = last == trainer.num_training_batches or (
        batches == 0 and progress.is_last_batch
    )
    return NextEnd(
        int(batches), updates=is_last_of_epoch or last % trainer.accumulate_grad_batches == 0
    )


def _batches_left(trainer: pl.Trainer, start: int) -> Iterator[int]:
    # Yield how many batches come after this one: to the epoch's end, a save, a validation.
    # And to an update of the first `start`.
    loop = trainer.fit_loop.epoch_loop
    ready = loop.batch_progress.current.ready  # with this one
    if loop.batch_progress.is_last_batch:
        yield 0
    if math.isfinite(trainer.num_training_batches):
        yield int(trainer.num_training_batches) - ready

    if _is_in_start(trainer, start):
        yield _batches_to_updates(trainer, 1)
    if loop.max_steps is not None and loop.max_steps >= 0:
        yield _batches_to_updates(trainer, loop.max_steps - trainer.global_step)
    for every in _saving_intervals(trainer):
        yield _batches_to_updates(trainer, every - trainer.global_step % every)
    every_batch = trainer.val_check_batch
    if loop._should_check_val_epoch() and every_batch is not None and math.isfinite(every_batch):
        place = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
        yield int(-(place + 1) % every_batch)
