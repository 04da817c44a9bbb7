"""`StageCosts`: seconds and bytes of one microbatch in each stage, and of what crosses between
stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_topt.schedules.schedule import Kind, Schedule

Edge = tuple[int, int]  # source stage, target stage


@dataclass(frozen=True)
class StageCosts:
    """All sequences are per stage, (stages,), and for one microbatch; stages may differ as models
    and devices do.

    `backward_input` and `backward_weight` are needed by schedules that split backward; an `update`
    takes no time unless given. `transfer_seconds` and `transfer_bytes` are by (source stage, target
    stage) in the direction of the forward pass, and the keys of the former say what stages need of
    one another; None: each needs the one before, at no cost. Gradients come back along the same
    edges, in `gradient_seconds` if that differs. Edges between stages of one rank cost nothing.
    With `overlapped` the network runs beside the ranks, with one link per pair of ranks and
    direction that carries one tensor at a time in the order in which they were made; without, a
    transfer occupies the sender after its pass and the receiver before its own.

    Bytes: `static_bytes` are held all the time; `activation_bytes` from the start of forward to the
    end of backward (or backward_input), with what was received and what was sent; `weight_bytes`
    from the end of backward_input to the end of backward_weight: autograd keeps the whole graph
    until then, and gradients of what operators with parameters made; `version_bytes`, of schedules
    that update as they go, is a copy of weights that an update is to replace but backward passes in
    flight still need (weight stashing); `forward_bytes` and `backward_bytes` while a pass runs,
    beyond those (in either half of a split backward).
    """

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float] | None = None
    backward_weight: Sequence[float] | None = None
    transfer_seconds: Mapping[Edge, float] | None = None
    gradient_seconds: Mapping[Edge, float] | None = None
    overlapped: bool = True
    static_bytes: Sequence[float] | None = None
    activation_bytes: Sequence[float] | None = None
    weight_bytes: Sequence[float] | None = None
    forward_bytes: Sequence[float] | None = None
    backward_bytes: Sequence[float] | None = None
    transfer_bytes: Mapping[Edge, float] | None = None
    update: Sequence[float] | None = None
    version_bytes: Sequence[float] | None = None

    def seconds(self, kind: Kind) -> Sequence[float] | None:
        """Return the seconds of a kind of pass in each stage, (stages,), None where they are not
        known.
        """
        found: Sequence[float] | None = getattr(self, kind)
        return found

    def edges(self, num_stages: int) -> tuple[Edge, ...]:
        """Return the edges between stages, in order of their sources."""
        if self.transfer_seconds is None:
            return tuple((stage, stage + 1) for stage in range(num_stages - 1))
        return tuple(sorted(self.transfer_seconds))

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError where costs do not fit the stages of `schedule`, are missing or are no
        times and sizes.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool):
                continue
            values = value.values() if isinstance(value, Mapping) else value
            if not isinstance(value, Mapping) and len(value) != schedule.num_stages:
                raise ValueError(
                    f"{field.name} has a number for each of {schedule.num_stages} stages; got "
                    f"{len(value)}"
                )
            if any(not (math.isfinite(each) and each >= 0) for each in values):
                raise ValueError(
                    f"{field.name} has finite numbers of at least 0; got {list(values)}"
                )
        for name in ("gradient_seconds", "transfer_bytes"):
            others = set(getattr(self, name) or ()) - set(self.edges(schedule.num_stages))
            if others:
                raise ValueError(
                    f"{name} has edges {sorted(others)} that transfer_seconds does not have"
                )
        if self.gradient_seconds is not None and len(self.gradient_seconds) < len(
            self.edges(schedule.num_stages)
        ):
            raise ValueError("gradient_seconds has every edge of transfer_seconds, or is None")
