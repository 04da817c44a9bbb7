"""Plain values of a plan are read entry by entry, those of older versions too; an error names the
entry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_topt.costs.plain_values import check_plain, names, shown, text, truth, whole
from lightning_topt.graph.joint_module import joint_from_value
from lightning_topt.plan.plan_parts import prediction_from_value, stage_from_value
from lightning_topt.plan.plan_values import exchange_from_value, mesh_from_list

VERSION = 2


def plan_entries(data: Any, *, known: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a `ParallelPlan`, whose fields are `known`, from plain values.

    Raises ValueError that names the wrong entry.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a plan is a mapping, got {type(data).__name__}")
    check_plain(data)
    if type(data.get("version")) is not int or data["version"] not in (1, VERSION):
        raise ValueError(
            f"version is {shown(data.get('version'))}; this release reads plans of the versions 1 "
            f"and {VERSION}"
        )
    if data["version"] == 1:
        data = _from_version_1(data, known)
    _check_entries(data, known={*known, "version"}, needed=("mesh", "stages"))
    texts = {
        name: "" if data.get(name) is None else text(data[name], name=name)
        for name in ("model", "cluster", "reason")
    }
    mesh = mesh_from_list(data["mesh"])
    if not isinstance(data["stages"], list | tuple):
        raise ValueError(f"stages must be a list, got {shown(data['stages'])}")
    return {
        "mesh": mesh,
        "stages": tuple(
            stage_from_value(entry, mesh, f"stages[{n}]") for n, entry in enumerate(data["stages"])
        ),
        "fingerprint": None
        if data.get("fingerprint") is None
        else text(data["fingerprint"], name="fingerprint"),
        "batch_size": None
        if data.get("batch_size") is None
        else whole(data["batch_size"], name="batch_size"),
        "predicted": None
        if data.get("predicted") is None
        else prediction_from_value(data["predicted"]),
        "gradient_exchange": exchange_from_value(data.get("gradient_exchange")),
        "num_microbatches": whole(data.get("num_microbatches", 1), name="num_microbatches"),
        "schedule": None
        if data.get("schedule") is None
        else text(data["schedule"], name="schedule"),
        "own_batches": truth(data.get("own_batches", False), name="own_batches"),
        "joint": joint_from_value(data.get("joint") or (), name="joint"),
        "prediction": data.get("prediction"),
        "gradient_views": truth(data.get("gradient_views", False), name="gradient_views"),
        **texts,
    }


def _from_version_1(data: Mapping[Any, Any], known: Collection[str]) -> dict[Any, Any]:
    """Version 1 had one data axis, without a name, and one stage."""
    known = {*known, "version", "data_parallel_size", "blocks"} - {"mesh", "stages"}
    _check_entries(data, known=known, needed=("data_parallel_size", "blocks"))
    rest = {
        name: value for name, value in data.items() if name not in ("data_parallel_size", "blocks")
    }
    size = whole(data["data_parallel_size"], name="data_parallel_size")
    return {
        **rest,
        "mesh": [{"name": "data", "size": size}],
        "stages": [{"blocks": data["blocks"]}],
    }


def _check_entries(
    data: Mapping[Any, Any], *, known: Collection[str], needed: Sequence[str]
) -> None:
    if unknown := set(data) - set(known):
        raise ValueError(f"unknown entries {names(unknown)}; known are {sorted(known)}")
    if missing := [name for name in needed if data.get(name) is None]:
        raise ValueError(f"the entry {missing[0]!r} is missing")
