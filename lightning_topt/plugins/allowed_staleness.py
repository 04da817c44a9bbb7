"""A plan may have stages that never wait for an update where the user allows that, with a rule of
weights for the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_topt.costs.plain_values import shown
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, rule_from_value
from lightning_topt.plan.pipeline_search import StaleWeights
from lightning_topt.plugins.given_plans import GivenPlan, MeshPlan, PipelinePlan
from lightning_topt.prediction import Prediction, TwoVersions, default_prediction, make_prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

AllowStaleness = bool | str | Mapping[str, Any] | Prediction
_NO_RULE_NEEDED = "stash"


@dataclass(frozen=True)
class AllowedStaleness:
    """Whether plans that never flush are `allowed`, and with which rule of weights (None: the
    optimizer's default).
    """

    allowed: bool = False
    prediction: Prediction | None = None

    @classmethod
    def read(cls, allow: AllowStaleness) -> AllowedStaleness:
        """Read what `allow_staleness` says: False, True, or a rule. Raises ValueError for anything
        else.
        """
        if isinstance(allow, bool):
            return cls(allow)
        try:
            return cls(True, rule_from_value(allow))
        except ValueError as error:
            raise ValueError(
                f"allow_staleness is true, false or a rule of weights: {error}"
            ) from error

    def check(self, plan: GivenPlan | None) -> None:
        """Raise PlanError for a plan that needs to be allowed and is not, ValueError where nothing
        is left to be allowed.
        """
        schedule = plan.schedule if isinstance(plan, ParallelPlan | PipelinePlan) else None
        if schedule in CONTINUOUS_SCHEDULES and not self.allowed:
            raise PlanError(
                f"this plan's stages never wait for an update (schedule {schedule!r}), and compute "
                "with weights that miss some, which changes the training. To run it, say "
                "allow_staleness=True; or choose another schedule"
            )
        if not self.allowed or plan is None:
            return
        if isinstance(plan, PipelinePlan) and schedule in (None, *CONTINUOUS_SCHEDULES):
            if dict(plan.sizes or ()).get("tensor", 1) > 1:
                raise ValueError(
                    f"the search takes the schedules {' and '.join(CONTINUOUS_SCHEDULES)} beside "
                    "an axis 'data' alone: leave out the axis 'tensor', or allow_staleness"
                )
            return
        if not isinstance(plan, ParallelPlan) or schedule not in CONTINUOUS_SCHEDULES:
            named = "the mesh" if isinstance(plan, MeshPlan) else "the plan"
            raise ValueError(
                f"allow_staleness is for the schedules {' and '.join(CONTINUOUS_SCHEDULES)}, which "
                f"{named} excludes: leave out one of them"
            )
        own = plan.weight_prediction
        if self.prediction is not None and own is not None and own != self.prediction:
            raise ValueError(
                f"the plan predicts weights by {own.name!r}, and allow_staleness names another "
                "rule: say allow_staleness=True, or change the plan's prediction"
            )

    def weights(self, optimizer: Optimizer) -> StaleWeights | None:
        """Return what a search may choose, None where nothing is allowed. Raises ValueError as
        `rule_for`.
        """
        return StaleWeights(rule_for(optimizer, self.prediction)) if self.allowed else None


def rule_for(optimizer: Optimizer, prediction: Prediction | None = None) -> Prediction:
    """Return the rule of weights for an optimizer: `prediction`, else its default.

    Raises ValueError where `prediction` does not know the optimizer, or this needs its closure.
    """
    if type(optimizer).__name__ == "LBFGS":
        raise ValueError(
            "LBFGS runs the training step several times per update, which stages that never wait "
            "cannot do: choose another optimizer, or another schedule"
        )
    if prediction is not None:
        prediction.on(optimizer, stage=0, num_stages=2)
        return prediction
    default = default_prediction(optimizer)
    try:
        default.on(optimizer, stage=0, num_stages=2)
    except ValueError:  # SGD without momentum, say
        return make_prediction(_NO_RULE_NEEDED)
    return default


def why_not_continuous(trainer: pl.Trainer) -> str | None:
    """Return why this fit cannot run in stages that never wait, beside what every pipeline refuses,
    as a clause.
    """
    strategy = trainer.strategy
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        return (
            "a gradient scaler skips updates and changes its scale with minibatches in flight "
            "(bf16-mixed needs none)"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return (
            "each rank's clock would decide when to validate (val_check_interval is a number of "
            "batches, or a share of them)"
        )
    for config in strategy.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            return (
                "ReduceLROnPlateau in each step sees other values on each stage (interval='epoch' "
                "sees the same)"
            )
    return None


def check_flight(plan: ParallelPlan, trainer: pl.Trainer) -> None:
    """Raise PlanError where a rule needs more minibatches in an update than the fit accumulates."""
    rule, flight = (
        plan.weight_prediction,
        (len(plan.stages) - 1) * CONTINUOUS_SCHEDULES[plan.schedule or ""],
    )
    if isinstance(rule, TwoVersions) and trainer.accumulate_grad_batches < flight:
        raise PlanError(
            f"prediction {rule.name!r} needs as many minibatches in an update as are in flight, "
            f"{flight}: set accumulate_grad_batches={flight}, or use prediction 'stash'"
        )


def with_rule(
    plan: ParallelPlan, optimizers: Sequence[Optimizer], allowed: AllowedStaleness
) -> ParallelPlan:
    """Return `plan`, which never flushes, with its rule of weights. Raises PlanError where none
    suits.
    """
    if len(optimizers) != 1:
        raise PlanError(
            f"the schedule {plan.schedule!r} updates with one optimizer, and the module has "
            f"{shown(len(optimizers))}"
        )
    try:
        return replace(
            plan, prediction=rule_for(optimizers[0], plan.weight_prediction or allowed.prediction)
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
