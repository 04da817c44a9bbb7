"""Two simulators of a continuous pipeline in one process: a fast one, and its slow twin.

`ContinuousTraining` runs stages in turn; each stage has a prediction rule of the package. Stages
are modules of one input and one output, and may be without parameters. What a stage does when comes
from `lightning_topt.schedules.schedules`, iteration by iteration.

`DefinedTraining` is the reference for it and uses nothing of the package. It keeps every version of
all weights and runs minibatches one at a time. When passes run, with which weights, and what is
known of learning rates and norms then, is all written out once more. A minibatch's forward pass
runs through the whole model at once, with the weights that each stage would have had. Then every
storage gets what its stage would have for the backward pass, which also runs through the whole
model. tests/weight_prediction/test_simulators.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved
from torch.optim import Optimizer

from lightning_topt.schedules.schedules import Action, continuous_schedule, every, lag_of
from lightning_topt.schedules.staleness import Staleness, staleness
from lightning_topt.weight_prediction import Prediction, make_prediction

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Step(NamedTuple):
    """How updates are made.

    `rate` is the factor on all learning rates in the iteration of a minibatch, `max_norm` the
    largest norm.
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
    """Train `stages` as a continuous pipeline would.

    `optimizers` has one per stage, None where it has no parameters.
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
        """Train on all batches from one drained state to the next; return the losses.

        Minibatches are counted from 0.
        """
        for _ in self.iterations(batches):
            pass
        return self.losses

    def iterations(self, batches: Iterable[Batch]) -> Iterator[int]:
        """Train as `run` does, and give the number of each iteration when it is over.

        All stages then hold true weights, earlier ones without the updates in flight. Whoever stops
        early has a training that cannot go on.
        """
        data, count = list(batches), len(self.stages)
        schedule = continuous_schedule(num_ranks=count, num_minibatches=len(data), **self.sizes)
        self.data, self.staleness, self.losses = data, staleness(schedule), [0.0] * len(data)
        completes = every(self.sizes["accumulate"], num_minibatches=len(data))
        hop = self.sizes["lag_per_hop"]
        lags = [lag_of(rank, num_ranks=count, lag_per_hop=hop) for rank in range(count)]

        def back(rank: int, minibatch: int, iteration: int) -> None:
            if minibatch >= 0:
                self._back(Action("backward", rank, minibatch), iteration)
                if completes(minibatch):
                    self._back(Action("update", rank, minibatch), iteration)

        for iteration in range(len(data)):
            for rank in range(count):
                self._forward(Action("forward", rank, iteration))
            for rank in range(count):
                back(rank, iteration - lags[rank], iteration)
            yield iteration
        for rank in reversed(range(count)):  # what is left of a stage waits for the later ones only
            for minibatch in range(max(0, len(data) - lags[rank]), len(data)):
                back(rank, minibatch, len(data) - 1)
        for stage in self.stages:
            assert not stage.inputs and not stage.outputs and not stage.gradients
            stage.updates, stage.last_forward = 0, 0
            stage.square_norms.clear()
            stage.finished_at.clear()
            if stage.rule is not None:
                stage.rule.drained()

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
        """Clip by the norm of this minibatch on this and later stages.

        Of earlier stages counts the latest norm that they had finished when they sent what this
        stage received last.
        """
        assert self.step.max_norm is not None
        latest = self.stages[rank].last_forward
        square = sum(stage.square_norms[index] for stage in self.stages[rank:])
        square += sum(stage.finished_at[latest] for stage in self.stages[:rank])
        factor = min(1.0, self.step.max_norm / (square**0.5 + 1e-6))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)


# ---- the same by its definition, slow and plain: every version of all weights is kept ------------

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass
class Passes:
    """Updates of one stage around its passes, by minibatch.

    `version` are done before, `trip` more until stage 0 is done.
    """

    forward_version: dict[int, int] = field(default_factory=dict)
    backward_version: dict[int, int] = field(default_factory=dict)
    forward_trip: dict[int, int] = field(default_factory=dict)
    backward_trip: dict[int, int] = field(default_factory=dict)


def passes_by_clock(
    num_stages: int, num_minibatches: int, lag_per_hop: int, accumulate: int
) -> list[Passes]:
    """Run every stage by a clock on which a pass takes 1, an update and a transfer 0.

    Passes start as early as they can.
    """
    lags = [(num_stages - 1 - stage) * lag_per_hop for stage in range(num_stages)]
    ends: dict[tuple[str, int, int], float] = {}
    updates: list[list[float]] = [[] for _ in range(num_stages)]  # when they end
    before: dict[tuple[str, int, int], int] = {}
    clocks, lists = [0.0] * num_stages, []
    for lag in lags:
        steps = []
        for iteration in range(num_minibatches + lag):
            steps += [("forward", iteration)] if iteration < num_minibatches else []
            steps += [("backward", iteration - lag)] if iteration >= lag else []
        lists.append(steps)
    while any(lists):
        for stage, steps in enumerate(lists):
            if not steps:
                continue
            kind, minibatch = steps[0]
            if kind == "forward":
                source = ("forward", stage - 1, minibatch) if stage else None
            else:
                source = ("backward", stage + 1, minibatch) if stage < num_stages - 1 else None
            if source is not None and source not in ends:
                continue
            steps.pop(0)
            before[kind, stage, minibatch] = len(updates[stage])
            clocks[stage] = max(clocks[stage], ends[source] if source else 0.0) + 1
            ends[kind, stage, minibatch] = clocks[stage]
            if kind == "backward" and (
                (minibatch + 1) % accumulate == 0 or minibatch == num_minibatches - 1
            ):
                updates[stage].append(clocks[stage])
    found = [Passes() for _ in range(num_stages)]
    for (kind, stage, minibatch), version in before.items():
        done = updates[0][minibatch // accumulate]  # stage 0 has made the minibatch's update
        # but for the minibatch's own one
        trip = sum(end <= done for end in updates[stage]) - version - 1
        getattr(found[stage], f"{kind}_version")[minibatch] = version
        getattr(found[stage], f"{kind}_trip")[minibatch] = trip
    return found


@dataclass
class Snapshot:
    """The weights and the optimizer's state after some updates, by name of the parameter."""

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


class DefinedTraining:
    """Trains `module` as a continuous pipeline by `rule`.

    Args:
        stage_of: the stage of every parameter, by its name; a parameter is on one stage.
        loss: of the module and a batch.
        make_optimizer: from the names and parameters of one stage.
        rate: factor on the learning rates of all groups in the iteration of a minibatch.
        max_norm: gradients are clipped by their norm: over this and later stages that of the
            update's minibatches, of earlier stages that of the latest update they had made when
            they ran the forward pass that this stage has run last.
        error_feedback: of two versions.
        seed_of: a seed to set before each forward pass, by minibatch.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_of: Mapping[str, int],
        num_stages: int,
        loss: Callable[[nn.Module, Any], Tensor],
        make_optimizer: Callable[[Named], Optimizer],
        rule: str,
        rate: Callable[[int], float] = lambda minibatch: 1.0,
        max_norm: float | None = None,
        lag_per_hop: int = 1,
        accumulate: int = 1,
        error_feedback: bool = False,
        seed_of: Callable[[int], int] | None = None,
    ) -> None:
        self.module, self.loss, self.rule, self.rate, self.max_norm = (
            module,
            loss,
            rule,
            rate,
            max_norm,
        )
        self.num_stages, self.hop, self.accumulate = num_stages, lag_per_hop, accumulate
        self.seed_of = seed_of
        self.error_feedback = error_feedback
        parameters = dict(module.named_parameters())
        assert parameters.keys() == stage_of.keys()
        self.own = [
            [(n, p) for n, p in parameters.items() if stage_of[n] == s] for s in range(num_stages)
        ]
        self.optimizers = [make_optimizer(own) if own else None for own in self.own]
        self.history: list[list[Snapshot]] = [
            [self._snapshot(stage)] for stage in range(num_stages)
        ]
        self.norms: list[list[float]] = []  # squares of each stage, by update

    def run(self, batches: Sequence[Any]) -> list[float]:
        """Train on all batches from one drained state to the next; return the losses.

        The module is left with the trained weights. Minibatches and versions are counted from 0 in
        every run, and nothing but weights and optimizers' states is remembered
        from one to the next.
        """
        self.count = len(batches)
        self.history = [[versions[-1]] for versions in self.history]
        self.norms = [[] for _ in self.history]
        # by stage and update, without feedback: they say what an update of fresh gradients had been
        self.moves: list[list[dict[str, Tensor]]] = [[] for _ in self.history]
        self.passes = passes_by_clock(self.num_stages, self.count, self.hop, self.accumulate)
        losses = []
        for minibatch, batch in enumerate(batches):
            if self.seed_of is not None:
                torch.manual_seed(self.seed_of(minibatch))
            self._put("forward", minibatch)
            loss = self.loss(self.module, batch)
            losses.append(loss.item())
            self._put("backward", minibatch)
            (loss / self.accumulate).backward()
            if (minibatch + 1) % self.accumulate == 0 or minibatch == self.count - 1:
                self._update(minibatch)
        for stage in range(self.num_stages):
            self._write(stage, self.history[stage][-1].weights)
        return losses

    def _put(self, kind: str, minibatch: int) -> None:
        for stage in range(self.num_stages):
            self._write(stage, self._weights(kind, minibatch, stage))

    def _weights(self, kind: str, minibatch: int, stage: int) -> dict[str, Tensor]:
        """The rules, one by one."""
        passes, history, own = self.passes[stage], self.history[stage], minibatch // self.accumulate
        version = getattr(passes, f"{kind}_version")[minibatch]
        trip = getattr(passes, f"{kind}_trip")[minibatch]
        if self.rule == "none":
            return history[version].weights
        if self.rule in ("stash", "nesterov"):
            return history[passes.forward_version[minibatch]].weights
        if self.rule == "two_versions":
            return history[max(own - 1, 0) if self.num_stages > 1 else own].weights
        ahead = trip if self.rule == "spectrain" else own - version
        # learning rates are known up to the iteration in which the pass runs; when draining, up to
        # the last one
        now = minibatch if kind == "forward" else min(minibatch + self._lag(stage), self.count - 1)
        factors = [
            self.rate(min((version + n + 1) * self.accumulate - 1, now))
            for n in range(max(ahead, 1))
        ]
        return self._predicted(stage, history[version], ahead, factors)

    def _lag(self, stage: int) -> int:
        return (self.num_stages - 1 - stage) * self.hop

    def _predicted(
        self, stage: int, snapshot: Snapshot, ahead: int, factors: list[float]
    ) -> dict[str, Tensor]:
        optimizer, found = self.optimizers[stage], {}
        assert optimizer is not None or not self.own[stage]
        for name, parameter in self.own[stage]:
            weight, state = snapshot.weights[name], snapshot.state[name]
            group = next(
                g for g in optimizer.param_groups if any(parameter is p for p in g["params"])
            )
            if not state or ahead == 0:
                found[name] = weight
            elif self.rule == "multistep":
                follow = (
                    sgd_without_gradients
                    if isinstance(optimizer, optim.SGD)
                    else adam_without_gradients
                )
                found[name] = follow(
                    weight, state, group, [group["lr"] * factor for factor in factors]
                )
            else:
                found[name] = weight - ahead * group["lr"] * factors[0] * last_direction(
                    optimizer, state, group
                )
        return found

    def _update(self, minibatch: int) -> None:
        """Update all stages with this minibatch, one after the other.

        Each starts from its newest weights.
        """
        squares = [
            sum(float(p.grad.norm()) ** 2 for _, p in own if p.grad is not None) for own in self.own
        ]
        for stage, square in enumerate(squares):
            self.norms[stage].append(square)
        for stage, optimizer in enumerate(self.optimizers):
            if optimizer is None:
                self.history[stage].append(self._snapshot(stage))
                continue
            self._write(stage, self.history[stage][-1].weights)
            if self.max_norm is not None:
                norm = math.sqrt(sum(squares[stage:]) + self._earlier_squares(stage, minibatch))
                for _, parameter in self.own[stage]:
                    if parameter.grad is not None:
                        parameter.grad *= min(1.0, self.max_norm / (norm + 1e-6))
            rates = [group["lr"] for group in optimizer.param_groups]
            factor = self.rate(minibatch)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._feed_back(stage)
            self.history[stage].append(self._snapshot(stage))
        self.module.zero_grad()

    def _feed_back(self, stage: int) -> None:
        """Two versions: the error of an update is what the next one's move adds to its own.

        An update's gradient is of the weights that the one before began with. So the one before
        should have made this move. The first one of a run did: its gradient was not old.
        """
        before, moves = self.history[stage][-1].weights, self.moves[stage]
        moves.append({n: p.detach() - before[n] for n, p in self.own[stage]})
        if self.error_feedback and self.num_stages > 1 and len(moves) > 2:
            missed = {n: moves[-1][n] - moves[-2][n] for n in before}
            self._write(stage, {n: before[n] + moves[-1][n] + missed[n] for n in before})

    def _earlier_squares(self, stage: int, minibatch: int) -> float:
        # the forward pass that this stage has run last
        latest = min(minibatch + self._lag(stage), self.count - 1)
        found = 0.0
        for earlier in range(stage):
            done = self.passes[earlier].forward_version[latest]
            found += self.norms[earlier][done - 1] if done else 0.0
        return found

    def _snapshot(self, stage: int) -> Snapshot:
        optimizer = self.optimizers[stage]
        copied = {name: parameter.detach().clone() for name, parameter in self.own[stage]}
        state = {
            name: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in held.items()
            }
            for name, parameter in self.own[stage]
            for held in [optimizer.state.get(parameter, {}) if optimizer else {}]
        }
        return Snapshot(copied, state)

    def _write(self, stage: int, weights: Mapping[str, Tensor]) -> None:
        """Into the storages, of which autograd has saved some."""
        for name, parameter in self.own[stage]:
            with torch.no_grad(), preserved(parameter):
                parameter.copy_(weights[name])


def last_direction(
    optimizer: Optimizer, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Tensor:
    """The direction of the last update, without decoupled weight decay.

    That is SpecTrain's v.
    """
    if isinstance(optimizer, optim.SGD):
        return state["momentum_buffer"]
    (beta1, beta2), steps = group["betas"], int(state["step"])
    mean = state["exp_avg"] / (1 - beta1**steps)
    square = state["exp_avg_sq"] / (1 - beta2**steps)
    return mean / (square.sqrt() + group["eps"])


def sgd_without_gradients(
    weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], rates: Sequence[float]
) -> Tensor:
    """FTPipe: v <- momentum v + (1 - dampening) decay W; W <- W - lr v."""
    velocity = state["momentum_buffer"]
    for rate in rates:
        gradient = group["weight_decay"] * weight
        velocity = group["momentum"] * velocity + (1 - group["dampening"]) * gradient
        weight = weight - rate * (
            gradient + group["momentum"] * velocity if group["nesterov"] else velocity
        )
    return weight


def adam_without_gradients(
    weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], rates: Sequence[float]
) -> Tensor:
    """FTPipe: m <- beta1 m; the second moment stays.

    AdamW decays before each step, Adam by its gradient.
    """
    (beta1, beta2), mean = group["betas"], state["exp_avg"]
    for ahead, rate in enumerate(rates, start=1):
        steps = int(state["step"]) + ahead
        if group["decoupled_weight_decay"]:
            weight = weight * (1 - rate * group["weight_decay"])
            mean = beta1 * mean
        else:
            mean = beta1 * mean + (1 - beta1) * group["weight_decay"] * weight
        square = state["exp_avg_sq"] / (1 - beta2**steps)
        weight = weight - rate * mean / (1 - beta1**steps) / (square.sqrt() + group["eps"])
    return weight
