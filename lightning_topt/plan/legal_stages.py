"""Stages, schedule, mesh and prediction of a plan: what may be together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_topt.costs.plain_values import one_line, shown
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.plan_parts import BlockPlan, PlanError, StagePlan
from lightning_topt.prediction.rule import Prediction
from lightning_topt.prediction.rules import make_prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES


class _StagedPlan(Protocol):
    """The parts of a plan that are checked here."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def stages(self) -> tuple[StagePlan, ...]: ...
    @property
    def schedule(self) -> str | None: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def own_batches(self) -> bool: ...
    @property
    def prediction(self) -> object: ...
    @property
    def blocks(self) -> tuple[BlockPlan, ...]: ...
    @property
    def configs(self) -> dict[str, OpConfig]: ...


def check_continuous(plan: _StagedPlan) -> None:
    """Raise PlanError for what does not go together with a schedule that never flushes, or needs
    one.
    """
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        if plan.prediction is not None:
            raise PlanError(
                "prediction is for schedules that never flush: leave it out, or choose the "
                f"schedule {' or '.join(CONTINUOUS_SCHEDULES)}; got "
                f"{plan.schedule}"
            )
        return
    if len(plan.stages) != plan.mesh.pipeline_size:
        raise PlanError(
            f"schedule {plan.schedule!r} runs one stage on each rank: {plan.mesh.pipeline_size} "
            f"stages; got {len(plan.stages)}"
        )
    if plan.num_microbatches != 1 or plan.own_batches:
        raise PlanError(
            f"schedule {plan.schedule!r} does not cut batches: num_microbatches is 1, without "
            "own_batches; got "
            f"{plan.num_microbatches}"
        )
    for block in plan.blocks:
        if block.config.storage.level:
            raise PlanError(
                f"block {shown(block.block)} has ZeRO level {block.config.storage.level}, and "
                f"schedule {plan.schedule!r} needs "
                "whole weights and optimizer state in every pass: choose level 0 (ddp)"
            )


def rule_from_value(value: Any) -> Prediction | None:
    """Return the prediction that a plan names, or has. Raises PlanError for one that is not
    there.
    """
    if value is None or isinstance(value, Prediction):
        return value
    if not isinstance(value, str | Mapping):
        raise PlanError(
            "prediction is the name of a rule, or a mapping with one under 'rule'; got "
            f"{shown(value)}"
        )
    try:
        return make_prediction(value)
    except (TypeError, ValueError) as error:
        raise PlanError(f"prediction: {one_line(error)}") from error
