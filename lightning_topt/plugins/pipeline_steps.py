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

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.loss_kinds import (
    LossKinds,
    Summands,
    TriedStep,
    compare_steps,
    drawn_since,
    loss_weights,
    summands_of,
    without_trace,
)
from lightning_topt.plugins.microbatches import (
    Parts,
    combined_calls,
    combined_output,
    first_samples,
    split_batch,
    weighted_losses,
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
    loss_of,
    recorded_calls,
    replay,
    uncounted,
)
from lightning_topt.plugins.step_runner import Step, StepRunner, evaluating
from lightning_topt.plugins.value_exchange import (
    AgreedBatches,
    value_of_rank,
    values_of_ranks,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.techniques.tensor_parallel.random_states import (
    random_states,
    set_random_states,
)

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

    def shared(self, found: Found | str | None, counting: MetricChanges) -> StepRecord:
        """Give all ranks of the pipeline what the last stage found; they log and count it.

        Raises ValueError on all of them for a problem that it found.
        """
        if isinstance(found, str):
            own = StepRecord(problem=found)
        else:
            own = StepRecord() if found is None else StepRecord(*found, counting.since(self.module))
        record: StepRecord = value_of_rank(
            own, self.group, place=self.last_place, device=self.device
        )
        if record.problem:
            raise ValueError(record.problem)
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

    def __init__(self, steps: StageSteps) -> None:
        self.engine, self._steps, self._module = steps.engine, steps, steps.module
        self._kinds = LossKinds(None)  # until a batch tells how its loss adds up

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on a microbatch of `batch`, for the engine to trace."""
        parts = split_batch(self._steps.batches.agreed(batch), self.engine.plan.num_microbatches)
        batch_idx = 0 if takes_index(self._module) else None
        passes = _Passes(
            self._steps, Parts((), ()), LossKinds(None), scale=1.0, batch_idx=batch_idx
        )
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

        Its loss has the gradients of the weighted mean of the microbatches' losses, or of their
        sum, where the loss is a sum.
        """
        args = (*args, *kwargs.values())
        batch = self._steps.batches.agreed(args[0])
        # Microbatches; a small batch has fewer.
        parts = split_batch(batch, self.engine.plan.num_microbatches)
        # Until a batch tells how the loss adds up.
        if self._kinds.loss is None and len(parts.batches) > 1:
            self._kinds = self._find_kinds(batch, parts, args[1:])
        counting = MetricChanges.begin(self._module)
        passes = _Passes(
            self._steps,
            parts,
            self._kinds,
            scale=self._steps.loss_scale(),
            batch_idx=index_in(args),
        )
        with stashed_gradients(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            self.engine.run_step(
                passes.microbatches,
                passes.loss,
                weights=[1.0] * len(parts.batches),
                divisor=passes.total if passes.by_divisors else None,
            )
        record = self._steps.shared(
            self._combined(passes, parts) if passes.finished else None, counting
        )
        return self._steps.with_gradients(record.output, gradients, scale=passes.scale)

    def _combined(self, passes: _Passes, parts: Parts) -> Found | str:
        """Return the output and the calls of the whole step, or why it has none; last stage."""
        # In the order of microbatches, whatever the schedule.
        done = [passes.finished[index] for index in range(len(parts.batches))]
        outputs, calls = [output for output, _ in done], [calls for _, calls in done]
        if len(done) == 1:
            return outputs[0], tuple(calls[0])
        try:
            weights = passes.weights()
        except ValueError as error:
            return str(error)
        output = combined_output(
            outputs, sizes=parts.sizes, weights=weights, kinds=self._kinds.returned
        )
        loss = weighted_losses([loss_in(each).reshape(()) for each in outputs], weights)
        output = {**output, "loss": loss} if isinstance(output, Mapping) else loss
        return output, combined_calls(
            calls, sizes=parts.sizes, weights=weights, kinds=self._kinds.logged
        )

    def _find_kinds(self, batch: Any, parts: Parts, rest: Sequence[Any]) -> LossKinds:
        """Test how the loss adds up, with three steps forward; nothing of the test is left.

        Raises ValueError on every rank.
        """
        # The first two microbatches, and both together, with the same random numbers.
        sizes, draws = (*parts.sizes[:2], sum(parts.sizes[:2])), False
        tried = []
        with without_trace(self._module):
            before = random_states()
            for part, size in zip(
                (*parts.batches[:2], first_samples(batch, sizes[-1])), sizes, strict=True
            ):
                set_random_states(before)
                step = _Trial(self._steps, (part, *rest[1:]), index_in((part, *rest)), size=size)
                self.engine.evaluate(step.batch, step)
                tried.append(step)
                draws |= drawn_since(before)
        # The last stage's rank has seen all three, and compares them.
        verdict: Any = None
        done = [step.tried() for step in tried if step.found is not None]
        if done and len(done) == len(tried):
            half = self._steps.precision.precision not in ("32-true", "64-true")
            try:
                verdict = compare_steps((done[0], done[1]), done[2], draws=draws, half=half)
            except ValueError as error:
                verdict = str(error)
        # All pipelines exchange their gradients in one way: the first that can tell decides.
        verdict = value_of_rank(
            verdict, self._steps.group, place=self._steps.last_place, device=self._steps.device
        )
        verdicts = [verdict]
        if (data := self.engine.data_group) is not None:
            verdicts = list(values_of_ranks(verdict, data, device=self._steps.device))
        for each in verdicts:
            if isinstance(each, str):
                raise ValueError(each)
        kinds: LossKinds = next((each for each in verdicts if each.loss is not None), verdicts[0])
        if kinds.unlike:
            rank_zero_warn(
                f"topt: what is logged as {', '.join(map(repr, kinds.unlike))} is averaged over "
                "microbatches, and the test of the first batch found that the whole batch has "
                "another value: log a torchmetrics Metric, or what adds up, or use "
                "num_microbatches=1"
            )
        return kinds

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
    """Return the place along the pipeline of the rank that runs the last stage."""
    assert plan.schedule is not None
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return plan.mesh.pipeline_size - 1
    rule = SCHEDULES[check_choice(plan.schedule, name="schedule", allowed=SCHEDULES)]
    return rule.rank_of_stage(
        num_ranks=plan.mesh.pipeline_size, stages_per_rank=plan.stages_per_rank
    )[-1]


class _Passes:
    """The passes of one training step's microbatches on this rank.

    `finished` has what those that reached the end returned and called. With `by_divisors` losses
    are weighted by what they are divided by, which is known only when they are there; gradients are
    then those of the loss times `total`.
    """

    def __init__(
        self,
        steps: StageSteps,
        parts: Parts,
        kinds: LossKinds,
        *,
        scale: float,
        batch_idx: int | None,
    ) -> None:
        self._steps, self._sizes, self._kinds = steps, parts.sizes, kinds
        self.scale, self._batch_idx = scale, batch_idx
        self.microbatches = [(batch,) for batch in parts.batches]
        self._places = {id(microbatch): index for index, microbatch in enumerate(self.microbatches)}
        splits = steps.engine.plan.num_microbatches > 1
        self.by_divisors = splits and kinds.loss != "sum" and not kinds.loops
        self.finished: dict[int, Found] = {}
        self._summands: dict[int, Summands] = {}
        self._factors: dict[int, float] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch, scaled and weighted.

        The engine also calls it with copies of the module and of a microbatch, to trace them.
        """
        index = self._places.get(id(microbatch))
        if index is None:
            return loss_in(self._steps.step("training_step", model, microbatch, self._batch_idx))
        output, calls = self._steps.recorded_step("training_step", microbatch, self._batch_idx)
        loss = loss_in(output)
        self.finished[index] = map_tensors(output, Tensor.detach), calls
        self._summands[index] = summands_of(loss, samples=self._sizes[index])
        factor = self._factors[index] = self._factor(index)
        if factor == 0:  # of padding alone: NaN
            return torch.zeros_like(loss)
        return loss if self.scale * factor == 1 else loss * (self.scale * factor)

    def _factor(self, index: int) -> float:
        """Return the weight of a microbatch's loss: its divisor, or its share of the samples."""
        if self._kinds.loss == "sum" or len(self._sizes) == 1:
            return 1.0
        divided = {
            other: next((each.divisor for each in own if each.factor), None)
            for other, own in self._summands.items()
        }
        divisor = divided[index]
        if not self.by_divisors or divisor is None:
            return self._sizes[index] / sum(self._sizes)
        # Near the share of a microbatch, so that no number of 16 bits overflows.
        units = (each / self._sizes[other] for other, each in divided.items() if each)
        return divisor / next(units, 1.0) / sum(self._sizes)

    def total(self) -> float:
        """Return the sum of the weights that losses have been given."""
        return sum(self._factors.values()) or 1.0

    def weights(self) -> list[float]:
        """Return the weights of the losses in that of the batch. Raises ValueError if none fit."""
        places = range(len(self._sizes))
        if not self._kinds.loops:
            loss_weights([self._summands[index] for index in places], kind=self._kinds.loss)
        return [
            self._factors[index] / (self.total() if self.by_divisors else 1.0) for index in places
        ]


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


@dataclass
class _Trial(_Evaluation):
    """A training step on `size` samples forward only, with the graph of its loss."""

    size: int = 0
    summands: Summands = ()
    name: ClassVar[str] = "training_step"

    @override
    def run(self) -> Found:
        with torch.enable_grad():
            output, calls = super().run()
        if (loss := loss_of(output)) is not None:
            self.summands = summands_of(loss, samples=self.size)
        return map_tensors(output, Tensor.detach), calls

    def tried(self) -> TriedStep:
        assert self.found is not None
        return TriedStep(*self.found, self.summands, self.size)
