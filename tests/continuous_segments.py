"""The continuous schedule in one process, action by action, in an order that ranks could take: the
slow twin of ranks that run it.

Each stage has an optimizer and a rule of its own. Passes keep graphs of all they compute, none of
which is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.check import Edges, run_order
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, continuous_schedule, lag_of
from lightning_topt.schedules.staleness import staleness

Named = Sequence[tuple[str, nn.Parameter]]


class SegmentTwin:
    """A twin has `block_of` (stage, name), `inputs_of` and `loss_of` (of a minibatch), `completes`
    and `scale_of` (of the rates with which a minibatch comes in).
    """

    def __init__(
        self,
        plan: ParallelPlan,
        parameters: Sequence[Named],
        optimizer: Callable[[Any], Optimizer],
        *,
        accumulate: int,
        clip: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.plan, self.parameters = plan, parameters
        self.accumulate, self.clip, self.clip_value = accumulate, clip, clip_value
        self.count, self.lag = len(plan.stages), CONTINUOUS_SCHEDULES[plan.schedule or ""]
        self.names = [[b.block for b in stage.blocks if b.block] for stage in plan.stages]
        self.optimizers = [optimizer(named) for named in parameters]
        self.base = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        rule = plan.weight_prediction
        assert rule is not None
        sizes = {"num_stages": self.count, "lag_per_hop": self.lag, "accumulate": accumulate}
        self.rules = [
            rule.on(each, stage=stage, **sizes) for stage, each in enumerate(self.optimizers)
        ]
        self.powers: list[dict[int, float]] = [{} for _ in range(self.count)]
        self.losses: dict[int, Tensor] = {}

    crossing: dict[tuple[int, int], tuple[Tensor, Tensor]]  # what a stage received, what it made
    block_of: Callable[[int, str], nn.Module]
    inputs_of: Callable[[int], Tensor]
    loss_of: Callable[[Tensor, int], Tensor]
    completes: Callable[[int], bool]
    scale_of: Callable[[int], float]

    def segment(self, start: int, stop: int) -> None:
        """Train from one drained state to the next."""
        schedule = continuous_schedule(
            num_ranks=self.count,
            num_minibatches=stop - start,
            lag_per_hop=self.lag,
            completes=lambda index: self.completes(index + start),
        )
        order, waiting = run_order(schedule, Edges(self.count, needs=None))
        assert not waiting
        self.start, self.stop, self.known = start, stop, staleness(schedule)
        self.crossing = {}
        for stage, action in order:
            getattr(self, action.kind)(stage, action.microbatch_index + start)
        for rule in self.rules:
            rule.drained()

    # ---- actions ---------------------------------------------------------------------------------

    def forward(self, stage: int, index: int) -> None:
        received = self.inputs_of(index)
        if stage:
            received = self.crossing[stage - 1, index][1].detach().requires_grad_()
        near = self.known[stage].forward[index - self.start]
        with self.rules[stage].forward(index, near, self.rates(stage, near.version, index)):
            self.placed(stage, index)
            made = received
            for name in self.names[stage]:
                block, again = self.block_of(stage, name), self.plan.configs[name].recompute
                made = checkpoint(block, made, use_reentrant=False) if again else block(made)
            if stage + 1 == self.count:
                made = self.loss_of(made, index)
                self.losses[index] = made.detach()
        self.crossing[stage, index] = received, made

    def placed(self, stage: int, index: int) -> None:
        """Called where the weights of a forward pass are in place."""

    def backward(self, stage: int, index: int) -> None:
        made, behind = self.crossing[stage, index][1], self.crossing.pop((stage + 1, index), None)
        gradient = torch.tensor(1 / self.accumulate) if behind is None else behind[0].grad
        near = self.known[stage].backward[index - self.start]
        rates = self.rates(stage, near.version, self.iteration(stage, index))
        with self.rules[stage].backward(index, near, rates):
            made.backward(gradient)  # type: ignore[no-untyped-call]

    def update(self, stage: int, index: int) -> None:
        optimizer = self.optimizers[stage]
        gradients = [p.grad for _, p in self.parameters[stage] if p.grad is not None]
        if self.clip is not None:
            factor = min(1.0, self.clip / (self.norm(stage, index, gradients) + 1e-6))
            torch._foreach_mul_(gradients, factor)
        if self.clip_value is not None:
            torch._foreach_clamp_min_(gradients, -self.clip_value)
            torch._foreach_clamp_max_(gradients, self.clip_value)
        for group, given in zip(optimizer.param_groups, self.groups(stage, index), strict=True):
            group["lr"] = given["lr"]
        with self.rules[stage].update(index):
            optimizer.step()
        optimizer.zero_grad()

    # ---- what they need --------------------------------------------------------------------------

    def iteration(self, stage: int, index: int) -> int:
        """The iteration in which a stage runs backward of a minibatch."""
        return min(index + lag_of(stage, num_ranks=self.count, lag_per_hop=self.lag), self.stop - 1)

    def groups(self, stage: int, index: int) -> list[dict[str, Any]]:
        """Hyperparameters with which a minibatch comes in."""
        rows = zip(self.optimizers[stage].param_groups, self.base[stage], strict=True)
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "lr": base * self.scale_of(index)}
            for group, base in rows
        ]

    def rates(self, stage: int, done: int, iteration: int) -> list[list[dict[str, Any]]]:
        """Those of updates after `done` of them, as known in an iteration; more than anybody asks
        for.
        """
        completing = [i for i in range(self.start, self.stop) if self.completes(i)][done:]
        steps = [*(min(each, iteration) for each in completing), *[iteration] * 40]
        return [self.groups(stage, index) for index in steps]

    def norm(self, stage: int, index: int, gradients: Sequence[Tensor]) -> float:
        """Of all stages: later ones' of the same update, earlier ones' of the last that they had
        done in the last iteration.
        """
        self.powers[stage][index] = sum(float(each.double().square().sum()) for each in gradients)
        total = sum(self.powers[later][index] for later in range(stage, self.count))
        for earlier in range(stage):
            lag = lag_of(earlier, num_ranks=self.count, lag_per_hop=self.lag)
            last = self.iteration(stage, index) - 1 - lag
            done = [i for i in self.powers[earlier] if i <= last or i < self.start]
            total += self.powers[earlier][max(done)] if done else 0.0
        return float(total**0.5)
