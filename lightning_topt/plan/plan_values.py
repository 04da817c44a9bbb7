"""Plain values of the parts of a plan, as they stand in YAML, `frontier.json` and checkpoints, and
the way back.

A placement on a mesh is one word where it is alike along all axes (``shard(0)``), else a mapping
from axis to word. Everything that reads raises ValueError with one sentence that names the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.plain_values import names, shown, text, whole
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placements, Storage, parse_placement
from lightning_topt.plan.gradient_exchange import exchange_from_dict
from lightning_topt.plan.presets import PRESETS

_STORED = ("parameters", "gradients", "optimizer_state")
_COMPUTED = ("inputs", "outputs", "parameters", "sums", "gathers")


def mesh_to_list(mesh: Mesh) -> list[dict[str, Any]]:
    """Return the axes as mappings, outermost first."""
    return [{**vars(axis)} for axis in mesh.axes]


def mesh_from_list(data: Any) -> Mesh:
    """Read what `mesh_to_list` wrote; the scope of an axis may be left out (intra)."""
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


def config_to_dict(config: OpConfig, mesh: Mesh) -> dict[str, Any]:
    """Return storage and recomputation, and the placements of its computation where it has its
    own.
    """
    values: dict[str, Any] = {
        kind: _placed(getattr(config.storage, kind), mesh) for kind in _STORED
    }
    values["recompute"] = config.recompute
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


def config_from_dict(entry: Mapping[str, Any], mesh: Mesh, *, where: str) -> OpConfig:
    """Read what `config_to_dict` wrote; the three storages may be given together by a preset
    (``storage: zero3``).
    """
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


def exchange_from_value(entry: Any) -> GradientMethod | None:
    """Read the entry `gradient_exchange`; None stays None."""
    try:
        return None if entry is None else exchange_from_dict(entry)
    except ValueError as error:
        raise ValueError(f"gradient_exchange: {error}") from error


def _storage(entry: Mapping[str, Any], mesh: Mesh) -> Storage:
    if "storage" not in entry:
        return Storage(*(_placements(entry[kind], mesh) for kind in _STORED))
    name = entry["storage"]
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"storage is one of {', '.join(PRESETS)}, got {shown(name)}")
    return PRESETS[name].storage(mesh)


def _computed(data: Any, mesh: Mesh) -> dict[str, Any]:
    if not isinstance(data, Mapping) or set(data) - set(_COMPUTED):
        raise ValueError(
            f"computes is a mapping with the entries {', '.join(_COMPUTED)}, got {shown(data)}"
        )
    found: dict[str, Any] = {}
    for kind in ("inputs", "outputs"):
        if not isinstance(tensors := data.get(kind, []), list | tuple):
            raise ValueError(f"computes.{kind} is a list of placements, got {shown(tensors)}")
        found[kind] = tuple(_placements(tensor, mesh) for tensor in tensors)
    if not isinstance(parameters := data.get("parameters", {}), Mapping):
        raise ValueError(f"computes.parameters maps names to placements, got {shown(parameters)}")
    found["parameters"] = tuple(
        (text(name, name="computes.parameters"), _placements(placed, mesh))
        for name, placed in parameters.items()
    )
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


def _placed(placements: Placements, mesh: Mesh) -> Any:
    words = [str(placement) for placement in placements]
    return words[0] if len(set(words)) == 1 else dict(zip(mesh.names, words, strict=True))


def _placements(value: Any, mesh: Mesh) -> Placements:
    if not isinstance(value, Mapping):
        return (parse_placement(value),) * len(mesh.axes)
    # a block is in one stage
    along_stages = {mesh.names[axis]: "replicate" for axis in mesh.pipeline_axes}
    value = {**along_stages, **value}
    if set(value) != set(mesh.names):
        needed = ", ".join(name for name in mesh.names if name not in along_stages)
        raise ValueError(
            f"a placement names each axis of the mesh ({needed}), got {shown(dict(value))}"
        )
    return tuple(parse_placement(value[name]) for name in mesh.names)
