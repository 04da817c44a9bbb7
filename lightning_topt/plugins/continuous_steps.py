"""Steps of a LightningModule under a plan whose stages never wait for an update: one batch of the
loop comes in, another one comes back.

In iteration i of Lightning's loop a stage runs forward of batch i and backward of the one whose
gradients have arrived; with these the optimizer steps, if they complete an update. What this
batch's step returned and logged travels back with its gradients, so each rank logs it then, and its
samples count for the means of the epoch. Before the loop validates, saves or ends an epoch all
batches are waited for (`continuous_ends`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.continuous_run import BackwardResult, ContinuousRun
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plugins.continuous_ends import is_end, next_end
from lightning_topt.plugins.former_gradients import Gradients
from lightning_topt.plugins.member_batches import packed, unpacked
from lightning_topt.plugins.metric_states import MetricChanges, take_over
from lightning_topt.plugins.pipeline_members import takes_index
from lightning_topt.plugins.pipeline_steps import PipelineSteps, loss_in
from lightning_topt.plugins.pipeline_values import Call, Told, replay
from lightning_topt.plugins.turns import loss_of


class ContinuousSteps(PipelineSteps):
    """The steps of `module`, which `engine` runs in stages on `device` as its plan says. Made
    before the plan is applied.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        precision: Precision,
        device: torch.device,
    ) -> None:
        super().__init__(engine, module, precision=precision, device=device)
        self._batches_in_flight: dict[int, Any] = {}
        self._told_here: dict[int, Told] = {}  # on the last stage
        self._turn: BackwardResult | None = None  # whose update is to come
        self._updated = True
        self._modes: list[tuple[nn.Module, bool]] = []
        self._undo = ExitStack()

    @property
    def _run(self) -> ContinuousRun:
        return self._engine.continuous

    @property
    def device(self) -> torch.device:
        """The device of the stage."""
        return self._device

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on `batch`, for the engine to see what it needs. A collective
        call.
        """
        own = _Pass(self, None, 0 if takes_index(self._module) else None)
        return Example(own.loss, (self._batches.agreed(batch),))

    # ---- the loop around it ----------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer) -> None:
        """Let the loop of `trainer` wait for minibatches in flight where it has to, and nowhere
        else.
        """
        loop, callbacks = trainer.fit_loop.epoch_loop, trainer.callbacks  # type: ignore[attr-defined]
        tells, callback = loop._broadcast_sigterm_tensor, _Drains(self)

        def tell_when_drained() -> None:
            # a broadcast in each iteration would make ranks wait for one another
            if self._run.is_drained:
                tells()

        loop._broadcast_sigterm_tensor = tell_when_drained  # type: ignore[method-assign]
        self._undo.callback(loop.__dict__.pop, "_broadcast_sigterm_tensor", None)
        callbacks.insert(0, callback)
        self._undo.callback(lambda: callbacks.remove(callback) if callback in callbacks else None)

    def end(self) -> None:
        """Undo `begin`."""
        self._undo.close()

    # ---- training --------------------------------------------------------------------------------

    def minibatch_step(self, args: Sequence[Any], *, completes: bool) -> Any:
        """Run this rank's passes of an iteration; `completes`: an update follows this batch.

        Returns the output of the step of the batch that came back, its loss with all gradients in
        its graph that the next update has so far; NaN while none has come back.
        """
        if self._turn is not None:
            raise RuntimeError(
                f"{type(self._module).__name__}.optimizer_step did not step, and the stages of "
                "this pipeline update as they go: call optimizer.step(closure=optimizer_closure) "
                "in it, or choose another schedule"
            )
        trainer, each = self._module.trainer, self._module.trainer.accumulate_grad_batches
        batch = (
            self._batches.agreed(args[0])
            if self._run.is_drained or self._batches.differ
            else args[0]
        )
        self._modes = [(part, part.training) for part in self._module.modules()]
        self._drop_used_gradients()
        index, end = self._run.minibatches, next_end(trainer)
        self._batches_in_flight[index] = batch
        own = _Pass(self, (batch,), args[1] if len(args) > 1 else None)

        def payload() -> bytes:
            self._told_here[index] = told = own.told()
            return packed(told)

        self._turn = self._run.advance(
            own.microbatch,
            own.loss,
            weight=1 / each,
            completes=completes,
            accumulate=each,
            remaining=end.batches,
            last_completes=end.updates,
            payload=payload,
        )
        told = self._hear(self._turn)
        output = None if told is None else told.output
        value = (
            torch.full((), torch.nan, device=self._device) if output is None else loss_of(output)
        )
        assert value is not None
        joint = _with_gradients(value, self._take_gradients())
        return {**output, "loss": joint} if isinstance(output, Mapping) else joint

    def update(self, optimizer: Optimizer) -> None:
        """Step with the gradients of the last turn, if they complete an update."""
        turn, self._turn = self._turn, None
        if turn is None or not turn.completes:
            optimizer.__dict__["_opt_called"] = True  # schedulers step all the same, and would warn
            return
        self._turn = turn
        self._precision._after_closure(self._module, optimizer)
        self._turn = None
        with self._run.update(turn):
            optimizer.step()
        self._updated = True

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients of the turn by their norm over all stages, as far as it is known."""
        assert self._turn is not None, "gradients are clipped before the update"
        return self._run.clip_norm(self._turn, max_norm, parameters=parameters)

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-`clip_value`, `clip_value`]."""
        self._engine.clip_value(parameters, clip_value)

    def drain(self) -> None:
        """Wait for all minibatches in flight, with their updates, and log what they told. A
        collective call.
        """
        if self._run.is_drained:
            return
        if self._module.trainer.interrupted:
            raise RuntimeError(
                "minibatches were under way in the pipeline when the fit was interrupted, so that "
                "stages have updates of different batches: go on from the last checkpoint"
            )
        (optimizer,) = self._module.trainer.optimizers
        with self._as_in_training(), torch.inference_mode(False), torch.enable_grad():
            self._drop_used_gradients()
            for turn in self._run.drain():
                self._turn = turn
                self._hear(turn)
                self.update(optimizer)
                # before the next backward pass, which is run when the loop goes on
                self._drop_used_gradients()

    def _hear(self, turn: BackwardResult) -> Told | None:
        """Log on this rank what the step of the turn's batch told, and return it."""
        if turn.minibatch is None:
            return None
        batch, own = (
            self._batches_in_flight.pop(turn.minibatch),
            self._told_here.pop(turn.minibatch, None),
        )
        if own is None:
            assert turn.payload is not None
            told: Told = unpacked(turn.payload, device=self._device)
            take_over(self._module, told.counted)
        else:
            told = own
        with _as_training_step(self._module, batch):
            replay(self._module, told.calls)
        return told

    # ---- gradients -------------------------------------------------------------------------------

    def _drop_used_gradients(self) -> None:
        if self._updated:
            for parameter in self._module.parameters():
                parameter.grad = None
        self._updated = False

    def _take_gradients(self) -> Gradients:
        """The gradients of the update that is to come, so far; Lightning clears those in place
        before its backward.
        """
        found: Gradients = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
        return found

    @contextmanager
    def _as_in_training(self) -> Generator[None, None, None]:
        """Let the loop, and modules, be as in the last step: recomputation runs these again, and
        hooks may log.
        """
        trainer, before = self._module.trainer, [(part, part.training) for part, _ in self._modes]
        stage, trainer.training = trainer.state.stage, True
        for part, mode in self._modes:
            part.training = mode
        try:
            yield
        finally:
            trainer.state.stage = stage
            for part, mode in before:
                part.training = mode


class _Drains(pl.Callback):
    """The first of the callbacks: the others find a pipeline without minibatches in flight."""

    def __init__(self, steps: ContinuousSteps) -> None:
        self._steps = steps

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if is_end(trainer):
            self._steps.drain()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.drain()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.drain()


@dataclass
class _Pass:
    """The passes of one minibatch on this rank; None: there is none yet, only copies to see what
    they need.
    """

    steps: ContinuousSteps
    microbatch: Any
    batch_idx: int | None
    found: tuple[Any, tuple[Call, ...]] = (None, ())

    def __post_init__(self) -> None:
        self._counting = MetricChanges.begin(self.steps._module)

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of the minibatch, or of a copy of it by a copy of the module."""
        if self.microbatch is None or microbatch is not self.microbatch:
            return loss_in(self.steps.step("training_step", model, microbatch, self.batch_idx))
        output, calls = self.steps.observed("training_step", microbatch, self.batch_idx)
        self.found = map_tensors(output, Tensor.detach), calls
        return loss_in(output)

    def told(self) -> Told:
        """Return what the step told, on the last stage."""
        output, calls = self.found
        return Told(output, calls, self._counting.since(self.steps._module))


@contextmanager
def _as_training_step(module: pl.LightningModule, batch: Any) -> Generator[None, None, None]:
    """Let what is logged within count as logged in `training_step` with this `batch`."""
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


def _with_gradients(value: Tensor, gradients: Gradients) -> Tensor:
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    joint: Tensor = _WithGradients.apply(anchor, value.detach(), gradients)  # type: ignore[no-untyped-call]
    return joint


class _WithGradients(torch.autograd.Function):
    """Has a value, and a backward that gives parameters the gradients which exist already."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, gradients: Gradients) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        while ctx.gradients:
            parameter, found = ctx.gradients.popitem()
            parameter.grad = found
        return torch.zeros_like(gradient), None, None
