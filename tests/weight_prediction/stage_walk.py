"""One stage of a continuous pipeline alone: its actions, with random gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_topt.schedules.schedules import continuous_schedule
from lightning_topt.schedules.staleness import staleness
from lightning_topt.weight_prediction import Prediction, StagePrediction

SHAPES = ((3, 4), (5,), (), (2, 3, 2))
# called inside each pass with its kind, minibatch and the rule
Seen = Callable[[str, int, StagePrediction], None]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(minibatch: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + minibatch)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """Two groups with hyperparameters of their own."""
    groups = [
        {"params": parameters[:2], "lr": 0.1},
        {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.1},
    ]
    if name == "SGD":
        return optim.SGD(groups, momentum=0.9)
    if name == "NAdam":
        return optim.NAdam(groups, betas=(0.99, 0.999), decoupled_weight_decay=True)
    return getattr(optim, name)(groups)


def rates_of(optimizer: Optimizer, count: int = 1) -> list[list[dict]]:
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return [groups] * count


def walk(
    rule: Prediction,
    optimizer: Optimizer,
    *,
    stage: int,
    num_stages: int,
    num_minibatches: int = 24,
    accumulate: int = 1,
    lag_per_hop: int = 1,
    seen: Seen = lambda kind, minibatch, at_work: None,
) -> StagePrediction:
    """Run all actions of `stage`; backward passes leave their gradients, updates step."""
    sizes = {"lag_per_hop": lag_per_hop, "accumulate": accumulate}
    schedule = continuous_schedule(num_ranks=num_stages, num_minibatches=num_minibatches, **sizes)
    of_stage = staleness(schedule)[stage]
    at_work = rule.on(optimizer, stage=stage, num_stages=num_stages, **sizes)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for action in schedule.actions[stage]:
        index, rates = action.microbatch_index, rates_of(optimizer)
        if action.kind == "forward":
            with at_work.forward(index, of_stage.forward[index], rates):
                seen("forward", index, at_work)
        elif action.kind == "backward":
            with at_work.backward(index, of_stage.backward[index], rates):
                seen("backward", index, at_work)
            for parameter, gradient in zip(
                parameters, gradients(index, parameters[0].dtype), strict=True
            ):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        else:
            with at_work.update(index):
                optimizer.step()
                seen("update", index, at_work)
            optimizer.zero_grad()
    return at_work


def values(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value.clone() for value in state.values() if isinstance(value, Tensor))
