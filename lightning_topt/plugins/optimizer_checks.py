"""Ranks can share an optimizer step where this holds: equal gradients, equal optimizers, whole
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.hook import equal_parameters
from lightning_topt.optim.adaptive_step import AdaptiveStep
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.exchange_steps import ExchangeSteps
from lightning_topt.plugins.local_steps_strategy import LocalStepsStrategy


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError unless every rank has whole parameters and equal gradients under
    `strategy`.
    """
    name, where = type(strategy).__name__, 'it runs under strategy="ddp" and "topt_compressed"'
    if isinstance(strategy, AutoParallelStrategy):
        raise ValueError(
            f'{name} shares the optimizer step itself where its plan says so (plan="zero1" always '
            "does): leave "
            f"ParallelOptimizerStep out; {where}"
        )
    if isinstance(strategy, LocalStepsStrategy):
        raise ValueError(
            f"under {name} ranks train alone, each with its own gradients, so there is no common "
            f"step to share: leave ParallelOptimizerStep out; {where}"
        )
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(
            "ParallelOptimizerStep shares the step of whole parameters that have the same gradient "
            f"on all ranks, which {name} does not keep: leave it out (a strategy that shards "
            f"parameters shards their step too); {where}"
        )
    if getattr(strategy, "_model_averager", None) is not None:
        raise ValueError(
            "under post-local SGD (ddp_comm_state=PostLocalSGDState) gradients differ between "
            "ranks, so there is no common step to share: leave ParallelOptimizerStep or that "
            "communication hook out"
        )


def check_reduce_scatter(strategy: Strategy) -> None:
    """Raise ValueError where gradients are exchanged in another way than DDP's own all-reduce."""
    if (
        not isinstance(strategy, DDPStrategy)
        or isinstance(strategy, ExchangeSteps)
        or strategy._ddp_comm_hook is not None
    ):
        raise ValueError(
            "reduce_scatter=True exchanges gradients in place of DDP's all-reduce, and "
            f"{type(strategy).__name__} has its own exchange (a communication hook): leave one of "
            "them out"
        )


def optimizers_of(trainer: pl.Trainer) -> list[Optimizer]:
    """Return the user's optimizers, without Lightning's wrapper.

    Raises ValueError for one that shards its state itself, and for sharded parameters.
    """
    found: list[Optimizer] = [
        getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.strategy.optimizers
    ]
    for optimizer in found:
        name = type(optimizer).__name__
        if isinstance(optimizer.__dict__.get("step"), AdaptiveStep):
            raise ValueError(
                f"the state of {name} is spread over the ranks since a fit that ended with an "
                "exception: build a new one in configure_optimizers, and go on from a checkpoint"
            )
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"{name} shards its state over the ranks by itself: leave ParallelOptimizerStep "
                "out, or give it the optimizer that is inside"
            )
        if any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)):
            raise ValueError(
                f"{name} has sharded parameters (DTensor), whose step is shared already: leave "
                "ParallelOptimizerStep out"
            )
    return found


def reduced_parameters(strategy: Strategy) -> frozenset[Tensor]:
    """Return the parameters that DDP keeps equal, those that need a gradient when the module is
    wrapped: call it soon after that.
    """
    assert isinstance(strategy.model, DistributedDataParallel)
    return frozenset(
        equal_parameters(strategy.model.module, strategy.model.parameters_to_ignore).values()
    )


def check_equal_optimizers(
    optimizers: Sequence[Optimizer], *, names: Mapping[Tensor, str], group: dist.ProcessGroup
) -> None:
    """Collective call on `group`: raise ValueError, on all ranks, naming the first difference from
    rank 0's optimizers.

    Compared are classes, groups with their numbers and switches, and parameters (`names`, shapes,
    dtypes, and whether they are trained), in their order.
    """
    own = _describe(optimizers, names)
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    missing = ("", "missing")
    for rank, theirs in enumerate(everyone):
        for (place, value), (first_place, first) in zip_longest(
            theirs, everyone[0], fillvalue=missing
        ):
            if (place, value) != (first_place, first):
                value, first = (
                    (value, first)
                    if place == first_place
                    else (f"{place} {value}", f"{first_place} {first}")
                )
                raise ValueError(
                    f"ranks can share the step of equal optimizers only: {place or first_place} is "
                    f"{value.strip()} on rank {rank} and {first.strip()} on rank 0; make "
                    "configure_optimizers do the same on all ranks"
                )


def _describe(
    optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> list[tuple[str, str]]:
    """Return (place, what is there) of everything that must be equal, in order."""
    entries: list[tuple[str, str]] = []
    for number, optimizer in enumerate(optimizers):
        entries.append((f"optimizer {number}", type(optimizer).__qualname__))
        for index, group in enumerate(optimizer.param_groups):
            place = f"optimizer {number}, group {index}"
            entries += [
                (f"{place}, {key}", repr(value))
                for key, value in sorted(group.items())
                if _is_plain(value)
            ]
            for position, parameter in enumerate(group["params"]):
                name = names.get(parameter, "(not of the module)")
                frozen = "" if parameter.requires_grad else ", frozen"
                entries.append(
                    (
                        f"{place}, parameter {position}",
                        f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}",
                    )
                )
    return entries


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | str)
