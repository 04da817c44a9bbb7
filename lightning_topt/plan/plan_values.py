"""Parts of a plan: storage presets, blocks, stages, expected costs; and these as plain values.

A `ParallelPlan` is made of these parts, and `plan.yaml`, `frontier.json`, `run.json` and
checkpoints hold them as plain values. Each pair of functions here writes and reads one part:

    part               written by              read by                plain values
    mesh               mesh_to_list            mesh_from_list         [{name: data, size: 4}]
    stage              `ParallelPlan.to_dict`  stage_from_value       {blocks: [{block: a, ...}]}
    block's OpConfig   config_to_dict          config_from_dict       {parameters: shard(0), ...}
    gradient exchange  exchange_to_dict        exchange_from_value    {method: topk, density: 0.01}
    expected costs     `dataclasses.asdict`    prediction_from_value  {step_seconds: 0.1, ...}

A placement on a mesh is one word where it is the same along all axes (``shard(0)``), else a mapping
from axis to word. Readers raise ValueError with one sentence that names the entry. Sizes, depth and
aliases of a text are bounded before that (`costs.plain_values`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod
from lightning_topt.communication.method_registry import (
    DEFAULT_METHOD,
    method_classes,
    read_gradient_method,
)
from lightning_topt.costs.plain_values import names, number, shown, text, whole
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placements, Shard, Storage, parse_placement

# ---- parts


class PlanError(ValueError):
    """Report an unreadable plan file, or a plan of another model or other ranks."""


@dataclass(frozen=True)
class BlockPlan:
    """How one block runs.

    `block` is the name of a module, or ``""`` for all that is outside the named ones.
    """

    block: str
    config: OpConfig


@dataclass(frozen=True)
class StagePlan:
    """The part of a model that one group of ranks runs: its blocks.

    ``""`` is all that is outside the named blocks of a plan. A stage runs those calls of it that
    come after its first named call and before that of the next stage.

    Raises:
        PlanError: a block appears twice.
    """

    blocks: tuple[BlockPlan, ...]

    def __post_init__(self) -> None:
        names = [block.block for block in self.blocks]
        if len(set(names)) != len(names):
            raise PlanError("a block appears twice in the plan, in one stage")


@dataclass(frozen=True)
class StepEstimate:
    """What the cost model expects of one step on each rank, in seconds and bytes."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True)
class Preset:
    """A ZeRO level over all data axes of a mesh, or over the last one alone.

    `inner` means the last one alone: hybrid sharding. `gather_dtype` as in `ParallelPlan`.
    """

    level: int
    inner: bool = False
    gather_dtype: str | None = None

    def storage(self, mesh: Mesh) -> Storage:
        """Return the placements on `mesh`."""
        # inner: the last data axis, which is the one inside a node
        over = mesh.data_axes[-1:] if self.inner else mesh.data_axes
        return Storage.zero(self.level, axes=len(mesh.axes), over=over)


PRESETS = {
    "ddp": Preset(0),
    "zero1": Preset(1),
    "zero2": Preset(2),
    "zero3": Preset(3),
    "hybrid_zero2": Preset(2, inner=True),
    "hybrid": Preset(3, inner=True),
}
_LEVELS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def describe_config(config: OpConfig, mesh: Mesh) -> str:
    """Return a few words for people, such as ``"hybrid ZeRO-3 + recompute"``.

    ``"DDP + split"`` has slices of parameters along tensor axes. ``"DDP + split activations"`` has
    activations in slices between calls too, or these alone.
    """
    storage = config.storage
    # hybrid: sharded along some of the data axes, not along all
    sharded = storage.sharded_axes("optimizer_state")
    words = [
        f"{'hybrid ' if 0 < len(sharded) < len(mesh.data_axes) else ''}{_LEVELS[storage.level]}"
    ]
    words += (
        ["split"]
        if any(isinstance(p, Shard) for _, placements in config.parameters for p in placements)
        else []
    )
    between = [
        placements[axis]
        for placements in (*config.inputs, *config.outputs)
        for axis in mesh.tensor_axes
    ]
    words += (
        ["split activations"] if any(isinstance(placement, Shard) for placement in between) else []
    )
    words += ["recompute"] if config.recompute else []
    return " + ".join(words)


# ---- as plain values


def mesh_to_list(mesh: Mesh) -> list[dict[str, object]]:
    """Return the axes as mappings, outermost first."""
    # a copy, so that the entries of the file are not those of the axis
    return [{**vars(axis)} for axis in mesh.axes]


def mesh_from_list(data: object) -> Mesh:
    """Read what `mesh_to_list` wrote; an axis without a scope is inside a node ("intra")."""
    if not isinstance(data, list | tuple) or not all(isinstance(axis, Mapping) for axis in data):
        raise ValueError(
            f"mesh must be a list of axes such as {{name: data, size: 4}}, got {shown(data)}"
        )
    axes = []
    for index, entry in enumerate(data):
        where = f"mesh[{index}]"
        if unknown := set(entry) - {"name", "size", "scope"}:
            raise ValueError(
                f"{where}: unknown entries {names(unknown)}; an axis has name, size and scope"
            )
        scope = text(entry.get("scope", "intra"), name=f"{where}.scope")
        size = whole(entry.get("size"), name=f"{where}.size")
        axes.append(Axis(text(entry.get("name"), name=f"{where}.name"), size, scope))
    return Mesh(tuple(axes))


def stage_from_value(entry: object, mesh: Mesh, where: str) -> StagePlan:
    """Read a stage; `where` names it in errors."""
    if not isinstance(entry, Mapping) or set(entry) != {"blocks"}:
        raise ValueError(f"{where} must be a mapping with the entry 'blocks', got {shown(entry)}")
    if not isinstance(entry["blocks"], list | tuple):
        raise ValueError(f"blocks must be a list, got {shown(entry['blocks'])}")
    return StagePlan(
        tuple(_block(block, mesh, index) for index, block in enumerate(entry["blocks"]))
    )


def _block(entry: object, mesh: Mesh, index: int) -> BlockPlan:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("block"), str):
        raise ValueError(
            f"blocks[{index}] must be a mapping with the name of a module under 'block', got "
            f"{shown(entry)}"
        )
    # the rest of the entry is the configuration; errors name the block
    rest = {name: value for name, value in entry.items() if name != "block"}
    return BlockPlan(
        entry["block"],
        config_from_dict(rest, mesh, where=f"blocks[{index}] ({shown(entry['block'])})"),
    )


_STORED = ("parameters", "gradients", "optimizer_state")
_COMPUTED = ("inputs", "outputs", "parameters", "sums", "gathers")


def config_to_dict(config: OpConfig, mesh: Mesh) -> dict[str, object]:
    """Return storage, recomputation and, where given, placements of the computation."""
    values: dict[str, object] = {
        kind: _placed(getattr(config.storage, kind), mesh) for kind in _STORED
    }
    values["recompute"] = config.recompute
    # placements of the computation are rare: only plans with tensor axes have them
    if any(getattr(config, kind) for kind in _COMPUTED):
        values["computes"] = {
            "inputs": [_placed(placements, mesh) for placements in config.inputs],
            "outputs": [_placed(placements, mesh) for placements in config.outputs],
            "parameters": {
                name: _placed(placements, mesh) for name, placements in config.parameters
            },
            **({"sums": _placed(config.sums, mesh)} if config.sums else {}),
            **({"gathers": [*config.gathers]} if config.gathers else {}),
        }
    return values


def config_from_dict(entry: Mapping[str, object], mesh: Mesh, *, where: str) -> OpConfig:
    """Read what `config_to_dict` wrote; `where` names the block in errors.

    A preset may give the three storages together (``storage: zero3``).
    """
    # one word for all three storages, or a word for each
    given = ("storage",) if "storage" in entry else _STORED
    if unknown := set(entry) - {*given, "recompute", "computes"}:
        raise ValueError(f"{where} has unknown entries {names(unknown)}")
    if missing := [name for name in given if name not in entry]:
        raise ValueError(f"{where}: the entry {missing[0]!r} is missing")
    recompute = entry.get("recompute", False)
    if not isinstance(recompute, bool):
        raise ValueError(f"{where}: recompute must be true or false, got {shown(recompute)}")
    try:
        return OpConfig(
            _storage(entry, mesh), recompute, **_computed(entry.get("computes", {}), mesh)
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _storage(entry: Mapping[str, object], mesh: Mesh) -> Storage:
    if "storage" not in entry:
        return Storage(*(_placements(entry[kind], mesh) for kind in _STORED))
    name = entry["storage"]
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"storage is one of {', '.join(PRESETS)}, got {shown(name)}")
    return PRESETS[name].storage(mesh)


def _computed(data: object, mesh: Mesh) -> dict[str, Any]:
    if not isinstance(data, Mapping) or set(data) - set(_COMPUTED):
        raise ValueError(
            f"computes is a mapping with the entries {', '.join(_COMPUTED)}, got {shown(data)}"
        )
    # placements of tensors at the borders of the block
    found: dict[str, Any] = {}
    for kind in ("inputs", "outputs"):
        if not isinstance(tensors := data.get(kind, []), list | tuple):
            raise ValueError(f"computes.{kind} is a list of placements, got {shown(tensors)}")
        found[kind] = tuple(_placements(tensor, mesh) for tensor in tensors)
    # by name of the parameter inside the block
    if not isinstance(parameters := data.get("parameters", {}), Mapping):
        raise ValueError(f"computes.parameters maps names to placements, got {shown(parameters)}")
    # one placement for each axis of the mesh
    found["parameters"] = tuple(
        (text(name, name="computes.parameters"), _placements(placed, mesh))
        for name, placed in parameters.items()
    )
    # sums and gathers, which few blocks have
    found["sums"] = _placements(data["sums"], mesh) if data.get("sums") is not None else ()
    if not isinstance(gathers := data.get("gathers", []), list | tuple) or set(
        map(str, gathers)
    ) - set(mesh.names):
        raise ValueError(
            f"computes.gathers is a list of axes of the mesh ({', '.join(mesh.names)}), got "
            f"{shown(gathers)}"
        )
    found["gathers"] = tuple(gathers)
    return found


def _placed(placements: Placements, mesh: Mesh) -> str | dict[str, str]:
    # the same along all axes: one word
    words = [str(placement) for placement in placements]
    return words[0] if len(set(words)) == 1 else dict(zip(mesh.names, words, strict=True))


def _placements(value: object, mesh: Mesh) -> Placements:
    if not isinstance(value, Mapping):
        # one word holds for every axis
        return (parse_placement(value),) * len(mesh.axes)
    # A block is in one stage, so nothing is split along the pipeline.
    along_stages = {mesh.names[axis]: "replicate" for axis in mesh.pipeline_axes}
    value = {**along_stages, **value}
    if set(value) != set(mesh.names):
        needed = ", ".join(name for name in mesh.names if name not in along_stages)
        raise ValueError(
            f"a placement names each axis of the mesh ({needed}), got {shown(dict(value))}"
        )
    return tuple(parse_placement(value[name]) for name in mesh.names)


def prediction_from_value(entry: object) -> StepEstimate:
    """Read the entry `predicted`."""
    known = {field.name for field in dataclasses.fields(StepEstimate)}
    if not isinstance(entry, Mapping) or set(entry) != known:
        raise ValueError(
            f"predicted must be a mapping with the entries {sorted(known)}, got {shown(entry)}"
        )
    return StepEstimate(**{name: number(entry[name], name=f"predicted.{name}") for name in known})


def exchange_to_dict(method: GradientMethod) -> dict[str, object]:
    """Return plain values of the method and of the options that a plan fixes.

    How a run waits, checks and treats infinities (`ExchangeSettings`) is not part of a plan.
    """
    return {
        name: value
        for name, value in method.as_mapping().items()
        if name not in method.not_in_plans
    }


def read_exchange(given: ExchangeMethod | str | Mapping[str, object]) -> GradientMethod:
    """Return a method that a plan can have, from any of the forms of `read_method`.

    Raises:
        ValueError: for any other method or form.
    """
    method = read_gradient_method(given)
    method.check_in_plan()
    return method


def exchange_from_value(data: object) -> GradientMethod | None:
    """Read the entry `gradient_exchange`, or a part of it, also of earlier releases.

    None stays None.
    """
    try:
        if data is None:
            return None
        if not isinstance(data, Mapping):
            raise ValueError(
                f"must be a mapping such as {{method: topk, density: 0.01}}, got {shown(data)}"
            )
        # options of other methods, as older releases wrote them: ignored at the old default
        kind = method_classes().get(str(data.get("method", DEFAULT_METHOD)))
        known = set() if kind is None else {"method", *kind.__dataclass_fields__}
        ignored = {
            name
            for name, value in data.items()
            if name not in known and _ONCE_COMMON.get(name, ...) == value
        }
        return read_exchange({name: value for name, value in data.items() if name not in ignored})
    except ValueError as error:
        raise ValueError(f"gradient_exchange: {error}") from error


# Plans were once read with the options of all methods. An option that a method ignores had to have
# this value.
_ONCE_COMMON = {
    "density": 0.01,
    "hierarchical": None,
    "value_dtype": "float32",
    "error_feedback": True,
    "warmup_steps": 0,
    "dense_steps": 1,
    "exempt": ["norm", "bias"],
    "rank": 2,
}
