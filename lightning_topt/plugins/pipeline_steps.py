"""Steps of a LightningModule under a plan with stages: its own code on every rank, results and logged values on all of them.

A batch is split into microbatches, which the engine takes through the stages. What the last stage's passes return, log and count
is combined as one step's would be, and every rank logs it itself, so that callbacks find it everywhere. The engine has done
backward by then; Lightning clears gradients after `training_step`, so they wait aside until backward of the loss that it
returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_topt.communication.topology import own_group
from lightning_topt.execution.engine import Engine
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plugins.loss_kinds import LossKinds, compare_steps, drawn_since, without_trace
from lightning_topt.plugins.member_batches import value_of_member
from lightning_topt.plugins.metric_states import MetricChanges, take_over, uncounted
from lightning_topt.plugins.microbatches import Parts, doubled, split_batch
from lightning_topt.plugins.pipeline_values import Call, Told, combined_calls, combined_output, replay, telling
from lightning_topt.plugins.row_batches import RowBatches
from lightning_topt.plugins.turns import Gradients, gradients_aside, loss_of
from lightning_topt.techniques.tensor_parallel.random_states import random_states

_CONTEXTS = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


class PipelineSteps:
    """The steps of `module`, which `engine` runs in stages on `device` as its plan says."""

    def __init__(
        self, engine: Engine, module: pl.LightningModule, *, precision: Precision, device: torch.device
    ) -> None:
        self._engine, self._module, self._precision, self._device = engine, module, precision, device
        mesh = engine.plan.mesh
        self._row = own_group(mesh.groups_along((*mesh.pipeline_axes, *mesh.tensor_axes)))
        self._teller = engine.last_stage_rank * mesh.ranks_along(mesh.tensor_axes)
        self._batches = RowBatches(self._row, device=device)
        self._kinds = LossKinds(None)

    # ---- training -------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any) -> Any:
        """Return the output of the module's step on every rank of the row, whose loss has the gradients of the weighted mean
        of its microbatches' losses (of their sum, where the loss is a sum). A collective call.
        """
        batch, *rest = args
        parts = split_batch(self._batches.agreed(batch), self._engine.plan.num_microbatches)
        if self._kinds.loss is None and len(parts.batches) > 1:
            self._kinds = self._find_kinds(parts, rest)
        weights, counting = self._kinds.weights(parts.sizes), MetricChanges.begin(self._module)
        passes = _Passes(self, parts, rest, weights=weights, scale=self._loss_scale())
        with gradients_aside(self._module) as gradients:
            self._engine.run_step(parts.batches, passes.loss)
        told = self._told(self._combined(passes, parts) if passes.finished else None, counting)
        loss = loss_of(told.output)
        assert loss is not None
        joint = joint_loss(loss, gradients, scale=passes.scale, device=self._device)
        return {**told.output, "loss": joint} if isinstance(told.output, dict) else joint

    def _combined(self, passes: _Passes, parts: Parts) -> tuple[Any, tuple[Call, ...]]:
        """The output and the calls of the whole step; the last stage alone has them."""
        done = [passes.finished[index] for index in range(len(parts.batches))]
        outputs, calls = [output for output, _ in done], [calls for _, calls in done]
        output = combined_output(outputs, sizes=parts.sizes, kinds=self._kinds.returned)
        if len(outputs) > 1:
            losses = torch.stack([loss.reshape(()) for loss in map(loss_of, outputs) if loss is not None])
            weights = torch.tensor(passes.weights, device=losses.device, dtype=losses.dtype)
            loss = (losses * weights).sum()
            output = {**output, "loss": loss} if isinstance(output, dict) else loss
        return output, combined_calls(calls, sizes=parts.sizes, kinds=self._kinds.logged)

    def _loss_scale(self) -> float:
        """What a scaler will multiply the loss by: microbatches need it already."""
        scaler = getattr(self._precision, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return 1.0
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(self._device)
        return float(scaler.get_scale())

    def _find_kinds(self, parts: Parts, rest: Sequence[Any]) -> LossKinds:
        """Test how the loss adds up; nothing of the test is left. A collective call. Raises ValueError on every rank."""
        part, found = parts.batches[0], []
        with without_trace(self._module):
            before = random_states()
            for batch in (part, doubled(part)):
                found.append(self._pass_through("training_step", (batch, *rest)))
            draws = drawn_since(before)
        verdict: Any = None
        if found[0] is not None and found[1] is not None:
            half = self._precision.precision not in ("32-true", "64-true")
            try:
                verdict = compare_steps(found[0], found[1], draws=draws, half=half)
            except ValueError as error:
                verdict = str(error)
        verdict = value_of_member(verdict, self._row, member=self._teller, device=self._device)
        if isinstance(verdict, str):
            raise ValueError(verdict)
        kinds: LossKinds = verdict
        return kinds

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def evaluation_step(self, name: str, *args: Any) -> Any:
        """Return the output of the module's step of this name on every rank of the row. A collective call."""
        batch, *rest = args
        counting = MetricChanges.begin(self._module)
        found = self._pass_through(name, (self._batches.agreed(batch), *rest))
        return self._told(found, counting).output

    def _pass_through(self, name: str, args: Sequence[Any]) -> tuple[Any, tuple[Call, ...]] | None:
        """Run a step forward only; its output and calls on the last stage, None elsewhere."""
        batch, *rest = args
        found: list[tuple[Any, tuple[Call, ...]]] = []

        def run(model: nn.Module, given: Any) -> Any:
            if given is not batch:  # on a copy, to see what it needs
                return self._step(name, model, (given, *rest))
            calls, done = list[Call](), list[bool]()
            with telling(self._module, calls), uncounted(self._module, unless=done):
                output = self._engine.whole(self._step(name, model, (given, *rest)))
                done.append(True)
            found[:] = [(output, tuple(calls))]
            return None

        self._engine.evaluate(batch, run)
        return found[0] if found else None

    # ---- both -----------------------------------------------------------------------------------------------------

    def _step(self, name: str, model: nn.Module, args: Sequence[Any]) -> Any:
        with getattr(self._precision, f"{_CONTEXTS[name]}_step_context")():
            return getattr(model, name)(*args)

    def _told(self, found: tuple[Any, tuple[Call, ...]] | None, counting: MetricChanges) -> Told:
        """Give all ranks of the row what the last stage found; they log it, and count it in their metrics."""
        told = Told() if found is None else Told(*found, counting.since(self._module))
        told = value_of_member(told, self._row, member=self._teller, device=self._device)
        if found is None or dist.get_rank(self._row) != self._teller:
            take_over(self._module, told.counted)
        replay(self._module, told.calls)
        return told


class _Passes:
    """The passes of one training step's microbatches on this rank; `finished` has what those that reached the end found."""

    def __init__(
        self, steps: PipelineSteps, parts: Parts, rest: Sequence[Any], *, weights: Sequence[float], scale: float
    ) -> None:
        self._steps, self._rest, self.weights, self.scale = steps, rest, weights, scale
        self._places = {id(batch): index for index, batch in enumerate(parts.batches)}
        self.finished: dict[int, tuple[Any, tuple[Call, ...]]] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch, so that the mean of all is that of the step."""
        steps, index = self._steps, self._places.get(id(microbatch))
        args = (microbatch, *self._rest)
        if index is None:  # on a copy, to see what it needs
            return _loss_in(steps._step("training_step", model, args))
        calls, done = list[Call](), list[bool]()
        with telling(steps._module, calls), uncounted(steps._module, unless=done):
            output = steps._engine.whole(steps._step("training_step", model, args))
            done.append(True)
        loss = _loss_in(output)
        self.finished[index] = map_tensors(output, Tensor.detach), tuple(calls)
        factor = self.weights[index] * len(self._places) * self.scale
        return loss if factor == 1 else loss * factor


def _loss_in(output: Any) -> Tensor:
    if (loss := loss_of(output)) is None:
        raise ValueError(
            f"training_step returned no loss but {type(output).__name__} for a microbatch, which a pipeline cannot leave out; "
            "return a loss, or use another strategy"
        )
    return loss


def joint_loss(value: Tensor, gradients: Gradients, *, scale: float, device: torch.device) -> Tensor:
    """Return a loss of this `value`, whose backward adds `gradients` to those of the parameters.

    `gradients` are those of the loss times `scale`.
    """
    anchor = torch.zeros((), device=device, requires_grad=True)
    joint: Tensor = _JointLoss.apply(anchor, value.detach(), 1 / scale, gradients)  # type: ignore[no-untyped-call]
    return joint


class _JointLoss(torch.autograd.Function):
    """Has a value, and a backward that adds gradients which exist already, times `share`; it empties their mapping."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, share: float, gradients: Gradients) -> Tensor:
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
