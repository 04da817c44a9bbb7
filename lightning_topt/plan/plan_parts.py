"""Parts of a plan: how a block runs, what a stage runs, what is expected; as values, and read from
plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_topt.costs.plain_values import number, shown
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.plan_values import config_from_dict


class PlanError(ValueError):
    """A plan file that cannot be read, or a plan that does not belong to this model or these
    ranks.
    """


@dataclass(frozen=True)
class BlockPlan:
    """A `BlockPlan` says how one block runs: `block` is the name of a module, or ``""`` for
    everything outside the named ones.
    """

    block: str
    config: OpConfig


@dataclass(frozen=True)
class StagePlan:
    """The part of a model that one group of ranks runs: its blocks. ``""`` is all that is outside
    the named blocks of a plan; a stage runs those calls of it that come after its first named call
    and before that of the next stage.

    Raises PlanError when a block appears twice.
    """

    blocks: tuple[BlockPlan, ...]

    def __post_init__(self) -> None:
        names = [block.block for block in self.blocks]
        if len(set(names)) != len(names):
            raise PlanError("a block appears twice in the plan, in one stage")


@dataclass(frozen=True)
class Prediction:
    """A `Prediction` is what the cost model expects of one step on each rank: seconds and bytes."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float
    exposed_communication_seconds: float


def stage_from_value(entry: Any, mesh: Mesh, where: str) -> StagePlan:
    """Read a stage; `where` names it in errors."""
    if not isinstance(entry, Mapping) or set(entry) != {"blocks"}:
        raise ValueError(f"{where} must be a mapping with the entry 'blocks', got {shown(entry)}")
    if not isinstance(entry["blocks"], list | tuple):
        raise ValueError(f"blocks must be a list, got {shown(entry['blocks'])}")
    return StagePlan(
        tuple(_block(block, mesh, index) for index, block in enumerate(entry["blocks"]))
    )


def prediction_from_value(entry: Any) -> Prediction:
    """Read a prediction."""
    known = {field.name for field in dataclasses.fields(Prediction)}
    if not isinstance(entry, Mapping) or set(entry) != known:
        raise ValueError(
            f"predicted must be a mapping with the entries {sorted(known)}, got {shown(entry)}"
        )
    return Prediction(**{name: number(entry[name], name=f"predicted.{name}") for name in known})


def _block(entry: Any, mesh: Mesh, index: int) -> BlockPlan:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("block"), str):
        raise ValueError(
            f"blocks[{index}] must be a mapping with the name of a module under 'block', got "
            f"{shown(entry)}"
        )
    rest = {name: value for name, value in entry.items() if name != "block"}
    return BlockPlan(
        entry["block"],
        config_from_dict(rest, mesh, where=f"blocks[{index}] ({shown(entry['block'])})"),
    )
