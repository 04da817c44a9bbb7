"""The order in which a rank runs its microbatches, complete before the first tensor moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward"]
_PASSES: tuple[Pass, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch; `exchanges`: its gradients are exchanged, with those accumulated before."""

    kind: Pass
    microbatch_index: int
    exchanges: bool = False


def single_stage_schedule(num_microbatches: int) -> tuple[Action, ...]:
    """Return data parallelism's schedule: forward and backward in turn, gradients exchanged with the last microbatch.

    Raises ValueError for less than one microbatch.
    """
    if num_microbatches < 1:
        raise ValueError(f"a step has at least one microbatch, got {num_microbatches}")
    return tuple(
        Action(kind, index, exchanges=index == num_microbatches - 1)
        for index in range(num_microbatches)
        for kind in _PASSES
    )
