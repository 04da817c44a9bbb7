"""Verify a plan before its ranks exist: would it run, and what would each rank hold?

Nothing is started and nothing allocated: the model may be on the meta device, and the number of
ranks is that of the plan.

    plan = ParallelPlan.load("plan.yaml")
    with torch.device("meta"):
        module = MyModel()
    verification = verify_plan(
        plan, module, optimizers_of=lambda module: [torch.optim.AdamW(module.parameters())]
    )
    verification.problems                         # sentences; none: it would run
    verification.held[""]                         # bytes of the block "" on each rank, by KINDS
    print_verification(verification, console=rich.console.Console())

Problems are found by `plan_problems`, and the bytes follow from the placements (`held_bytes`). Of a
plan with stages a step is traced on shapes: it says which parameters each stage needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lightning_topt.basics.units import format_bytes
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.optimizer_copy import OptimizerError
from lightning_topt.costs.sizes import narrow_parameters
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.held_bytes import KINDS, Blocks, Integers, held_bytes
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.execution.plan_problems import (
    batch_problems,
    cluster_problems,
    configs_of,
    exchange_problems,
    find_notes,
    graph_problems,
    model_problems,
    shard_problems,
)
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.graph.step_flow import assign_calls
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.report_table import block_ranges, ranges
from lightning_topt.schedules.check import check_schedule
from lightning_topt.schedules.schedules import make_schedule
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.registry import parameters_by_block
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_parameters import split_parameters
from lightning_topt.techniques.tensor_parallelism import split_placements

OptimizersOf = Callable[[Any], Sequence[Optimizer]]  # the optimizers of a module
_ROWS, _PROBLEMS = 8, 8  # that are printed


def verify_plan(
    plan: ParallelPlan,
    module: nn.Module,
    *,
    optimizers_of: OptimizersOf | None = None,
    graph: OpGraph | None = None,
    cluster: Cluster | None = None,
    global_batch_size: int | None = None,
    batch_size: int | None = None,
    example: Example | None = None,
) -> Verification:
    """Return whether `plan` would run on `module`, and what ranks would hold.

    Never raises for a plan that does not run: that is among `Verification.problems`.

    Args:
        plan: for any number of ranks.
        module: on any device, ``meta`` included; it is only looked at.
        optimizers_of: makes the optimizers of a module (of a copy of this one with fake tensors).
        graph: the captured step (`capture`); the memory of activations and unused parameters are
            known with it.
        cluster: the machines; None: nothing is asked of them.
        global_batch_size: samples of a step on all ranks together.
        batch_size: samples of the batches that a rank gets.
        example: a step and a microbatch of a plan with stages, which is traced on shapes.
    """
    # The plan and the model.
    of_batch = list(
        batch_problems(plan, global_batch_size=global_batch_size, batch_size=batch_size)
    )
    if of_model := list(model_problems(plan, module)):
        return Verification(plan, (*of_model, *of_batch))
    local = _LocalModule.of(plan, module, optimizers_of)
    problems = [*shard_problems(plan, local.blocks, local.optimizers), *of_batch]
    machines = _machines(plan.mesh, cluster)
    problems += exchange_problems(plan, machines)
    notes, peak = [*local.notes], None
    # What ranks hold, and what is known of a captured step.
    held: Mapping[str, Integers] = {}
    if plan.schedule is not None:
        try:
            held = _held_by_stages(plan, module, example, local)
            notes.append("the peak of a step is not predicted: the plan has stages")
        except ValueError as error:  # a schedule that does not fit, or a step that cannot be cut
            problems.append(" ".join(str(error).split()))
    else:
        held = local.held(plan, local.blocks)
        if graph is not None:
            problems += graph_problems(plan, graph, local.blocks)
            if not problems and local.profile is not None:
                peak, why = _peak(plan, graph, local.profile, machines)
                notes += why
        notes += find_notes(plan, local.blocks, cluster)
    # Whether the machines suffice.
    found = Verification(plan, tuple(problems), tuple(notes), held, peak)
    return found if cluster is None or not held else _on_cluster(found, cluster)


@dataclass(frozen=True)
class Verification:
    """What `verify_plan` found out.

    Attributes:
        plan: that was verified.
        problems: why the plan would not run, and what to do, a sentence each; none: it would.
        notes: what is worth knowing.
        held: bytes of each block on each rank, (rank, kind) by `KINDS`. Empty where the plan does
            not belong to the model. There is no state without optimizers, nor where these do not
            tell what they keep, which is a note.
        peak_bytes: of a step's peak on the fullest rank, with activations; None where the step was
            not captured.
    """

    plan: ParallelPlan
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    held: Mapping[str, Integers] = field(default_factory=dict)
    peak_bytes: float | None = None

    @property
    def would_run(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def held_by_rank(self) -> Integers:
        """Bytes of all blocks together (rank, kind)."""
        zero = np.zeros((self.plan.mesh.size, len(KINDS)), np.int64)
        return zero + sum(self.held.values())

    def equal_ranks(self) -> list[tuple[list[int], int]]:
        """Return groups of ranks that hold equally much of every block, the fullest first.

        Each comes with one rank that stands for it.
        """
        if not self.held:
            return []
        # One row for each rank, (rank, block x kind): equal rows are a group.
        blocks = np.concatenate([*self.held.values()], axis=1)
        _, first, group = np.unique(blocks, axis=0, return_index=True, return_inverse=True)
        totals = self.held_by_rank.sum(axis=1)
        order = sorted(range(len(first)), key=lambda index: (-totals[first[index]], first[index]))
        return [
            (np.flatnonzero(group.ravel() == index).tolist(), int(first[index])) for index in order
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. Ranks that hold equally much of every block are one entry."""
        return {
            "schema_version": 2,
            "would_run": self.would_run,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "plan": self.plan.summary(),
            "world_size": self.plan.mesh.size,
            "peak_bytes": self.peak_bytes,
            "held": [
                {
                    "ranks": ranks,
                    **dict(zip(KINDS, self.held_by_rank[one].tolist(), strict=True)),
                    "blocks": {
                        block: dict(zip(KINDS, sizes[one].tolist(), strict=True))
                        for block, sizes in self.held.items()
                    },
                }
                for ranks, one in self.equal_ranks()
            ],
        }


def cluster_for(mesh: Mesh) -> Cluster:
    """Return a cluster with the nodes that `mesh` was made for.

    Its speeds are not known: it may be asked about bytes only.
    """
    # Axes inside a node are the last ones.
    per_node = 1
    for axis in reversed(mesh.axes):
        if axis.scope == "inter":
            break
        per_node *= axis.size
    device, link = Device("any device", 1, {"float32": 1.0}, 1.0), Link(0.0, 1.0)
    return Cluster("any cluster", device, per_node, mesh.size // per_node, link, link)


def _machines(mesh: Mesh, cluster: Cluster | None) -> Cluster:
    # `cluster`, or one that is large enough: bytes are the same on any
    return cluster_for(mesh) if cluster is None or mesh.size > cluster.num_devices else cluster


def _peak(
    plan: ParallelPlan, graph: OpGraph, profile: OptimizerProfile, machines: Cluster
) -> tuple[float | None, list[str]]:
    # The bytes of a step's peak on the fullest rank, or why they are not known
    unknown = "the peak of a step is not predicted: "
    if plan.mesh.tensor_axes:
        return None, [f"{unknown}the step was captured with whole operators, not with their pieces"]
    if graph.unused:
        return None, [f"{unknown}the step gives {graph.unused[0]!r} no gradient"]
    # Blocks as the plan has them, none of which is recomputed.
    blocks = tuple(
        Block(each.block, group=index, recomputable=False) for index, each in enumerate(plan.blocks)
    )
    try:
        step = TrainingStep(
            graph.with_blocks(blocks),
            machines,
            profile,
            plan.mesh,
            graph.batch_size,
            exchange=plan.gradient_exchange,
            local_steps=plan.local_steps,
            narrow=narrow_parameters(graph) if plan.gather_dtype else frozenset(),
        )
        return float(PlanCosts(step).memory(configs_of(plan)).max()), []
    except ValueError as error:  # blocks that are no modules of the graph
        return None, [f"{unknown}{error}"]


def _on_cluster(verification: Verification, cluster: Cluster) -> Verification:
    # The verification with the problems that the machines have
    # of the fullest rank: what is held all the time, or the peak where it is known
    needed = float(verification.held_by_rank.sum(axis=1).max())
    what = "parameters, gradients and optimizer state"
    if verification.peak_bytes is not None:
        needed, what = verification.peak_bytes, "a training step"
    problems = cluster_problems(verification.plan, cluster, needed=needed, what=what)
    return replace(verification, problems=(*verification.problems, *problems))


@dataclass(frozen=True)
class _LocalModule:
    """A copy of a module with fake tensors, as a rank of the tensor axes has it."""

    module: nn.Module
    blocks: Blocks
    optimizers: Sequence[Optimizer]
    profile: OptimizerProfile | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, plan: ParallelPlan, module: nn.Module, optimizers_of: OptimizersOf | None
    ) -> _LocalModule:
        local, mode = fake_copy(module)
        # Slices of one rank stand for those of all: they are equally large.
        placements = split_placements(configs_of(plan), plan.mesh)
        with mode:
            split_parameters(local, placements, TensorAxes.of_mesh(plan.mesh, rank=0))
        # optimizers are made over slices, as in the run, so that their states have these sizes
        blocks = parameters_by_block(local, configs_of(plan))
        if optimizers_of is None:
            return cls(local, blocks, (), None)
        with mode:
            optimizers = optimizers_of(local)
        try:
            profile = read_optimizer(optimizers, named_parameters=local.named_parameters())
        except OptimizerError as error:
            return cls(
                local, blocks, optimizers, None, (f"the optimizer state is not known: {error}",)
            )
        return cls(local, blocks, optimizers, profile)

    def held(self, plan: ParallelPlan, blocks: Blocks) -> dict[str, Integers]:
        """Return what ranks hold of `blocks`, some of the parameters of the module."""
        given: dict[str, Any] = {"optimizers": self.optimizers, "profile": self.profile}
        return held_bytes(blocks, configs_of(plan), plan.mesh, **given)


# ---- plans with stages ---------------------------------------------------------------------------


def _held_by_stages(
    plan: ParallelPlan, module: nn.Module, example: Example | None, local: _LocalModule
) -> dict[str, Integers]:
    """Return what `held_bytes` returns, each rank with the parameters that its stages need.

    Raises ValueError as `_layout`.
    """
    layout = _layout(plan, module, example)
    # A tied parameter is where any of its names is needed.
    names_of = defaultdict[nn.Parameter, list[str]](list)
    for parameters in local.blocks.values():
        for name, parameter in parameters.items():
            names_of[parameter].append(name)
    # (rank, kind) for each block, place after place of the pipeline.
    mesh = plan.mesh
    held = {block: np.zeros((mesh.size, len(KINDS)), np.int64) for block in local.blocks}
    places = np.array([mesh.pipeline_rank(rank) for rank in range(mesh.size)])  # (rank,)
    for place in range(mesh.pipeline_size):
        kept = set()
        for parameter, names in names_of.items():
            holders = {rank for name in names for rank in layout.holders(name)}
            if not holders or place in holders:
                kept.add(parameter)
        own = {
            block: {name: p for name, p in parameters.items() if p in kept}
            for block, parameters in local.blocks.items()
        }
        for block, sizes in local.held(plan, own).items():
            held[block][places == place] = sizes[places == place]
    return held


def _layout(plan: ParallelPlan, module: nn.Module, example: Example | None) -> StageLayout:
    """Return which parameters each stage of `plan` needs in a step like that of `example`.

    Raises:
        ValueError: without an example; for a schedule that these ranks cannot have, or that would
            hang with what stages need of one another; for a step that cannot be cut like this.
    """
    if example is None:
        raise ValueError(
            "a plan with stages is verified with an example of its steps: "
            "verify_plan(example=Example(step, microbatch))"
        )
    assert plan.schedule is not None, "a plan without stages"
    schedule = make_schedule(
        plan.schedule,
        num_ranks=plan.mesh.pipeline_size,
        num_microbatches=plan.num_microbatches,
        stages_per_rank=plan.stages_per_rank,
    )
    # The step on shapes, cut where the plan cuts it.
    blocks = [tuple(each.block for each in stage.blocks if each.block) for stage in plan.stages]
    units = [name for names in blocks for name in names]
    flow = trace_flow(module, example.step, example.microbatch, units=units)
    stage_of_call = assign_calls(flow, blocks)
    # For each stage the earlier ones that it receives from: the schedule must not hang.
    sources = defaultdict[int, set[int]](set)
    for ref, needed_by in flow.crossings(stage_of_call).items():
        for stage in needed_by:
            sources[stage].add(stage_of_call[ref.call])
    check_schedule(schedule, needs={stage: sorted(found) for stage, found in sources.items()})
    ranks = schedule.rank_of_stage
    return StageLayout.of_flow(flow, stage_of_call, module, rank_of_stage=ranks)


# ---- for people ----------------------------------------------------------------------------------


def print_verification(verification: Verification, *, console: Console) -> None:
    """Print all that is known of a plan, the answer last."""
    plan = verification.plan
    console.print(f"{plan.summary()}, {plan.mesh.size} rank(s)", highlight=False, markup=False)
    if verification.held:
        console.print(_ranks_table(verification))
        console.print(_blocks_table(verification))
    if verification.peak_bytes is not None:
        console.print(
            "peak of a step on the fullest rank, predicted: "
            f"{format_bytes(verification.peak_bytes)}",
            highlight=False,
        )
    for note in verification.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for problem in verification.problems[:_PROBLEMS]:
        console.print(f"[bold red]problem[/]: {escape(problem)}", highlight=False)
    if (hidden := len(verification.problems) - _PROBLEMS) > 0:
        console.print(f"and {hidden} more problems", highlight=False)
    console.print(
        "[bold green]would run[/]" if verification.would_run else "[bold red]would not run[/]"
    )


def _table(*columns: str, caption: str) -> Table:
    # A table of numbers with names in its first column
    table = Table(*columns, caption=caption or None, caption_justify="left")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    return table


def _ranks_table(verification: Verification) -> Table:
    groups, held = verification.equal_ranks(), verification.held_by_rank
    hidden = len(groups) - _ROWS
    caption = f"{hidden} more kinds of ranks, which hold less" if hidden > 0 else ""
    table = _table(
        "ranks", *(kind.replace("_", " ") for kind in KINDS), "together", caption=caption
    )
    for ranks, one in groups[:_ROWS]:
        sizes = held[one].tolist()
        table.add_row(ranges(ranks), *map(format_bytes, (*sizes, sum(sizes))))
    return table


def _blocks_table(verification: Verification) -> Table:
    # The bytes by block, with blocks of equal size in one row
    # Sizes of the fullest rank, (kind,), and the blocks that have them.
    alike: dict[tuple[int, ...], list[str]] = {}
    for block, held in verification.held.items():
        alike.setdefault(tuple(held.max(axis=0).tolist()), []).append(block)
    order = sorted(alike, key=lambda sizes: -sum(sizes))
    hidden = len(order) - _ROWS
    caption = "on the fullest rank of each" + (
        f"; {hidden} more kinds of blocks are smaller" if hidden > 0 else ""
    )
    columns = (kind.replace("_", " ") for kind in KINDS)
    table = _table("blocks", *columns, caption=caption)
    for sizes in order[:_ROWS]:
        table.add_row(escape(block_ranges(alike[sizes])), *map(format_bytes, sizes))
    return table
