"""Verify a plan before its ranks exist: would it run, what would each rank hold, which collectives
would a step call.

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
    verification.collectives                      # of one step
    verification.messages                         # of one step, of a plan with stages (`example=`)

The bytes follow from the placements (`held_bytes`), the collectives from what the techniques say
that they cost (`planned_collectives`). What operators exchange along tensor axes depends on the
code between them: it is learnt from the step of a rank (`compare_observed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.optimizer_copy import OptimizerError
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.collective_rows import CollectiveRow, rows_of
from lightning_topt.execution.held_bytes import KINDS, Blocks, Integers, held_bytes
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.plan_problems import (
    batch_problems,
    cluster_problems,
    configs_of,
    find_notes,
    graph_problems,
    model_problems,
    shard_problems,
)
from lightning_topt.execution.planned_collectives import cluster_for, planned_collectives
from lightning_topt.execution.verify_stages import MessageRow, StagedStep
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.block_parameters import parameters_by_block
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.tensor_parallel.split_parameters import split_parameters
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes
from lightning_topt.techniques.tensor_parallelism import split_placements

OptimizersOf = Callable[[Any], Sequence[Optimizer]]  # the optimizers of a module


@dataclass(frozen=True)
class Verification:
    """A `Verification` is what `verify_plan` found out.

    `problems` say, each in a sentence, why the plan would not run, and what to do; without any it
    would. `notes` say what is worth knowing. `held` are the bytes of each block on each rank (rank,
    kind), by `KINDS`, empty where the plan does not belong to the model; without optimizers there
    is no state among them. `collectives` are those of one step, of each rank; along tensor axes
    once a rank was seen (`with_observations`); of a plan with stages there are `messages` instead.
    `peak_bytes` are those of a step's peak on the fullest rank, activations included; None where
    the step was not captured. `knows_state` is false where optimizers do not tell what state they
    make: then none is among what is held.
    """

    plan: ParallelPlan
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    held: Mapping[str, Integers] = field(default_factory=dict)
    collectives: tuple[CollectiveRow, ...] = ()
    peak_bytes: float | None = None
    knows_state: bool = True
    messages: tuple[MessageRow, ...] = ()

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
        """Return the ranks that hold equally much of every block, fullest first, each with one that
        stands for them.
        """
        if not self.held:
            return []
        blocks = np.concatenate([*self.held.values()], axis=1)
        _, first, group = np.unique(blocks, axis=0, return_index=True, return_inverse=True)
        totals = self.held_by_rank.sum(axis=1)
        order = sorted(range(len(first)), key=lambda index: (-totals[first[index]], first[index]))
        return [
            (np.flatnonzero(group.ravel() == index).tolist(), int(first[index])) for index in order
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; ranks that hold equally much of every block are one entry."""
        return {
            "schema_version": 1,
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
            "collectives": [{**vars(row)} for row in self.collectives],
            "messages": [{**vars(row)} for row in self.messages],
        }


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
    """Return whether `plan` would run on `module`, what each rank would hold, and what ranks would
    exchange in a step.

    Args:
        module: on any device, ``meta`` included; it is only looked at.
        optimizers_of: makes the optimizers of a module (of a copy of this one with fake tensors).
        graph: the captured step (`capture`); the memory of activations and unused parameters are
            known with it.
        cluster: the machines; None: nothing is asked of them.
        global_batch_size: samples of a step on all ranks together.
        batch_size: samples of the batches that a rank gets.
        example: a step and a microbatch of a plan with stages, which is traced on shapes.

    Never raises for a plan that does not run: that is among `Verification.problems`.
    """
    of_batch = list(
        batch_problems(plan, global_batch_size=global_batch_size, batch_size=batch_size)
    )
    if of_model := list(model_problems(plan, module)):
        return Verification(plan, (*of_model, *of_batch))
    local = _LocalModule.of(plan, module, optimizers_of)
    problems, notes = (
        [*shard_problems(plan, local.blocks, local.optimizers), *of_batch],
        [*local.notes],
    )
    if plan.schedule is not None:
        found = _verify_stages(plan, module, local, example, problems=problems, notes=notes)
        return found if cluster is None or not found.held else _on_cluster(found, cluster)
    given: dict[str, Any] = {"optimizers": local.optimizers}
    held = held_bytes(local.blocks, configs_of(plan), plan.mesh, profile=local.profile, **given)
    collectives: tuple[CollectiveRow, ...] = ()
    try:
        planned = planned_collectives(
            plan, local.module, local.blocks, cluster=cluster, graph=graph, **given
        )
        collectives = rows_of(planned, plan.mesh)
    except ValueError as error:  # an exchange of gradients that these ranks cannot have
        problems.append(str(error))
    peak = None
    if graph is not None:
        problems += graph_problems(plan, graph, local.blocks)
        if not problems and local.profile is not None:
            peak, why = _peak(plan, graph, local.profile, cluster=cluster)
            notes += why
    notes += find_notes(plan, local.blocks, cluster)
    known = optimizers_of is None or local.profile is not None
    verification = Verification(plan, tuple(problems), tuple(notes), held, collectives, peak, known)
    return verification if cluster is None else _on_cluster(verification, cluster)


def _verify_stages(
    plan: ParallelPlan,
    module: nn.Module,
    local: _LocalModule,
    example: Example | None,
    *,
    problems: Sequence[str],
    notes: Sequence[str],
) -> Verification:
    """Verify a plan with stages, of which `problems` and `notes` are known already."""
    if example is None:
        missing = (
            "a plan with stages is verified with an example of its steps: "
            "verify_plan(example=Example(step, microbatch))"
        )
        return Verification(plan, (*problems, missing), tuple(notes))
    try:
        step = StagedStep.of(plan, module, example)
    except ValueError as error:  # a schedule that does not fit, or a step that cannot be cut
        return Verification(plan, (*problems, " ".join(str(error).split())), tuple(notes))
    held = step.held(plan, local.blocks, optimizers=local.optimizers, profile=local.profile)
    more = [
        *notes,
        "the peak of a step is not predicted, nor what data ranks exchange: the plan has stages",
    ]
    knows_state = local.profile is not None or not local.optimizers
    return Verification(
        plan, tuple(problems), tuple(more), held, knows_state=knows_state, messages=step.messages
    )


def peak_bytes(
    plan: ParallelPlan, graph: OpGraph, profile: OptimizerProfile, *, cluster: Cluster | None
) -> float:
    """Return the bytes of a captured step at its peak on the fullest rank, as the cost model has
    them.

    Raises ValueError for a plan with blocks that are no modules of `graph`.
    """
    blocks = tuple(
        Block(each.block, group=index, recomputable=False) for index, each in enumerate(plan.blocks)
    )
    machines = (
        cluster_for(plan.mesh)
        if cluster is None or plan.mesh.size > cluster.num_devices
        else cluster
    )
    step = TrainingStep(
        graph.with_blocks(blocks),
        machines,
        profile,
        plan.mesh,
        graph.batch_size,
        exchange=plan.gradient_exchange,
    )
    return float(PlanCosts(step).memory(configs_of(plan)).max())


def _peak(
    plan: ParallelPlan, graph: OpGraph, profile: OptimizerProfile, *, cluster: Cluster | None
) -> tuple[float | None, list[str]]:
    """The peak, or why it is not known."""
    unknown = "the peak of a step is not predicted: "
    if plan.mesh.tensor_axes:
        return None, [f"{unknown}the step was captured with whole operators, not with their pieces"]
    if graph.unused:
        return None, [f"{unknown}the step gives {graph.unused[0]!r} no gradient"]
    try:
        return peak_bytes(plan, graph, profile, cluster=cluster), []
    except ValueError as error:
        return None, [f"{unknown}{error}"]


def _on_cluster(verification: Verification, cluster: Cluster) -> Verification:
    """With the problems that its machines have."""
    needed, what = (
        float(verification.held_by_rank.sum(axis=1).max()),
        "parameters, gradients and optimizer state",
    )
    if verification.peak_bytes is not None:
        needed, what = verification.peak_bytes, "a training step"
    problems = cluster_problems(verification.plan, cluster, needed=needed, what=what)
    return replace(verification, problems=(*verification.problems, *problems))


@dataclass(frozen=True)
class _LocalModule:
    """A copy of a module with fake tensors, as a rank of the tensor axes has it, and its
    optimizers.
    """

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
        placements = split_placements(configs_of(plan), plan.mesh)
        with mode:
            split_parameters(local, placements, TensorAxes.of_mesh(plan.mesh, rank=0))
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
