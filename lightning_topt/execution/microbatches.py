"""Microbatches of a plan without stages: forward and backward of each in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_topt.schedules.schedules import Schedule, single_stage_schedule


def run_in_turn(
    microbatches: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    weights: Sequence[float],
    *,
    around: Callable[[bool], AbstractContextManager[None]],
) -> Tensor:
    """Run forward and backward of every microbatch; gradients are those of the losses' sum with
    `weights`. Returns losses (n,).

    ``around(is_last)`` is the context of each pass.
    """
    losses: dict[int, Tensor] = {}
    for action in _schedule(len(microbatches)).actions[0]:
        index = action.microbatch_index
        with around(index == len(microbatches) - 1):
            if action.kind == "forward":
                losses[index] = loss_of(microbatches[index])
            else:
                (losses[index] * weights[index]).backward()  # type: ignore[no-untyped-call]
                losses[index] = losses[index].detach()
    return torch.stack([losses[index] for index in range(len(microbatches))])


_schedule: Callable[[int], Schedule] = cache(single_stage_schedule)
