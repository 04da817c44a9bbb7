"""A `Case` of continuous training in one process. For chains of blocks.

Each stage has a copy of the model. A parameter that stages share is the first one's, which has the
gradients of all; the others run forward of a minibatch with the weights that the first one did.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.weight_prediction.weights import unseen
from tests.continuous_segments import SegmentTwin
from tests.execution.pipeline.continuous_training import Case, Outcome
from tests.execution.pipeline.stage_models import Plain, make


class Twin(SegmentTwin):
    """All stages of a training."""

    def __init__(self, case: Case) -> None:
        self.case, count = case, len(case.plan.stages)
        self.models: list[Plain] = [make(case.model) for _ in range(count)]
        self.needed = [self.of_stage(stage) for stage in range(count)]  # by first name
        self.holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.needed):
            for name in names:
                self.holders.setdefault(name, []).append(stage)
        parameters = [
            [(name, p) for name, p in names.items() if self.holders[name][0] == stage]
            for stage, names in enumerate(self.needed)
        ]
        super().__init__(
            case.plan,
            parameters,
            lambda named: case.optimizer([p for _, p in named]),
            accumulate=case.accumulate,
            clip=case.clip,
        )
        # weights of shared parameters in forward passes, and parts of their gradients
        self.given: dict[tuple[str, int], Tensor] = {}
        self.parts: dict[tuple[str, int], list[Tensor]] = {}

    def of_stage(self, stage: int) -> dict[str, nn.Parameter]:
        model = self.models[stage]
        blocks = [b.block for b in self.case.plan.stages[stage].blocks if b.block]
        found = [p for name in blocks for p in model.get_submodule(name).parameters()]
        here = {id(p) for p in ([model.positions, *found] if stage == 0 else found)}
        return {name: p for name, p in model.named_parameters() if id(p) in here}

    def run(self) -> Outcome:
        """Train segment by segment: from one drained state to the next."""
        torch.manual_seed(5)
        steps, every = self.case.steps, self.case.drain_every or self.case.steps
        for start, stop in itertools.pairwise((*range(0, steps, every), steps)):
            self.segment(start, stop)
        first = self.models[0]
        for name, stages in self.holders.items():
            first.get_parameter(name).data.copy_(self.needed[stages[0]][name].data)
        return Outcome(losses=self.losses, state=first.state_dict())

    def completes(self, index: int) -> bool:
        return self.case.completes(index)

    def scale_of(self, index: int) -> float:
        return 1.0 if self.case.schedule is None else self.case.schedule(index)

    def block_of(self, stage: int, name: str) -> Any:
        model, block = self.models[stage], self.models[stage].get_submodule(name)
        return block if name != "embed" else lambda tokens: block(tokens) + model.positions

    def inputs_of(self, index: int) -> Tensor:
        return self.case.batch(index)

    def loss_of(self, made: Tensor, index: int) -> Tensor:
        return self.models[-1].loss(made, self.case.batch(index))

    # ---- parameters that stages share ------------------------------------------------------------

    def shared(self, stage: int, *, is_first: bool) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self.needed[stage].items()
            if len(self.holders[name]) > 1 and (self.holders[name][0] == stage) == is_first
        ]

    def forward(self, stage: int, index: int) -> None:
        for name, parameter in self.shared(stage, is_first=False):
            with torch.no_grad(), unseen([parameter]):
                parameter.copy_(self.given[name, index])
        super().forward(stage, index)

    def placed(self, stage: int, index: int) -> None:
        for name, parameter in self.shared(stage, is_first=True):
            self.given[name, index] = parameter.detach().clone()

    def backward(self, stage: int, index: int) -> None:
        super().backward(stage, index)
        for name, parameter in self.shared(stage, is_first=False) * self.completes(index):
            assert parameter.grad is not None
            self.parts.setdefault((name, index), []).insert(0, parameter.grad)
            parameter.grad = None

    def update(self, stage: int, index: int) -> None:
        for name, parameter in self.shared(stage, is_first=True):
            for part in self.parts.pop((name, index), []):
                assert parameter.grad is not None
                parameter.grad += part
        super().update(stage, index)
