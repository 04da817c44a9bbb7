"""Steps of a LightningModule under a plan with stages: its own code on each rank, results and
logged values on all of them.

A batch is split into microbatches, which the engine takes through the stages. What the last stage's
passes return, log and count is combined as one step's would be, and every rank logs it itself, so
that callbacks find it everywhere. The engine has done backward by then; Lightning clears gradients
after `training_step`, so they wait aside until backward of the loss that it returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.topology import own_group
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.batch_parts import Parts, first_samples, split_batch
from lightning_topt.plugins.former_gradients import (
    Gradients,
    cleared_before_backward,
    gradients_aside,
)
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
from lightning_topt.plugins.member_batches import value_of_member, values_of_members
from lightning_topt.plugins.metric_states import MetricChanges, take_over, uncounted
from lightning_topt.plugins.pipeline_values import (
    Call,
    Told,
    combined_calls,
    combined_output,
    replay,
    telling,
    weighted_losses,
)
from lightning_topt.plugins.row_batches import RowBatches
from lightning_topt.plugins.turns import loss_of
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states

Found = tuple[Any, tuple[Call, ...]]  # what a step returned, and what it told
_CONTEXTS = {
    "training_step": "train",
    "validation_step": "val",
    "test_step": "test",
    "predict_step": "predict",
}


class PipelineSteps:
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
        self._engine, self._module, self._precision, self._device = (
            engine,
            module,
            precision,
            device,
        )
        mesh = engine.plan.mesh
        self._row = own_group(mesh.groups_along(mesh.pipeline_axes))
        self._teller = _last_rank(engine.plan)
        alike = (
            own_group(mesh.groups_along([*mesh.pipeline_axes, *mesh.tensor_axes]))
            if mesh.tensor_axes
            else self._row
        )
        self._batches = RowBatches(alike, device=device)
        self._kinds = LossKinds(None)

    def example(self, batch: Any) -> Example:
        """Return a training step on a microbatch of `batch`, for the engine to see what it needs. A
        collective call.
        """
        parts = split_batch(self._batches.agreed(batch), self._engine.plan.num_microbatches)
        takes_index = is_param_in_hook_signature(
            self._module.training_step, "batch_idx", min_args=2
        )
        passes = _Passes(
            self, Parts((), ()), LossKinds(None), scale=1.0, batch_idx=0 if takes_index else None
        )
        return Example(passes.loss, (parts.batches[0],))

    def check(self) -> None:
        """Raise PlanError where a microbatch depends on the one before, which it would not in one
        batch.
        """
        plan = self._engine.plan
        if plan.num_microbatches > 1 and (carried := self._engine.stages.carried_buffers):
            raise PlanError(
                f"training steps change the buffer {carried[0]!r} and compute with it, as "
                "spectral_norm does: in microbatches that would happen once in each, and another "
                "loss be trained than that of the batch; use microbatches=1, or choose a plan "
                "without stages"
            )

    # ---- training --------------------------------------------------------------------------------

    def training_step(self, *args: Any) -> Any:
        """Return the output of the module's step on every rank of the row, whose loss has the
        gradients of the weighted mean of its microbatches' losses (of their sum, where the loss is
        a sum). A collective call.
        """
        batch = self._batches.agreed(args[0])
        parts = split_batch(batch, self._engine.plan.num_microbatches)
        if self._kinds.loss is None and len(parts.batches) > 1:
            self._kinds = self._find_kinds(batch, parts, args[1:])
        counting = MetricChanges.begin(self._module)
        passes = _Passes(
            self, parts, self._kinds, scale=self._loss_scale(), batch_idx=_index_in(args)
        )
        weights = [1.0] * len(parts.batches)
        divisor = passes.total if passes.by_divisors else None
        with gradients_aside(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            self._engine.run_step(
                passes.microbatches, passes.loss, weights=weights, divisor=divisor
            )
        told = self._told(self._combined(passes, parts) if passes.finished else None, counting)
        loss = loss_of(told.output)
        assert loss is not None
        joint = joint_loss(loss, gradients, scale=passes.scale, device=self._device)
        return {**told.output, "loss": joint} if isinstance(told.output, Mapping) else joint

    def _combined(self, passes: _Passes, parts: Parts) -> Found | str:
        """The output and the calls of the whole step, or why it has none; the last stage alone has
        them.
        """
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

    def _loss_scale(self) -> float:
        """The number that a scaler will multiply the loss by: microbatches need it already."""
        scaler = getattr(self._precision, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return 1.0
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(self._device)
        return float(scaler.get_scale())

    def _find_kinds(self, batch: Any, parts: Parts, rest: Sequence[Any]) -> LossKinds:
        """Test how the loss adds up; nothing of the test is left. A collective call. Raises
        ValueError on every rank.
        """
        sizes, draws = (*parts.sizes[:2], sum(parts.sizes[:2])), False
        tried = []
        with without_trace(self._module):
            before = random_states()
            for part, size in zip(
                (*parts.batches[:2], first_samples(batch, sizes[-1])), sizes, strict=True
            ):
                set_random_states(before)
                step = _Trial(self, (part, *rest[1:]), _index_in((part, *rest)), size=size)
                self._engine.evaluate(step.batch, step)
                tried.append(step)
                draws |= drawn_since(before)
        verdict: Any = None
        if (done := [step.tried() for step in tried if step.found is not None]) and len(
            done
        ) == len(tried):
            half = self._precision.precision not in ("32-true", "64-true")
            try:
                verdict = compare_steps((done[0], done[1]), done[2], draws=draws, half=half)
            except ValueError as error:
                verdict = str(error)
        verdict = value_of_member(verdict, self._row, member=self._teller, device=self._device)
        verdicts = [verdict]
        # rows exchange their gradients in one way
        if (data := self._engine.data_group) is not None:
            verdicts = list(values_of_members(verdict, data, device=self._device))
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

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluation_step(self, name: str, *args: Any) -> Any:
        """Return the output of the module's step of this name on every rank of the row. A
        collective call.
        """
        counting = MetricChanges.begin(self._module)
        found = self._pass_through(name, (self._batches.agreed(args[0]), *args[1:]))
        return self._told(found, counting).output

    def _pass_through(self, name: str, args: Sequence[Any]) -> Found | None:
        """Run a step forward only; its output and calls on the last stage, None elsewhere."""
        batch = (args[0], *args[2:])
        step = _EVALUATIONS[name](self, batch, _index_in(args))
        self._engine.evaluate(batch, step)
        found: Found | None = step.found
        return found

    # ---- both ------------------------------------------------------------------------------------

    def step(self, name: str, model: nn.Module, batch: Any, batch_idx: int | None) -> Any:
        """Return what this step of `model`, the module or a copy of it, returns. `batch`: (batch,
        dataloader_idx).
        """
        indices = () if batch_idx is None else (batch_idx,)
        with getattr(self._precision, f"{_CONTEXTS[name]}_step_context")():
            return getattr(model, name)(batch[0], *indices, *batch[1:])

    def observed(self, name: str, batch: Any, batch_idx: int | None) -> Found:
        """Return the output of the module's own step and the calls that it told; a step that does
        not end counts nothing.
        """
        calls, done = list[Call](), list[bool]()
        with telling(self._module, calls), uncounted(self._module, unless=done):
            output = self._engine.whole(self.step(name, self._module, batch, batch_idx))
            done.append(True)
        return output, tuple(calls)

    def _told(self, found: Found | str | None, counting: MetricChanges) -> Told:
        """Give all ranks of the row what the last stage found; they log it, and count it in their
        metrics.

        Raises ValueError on all of them for a problem that it found.
        """
        if isinstance(found, str):
            own = Told(problem=found)
        else:
            own = Told() if found is None else Told(*found, counting.since(self._module))
        told: Told = value_of_member(own, self._row, member=self._teller, device=self._device)
        if told.problem:
            raise ValueError(told.problem)
        if found is None:
            take_over(self._module, told.counted)
        replay(self._module, told.calls)
        return told


def _last_rank(plan: ParallelPlan) -> int:
    """The place along the pipeline of the rank that runs the last stage."""
    assert plan.schedule is not None
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return plan.mesh.pipeline_size - 1
    rule = SCHEDULES[check_choice(plan.schedule, name="schedule", allowed=SCHEDULES)]
    return rule.rank_of_stage(
        num_ranks=plan.mesh.pipeline_size, stages_per_rank=plan.stages_per_rank
    )[-1]


def _index_in(args: Sequence[Any]) -> int | None:
    """The index of the batch, where the module's step takes one."""
    return args[1] if len(args) > 1 else None


class _Passes:
    """The passes of one training step's microbatches on this rank; `finished` has what those that
    reached the end found.

    `by_divisors`: losses are weighted by what they are divided by, which is not known before;
    gradients are then those of the loss times `total`.
    """

    def __init__(
        self,
        steps: PipelineSteps,
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
        splits = steps._engine.plan.num_microbatches > 1
        self.by_divisors = splits and kinds.loss != "sum" and not kinds.loops
        self.finished: dict[int, Found] = {}
        self._summands: dict[int, Summands] = {}
        self._factors: dict[int, float] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch, scaled and weighted; or of a copy of it by a copy of the
        module, to see what they need.
        """
        index = self._places.get(id(microbatch))
        if index is None:
            return loss_in(self._steps.step("training_step", model, microbatch, self._batch_idx))
        output, calls = self._steps.observed("training_step", microbatch, self._batch_idx)
        loss = loss_in(output)
        self.finished[index] = map_tensors(output, Tensor.detach), calls
        self._summands[index] = summands_of(loss, samples=self._sizes[index])
        factor = self._factors[index] = self._factor(index)
        if factor == 0:  # of padding alone: NaN
            return torch.zeros_like(loss)
        return loss if self.scale * factor == 1 else loss * (self.scale * factor)

    def _factor(self, index: int) -> float:
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
        """Return the weights of the losses. Raises ValueError where none make them the loss of the
        batch.
        """
        places = range(len(self._sizes))
        if not self._kinds.loops:
            loss_weights([self._summands[index] for index in places], kind=self._kinds.loss)
        return [
            self._factors[index] / (self.total() if self.by_divisors else 1.0) for index in places
        ]


@dataclass
class _Evaluation:
    """A step forward only; `found` is what it found, where it reached the end."""

    steps: PipelineSteps
    batch: Any
    batch_idx: int | None
    found: Found | None = None
    name: ClassVar[str] = ""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if batch is not self.batch:  # a copy, to see what it needs
            return self.steps.step(self.name, model, batch, self.batch_idx)
        self.found = self.observed()
        return None

    def observed(self) -> Found:
        return self.steps.observed(self.name, self.batch, self.batch_idx)


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

    def observed(self) -> Found:
        with torch.enable_grad():
            output, calls = super().observed()
        if (loss := loss_of(output)) is not None:
            self.summands = summands_of(loss, samples=self.size)
        return map_tensors(output, Tensor.detach), calls

    def tried(self) -> TriedStep:
        assert self.found is not None
        return TriedStep(*self.found, self.summands, self.size)


def loss_in(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned. Raises ValueError where there is none."""
    if (loss := loss_of(output)) is None:
        raise ValueError(
            f"training_step returned no loss but {type(output).__name__} for a microbatch, which a "
            "pipeline cannot leave out; return a loss, or use another strategy"
        )
    return loss


def joint_loss(
    value: Tensor, gradients: Gradients, *, scale: float, device: torch.device
) -> Tensor:
    """Return a loss of this `value`, whose backward adds `gradients` to those of the parameters.

    `gradients` are those of the loss times `scale`.
    """
    anchor = torch.zeros((), device=device, requires_grad=True)
    joint: Tensor = _JointLoss.apply(anchor, value.detach(), 1 / scale, gradients)  # type: ignore[no-untyped-call]
    return joint


class _JointLoss(torch.autograd.Function):
    """Has a value, and a backward that adds gradients which exist already, times `share`; it
    empties their mapping.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, share: float, gradients: Gradients
    ) -> Tensor:
        ctx.share, ctx.gradients = share, gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        factor = gradient.reshape(()) * ctx.share
        while ctx.gradients:
            parameter, found = ctx.gradients.popitem()
            found.mul_(factor.to(found.dtype))
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        return torch.zeros_like(gradient.reshape(())), None, None, None
