"""How one block is placed on the mesh: where its parameters, gradients and optimizer state live.

The ZeRO stages (Rajbhandari et al., arXiv 1910.02054, section 5) are points of this space:

    stage   parameters    gradients     optimizer_state
    0       Replicate     Replicate     Replicate          data parallel
    1       Replicate     Replicate     Shard(0)
    2       Replicate     Shard(0)      Shard(0)
    3       Shard(0)      Shard(0)      Shard(0)
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank of the axis holds one slice along `dim`."""

    dim: int = 0

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial
_SHARD = re.compile(r"shard\(([0-9]{1,3})\)")


def parse_placement(text: object) -> Placement:
    """Read ``"replicate"``, ``"partial"`` or ``"shard(0)"``. Raises ValueError on anything else."""
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    if isinstance(text, str) and (found := _SHARD.fullmatch(text)):
        return Shard(int(found[1]))
    raise ValueError(f"{reprlib.repr(text)} is not a placement; write 'replicate' or 'shard(0)'")


@dataclass(frozen=True)
class OpConfig:
    """One legal placement on the data-parallel axis, and whether the forward is recomputed in the backward pass.

    Raises ValueError where a tensor would be sharded while one derived from it is whole on every rank.
    """

    parameters: Placement = Replicate()
    gradients: Placement = Replicate()
    optimizer_state: Placement = Replicate()
    recompute: bool = False

    def __post_init__(self) -> None:
        order = [self.parameters, self.gradients, self.optimizer_state]
        sharded = [isinstance(placement, Shard) for placement in order]
        if Partial() in order:
            raise ValueError("parameters, gradients and optimizer state rest whole or sharded, never partial")
        if sharded != sorted(sharded):
            raise ValueError(
                "sharded parameters need sharded gradients, and those a sharded optimizer state; got "
                f"parameters={self.parameters}, gradients={self.gradients}, optimizer_state={self.optimizer_state}"
            )
        if any(placement.dim != 0 for placement in order if isinstance(placement, Shard)):
            raise ValueError("data parallelism shards along dim 0 only")

    @property
    def zero_stage(self) -> int:
        """0 (data parallel), 1, 2 or 3."""
        return sum(isinstance(p, Shard) for p in (self.parameters, self.gradients, self.optimizer_state))

    @classmethod
    def zero(cls, stage: int, *, recompute: bool = False) -> OpConfig:
        """The configuration of a ZeRO stage."""
        if stage not in range(4):
            raise ValueError(f"a ZeRO stage is 0, 1, 2 or 3; got {stage}")
        placements: list[Placement] = [Shard(0) if stage >= needed else Replicate() for needed in (3, 2, 1)]
        parameters, gradients, optimizer_state = placements
        return cls(parameters, gradients, optimizer_state, recompute)
