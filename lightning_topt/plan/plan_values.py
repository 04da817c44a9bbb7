"""Parts of a plan: storage presets, blocks, stages, expected costs; and these as plain values.

A `ParallelPlan` is made of these parts, and `plan.yaml`, `frontier.json`, `run.json` and
checkpoints hold them as plain values. Each pair of functions here writes and reads one part:

    part               written by              read by              plain values
    mesh               mesh_to_list            read_mesh            [{name: data, size: 4}]
    stage              `ParallelPlan.to_dict`  stage_reader         {blocks: [{block: a, ...}]}
    block's OpConfig   config_to_dict          config_reader        {parameters: shard(0), ...}
    gradient exchange  as_mapping              read_given_exchange  {method: topk, density: 0.01}
    local steps        as_mapping              read_given_local_steps  {method: local_steps, ...}
    expected costs     `dataclasses.asdict`    read_estimate        {step_seconds: 0.1, ...}

A placement on a mesh is one word where it is the same along all axes (``shard(0)``), else a mapping
from axis to word. Readers raise ValueError with one sentence that names the entry. Sizes, depth and
aliases of a text are bounded before that (`costs.plain_values`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_topt.communication.exchange_method import (
    ExchangeMethod,
    GradientMethod,
    LocalMethod,
    gradient_methods,
    method_classes,
    read_gradient_method,
    read_method,
)
from lightning_topt.costs.plain_values import (
    ValueReader,
    list_of,
    number,
    read_entries,
    record,
    shown,
    text,
    truth,
    whole,
)
from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placements, Shard, Storage, parse_placement

# ---- parts


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

    `inner` means the last one alone: hybrid sharding. `float32_gathers`: nothing in 16 bits.
    `offload`: shards are in the memory of the host (`Storage`).
    """

    level: int
    inner: bool = False
    float32_gathers: bool = False
    offload: bool = False

    def storage(self, mesh: Mesh) -> Storage:
        """Return the placements on `mesh`."""
        # inner: the last data axis, which is the one inside a node
        over = mesh.data_axes[-1:] if self.inner else mesh.data_axes
        return Storage.zero(self.level, axes=len(mesh.axes), over=over, offload=self.offload)


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
    words += ["offload"] if storage.offload else []
    words += ["recompute"] if config.recompute else []
    words += ["compile"] if config.compile else []
    return " + ".join(words)


# ---- as plain values


def mesh_to_list(mesh: Mesh) -> list[dict[str, object]]:
    """Return the axes as mappings, outermost first."""
    # a copy, so that the entries of the file are not those of the axis
    return [{**vars(axis)} for axis in mesh.axes]


def read_mesh(value: Any, /, *, name: str) -> Mesh:
    """Read what `mesh_to_list` wrote; an axis without a scope is inside a node ("intra")."""
    return Mesh(_read_axes(value, name=name))


_read_axes = list_of(record(Axis, name=text, size=whole, scope=text))


_STORED = ("parameters", "gradients", "optimizer_state")
_COMPUTED = ("inputs", "outputs", "parameters", "sums", "gathers")


def config_to_dict(config: OpConfig, mesh: Mesh) -> dict[str, object]:
    """Return storage, recomputation and, where given, placements of the computation."""
    values: dict[str, object] = {
        kind: _placed(getattr(config.storage, kind), mesh) for kind in _STORED
    }
    values["recompute"] = config.recompute
    if config.storage.offload:
        values["offload"] = True
    if config.compile:
        values["compile"] = True
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


def _placed(placements: Placements, mesh: Mesh) -> Any:
    words = [str(placement) for placement in placements]
    return words[0] if len(set(words)) == 1 else dict(zip(mesh.names, words, strict=True))


def stage_reader(mesh: Mesh) -> ValueReader[StagePlan]:
    """Return the reader of a stage on `mesh`: the name and `config_to_dict` of each block."""
    read_config = config_reader(mesh)

    def read_block(value: Any, /, *, name: str) -> BlockPlan:
        if not isinstance(value, Mapping) or not isinstance(value.get("block"), str):
            raise ValueError(
                f"{name} must be a mapping with the name of a module under 'block', got "
                f"{shown(value)}"
            )
        rest = {key: entry for key, entry in value.items() if key != "block"}
        # people know it by its name
        config = read_config(rest, name=f"{name} ({shown(value['block'])})")
        return BlockPlan(value["block"], config)

    return record(StagePlan, blocks=list_of(read_block))


def config_reader(mesh: Mesh) -> ValueReader[OpConfig]:
    """Return the reader of what `config_to_dict` wrote.

    A preset may give the three storages together (``storage: zero3``).
    """
    placed = partial(_read_placements, mesh)
    computed: dict[str, ValueReader[Any]] = {
        "inputs": list_of(placed),
        "outputs": list_of(placed),
        "parameters": partial(_read_parameters, mesh),
        "sums": placed,
        "gathers": list_of(partial(_read_axis, mesh)),
    }
    rest: dict[str, ValueReader[Any]] = {
        "recompute": truth,
        "offload": truth,
        "compile": truth,
        "computes": partial(read_entries, readers=computed, needed=()),
    }
    kinds: dict[str, ValueReader[Any]] = dict.fromkeys(_STORED, placed)
    preset: dict[str, ValueReader[Any]] = {"storage": partial(_read_preset, mesh)}

    def read_config(value: Any, /, *, name: str) -> OpConfig:
        stored = preset if isinstance(value, Mapping) and "storage" in value else kinds
        entries = read_entries(value, {**stored, **rest}, needed=stored, name=name)
        try:
            storage = entries.get("storage") or Storage(*(entries[kind] for kind in _STORED))
            storage = replace(storage, offload=entries.get("offload", False))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        switches = {name: entries.get(name, False) for name in ("recompute", "compile")}
        return OpConfig(storage, **switches, **entries.get("computes", {}))

    return read_config


def _read_preset(mesh: Mesh, value: Any, /, *, name: str) -> Storage:
    if not isinstance(value, str) or value not in PRESETS:
        raise ValueError(f"{name} is one of {', '.join(PRESETS)}, got {shown(value)}")
    return PRESETS[value].storage(mesh)


def _read_parameters(mesh: Mesh, value: Any, /, *, name: str) -> tuple[tuple[str, Placements], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} maps names to placements, got {shown(value)}")
    # one placement for each axis of the mesh
    return tuple(
        (text(key, name=name), _read_placements(mesh, placed, name=f"{name}.{key}"))
        for key, placed in value.items()
    )


def _read_axis(mesh: Mesh, value: Any, /, *, name: str) -> str:
    if value not in mesh.names:
        raise ValueError(
            f"{name} is an axis of the mesh ({', '.join(mesh.names)}), got {shown(value)}"
        )
    return str(value)


def _read_placements(mesh: Mesh, value: Any, /, *, name: str) -> Placements:
    try:
        if not isinstance(value, Mapping):
            return (parse_placement(value),) * len(mesh.axes)
        # A block is in one stage, so nothing is split along the pipeline.
        along_stages = {mesh.names[axis]: "replicate" for axis in mesh.pipeline_axes}
        value = {**along_stages, **value}
        if set(value) != set(mesh.names):
            needed = ", ".join(axis for axis in mesh.names if axis not in along_stages)
            raise ValueError(
                f"a placement names each axis of the mesh ({needed}), got {shown(dict(value))}"
            )
        return tuple(parse_placement(value[axis]) for axis in mesh.names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


read_estimate = record(
    StepEstimate, **{field.name: number for field in dataclasses.fields(StepEstimate)}
)


def read_exchange(given: ExchangeMethod | str | Mapping[str, object]) -> GradientMethod:
    """Return a method that a plan can have, from any of the forms of `read_method`.

    Raises:
        ValueError: for any other method or form.
    """
    method = read_gradient_method(given)
    method.check_in_plan()
    return method


def read_local_steps(given: ExchangeMethod | str | Mapping[str, object]) -> LocalMethod:
    """Return the local steps that a plan can have, from any of the forms of `read_method`.

    Raises:
        ValueError: for any other method or form, and where ranks of a node train one replica.
    """
    method = read_method(given)
    if not isinstance(method, LocalMethod):
        raise ValueError(
            f"{type(method).__name__} averages gradients in every step: give it as "
            "gradient_exchange, or choose one of "
            f"{', '.join(name for name in method_classes() if name not in gradient_methods())}"
        )
    if method.hierarchical:
        raise ValueError(
            "under a plan each rank trains a replica of its own: leave out hierarchical, or use "
            "LocalStepsStrategy, whose nodes may train one replica each"
        )
    return replace(method, hierarchical=False)


def read_given_local_steps(value: Any, /, *, name: str) -> LocalMethod:
    """Read what `ExchangeMethod.as_mapping` wrote of local steps, or a part of it."""
    if not isinstance(value, Mapping) or "method" not in value:
        raise ValueError(
            f"{name} must be a mapping such as {{method: local_steps, every: 50}}, got "
            f"{shown(value)}"
        )
    try:
        return read_local_steps(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_given_exchange(value: Any, /, *, name: str) -> GradientMethod:
    """Read what `ExchangeMethod.as_mapping` wrote, or a part of it."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be a mapping such as {{method: topk, density: 0.01}}, got {shown(value)}"
        )
    try:
        return read_exchange(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
