"""A continuous pipeline in one process: its stages take turns, and its rule is the package's, one
per stage.

Stages are modules of one input and one output; a stage may be without parameters. What a stage does
when is that of `schedules.schedules`, iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.prediction import Prediction, make_prediction
from lightning_topt.schedules.schedules import (
    Action,
    continuous_schedule,
    drain_actions,
    every,
    iteration_actions,
)
from lightning_topt.schedules.staleness import Staleness, staleness

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Step(NamedTuple):
    """How updates are made: the factor on all learning rates in the iteration of a minibatch, and
    the largest norm.
    """

    rate: Callable[[int], float] = lambda minibatch: 1.0
    max_norm: float | None = None


class _Stage:
    """One stage: its module and optimizer, and what it keeps for backward passes."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        rule: Prediction,
        places: Mapping[str, int],
    ) -> None:
        self.module, self.optimizer, self.accumulate = module, optimizer, places["accumulate"]
        self.rule = None if optimizer is None else rule.on(optimizer, **places)
        self.base = (
            [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]
        )
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor | None] = {}  # of outputs
        self.updates = 0
        self.last_forward = 0
        self.square_norms: dict[int, float] = {}  # by minibatch that completes an update
        # the square norm of the latest update, by forward pass
        self.finished_at: dict[int, float] = {}

    def rates(self, step: Step, *, last: int, now: int) -> list[list[dict[str, Any]]]:
        """Hyperparameters of the updates to come, known up to iteration `now`."""
        assert self.optimizer is not None
        found = []
        for update in range(self.updates, max(self.updates, now // self.accumulate) + 1):
            factor = step.rate(min((update + 1) * self.accumulate - 1, last, now))
            groups = zip(self.optimizer.param_groups, self.base, strict=True)
            found.append([{**group, "lr": base * factor, "params": None} for group, base in groups])
        return found


class ContinuousTraining:
    """Trains `stages` as a continuous pipeline would; `optimizers` has one per stage, None where it
    has no parameters.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | None],
        *,
        rule: str | Mapping[str, Any] | Prediction,
        loss: Callable[[Tensor, Tensor], Tensor],
        step: Step | None = None,
        lag_per_hop: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.sizes = {"lag_per_hop": lag_per_hop, "accumulate": accumulate}
        made, count = make_prediction(rule), len(stages)
        self.stages = [
            _Stage(module, optimizer, made, {"stage": index, "num_stages": count, **self.sizes})
            for index, (module, optimizer) in enumerate(zip(stages, optimizers, strict=True))
        ]
        self.loss, self.step = loss, step or Step()

    def run(self, batches: Iterable[Batch]) -> list[float]:
        """Train on all batches from one drained state to the next; return the losses. Minibatches
        are counted from 0.
        """
        data, count = list(batches), len(self.stages)
        completes = every(self.sizes["accumulate"], num_minibatches=len(data))
        schedule = continuous_schedule(num_ranks=count, num_minibatches=len(data), **self.sizes)
        self.data, self.staleness, self.losses = data, staleness(schedule), [0.0] * len(data)
        places = {
            "num_ranks": count,
            "completes": completes,
            "lag_per_hop": self.sizes["lag_per_hop"],
        }
        for iteration in range(len(data)):
            turns = [
                iteration_actions(rank, iteration=iteration, **places) for rank in range(count)
            ]
            for action in (action for turn in turns for action in turn if action.kind == "forward"):
                self._forward(action)
            for action in (action for turn in turns for action in turn if action.kind != "forward"):
                self._back(action, iteration)
        drains = [drain_actions(rank, num_minibatches=len(data), **places) for rank in range(count)]
        for rank in reversed(range(count)):  # what is left of a stage waits for the later ones only
            for action in (action for turn in drains[rank] for action in turn):
                self._back(action, len(data) - 1)
        for stage in self.stages:
            assert not stage.inputs and not stage.outputs and not stage.gradients
            stage.updates, stage.last_forward = 0, 0
            stage.square_norms.clear()
            stage.finished_at.clear()
            if stage.rule is not None:
                stage.rule.drained()
        return self.losses

    def _forward(self, action: Action) -> None:
        index, stage = action.microbatch_index, self.stages[action.stage_index]
        inputs, targets = self.data[index]
        if action.stage_index:
            inputs = self.stages[action.stage_index - 1].outputs[index].detach()
        inputs = (
            inputs.requires_grad_() if inputs.is_floating_point() and action.stage_index else inputs
        )
        stage.last_forward = index
        stage.finished_at[index] = next(reversed(stage.square_norms.values()), 0.0)
        with self._weights(action, self.staleness[action.stage_index].forward[index], now=index):
            output = stage.module(inputs)
            if action.stage_index == len(self.stages) - 1:
                output = self.loss(output, targets) / self.sizes["accumulate"]
                self.losses[index] = output.item() * self.sizes["accumulate"]
        stage.inputs[index], stage.outputs[index] = inputs, output

    def _back(self, action: Action, now: int) -> None:
        if action.kind == "update":
            self._update(action)
            return
        index, stage = action.microbatch_index, self.stages[action.stage_index]
        inputs, output = stage.inputs.pop(index), stage.outputs.pop(index)
        gradient = stage.gradients.pop(index, None)
        with self._weights(action, self.staleness[action.stage_index].backward[index], now=now):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        if action.stage_index:
            self.stages[action.stage_index - 1].gradients[index] = inputs.grad

    def _weights(self, action: Action, staleness: Staleness, *, now: int) -> Any:
        stage = self.stages[action.stage_index]
        if stage.rule is None or stage.optimizer is None:
            return nullcontext()
        assert staleness.version == stage.updates
        enter = stage.rule.forward if action.kind == "forward" else stage.rule.backward
        return enter(
            action.microbatch_index,
            staleness,
            stage.rates(self.step, last=len(self.data) - 1, now=now),
        )

    def _update(self, action: Action) -> None:
        index, stage = action.microbatch_index, self.stages[action.stage_index]
        parameters = [p for p in stage.module.parameters() if p.grad is not None]
        if self.step.max_norm is not None:
            stage.square_norms[index] = sum(
                float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None
            )
            self._clip(action.stage_index, index, parameters)
        if stage.optimizer is None or stage.rule is None:
            return
        for group, base in zip(stage.optimizer.param_groups, stage.base, strict=True):
            group["lr"] = base * self.step.rate(index)
        with stage.rule.update(index):
            stage.optimizer.step()
        for group, base in zip(stage.optimizer.param_groups, stage.base, strict=True):
            group["lr"] = base
        stage.optimizer.zero_grad()
        stage.updates += 1

    def _clip(self, rank: int, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """By the norm of this minibatch on this and later stages, and of the latest that earlier
        stages had finished when they sent what this stage received last.
        """
        assert self.step.max_norm is not None
        latest = self.stages[rank].last_forward
        square = sum(stage.square_norms[index] for stage in self.stages[rank:])
        square += sum(stage.finished_at[latest] for stage in self.stages[:rank])
        factor = min(1.0, self.step.max_norm / (square**0.5 + 1e-6))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
