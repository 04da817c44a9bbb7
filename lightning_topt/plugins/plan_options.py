"""What users say about a plan: options of the strategies in any of the forms they may have.

    plan="zero3+recompute+offload"             UniformPlan   the same for every block
    plan="tensor", {"mesh": {"tensor": 4}}     MeshPlan      the best plan on a mesh, or a layout
    plan={"mesh": {"pipeline": 2, "data": 2}}  PipelinePlan  stages; what is not given is searched
    plan="plan.yaml", a mapping                ParallelPlan  a whole plan, run as it is

`read_plan_option` returns one of these; the other functions read clusters, limits and counts. They
are also used by the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.basics.units import parse_bytes
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.accuracy import LEVEL, check_level
from lightning_topt.costs.cluster import Cluster, ClusterError
from lightning_topt.costs.plain_values import shown
from lightning_topt.graph.mesh_axes import (
    DATA_AXES,
    PIPELINE_AXES,
    TENSOR_AXES,
    Axis,
    Mesh,
    data_mesh,
    hybrid_mesh,
)
from lightning_topt.plan.choose import TIME_TO_LOSS, check_objective
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan
from lightning_topt.plan.plan_values import PRESETS, Preset, read_exchange
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.weight_prediction import Prediction

if TYPE_CHECKING:
    from lightning_topt.graph.op_graph import OpGraph

_OF_PIPELINE = ("pipeline", "data", "tensor")
# of a pipeline
_BESIDE_MESH = {"stages": "stages", "schedule": "schedule", "num_microbatches": "microbatches"}
_BESIDE_MESH["gradient_exchange"] = "gradient_exchange"


@dataclass(frozen=True)
class UniformPlan:
    """The same storage, recomputed or not, compiled or not, for every block that is found."""

    preset: Preset
    recompute: bool = False
    compile: bool = False

    def mesh(self, world_size: int, *, num_nodes: int) -> Mesh:
        """Return the mesh: one data axis, or nodes times the ranks of a node.

        The latter where the preset shards inside nodes.

        Raises PlanError where these are not several of both.
        """
        # Ranks are numbered node by node.
        per_node = world_size // num_nodes
        if not self.preset.inner:
            return data_mesh(world_size, scope="intra" if num_nodes == 1 else "inter")
        if num_nodes == 1 or per_node == 1:
            raise PlanError(
                "a hybrid plan shards inside nodes and copies between them: it needs several nodes "
                f"of several ranks, and here are {num_nodes} node(s) with {per_node}. Use 'zero3', "
                "or give a plan with a mesh of its own"
            )
        return hybrid_mesh(num_nodes, per_node)

    def of(self, graph: OpGraph, mesh: Mesh) -> ParallelPlan:
        """Return the plan for the blocks of `graph`."""
        names = [block.name for block in graph.blocks]
        again = [block.name for block in graph.blocks if self.recompute and block.recomputable]
        plan = preset_plan(
            self.preset,
            mesh=mesh,
            blocks=names,
            recompute=again,
            compiled=self.compile,
            is_manual=graph.is_manual,
        )
        return plan.gathering(graph)


@dataclass(frozen=True)
class MeshPlan:
    """The best plan on a given mesh, or one named by its layout.

    The latter (`preset`, see `LAYOUTS`) splits most, and stores everything as ``ddp`` does. `sizes`
    has the axes by name, outermost first; None: the tensor axes of the layout over all ranks.
    """

    sizes: tuple[tuple[str, int], ...] | None = None
    preset: str = ""
    recompute: bool = False

    def mesh(self, world_size: int, *, num_nodes: int) -> Mesh:
        """Return the mesh. Raises PlanError where it is not one of `world_size` ranks."""
        # Sizes, outermost axis first.
        sizes = self.sizes or tuple((axis.name, axis.size) for axis in self._axes(world_size))
        mesh = Mesh(tuple(Axis(name, size) for name, size in sizes))
        if mesh.size != world_size:
            axes = " x ".join(f"{name} {size}" for name, size in sizes)
            raise PlanError(
                f"the mesh {axes} has {mesh.size} ranks, and this run has {world_size}: their "
                "product must be that"
            )
        per_node = world_size // num_nodes
        # An axis is inside of nodes if its groups of ranks are.
        spans = (mesh.stride([axis]) * mesh.shape[axis] for axis in range(len(sizes)))
        scopes = (
            "intra" if span <= per_node and per_node % span == 0 else "inter" for span in spans
        )
        return Mesh(
            tuple(replace(axis, scope=scope) for axis, scope in zip(mesh.axes, scopes, strict=True))
        )

    def _axes(self, world_size: int) -> tuple[Axis, ...]:
        axes: tuple[Axis, ...] = _layouts().layout_axes(self.preset, world_size)
        return axes


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of so many `stages` under a schedule.

    `stages` None: as many as the ranks run; `microbatches` None: chosen. Each rank runs
    `stages_per_rank` of them (None: the fewest that the schedule takes). Ranks that are left form a
    data axis. With `sizes`, the axes of the mesh as in `MeshPlan`, whatever is None is searched,
    the schedule as well. `prediction` belongs to asynchronous schedules; None: the optimizer's
    default. Data ranks exchange gradients by `gradient_exchange`, in any form of `read_method`;
    None: they average gradients as they are. Raises ValueError for wrong numbers and names.
    """

    stages: int | None = None
    schedule: str | None = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    recompute: bool = False
    sizes: tuple[tuple[str, int], ...] | None = None
    prediction: Prediction | None = None
    gradient_exchange: GradientMethod | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "stages_per_rank"):
            if getattr(self, name) is not None:
                check_whole(getattr(self, name), name=name)
        # What data ranks exchange, in any form.
        if self.gradient_exchange is not None:
            object.__setattr__(self, "gradient_exchange", read_exchange(self.gradient_exchange))
        # A schedule is searched on a given mesh only.
        if self.schedule is not None or self.sizes is None:
            allowed = (*SCHEDULES, *CONTINUOUS_SCHEDULES)
            check_choice(self.schedule, name="schedule", allowed=allowed)
        # Stages must fill the ranks of the pipeline.
        ranks, per_rank = dict(self.sizes or ()).get("pipeline"), self.per_rank
        if self.stages is not None and ranks is not None and self.stages % ranks:
            raise ValueError(
                f"{ranks} ranks in a row run equally many stages each, so stages is a multiple of "
                f"{ranks}; got {self.stages}"
            )
        if self.stages is not None and ranks is None and self.stages % per_rank:
            raise ValueError(
                f"schedule {self.schedule!r} runs {per_rank} stages on each rank, so stages is a "
                f"multiple of that; got {self.stages}"
            )
        # One that is searched has no rules of its own yet.
        if self.schedule is None:
            return
        if self.schedule in CONTINUOUS_SCHEDULES:
            self._check_continuous()
            return
        if self.prediction is not None:
            raise ValueError(
                f"prediction is for the schedules {' and '.join(CONTINUOUS_SCHEDULES)}, and this "
                f"one is {self.schedule!r}: leave it out"
            )
        sizes = {
            "num_ranks": ranks or max(1, (self.stages or per_rank) // per_rank),
            "stages_per_rank": per_rank,
        }
        problem = SCHEDULES[self.schedule].problem(num_microbatches=self.microbatches or 1, **sizes)
        if problem is not None:
            raise ValueError(problem)

    def _check_continuous(self) -> None:
        if self.microbatches not in (None, 1):
            raise ValueError(
                f"schedule={self.schedule!r} takes whole batches one after the other, without "
                "microbatches: leave them out"
            )
        if self.stages_per_rank not in (None, 1) or (
            self.sizes and self.stages not in (None, dict(self.sizes)["pipeline"])
        ):
            raise ValueError(
                f"schedule={self.schedule!r} runs one stage on each rank: leave out stages_per_rank"
            )

    @property
    def per_rank(self) -> int:
        """Number of stages on each rank; the fewest where that is searched."""
        if self.sizes is not None and self.stages is not None:
            return self.stages // dict(self.sizes)["pipeline"]
        rule = SCHEDULES.get(self.schedule or "")
        return self.stages_per_rank or (1 if rule is None else rule.least_stages)

    def mesh(self, world_size: int, *, num_nodes: int) -> Mesh:
        """Return the mesh: stages, parts of the batch, then slices, where asked for.

        Raises PlanError.
        """
        mesh = self._mesh(world_size, num_nodes=num_nodes)
        exchange = self.gradient_exchange
        if exchange is not None and mesh.data_parallel_size == 1:
            raise PlanError(
                f"one pipeline has all {world_size} ranks, and {exchange.name!r} is between "
                "several: leave it out, or choose fewer stages or more devices"
            )
        return mesh

    def _mesh(self, world_size: int, *, num_nodes: int) -> Mesh:
        if self.sizes is not None:
            sizes = {"pipeline": 1, "data": 1} | dict(self.sizes)
            return MeshPlan(tuple(sizes.items())).mesh(world_size, num_nodes=num_nodes)
        # Ranks that are left form a data axis.
        ranks = world_size if self.stages is None else self.stages // self.per_rank
        if world_size % ranks:
            raise PlanError(
                f"{self.stages} stages, {self.per_rank} on each rank, need {ranks} ranks or a "
                f"multiple of that, and this run has {world_size}: choose another number of stages "
                "or of devices"
            )
        return MeshPlan((("pipeline", ranks), ("data", world_size // ranks))).mesh(
            world_size, num_nodes=num_nodes
        )


def _layouts() -> Any:
    # imported where a plan names one
    from lightning_topt.techniques.tensor_parallel import split_layouts  # noqa: PLC0415

    return split_layouts


GivenPlan = ParallelPlan | UniformPlan | MeshPlan | PipelinePlan


# ---- reading -------------------------------------------------------------------------------------


def read_mesh(sizes: Any) -> MeshPlan | PipelinePlan:
    """Return the best plan on the mesh with these sizes by names of axes.

    Axes are ordered outermost first. Raises PlanError.
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
        _layouts().layout_named_by(tensor)
    for name, size in sizes.items():
        check_whole(size, name=f"the size of axis {name!r}")
    found = tuple(sizes.items())
    if "pipeline" not in sizes:
        return MeshPlan(found)
    # Order counts: the mesh is laid out by it.
    if [*sizes] != [name for name in _OF_PIPELINE if name in sizes]:
        raise PlanError(
            "beside an axis 'pipeline', which is the first, the search takes the axes 'data' and "
            f"'tensor' in this order; got {', '.join(sizes)}. Plans with others may be written by "
            "hand (docs/reference/schemas.md)"
        )
    return PipelinePlan(schedule=None, sizes=found)


def _read_searched(plan: Mapping[str, Any]) -> MeshPlan | PipelinePlan:
    # Read a mesh to search on, and with a pipeline axis what is given of its plan
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
            "(docs/reference/schemas.md)"
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
    # A name, or else a file.
    name, *more = str(plan).split("+")
    again = "recompute" in more
    if name in PRESETS and {*more} <= {"recompute", "compile", "float32_gathers", "offload"}:
        words = {word: word in more for word in ("float32_gathers", "offload")}
        if words["offload"] and PRESETS[name].level < 2:
            raise PlanError(f"plan={plan!r}: what is whole is not offloaded; choose zero3+offload")
        return UniformPlan(replace(PRESETS[name], **words), again, "compile" in more)
    if name in _layouts().LAYOUTS and {*more} <= {"recompute"}:
        return MeshPlan(preset=name, recompute=again)
    if name == "pipeline" and {*more} <= {"recompute"}:
        return PipelinePlan(recompute=again)
    if not os.path.lexists(plan):
        raise PlanError(
            f"plan={shown(str(plan))} is neither a file nor one of "
            f"{sorted([*PRESETS, *_layouts().LAYOUTS, 'pipeline'])} (or with '+recompute', "
            "'+compile', '+float32_gathers', '+offload')"
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
    *, memory_margin: Any, objective: Any, confidence: Any = LEVEL, equal_within: Any = None
) -> None:
    """Raise ValueError for options that `AutoParallelStrategy` cannot have."""
    check_objective(objective, allowed=("time", "memory", TIME_TO_LOSS))
    check_real(confidence, name="confidence")
    check_level(confidence)
    for name, share in (("memory_margin", memory_margin), ("equal_within", equal_within)):
        if share is None:
            continue
        check_real(share, name=name)
        if not 0 <= share < 1:
            raise ValueError(f"{name} is a share between 0 and 1, got {share}")


def read_memory_limit(limit: int | float | str | None) -> int | None:
    """Return the bytes from a number or text such as ``"2GiB"``; None stays None.

    Raises ValueError.
    """
    size = None if limit is None else parse_bytes(limit, name="memory_limit")
    if size == 0:
        raise ValueError("memory_limit is above 0 bytes; leave it out for the memory of the device")
    return size


def read_device_counts(counts: Any, *, default: int) -> tuple[int, ...]:
    """Return the numbers of ranks to plan for; None is the `default` alone.

    Raises ValueError for anything but a list of counts.
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
