"""ParallelPlan: the narrow waist between search and execution. Complete, readable YAML, and a hand-written one runs too."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.graph.op_config import OpConfig, parse_placement
from lightning_topt.plan.gradient_exchange import (
    check_exchange,
    describe_exchange,
    exchange_from_dict,
    exchange_to_dict,
)

VERSION = 1


class PlanError(ValueError):
    """A plan file that cannot be read, or a plan that does not belong to this model or these ranks."""


@dataclass(frozen=True)
class BlockPlan:
    """How one block runs: `block` is the name of a module, or ``""`` for everything outside the named ones."""

    block: str
    config: OpConfig


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of one step on each rank: seconds and bytes."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True)
class ParallelPlan:
    """A whole model's plan.

    `model` and `fingerprint` say which model it was made for (`OpGraph.fingerprint`; None in a hand-written plan means
    "any model that has these modules"). `batch_size` is per rank. `gradient_exchange` is for whole gradients (ZeRO stages 0
    and 1) on several ranks; None: an all-reduce. `predicted` and `reason` are for people.
    Raises PlanError when block names repeat, the block ``""`` is missing, storage kinds are mixed, or the gradient exchange
    does not suit the rest.
    """

    data_parallel_size: int
    blocks: tuple[BlockPlan, ...]
    model: str = ""
    fingerprint: str | None = None
    batch_size: int | None = None
    cluster: str = ""
    predicted: Prediction | None = None
    reason: str = field(default="", compare=False)
    gradient_exchange: ExchangeOptions | None = None

    def __post_init__(self) -> None:
        names = [block.block for block in self.blocks]
        if len(set(names)) != len(names):
            raise PlanError("a block appears twice in the plan")
        if "" not in names:
            raise PlanError('the plan lacks the block "" (everything outside the named blocks)')
        if self.data_parallel_size < 1:
            raise PlanError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        stages = {block.config.zero_stage for block in self.blocks}
        if stages & {0, 1} and stages & {2, 3}:
            raise PlanError(
                "a plan either keeps all gradients whole (ZeRO stages 0 and 1) or shards all of them (2 and 3); "
                f"this one mixes stages {sorted(stages)}"
            )
        if self.gradient_exchange is not None:
            self._check_exchange(self.gradient_exchange)

    def _check_exchange(self, exchange: ExchangeOptions) -> None:
        if self.is_sharded:
            raise PlanError("gradient_exchange: needs whole gradients (ZeRO stages 0 and 1), and this plan shards them")
        if self.data_parallel_size == 1:
            raise PlanError("gradient_exchange: a single rank exchanges nothing; leave it out")
        try:
            check_exchange(exchange)
        except ValueError as error:
            raise PlanError(f"gradient_exchange: {error}") from error

    @property
    def is_sharded(self) -> bool:
        """Whether gradients and parameters are stored in shards (ZeRO stages 2 and 3)."""
        return any(block.config.zero_stage >= 2 for block in self.blocks)

    def summary(self) -> str:
        """One line for people: how many blocks run in which way, and how gradients travel where not whole as they are."""
        counts: dict[str, int] = {}
        for block in self.blocks:
            name = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")[block.config.zero_stage]
            name += " + recompute" if block.config.recompute else ""
            counts[name] = counts.get(name, 0) + 1
        blocks = ", ".join(f"{count} x {name}" for name, count in counts.items())
        if self.gradient_exchange is None:
            return blocks
        return f"{blocks}, gradients {describe_exchange(self.gradient_exchange)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to YAML, `frontier.json`, `run.json` and checkpoints.

        A plan without a gradient exchange lacks that entry, so that releases which do not know it read the plan.
        """
        exchange = self.gradient_exchange
        return {
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "data_parallel_size": self.data_parallel_size,
            "batch_size": self.batch_size,
            "cluster": self.cluster,
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "reason": self.reason,
            **({} if exchange is None else {"gradient_exchange": exchange_to_dict(exchange)}),
            "blocks": [
                {
                    "block": block.block,
                    "parameters": str(block.config.parameters),
                    "gradients": str(block.config.gradients),
                    "optimizer_state": str(block.config.optimizer_state),
                    "recompute": block.config.recompute,
                }
                for block in self.blocks
            ],
        }

    @classmethod
    def from_dict(cls, data: Any) -> ParallelPlan:
        """Read what `to_dict` wrote. Raises PlanError that names the wrong entry."""
        if not isinstance(data, dict):
            raise PlanError(f"a plan is a mapping, got {type(data).__name__}")
        if data.get("version") != VERSION:
            raise PlanError(f"version is {data.get('version')!r}; this release reads plans of version {VERSION}")
        known = {f.name for f in dataclasses.fields(cls)} | {"version"}
        if unknown := sorted(set(data) - known):
            raise PlanError(f"unknown entries {unknown}; known are {sorted(known)}")
        try:
            predicted = data.get("predicted")
            return cls(
                data_parallel_size=_integer(data, "data_parallel_size"),
                blocks=tuple(_block(entry, index) for index, entry in enumerate(data["blocks"])),
                model=data.get("model") or "",
                fingerprint=data.get("fingerprint"),
                batch_size=None if data.get("batch_size") is None else _integer(data, "batch_size"),
                cluster=data.get("cluster") or "",
                predicted=Prediction(**predicted) if predicted else None,
                reason=data.get("reason") or "",
                gradient_exchange=_exchange(data.get("gradient_exchange")),
            )
        except KeyError as error:
            raise PlanError(f"the entry {error} is missing") from error
        except TypeError as error:
            raise PlanError(f"an entry has the wrong type: {error}") from error

    def to_yaml(self) -> str:
        """The plan as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> ParallelPlan:
        """Read a plan from YAML text. Raises PlanError that says what is wrong."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"not YAML: {error}") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        Path(path).write_text(self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan file. Raises PlanError that names the file and what is wrong with it."""
        try:
            return cls.from_yaml(Path(path).read_text())
        except (PlanError, OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error


def uniform_plan(
    stage: int, *, data_parallel_size: int, blocks: Sequence[str] = (), recompute: Collection[str] = ()
) -> ParallelPlan:
    """The same ZeRO `stage` for everything; `blocks` are sharded one by one, those in `recompute` recomputed too."""
    rest = BlockPlan("", OpConfig.zero(stage))
    named = tuple(BlockPlan(name, OpConfig.zero(stage, recompute=name in recompute)) for name in blocks if name)
    return ParallelPlan(data_parallel_size=data_parallel_size, blocks=(*named, rest))


def _integer(data: dict[str, Any], key: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{key} must be a whole number, got {value!r}")
    return value


def _exchange(entry: Any) -> ExchangeOptions | None:
    try:
        return None if entry is None else exchange_from_dict(entry)
    except ValueError as error:
        raise PlanError(f"gradient_exchange: {error}") from error


def _block(entry: Any, index: int) -> BlockPlan:
    if not isinstance(entry, dict) or not isinstance(entry.get("block"), str):
        raise PlanError(f"blocks[{index}] must be a mapping with the name of a module under 'block', got {entry!r}")
    allowed = {"block", "parameters", "gradients", "optimizer_state", "recompute"}
    if unknown := sorted(set(entry) - allowed):
        raise PlanError(f"blocks[{index}] ({entry['block']!r}) has unknown entries {unknown}")
    if not isinstance(entry.get("recompute", False), bool):
        raise PlanError(f"blocks[{index}] ({entry['block']!r}): recompute must be true or false")
    try:
        placements = {key: parse_placement(entry[key]) for key in ("parameters", "gradients", "optimizer_state")}
        return BlockPlan(entry["block"], OpConfig(**placements, recompute=entry.get("recompute", False)))
    except (ValueError, AttributeError) as error:
        raise PlanError(f"blocks[{index}] ({entry['block']!r}): {error}") from error
