"""Checks that the parts of a plan belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_topt.costs.plain_values import shown
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.plan_parts import PlanError, StagePlan


def check_stages(
    stages: Sequence[StagePlan],
    mesh: Mesh,
    configs: Mapping[str, OpConfig],
    *,
    schedule: str | None,
    num_microbatches: int,
    own_batches: bool,
) -> None:
    """Raise PlanError where stages, schedule, microbatches and mesh do not belong together."""
    count, ranks = len(stages), mesh.pipeline_size
    if schedule is None and (count > 1 or mesh.pipeline_axes):
        raise PlanError(
            f"a plan with stages ({count} stages on {ranks} ranks along the axis 'pipeline') needs "
            "a schedule such as "
            "'schedule: 1f1b'"
        )
    if schedule is not None and not mesh.pipeline_axes:
        raise PlanError(
            f"the schedule {schedule!r} needs an axis of the mesh for the stages: {{name: "
            f"pipeline, size: {count}}}"
        )
    if count % ranks:
        raise PlanError(
            f"every rank of the pipeline runs equally many stages: {count} stages cannot be "
            f"divided among {ranks} ranks"
        )
    if schedule is not None and num_microbatches < 1:
        raise PlanError(f"num_microbatches is at least 1, got {num_microbatches}")
    if own_batches and mesh.tensor_axes:
        raise PlanError(
            "own_batches: ranks along tensor axes get one batch, so leave it out, or these axes"
        )
    if own_batches and (schedule is None or num_microbatches != ranks):
        raise PlanError(
            "own_batches is for pipelines whose ranks bring one microbatch each: num_microbatches "
            "is then the ranks along the "
            f"axis 'pipeline', {ranks}, and there is a schedule; got {num_microbatches} and "
            f"{schedule}"
        )
    if count > 1 and (
        empty := [s for s, stage in enumerate(stages) if not any(b.block for b in stage.blocks)]
    ):
        raise PlanError(
            f'stages[{empty[0]}] names no block but "", so nothing says where it begins: name one'
        )
    if count == 1:
        return  # each block is there once
    stage_of: dict[str, int] = {}
    for index, block in (
        (index, block) for index, stage in enumerate(stages) for block in stage.blocks
    ):
        if stage_of.setdefault(block.block, index) != index and block.block:
            raise PlanError(
                f"block {shown(block.block)} is in the stages {stage_of[block.block]} and {index}: "
                "leave it in one"
            )
        if block.config is not configs[block.block] and block.config != configs[block.block]:
            raise PlanError('the block "" stands in several stages, which must place it alike')


def check_views(configs: Mapping[str, OpConfig], *, has_schedule: bool) -> None:
    """Raise PlanError where no gradient of the plan is in a bucket of DDP."""
    if has_schedule or all(config.storage.sharded_axes("gradients") for config in configs.values()):
        raise PlanError(
            "gradient_views is for gradients that DistributedDataParallel averages (ZeRO levels 0 "
            "and 1, no stages), of which "
            "this plan has none: leave it out"
        )


def check_joint_batches(
    mesh: Mesh,
    configs: Mapping[str, OpConfig],
    *,
    has_turns: bool,
    has_schedule: bool,
    has_exchange: bool,
) -> None:
    """Raise PlanError where a plan with joint modules asks for what they do not know."""
    if len(mesh.tensor_axes) != 1 or has_schedule or has_turns:
        raise PlanError(
            "joint modules are for a mesh with one tensor axis, whose ranks bring a batch each: "
            "leave out schedule and "
            "num_microbatches, or joint"
        )
    if has_exchange:
        raise PlanError(
            "a gradient exchange does not know joint modules: leave out gradient_exchange, or joint"
        )
    for block, config in configs.items():
        if config.storage.sharded_axes("gradients"):
            raise PlanError(
                f"block {shown(block)} shards gradients beside joint modules: choose ZeRO level 0 "
                "or 1"
            )
        if config.inputs or config.outputs or config.sums or config.gathers:
            raise PlanError(
                f"block {shown(block)} says where tensors are, which joint modules say themselves: "
                "leave out inputs, "
                "outputs, sums and gathers"
            )
