"""ParallelPlan: the narrow waist between search and execution. Complete, readable YAML, and a hand-written one runs too."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.plain_values import (
    check_plain,
    dump_yaml,
    names,
    number,
    one_line,
    parse_yaml,
    read_text,
    shown,
    text,
    whole,
)
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.gradient_exchange import check_exchange, describe_exchange, exchange_to_dict
from lightning_topt.plan.plan_values import (
    config_from_dict,
    config_to_dict,
    exchange_from_value,
    mesh_from_list,
    mesh_to_list,
)
from lightning_topt.plan.presets import Preset, describe_config

VERSION = 2


class PlanError(ValueError):
    """A plan file that cannot be read, or a plan that does not belong to this model or these ranks."""


@dataclass(frozen=True)
class BlockPlan:
    """A `BlockPlan` says how one block runs: `block` is the name of a module, or ``""`` for everything outside the named
    ones.
    """

    block: str
    config: OpConfig


@dataclass(frozen=True)
class StagePlan:
    """The part of a model that one group of ranks runs: its blocks, among them ``""`` for all that is outside the others.

    Raises PlanError when a block appears twice or the block ``""`` is missing.
    """

    blocks: tuple[BlockPlan, ...]

    def __post_init__(self) -> None:
        names = [block.block for block in self.blocks]
        if len(set(names)) != len(names):
            raise PlanError("a block appears twice in the plan")
        if "" not in names:
            raise PlanError('the plan lacks the block "" (everything outside the named blocks)')


@dataclass(frozen=True)
class Prediction:
    """A `Prediction` is what the cost model expects of one step on each rank: seconds and bytes."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True)
class ParallelPlan:
    """A whole model's plan: the mesh of ranks, and how each block is placed on its axes.

    `model` and `fingerprint` say which model it was made for (`OpGraph.fingerprint`; None in a hand-written plan means
    "any model that has these modules"). `batch_size` is per rank. `gradient_exchange` is for gradients that are whole on
    every rank; None: an all-reduce. `num_microbatches` is the number of batches that the ranks of a tensor group run together
    in a step, one after the other: 1, a batch that all of them get, or as many as they are, the batch of each rank.
    `predicted` and `reason` are for people.

    A plan says what is to run; whether a release can run it is asked of the techniques (`techniques.registry`).
    Raises PlanError when a placement does not have as many axes as the mesh, the gradient exchange is none that a plan can
    fix, or the microbatches are neither one nor as many as the ranks of a tensor group.
    """

    mesh: Mesh
    stages: tuple[StagePlan, ...]
    model: str = ""
    fingerprint: str | None = None
    batch_size: int | None = None
    cluster: str = ""
    predicted: Prediction | None = None
    reason: str = field(default="", compare=False)
    gradient_exchange: ExchangeOptions | None = None
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan has at least one stage")
        for block in {block.config: block for block in self.blocks}.values():
            self._check_axes(block)
        if self.num_microbatches not in (1, ranks := self.mesh.ranks_along(self.mesh.tensor_axes)):
            raise PlanError(
                f"num_microbatches is 1, or the ranks along tensor axes, {ranks}; got {self.num_microbatches}"
            )
        if self.gradient_exchange is not None:
            try:
                check_exchange(self.gradient_exchange)
            except ValueError as error:
                raise PlanError(f"gradient_exchange: {error}") from error

    def _check_axes(self, block: BlockPlan) -> None:
        config, axes = block.config, len(self.mesh.axes)
        placed = [config.storage.parameters, *config.placed()]
        if any(len(placements) != axes for placements in placed):
            raise PlanError(
                f"block {shown(block.block)} must be placed along each of the axes {', '.join(self.mesh.names)} of the mesh"
            )

    @classmethod
    def of_blocks(cls, blocks: Sequence[BlockPlan], *, mesh: Mesh | int, **rest: Any) -> ParallelPlan:
        """Return a plan of one stage; `mesh` may be the number of ranks of one data axis. `rest` as in the class."""
        return cls(data_mesh(mesh) if isinstance(mesh, int) else mesh, (StagePlan(tuple(blocks)),), **rest)

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The blocks of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts the global batch is split."""
        return self.mesh.data_parallel_size

    @property
    def keeps_gradients_whole(self) -> bool:
        """Whether every rank holds the whole gradient of every parameter after the backward pass, as under DDP."""
        return not self.mesh.tensor_axes and not any(
            block.config.storage.sharded_axes("gradients") for block in self.blocks
        )

    @property
    def saves_memory(self) -> bool:
        """Whether the plan takes more time than another to hold less: it shards gradients or recomputes."""
        return not self.keeps_gradients_whole or any(block.config.recompute for block in self.blocks)

    def summary(self) -> str:
        """Return one line for people: how many blocks run in which way, and how gradients travel if not whole as they are."""
        counts: dict[str, int] = {}
        for block in self.blocks:
            name = describe_config(block.config, self.mesh)
            counts[name] = counts.get(name, 0) + 1
        blocks = ", ".join(f"{count} x {name}" for name, count in counts.items())
        if len(self.mesh.axes) > 1:
            blocks += f" on {' x '.join(f'{axis.name} {axis.size}' for axis in self.mesh.axes)}"
        if self.num_microbatches > 1:
            blocks += f", {self.num_microbatches} microbatches"
        if self.gradient_exchange is None:
            return blocks
        return f"{blocks}, gradients {describe_exchange(self.gradient_exchange)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as written to YAML, `frontier.json`, `run.json` and checkpoints."""
        exchange, mesh = self.gradient_exchange, self.mesh
        configs = {config: config_to_dict(config, mesh) for config in {block.config for block in self.blocks}}
        return {
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "mesh": mesh_to_list(mesh),
            "batch_size": self.batch_size,
            "cluster": self.cluster,
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "reason": self.reason,
            **({} if exchange is None else {"gradient_exchange": exchange_to_dict(exchange)}),
            **({} if self.num_microbatches == 1 else {"num_microbatches": self.num_microbatches}),
            "stages": [
                {"blocks": [{"block": b.block, **configs[b.config]} for b in stage.blocks]} for stage in self.stages
            ],
        }

    @classmethod
    def from_dict(cls, data: Any) -> ParallelPlan:
        """Read what `to_dict` wrote, also in version 1. Raises PlanError that names the wrong entry."""
        try:
            return _read(data)
        except PlanError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise PlanError(one_line(error)) from error

    def to_yaml(self) -> str:
        """Return the plan as YAML text."""
        return dump_yaml(self.to_dict())

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
    level: int, *, data_parallel_size: int, blocks: Sequence[str] = (), recompute: Collection[str] = ()
) -> ParallelPlan:
    """Return the plan of one ZeRO `level` over all ranks; `blocks` are kept apart, those in `recompute` recomputed."""
    return preset_plan(Preset(level), mesh=data_mesh(data_parallel_size), blocks=blocks, recompute=recompute)


def preset_plan(
    preset: Preset, *, mesh: Mesh, blocks: Sequence[str] = (), recompute: Collection[str] = ()
) -> ParallelPlan:
    """Return the plan that stores everything as `preset` says on `mesh`; `blocks` and `recompute` as in `uniform_plan`."""
    storage = preset.storage(mesh)
    named = tuple(BlockPlan(name, OpConfig(storage, recompute=name in recompute)) for name in blocks if name)
    return ParallelPlan.of_blocks((*named, BlockPlan("", OpConfig(storage))), mesh=mesh)


def _read(data: Any) -> ParallelPlan:
    """A plan from plain values. Raises ValueError that names the wrong entry."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a plan is a mapping, got {type(data).__name__}")
    check_plain(data)
    if type(data.get("version")) is not int or data["version"] not in (1, VERSION):
        raise ValueError(
            f"version is {shown(data.get('version'))}; this release reads plans of the versions 1 and {VERSION}"
        )
    if data["version"] == 1:
        data = _from_version_1(data)
    known = {f.name for f in dataclasses.fields(ParallelPlan)} | {"version"}
    _check_entries(data, known=known, needed=("mesh", "stages"))
    texts = {
        name: "" if data.get(name) is None else text(data[name], name=name) for name in ("model", "cluster", "reason")
    }
    mesh = mesh_from_list(data["mesh"])
    if not isinstance(data["stages"], list | tuple):
        raise ValueError(f"stages must be a list, got {shown(data['stages'])}")
    return ParallelPlan(
        mesh=mesh,
        stages=tuple(_stage(entry, mesh, f"stages[{index}]") for index, entry in enumerate(data["stages"])),
        fingerprint=None if data.get("fingerprint") is None else text(data["fingerprint"], name="fingerprint"),
        batch_size=None if data.get("batch_size") is None else whole(data["batch_size"], name="batch_size"),
        predicted=None if data.get("predicted") is None else _prediction(data["predicted"]),
        gradient_exchange=exchange_from_value(data.get("gradient_exchange")),
        num_microbatches=whole(data.get("num_microbatches", 1), name="num_microbatches"),
        **texts,
    )


def _from_version_1(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Version 1 had one data axis, without a name, and one stage."""
    known = {f.name for f in dataclasses.fields(ParallelPlan)} - {"mesh", "stages"} | {
        "version",
        "data_parallel_size",
        "blocks",
    }
    _check_entries(data, known=known, needed=("data_parallel_size", "blocks"))
    rest = {name: value for name, value in data.items() if name not in ("data_parallel_size", "blocks")}
    size = whole(data["data_parallel_size"], name="data_parallel_size")
    return {**rest, "mesh": [{"name": "data", "size": size}], "stages": [{"blocks": data["blocks"]}]}


def _check_entries(data: Mapping[Any, Any], *, known: Collection[str], needed: Sequence[str]) -> None:
    if unknown := set(data) - set(known):
        raise ValueError(f"unknown entries {names(unknown)}; known are {sorted(known)}")
    if missing := [name for name in needed if data.get(name) is None]:
        raise ValueError(f"the entry {missing[0]!r} is missing")


def _stage(entry: Any, mesh: Mesh, where: str) -> StagePlan:
    if not isinstance(entry, Mapping) or set(entry) != {"blocks"}:
        raise ValueError(f"{where} must be a mapping with the entry 'blocks', got {shown(entry)}")
    if not isinstance(entry["blocks"], list | tuple):
        raise ValueError(f"blocks must be a list, got {shown(entry['blocks'])}")
    return StagePlan(tuple(_block(block, mesh, index) for index, block in enumerate(entry["blocks"])))


def _block(entry: Any, mesh: Mesh, index: int) -> BlockPlan:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("block"), str):
        raise ValueError(
            f"blocks[{index}] must be a mapping with the name of a module under 'block', got {shown(entry)}"
        )
    rest = {name: value for name, value in entry.items() if name != "block"}
    return BlockPlan(entry["block"], config_from_dict(rest, mesh, where=f"blocks[{index}] ({shown(entry['block'])})"))


def _prediction(entry: Any) -> Prediction:
    known = {field.name for field in dataclasses.fields(Prediction)}
    if not isinstance(entry, Mapping) or set(entry) != known:
        raise ValueError(f"predicted must be a mapping with the entries {sorted(known)}, got {shown(entry)}")
    return Prediction(**{name: number(entry[name], name=f"predicted.{name}") for name in known})
