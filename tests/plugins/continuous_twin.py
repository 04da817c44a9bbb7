"""A fit under a schedule that never flushes in one process, action by action: what a Trainer on
ranks has to equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, lag_of
from tests.continuous_segments import SegmentTwin


class ChainTwin(SegmentTwin):
    """`module` is a chain of the blocks of `plan`, trained on `batches` (inputs, targets), one
    update per `accumulate` of them and at the ends of epochs; drained before the batches in `ends`,
    and at the end. ``factor(n)`` is that of update n's rate.

    Every stage has an optimizer and a rule of its own; passes keep whole graphs, none of which is
    shared.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ParallelPlan,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer],
        ends: Sequence[int] = (),
        epoch: int | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        clip_value: float | None = None,
        factor: Callable[[int], float] = lambda update: 1.0,
    ) -> None:
        self.module, self.plan, self.batches, self.ends = module, plan, batches, ends
        self.accumulate, self.clip, self.clip_value, self.factor = (
            accumulate,
            clip,
            clip_value,
            factor,
        )
        self.epoch = len(batches) if epoch is None else epoch
        self.updates = [
            0,
            *itertools.accumulate(self.completes(index) for index in range(len(batches))),
        ]
        self.count, self.lag = len(plan.stages), CONTINUOUS_SCHEDULES[plan.schedule or ""]
        self.names = [
            [block.block for block in stage.blocks if block.block] for stage in plan.stages
        ]
        self.parameters = [
            [
                (name, p)
                for name, p in module.named_parameters()
                if any(name.startswith(f"{block}.") for block in names)
            ]
            for names in self.names
        ]
        self.optimizers = [optimizer(named) for named in self.parameters]
        self.base = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        rule = plan.weight_prediction
        assert rule is not None
        sizes = {"num_stages": self.count, "lag_per_hop": self.lag, "accumulate": accumulate}
        self.rules = [
            rule.on(each, stage=stage, **sizes) for stage, each in enumerate(self.optimizers)
        ]
        self.powers: list[dict[int, float]] = [{} for _ in range(self.count)]
        self.losses: dict[int, float] = {}

    @property
    def state(self) -> dict[str, Tensor]:
        """The module's."""
        return self.module.state_dict()

    def train(self) -> ChainTwin:
        """Train from one drained state to the next."""
        for start, stop in itertools.pairwise(sorted({0, *self.ends, len(self.batches)})):
            self.segment(start, stop, self.completes)
        return self

    def completes(self, index: int) -> bool:
        place = index % self.epoch + 1
        return place % self.accumulate == 0 or place == self.epoch or index + 1 == len(self.batches)

    # ---- actions ---------------------------------------------------------------------------------

    def forward(self, stage: int, index: int) -> None:
        inputs, targets = self.batches[index]
        received = (
            inputs if stage == 0 else self.crossing[stage - 1, index][1].detach().requires_grad_()
        )
        staleness = self.known[stage].forward[index - self.start]
        with self.rules[stage].forward(
            index, staleness, self.rates(stage, staleness.version, index)
        ):
            made = received
            for name in self.names[stage]:
                block = self.module.get_submodule(name)
                again = self.plan.configs[name].recompute
                made = checkpoint(block, made, use_reentrant=False) if again else block(made)
            if stage + 1 == self.count:
                made = nn.functional.cross_entropy(made, targets)
                self.losses[index] = float(made.detach())
        self.crossing[stage, index] = received, made

    def backward(self, stage: int, index: int) -> None:
        made, behind = self.crossing[stage, index][1], self.crossing.pop((stage + 1, index), None)
        gradient = torch.tensor(1 / self.accumulate) if behind is None else behind[0].grad
        staleness = self.known[stage].backward[index - self.start]
        with self.rules[stage].backward(
            index, staleness, self.rates(stage, staleness.version, self.iteration(stage, index))
        ):
            made.backward(gradient)  # type: ignore[no-untyped-call]

    def update(self, stage: int, index: int) -> None:
        optimizer, gradients = (
            self.optimizers[stage],
            [p.grad for _, p in self.parameters[stage] if p.grad is not None],
        )
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

    def groups(self, stage: int, index: int) -> list[dict[str, Any]]:
        """Hyperparameters with which a batch comes in."""
        rows = zip(self.optimizers[stage].param_groups, self.base[stage], strict=True)
        scale = self.factor(self.updates[index])
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "lr": base * scale}
            for group, base in rows
        ]

    def rates(self, stage: int, done: int, iteration: int) -> list[list[dict[str, Any]]]:
        """Those of updates after `done` of them, as known in an iteration; more than anybody asks
        for.
        """
        completing = [index for index in range(self.start, self.stop) if self.completes(index)][
            done:
        ]
        return [
            self.groups(stage, index)
            for index in [*(min(each, iteration) for each in completing), *[iteration] * 40]
        ]

    def norm(self, stage: int, index: int, gradients: Sequence[Tensor]) -> float:
        """Of all stages: later ones' of the same update, earlier ones' of the last that they had
        done in the last iteration.
        """
        self.powers[stage][index] = sum(
            float(gradient.double().square().sum()) for gradient in gradients
        )
        total = sum(self.powers[later][index] for later in range(stage, self.count))
        for earlier in range(stage):
            last = (
                self.iteration(stage, index)
                - 1
                - lag_of(earlier, num_ranks=self.count, lag_per_hop=self.lag)
            )
            done = [i for i in self.powers[earlier] if i <= last or i < self.start]
            total += self.powers[earlier][max(done)] if done else 0.0
        return float(total**0.5)
