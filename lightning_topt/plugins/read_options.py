"""Options of `AutoParallelStrategy` in any of the forms that users may give them in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.basics.units import parse_bytes
from lightning_topt.costs.cluster import Cluster, ClusterError
from lightning_topt.costs.plain_values import shown
from lightning_topt.graph.mesh_axes import DATA_AXES, PIPELINE_AXES, TENSOR_AXES
from lightning_topt.plan.choose import check_objective
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.given_plans import GivenPlan, MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.techniques.tensor_parallel.split_layouts import LAYOUTS, layout_named_by


def read_mesh(sizes: Any) -> MeshPlan | PipelinePlan:
    """Return the best plan on the mesh with these sizes by names of axes, outermost first. Raises
    PlanError.
    """
    if not isinstance(sizes, Mapping) or not sizes:
        raise PlanError(
            "mesh maps the names of axes to sizes, such as {'data': 2, 'tensor': 4}; got "
            f"{shown(sizes)}"
        )
    known = (*DATA_AXES, *TENSOR_AXES, *PIPELINE_AXES)
    if unknown := [name for name in sizes if name not in known]:
        raise PlanError(
            f"the mesh has an axis {shown(unknown[0])}; axes that can be searched are "
            f"{', '.join(known)}"
        )
    if tensor := [name for name in sizes if name in TENSOR_AXES]:
        try:
            layout_named_by(tensor)
        except ValueError as error:
            raise PlanError(str(error)) from error
    for name, size in sizes.items():
        check_whole(size, name=f"the size of axis {name!r}")
    found = tuple(sizes.items())
    if "pipeline" not in sizes:
        return MeshPlan(found)
    if [*sizes] != [name for name in _OF_PIPELINE if name in sizes]:
        raise PlanError(
            "beside an axis 'pipeline', which is the first, the search takes the axes 'data' and "
            f"'tensor' in this order; got {', '.join(sizes)}. Plans with others may be written by "
            "hand (docs/schemas.md)"
        )
    return PipelinePlan(schedule=None, sizes=found)


_OF_PIPELINE = ("pipeline", "data", "tensor")
# of a pipeline
_BESIDE_MESH = {"stages": "stages", "schedule": "schedule", "num_microbatches": "microbatches"}


def _read_searched(plan: Mapping[str, Any]) -> MeshPlan | PipelinePlan:
    """A mesh to search on, and with a pipeline axis what is given of its plan."""
    found, given = (
        read_mesh(plan["mesh"]),
        {key: value for key, value in plan.items() if key != "mesh"},
    )
    if not given:
        return found
    if not isinstance(found, PipelinePlan) or set(given) - set(_BESIDE_MESH):
        raise PlanError(
            "beside a mesh to search on, one with an axis 'pipeline' takes "
            f"{', '.join(_BESIDE_MESH)}; got {', '.join(map(str, given))}"
        )
    if isinstance(given.get("stages"), Sequence):
        raise PlanError(
            "stages that say their blocks belong to a whole plan, whose mesh is a list "
            "(docs/schemas.md)"
        )
    try:
        return replace(found, **{_BESIDE_MESH[key]: value for key, value in given.items()})
    except ValueError as error:
        raise PlanError(str(error)) from error


def read_plan_option(
    plan: ParallelPlan | PipelinePlan | Mapping[str, Any] | str | Path | None,
) -> GivenPlan | None:
    """Return a plan from any of the forms that users may give it in. Raises PlanError."""
    if plan is None or isinstance(plan, ParallelPlan | PipelinePlan):
        return plan
    if isinstance(plan, Mapping) and isinstance(plan.get("mesh"), Mapping):
        return _read_searched(plan)
    if isinstance(plan, Mapping):
        return ParallelPlan.from_dict(plan)
    if not isinstance(plan, str | Path):
        raise PlanError(
            "plan is a ParallelPlan, a file, a mapping or a name such as 'zero1', got "
            f"{shown(plan)}"
        )
    name, _, suffix = str(plan).partition("+")
    if name in PRESETS and suffix in ("", "recompute"):
        return UniformPlan(PRESETS[name], suffix == "recompute")
    if name in LAYOUTS and suffix in ("", "recompute"):
        return MeshPlan(preset=name, recompute=suffix == "recompute")
    if name == "pipeline" and suffix in ("", "recompute"):
        return PipelinePlan(recompute=suffix == "recompute")
    if not os.path.lexists(plan):
        raise PlanError(
            f"plan={shown(str(plan))} is neither a file nor one of "
            f"{sorted([*PRESETS, *LAYOUTS, 'pipeline'])} (or with '+recompute')"
        )
    return ParallelPlan.load(plan)


def read_cluster(cluster: Cluster | Mapping[str, Any] | str | Path | None) -> Cluster | None:
    """Return a cluster from any of these; None stays None. Raises ClusterError."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return Cluster.from_dict(cluster)
    if not isinstance(cluster, str | Path):
        raise ClusterError(
            f"cluster is a Cluster, a file, a mapping, or None to measure, got {shown(cluster)}"
        )
    return Cluster.load(cluster)


def check_planner_options(
    *, memory_margin: Any, objective: Any, objectives: Sequence[str] = ("time", "memory")
) -> None:
    """Raise ValueError for a margin or an objective that `AutoParallelStrategy` cannot have."""
    check_objective(objective, allowed=objectives)
    check_real(memory_margin, name="memory_margin")
    if not 0 <= memory_margin < 1:
        raise ValueError(f"memory_margin is a share between 0 and 1, got {memory_margin}")


def read_memory_limit(limit: int | float | str | None) -> int | None:
    """Return the bytes from a number or text such as ``"2GiB"``; None stays None. Raises
    ValueError.
    """
    size = None if limit is None else parse_bytes(limit, name="memory_limit")
    if size == 0:
        raise ValueError("memory_limit is above 0 bytes; leave it out for the memory of the device")
    return size


def read_device_counts(counts: Any, *, default: int) -> tuple[int, ...]:
    """Return the numbers of ranks to plan for; None is the `default` alone. Raises ValueError for
    anything but a list of counts.
    """
    if counts is None:
        return (default,)
    if (
        isinstance(counts, str | Mapping)
        or not isinstance(counts, Iterable)
        or not (found := tuple(counts))
    ):
        raise ValueError(
            "device_counts is a list of numbers of ranks such as [2,4], or null; got "
            f"{shown(counts)}"
        )
    for count in found:
        check_whole(count, name="each of device_counts")
    return tuple(dict.fromkeys(found))
