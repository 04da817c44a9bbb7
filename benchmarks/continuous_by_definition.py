"""A continuous pipeline by its definition, slow and plain: every version of all weights is kept,
minibatches run one at a time.

The reference of what runs and predicts fast. Nothing here is the package's: when passes run, with
which weights, what is known of learning rates and norms then, is all written out once more.

A minibatch's forward pass runs through the whole model at once, with the weights that each stage
would have had; then every storage gets what its stage would have for the backward pass, which runs
through the whole model too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved
from torch.optim import Optimizer

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass
class Passes:
    """Updates of one stage around its passes, by minibatch: `version` done before, `trip` more
    until stage 0 is done.
    """

    forward_version: dict[int, int] = field(default_factory=dict)
    backward_version: dict[int, int] = field(default_factory=dict)
    forward_trip: dict[int, int] = field(default_factory=dict)
    backward_trip: dict[int, int] = field(default_factory=dict)


def passes_by_clock(
    num_stages: int, num_minibatches: int, lag_per_hop: int, accumulate: int
) -> list[Passes]:
    """Run every stage by a clock on which a pass takes 1, an update and a transfer 0; passes start
    as early as they can.
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
        annealing_updates: PipeMare's.
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
        annealing_updates: int = 1000,
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
        self.annealing, self.seed_of = annealing_updates, seed_of
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
        self.made = 0  # updates in earlier runs

    def run(self, batches: Sequence[Any]) -> list[float]:
        """Train on all batches from one drained state to the next; return the losses.

        The module is left with the trained weights. Minibatches and versions are counted from 0 in
        every run, and nothing but weights, optimizers' states and PipeMare's count is remembered
        from one to the next.
        """
        self.count = len(batches)
        self.made += len(self.history[0]) - 1
        self.history = [[versions[-1]] for versions in self.history]
        self.norms = [[] for _ in self.history]
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
        if self.rule in ("none", "pipemare"):
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
        """All stages' updates with this minibatch; each from its newest weights, as they are made
        one after the other.
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
            factor = self.rate(minibatch) * self._pipemare(
                stage, self.made + len(self.history[stage]) - 1
            )
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.history[stage].append(self._snapshot(stage))
        self.module.zero_grad()

    def _earlier_squares(self, stage: int, minibatch: int) -> float:
        # the forward pass that this stage has run last
        latest = min(minibatch + self._lag(stage), self.count - 1)
        found = 0.0
        for earlier in range(stage):
            done = self.passes[earlier].forward_version[latest]
            found += self.norms[earlier][done - 1] if done else 0.0
        return found

    def _pipemare(self, stage: int, update: int) -> float:
        if self.rule != "pipemare":
            return 1.0
        power = 1 - min(update / self.annealing, 1)
        return 1 / max(self._lag(stage) / self.accumulate, 1) ** power

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
    """The direction of the last update, without decoupled weight decay; SpecTrain's v and
    PipeOptim's dW.
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
    """FTPipe: m <- beta1 m; the second moment stays; AdamW decays before each step, Adam by its
    gradient.
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
