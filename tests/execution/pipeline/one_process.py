"""The continuous schedule in one process, action by action: the slow twin of ranks that run it. For
chains of blocks.

Each stage has a copy of the model. A parameter that stages share is the first one's, which has the
gradients of all; the others run forward of a minibatch with the weights that the first one did.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, lag_of
from lightning_topt.weight_prediction import StagePrediction
from lightning_topt.weight_prediction.weights import unseen
from tests.continuous_segments import SegmentTwin
from tests.execution.pipeline.continuous_training import Case, Outcome
from tests.execution.pipeline.stage_models import Plain, cut, make


class Twin(SegmentTwin):
    """All stages of a training, with an optimizer and a rule each. Passes keep whole graphs, none
    of which is shared.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.found = case, Outcome()
        self.count, self.lag = len(case.plan.stages), CONTINUOUS_SCHEDULES[case.plan.schedule or ""]
        self.names = cut(self.count)
        self.models: list[Plain] = [make(case.model) for _ in range(self.count)]
        self.needed = [self.of_stage(stage) for stage in range(self.count)]  # by first name
        self.holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.needed):
            for name in names:
                self.holders.setdefault(name, []).append(stage)
        self.parameters = [
            [p for name, p in names.items() if self.holders[name][0] == stage]
            for stage, names in enumerate(self.needed)
        ]
        # weights of shared parameters in forward passes
        self.given: dict[tuple[str, int], Tensor] = {}
        self.parts: dict[tuple[str, int], list[Tensor]] = {}  # and their gradients
        self.optimizers = [case.optimizer(each) for each in self.parameters]
        self.base = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.rules: list[StagePrediction] = []
        rule = case.plan.weight_prediction
        assert rule is not None
        for stage, optimizer in enumerate(self.optimizers):
            sizes = {
                "num_stages": self.count,
                "lag_per_hop": self.lag,
                "accumulate": case.accumulate,
            }
            self.rules.append(rule.on(optimizer, stage=stage, **sizes))
        self.powers: list[dict[int, Tensor]] = [{} for _ in range(self.count)]

    def of_stage(self, stage: int) -> dict[str, nn.Parameter]:
        model, blocks = self.models[stage], self.names[stage]
        found = [p for name in blocks for p in model.get_submodule(name).parameters()]
        here = {id(p) for p in ([model.positions, *found] if stage == 0 else found)}
        return {name: p for name, p in model.named_parameters() if id(p) in here}

    def run(self) -> Outcome:
        """Train segment by segment: from one drained state to the next."""
        torch.manual_seed(5)
        ends = range(
            self.case.drain_every or self.case.steps,
            self.case.steps,
            self.case.drain_every or self.case.steps,
        )
        for start, stop in itertools.pairwise((0, *ends, self.case.steps)):
            self.segment(start, stop, self.case.completes)
        whole = self.models[0]
        for name, stages in self.holders.items():
            whole.get_parameter(name).data.copy_(self.needed[stages[0]][name].data)
        self.found.state = whole.state_dict()
        return self.found

    def rates(self, stage: int, done: int, iteration: int) -> list[list[dict[str, object]]]:
        """Hyperparameters of updates after `done` of them, as known in an iteration; more than
        anybody asks for.
        """
        completing = [
            index for index in range(self.start, self.stop) if self.case.completes(index)
        ][done:]
        steps = [min(index, iteration) for index in completing] + [iteration] * 40
        return [self.groups(stage, step) for step in steps]

    def groups(self, stage: int, step: int) -> list[dict[str, object]]:
        factor = 1.0 if self.case.schedule is None else self.case.schedule(step)
        rows = zip(self.optimizers[stage].param_groups, self.base[stage], strict=True)
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "lr": base * factor}
            for group, base in rows
        ]

    def forward(self, stage: int, index: int) -> None:
        staleness = self.known[stage].forward[index - self.start]
        tokens = self.case.batch(index)
        model = self.models[stage]
        for name in self.needed[stage]:
            if self.holders[name][0] != stage:
                with torch.no_grad(), unseen([self.needed[stage][name]]):
                    self.needed[stage][name].copy_(self.given[name, index])
        received = (
            tokens if stage == 0 else self.crossing[stage - 1, index][1].detach().requires_grad_()
        )
        with self.rules[stage].forward(
            index, staleness, self.rates(stage, staleness.version, index)
        ):
            for name, parameter in self.needed[stage].items():
                if self.holders[name][0] == stage and len(self.holders[name]) > 1:
                    self.given[name, index] = parameter.detach().clone()
            x = received
            for name in self.names[stage]:
                module = model.get_submodule(name)
                again = self.case.plan.configs[name].recompute
                x = checkpoint(module, x, use_reentrant=False) if again else module(x)
                x = x + model.positions if name == "embed" else x
            if stage + 1 == self.count:
                x = model.loss(x, tokens)
                self.found.losses[index] = x.detach()
        self.crossing[stage, index] = received, x

    def backward(self, stage: int, index: int) -> None:
        staleness = self.known[stage].backward[index - self.start]
        made = self.crossing[stage, index][1]
        behind = self.crossing.pop((stage + 1, index), None)
        gradient = torch.tensor(1 / self.case.accumulate) if behind is None else behind[0].grad
        with self.rules[stage].backward(
            index, staleness, self.rates(stage, staleness.version, self.iteration(stage, index))
        ):
            made.backward(gradient)
        if self.case.completes(index):
            for name, parameter in self.needed[stage].items():
                if self.holders[name][0] != stage:
                    assert parameter.grad is not None
                    self.parts.setdefault((name, index), []).insert(0, parameter.grad)
                    parameter.grad = None

    def update(self, stage: int, index: int) -> None:
        optimizer: Optimizer = self.optimizers[stage]
        for name, parameter in self.needed[stage].items():
            for part in self.parts.pop((name, index), []) if self.holders[name][0] == stage else []:
                assert parameter.grad is not None
                parameter.grad += part
        if self.case.clip is not None:
            self.clip(stage, index, self.case.clip)
        for group, given in zip(optimizer.param_groups, self.groups(stage, index), strict=True):
            group["lr"] = given["lr"]
        with self.rules[stage].update(index):
            optimizer.step()
        optimizer.zero_grad()

    def clip(self, stage: int, index: int, most: float) -> None:
        gradients = [p.grad for p in self.parameters[stage] if p.grad is not None]
        self.powers[stage][index] = torch.stack(
            [g.double().square().sum() for g in gradients]
        ).sum()
        total = sum(self.powers[later][index] for later in range(stage, self.count))
        for earlier in range(stage):
            lag = lag_of(earlier, num_ranks=self.count, lag_per_hop=self.lag)
            last = self.iteration(stage, index) - 1 - lag
            finished = [i for i in self.powers[earlier] if i <= last or i < self.start]
            total += self.powers[earlier][max(finished)] if finished else 0.0
        norm = float(total) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, most / (norm + 1e-6)))
