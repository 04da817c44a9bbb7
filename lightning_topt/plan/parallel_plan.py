"""ParallelPlan: the narrow waist between search and execution. Complete, readable YAML, and a hand-written one runs too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.plain_values import (
    check_plain,
    names,
    number,
    one_line,
    parse_yaml,
    read_text,
    shown,
    text,
    whole,
)
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
        _checked(whole, self.data_parallel_size, name="data_parallel_size")
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

    @property
    def saves_memory(self) -> bool:
        """Whether the plan takes more time than another to hold less: it shards or recomputes."""
        return self.is_sharded or any(block.config.recompute for block in self.blocks)

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
        try:
            return _read(data)
        except PlanError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise PlanError(one_line(error)) from error

    def to_yaml(self) -> str:
        """The plan as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> ParallelPlan:
        """Read a plan from YAML text. Raises PlanError that says what is wrong."""
        try:
            return cls.from_dict(parse_yaml(text))
        except ValueError as error:
            raise PlanError(one_line(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        Path(path).write_text(self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan file. Raises PlanError that names the file and what is wrong with it."""
        try:
            return cls.from_yaml(read_text(path))
        except (ValueError, OSError) as error:
            raise PlanError(f"cannot read the plan {shown(str(path))}: {one_line(error)}") from error


def uniform_plan(
    stage: int, *, data_parallel_size: int, blocks: Sequence[str] = (), recompute: Collection[str] = ()
) -> ParallelPlan:
    """The same ZeRO `stage` for everything; `blocks` are sharded one by one, those in `recompute` recomputed too."""
    rest = BlockPlan("", OpConfig.zero(stage))
    named = tuple(BlockPlan(name, OpConfig.zero(stage, recompute=name in recompute)) for name in blocks if name)
    return ParallelPlan(data_parallel_size=data_parallel_size, blocks=(*named, rest))


def _checked(check: Callable[..., Any], value: Any, **options: Any) -> Any:
    try:
        return check(value, **options)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _read(data: Any) -> ParallelPlan:
    """A plan from plain values. Raises ValueError that names the wrong entry."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a plan is a mapping, got {type(data).__name__}")
    check_plain(data)
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ValueError(f"version is {shown(data.get('version'))}; this release reads plans of version {VERSION}")
    known = {f.name for f in dataclasses.fields(ParallelPlan)} | {"version"}
    if unknown := set(data) - known:
        raise ValueError(f"unknown entries {names(unknown)}; known are {sorted(known)}")
    if missing := [name for name in ("data_parallel_size", "blocks") if data.get(name) is None]:
        raise ValueError(f"the entry {missing[0]!r} is missing")
    if not isinstance(data["blocks"], list | tuple):
        raise ValueError(f"blocks must be a list, got {shown(data['blocks'])}")
    texts = {
        name: "" if data.get(name) is None else text(data[name], name=name) for name in ("model", "cluster", "reason")
    }
    return ParallelPlan(
        data_parallel_size=whole(data["data_parallel_size"], name="data_parallel_size"),
        blocks=tuple(_block(entry, index) for index, entry in enumerate(data["blocks"])),
        fingerprint=None if data.get("fingerprint") is None else text(data["fingerprint"], name="fingerprint"),
        batch_size=None if data.get("batch_size") is None else whole(data["batch_size"], name="batch_size"),
        predicted=None if data.get("predicted") is None else _prediction(data["predicted"]),
        gradient_exchange=_exchange(data.get("gradient_exchange")),
        **texts,
    )


def _prediction(entry: Any) -> Prediction:
    known = {field.name for field in dataclasses.fields(Prediction)}
    if not isinstance(entry, Mapping) or set(entry) != known:
        raise ValueError(f"predicted must be a mapping with the entries {sorted(known)}, got {shown(entry)}")
    return Prediction(**{name: number(entry[name], name=f"predicted.{name}") for name in known})


def _exchange(entry: Any) -> ExchangeOptions | None:
    try:
        return None if entry is None else exchange_from_dict(entry)
    except ValueError as error:
        raise ValueError(f"gradient_exchange: {error}") from error


def _block(entry: Any, index: int) -> BlockPlan:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("block"), str):
        raise ValueError(
            f"blocks[{index}] must be a mapping with the name of a module under 'block', got {shown(entry)}"
        )
    where = f"blocks[{index}] ({shown(entry['block'])})"
    placed = ("parameters", "gradients", "optimizer_state")
    if unknown := set(entry) - {"block", "recompute", *placed}:
        raise ValueError(f"{where} has unknown entries {names(unknown)}")
    if missing := [name for name in placed if name not in entry]:
        raise ValueError(f"{where}: the entry {missing[0]!r} is missing")
    recompute = entry.get("recompute", False)
    if not isinstance(recompute, bool):
        raise ValueError(f"{where}: recompute must be true or false, got {shown(recompute)}")
    try:
        placements = {key: parse_placement(entry[key]) for key in placed}
        return BlockPlan(entry["block"], OpConfig(**placements, recompute=recompute))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
