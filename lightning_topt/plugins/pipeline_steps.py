"""Steps of a LightningModule under a plan with stages: its own code runs on every rank.

The ranks of a pipeline get one batch, which `PipelineRunner` splits into microbatches. It has
`StageSteps`, and so have pipelines whose ranks bring a batch each (`group_steps`), and the
asynchronous one (`continuous_steps`).

The engine takes microbatches through the stages, forward and backward, and calls ``training_step``
for each; only the last stage's rank gets to the end of it. What was returned, logged and counted
there is combined to what one step would give. Every rank of the pipeline logs it, so that callbacks
find it everywhere (`step_records`). As the engine has done backward by then, gradients are stashed
until Lightning calls backward of the loss that the step returned (`stashed_gradients`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.value_exchange import value_of_rank, values_of_ranks
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.microbatches import (
    AgreedBatches,
    MicrobatchLoss,
    Parts,
    combined_calls,
    combined_output,
    first_samples,
    loss_problem,
    loss_weights,
    split_batch,
    weighted_losses,
    without_trace,
)
from lightning_topt.plugins.stashed_gradients import (
    Gradients,
    cleared_before_backward,
    loss_with_gradients,
    stashed_gradients,
)
from lightning_topt.plugins.step_records import (
    LoggedCall,
    MetricChanges,
    StepRecord,
    apply_metric_changes,
    loss_in,
    recorded_calls,
    replay,
    uncounted,
)
from lightning_topt.plugins.step_runner import Step, StepRunner, evaluating
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states

Found = tuple[Any, tuple[LoggedCall, ...]]  # what a step returned, and its calls

# the contexts of a precision plugin
_CONTEXTS = {
    "training_step": "train",
    "validation_step": "val",
    "test_step": "test",
    "predict_step": "predict",
}


class StageSteps:
    """The steps of `module`, which `engine` runs in stages on `device` as its plan says.

    Made before the plan is applied. Most methods are collective calls.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.engine, self.module = engine, module
        self.precision, self.device = precision, device
        # The ranks of this pipeline, and the one among them that sees losses.
        mesh, groups = engine.plan.mesh, engine.make_stage_groups()
        self.group = groups.pipeline_group
        self.last_place = _place_of_last_stage(engine.plan)
        # Ranks of a tensor group run the same batch as well.
        alike = (
            groups.own(mesh.groups_along([*mesh.pipeline_axes, *mesh.tensor_axes]))
            if mesh.tensor_axes
            else self.group
        )
        self.batches = AgreedBatches(alike, device=device)

    def step(self, name: str, model: nn.Module, batch: Any, batch_idx: int | None) -> Any:
        """Return what this step of `model`, the module or a copy of it, returns.

        `batch` is ``(batch, dataloader_idx)``, or without the latter.
        """
        indices = () if batch_idx is None else (batch_idx,)
        with getattr(self.precision, f"{_CONTEXTS[name]}_step_context")():
            return getattr(model, name)(batch[0], *indices, *batch[1:])

    def recorded_step(self, name: str, batch: Any, batch_idx: int | None) -> Found:
        """Return the output of the module's own step, and its calls.

        A step that does not get to its end, as on all stages but the last, counts nothing.
        """
        calls, done = list[LoggedCall](), list[bool]()
        with recorded_calls(self.module, calls), uncounted(self.module, unless=done):
            output = self.engine.whole(self.step(name, self.module, batch, batch_idx))
            done.append(True)
        return output, tuple(calls)

    def evaluate(self, name: str, args: Sequence[Any]) -> Any:
        """Return the output of the module's step `name`, on every rank of the pipeline."""
        with evaluating(self.engine):
            counting = MetricChanges.begin(self.module)
            args = (self.batches.agreed(args[0]), *args[1:])
            batch = (args[0], *args[2:])
            step = _EVALUATIONS[name](self, batch, index_in(args))
            self.engine.evaluate(batch, step)
            return self.shared(step.found, counting).output

    def shared(self, found: Found | None, counting: MetricChanges) -> StepRecord:
        """Give all ranks of the pipeline what the last stage found; they log and count it."""
        own = StepRecord() if found is None else StepRecord(*found, counting.since(self.module))
        record: StepRecord = value_of_rank(
            own, self.group, place=self.last_place, device=self.device
        )
        if found is None:
            apply_metric_changes(self.module, record.counted)
        replay(self.module, record.calls)
        return record

    def with_gradients(self, output: Any, gradients: Gradients, *, scale: float) -> Any:
        """Return `output` with a loss that brings `gradients`, those of the loss times `scale`."""
        loss = loss_with_gradients(loss_in(output), gradients, factor=1 / scale, device=self.device)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def loss_scale(self) -> float:
        """Return by what a scaler will multiply the loss.

        Microbatches need that already, and so does the exchange of their gradients.
        """
        scaler, scale = getattr(self.precision, "scaler", None), 1.0
        if scaler is not None and scaler.is_enabled():
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(self.device)
            scale = float(scaler.get_scale())
        if self.engine.exchange is not None:
            self.engine.exchange.loss_scale = scale
        return scale


class PipelineRunner(StepRunner):
    """Runs one batch on the ranks of a pipeline, in microbatches."""

    engine: Engine

    def __init__(self, steps: StageSteps, loss: MicrobatchLoss = "mean") -> None:
        self.engine, self._steps, self._module = steps.engine, steps, steps.module
        self._loss, self._is_tested = loss, False

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on a microbatch of `batch`, for the engine to trace."""
        parts = split_batch(self._steps.batches.agreed(batch), self.engine.plan.num_microbatches)
        batch_idx = 0 if takes_index(self._module) else None
        passes = _Passes(self._steps, Parts((), ()), [], batch_idx=batch_idx)
        return Example(passes.loss, (parts.batches[0],))

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        check_microbatches(self.engine)

    @override
    def close(self, *, failed: bool) -> None:
        if failed:
            self.engine.abort()

    @override
    def drain(self) -> None:
        self.engine.synchronize()

    @override
    def begin_evaluation(self) -> None:
        self.drain()

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of the module's step, on every rank of the pipeline.

        Its loss has the gradients of the microbatches' losses, weighted by `microbatch_loss`.
        """
        args = (*args, *kwargs.values())
        batch = self._steps.batches.agreed(args[0])
        # Microbatches; a small batch has fewer.
        parts = split_batch(batch, self.engine.plan.num_microbatches)
        if not self._is_tested and len(parts.batches) > 1:
            self._is_tested = self._test_loss(batch, parts, args[1:])
        weights, scale = loss_weights(parts, self._loss), self._steps.loss_scale()
        counting = MetricChanges.begin(self._module)
        passes = _Passes(self._steps, parts, weights, batch_idx=index_in(args))
        with stashed_gradients(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            self.engine.run_step(
                passes.microbatches, passes.loss, weights=[weight * scale for weight in weights]
            )
        found = _combined(passes, parts, weights) if passes.finished else None
        record = self._steps.shared(found, counting)
        return self._steps.with_gradients(record.output, gradients, scale=scale)

    def _test_loss(self, batch: Any, parts: Parts, rest: Sequence[Any]) -> bool:
        # Test whether two microbatches add up as `microbatch_loss` says, by three steps forward.
        # Nothing of the test is left. Returns False where the batch could not tell, as all ranks
        # know. Raises ValueError on every rank.
        # The first two microbatches, and both together, with the same random numbers.
        first = Parts(parts.batches[:2], parts.sizes[:2])
        tried, draws = [], False
        with without_trace(self._module):
            before = random_states()
            for part in (*first.batches, first_samples(batch, sum(first.sizes))):
                set_random_states(before)
                args = (part, *rest)
                step = _EVALUATIONS["training_step"](self._steps, (part, *rest[1:]), index_in(args))
                self.engine.evaluate(step.batch, step)
                tried.append(step)
                draws |= pickle.dumps(random_states()) != pickle.dumps(before)
        # The last stage's rank has seen all three, and compares them.
        verdict: str | None = None
        if all(step.found is not None for step in tried):
            verdict = loss_problem(
                [float(loss_in(step.found[0])) for step in tried],
                loss_weights(first, self._loss),
                draws=draws,
                half=self._steps.precision.precision not in ("32-true", "64-true"),
            )
        verdict = value_of_rank(
            verdict, self._steps.group, place=self._steps.last_place, device=self._steps.device
        )
        # What one row of the pipelines finds is known to all.
        verdicts = [verdict]
        if (data := self.engine.data_group) is not None:
            verdicts = list(values_of_ranks(verdict, data, device=self._steps.device))
        for problem in filter(None, verdicts):
            raise ValueError(problem)
        return "" in verdicts

    @override
    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        return nullcontext()  # stashed gradients are exchanged by then, those of each batch

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._steps.evaluate(name, (*args, *kwargs.values()))


def check_microbatches(engine: Engine) -> None:
    """Raise PlanError where a microbatch depends on the one before, through a buffer."""
    plan = engine.plan
    if plan.num_microbatches > 1 and (carried := engine.stages.carried_buffers):
        raise PlanError(
            f"training steps change the buffer {carried[0]!r} and compute with it, as "
            "spectral_norm does: in microbatches that would happen once in each, and another "
            "loss be trained than that of the batch; use microbatches=1, or choose a plan "
            "without stages"
        )


def takes_index(module: pl.LightningModule) -> bool:
    """Return whether Lightning gives ``training_step`` the index of the batch."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def index_in(args: Sequence[Any]) -> int | None:
    """Return the index of the batch, where the module's step takes one."""
    return args[1] if len(args) > 1 else None


def _place_of_last_stage(plan: ParallelPlan) -> int:
    # The place along the pipeline of the rank that runs the last stage
    assert plan.schedule is not None
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return plan.mesh.pipeline_size - 1
    rule = SCHEDULES[check_choice(plan.schedule, name="schedule", allowed=SCHEDULES)]
    return rule.rank_of_stage(
        num_ranks=plan.mesh.pipeline_size, stages_per_rank=plan.stages_per_rank
    )[-1]


class _Passes:
    """The passes of one training step's microbatches on this rank.

    `finished` has what those that reached the end returned and called.
    """

    def __init__(
        self, steps: StageSteps, parts: Parts, weights: Sequence[float], *, batch_idx: int | None
    ) -> None:
        self._steps, self._weights, self._batch_idx = steps, weights, batch_idx
        self.microbatches = [(batch,) for batch in parts.batches]
        self._places = {id(microbatch): index for index, microbatch in enumerate(self.microbatches)}
        self.finished: dict[int, Found] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        # Return the loss of a microbatch.
        # The engine also calls it with copies of the module and of a microbatch, to trace them.
        index = self._places.get(id(microbatch))
        if index is None:
            return loss_in(self._steps.step("training_step", model, microbatch, self._batch_idx))
        output, calls = self._steps.recorded_step("training_step", microbatch, self._batch_idx)
        loss = loss_in(output)
        self.finished[index] = map_tensors(output, Tensor.detach), calls
        # of padding alone: NaN
        return torch.zeros_like(loss) if self._weights[index] == 0 else loss


def _combined(passes: _Passes, parts: Parts, weights: Sequence[float]) -> Found:
    # The output and the calls of the whole step, on the last stage's rank
    # In the order of microbatches, whatever the schedule.
    done = [passes.finished[index] for index in range(len(parts.batches))]
    outputs, calls = [output for output, _ in done], [calls for _, calls in done]
    if len(done) == 1:
        return outputs[0], tuple(calls[0])
    losses = [float(loss_in(output)) for output in outputs]
    options: dict[str, Any] = {"sizes": parts.sizes, "weights": weights, "losses": losses}
    output = combined_output(outputs, **options)
    loss = weighted_losses([loss_in(each).reshape(()) for each in outputs], weights)
    output = {**output, "loss": loss} if isinstance(output, Mapping) else loss
    return output, combined_calls(calls, **options)


@dataclass
class _Evaluation:
    """A step forward only; `found` is what it returned and called, where it reached the end."""

    steps: StageSteps
    batch: Any
    batch_idx: int | None
    found: Found | None = None
    name: ClassVar[str] = ""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if batch is not self.batch:  # a copy, which the engine traces
            return self.steps.step(self.name, model, batch, self.batch_idx)
        self.found = self.run()
        return None

    def run(self) -> Found:
        return self.steps.recorded_step(self.name, self.batch, self.batch_idx)


# The engine tells steps apart by their classes.
_EVALUATIONS: dict[str, Any] = {
    name: type(name, (_Evaluation,), {"name": name}) for name in _CONTEXTS
}
