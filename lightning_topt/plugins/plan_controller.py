"""The plan of a fit: what was asked is decided at setup, and compared with its first steps.

What was decided stays until the next fit, for whoever asks. What plans and searches is imported
when it is first used. A measurement that the first steps do not bear out is renewed.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.basics.units import format_seconds
from lightning_topt.costs.intervals import Interval, interval_of
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.monitors import StepMonitor
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.step_clock import StepsOfPlan
from lightning_topt.techniques.ddp_wrapper import bytes_of_buckets

if TYPE_CHECKING:
    from lightning_topt.costs.measurements import Measurements

# by which predictions from a measured machine may be off (a factor, less 1); and seconds, beside it
USUAL_ERROR, _LEAST_SECONDS = 0.5, 2e-3


class PlanController:
    """Makes the plan of a fit, as `request` says.

    Attributes:
        plan: what was decided, None before that.
        planning: what was searched, on rank 0.
        planned_by: ``"search"``, ``"given"``, ``"clock"``, or why the plan is ``ddp``.
        seconds: until it was decided; by a clock, with the steps that it has timed.
        memory_meter: of the plan's steps, where a `StepMonitor` measures them.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.plan: ParallelPlan | None = None
        self.planning: Planning | None = None
        self.planned_by: str | None = None
        self.seconds: float | None = None
        self.memory_meter: MemoryMeter | None = None
        self._measurements: Measurements | None = None
        self._compared: StepsOfPlan | None = None

    def begin_fit(self) -> None:
        """Forget the plan of the last fit, and what was measured of it.

        `planning` and `planned_by` are replaced with the next plan.
        """
        self.plan = self.memory_meter = self.seconds = None
        self._measurements = self._compared = None

    @property
    def reason(self) -> str:
        """Why the plan was decided."""
        return "" if self.plan is None else self.plan.reason.removesuffix(".")

    @property
    def busy_share(self) -> float:
        """The share without a core in what the plan's prediction was made of.

        0 where the machine was quiet.
        """
        return max(
            0.0 if self._measurements is None else self._measurements.busy_share,
            0.0 if self.request.cluster is None else self.request.cluster.busy_share,
        )

    @property
    def decided(self) -> Mapping[str, Any]:
        """What another process may take over, as plain values: all but what was searched."""
        plan = None if self.plan is None else self.plan.to_dict()
        return {"plan": plan, "planned_by": self.planned_by, "seconds": self.seconds}

    @decided.setter
    def decided(self, values: Mapping[str, Any]) -> None:
        plan = values["plan"]
        self.plan = None if plan is None else ParallelPlan.from_dict(plan)
        self.planned_by, self.seconds = values["planned_by"], values["seconds"]

    def end_fit(self) -> None:
        """Compare no more steps."""
        self._compared = None

    # ---- decisions -------------------------------------------------------------------------------

    def decide(self, trainer: pl.Trainer) -> ParallelPlan:
        """Return the plan of this fit, made now. A collective call. Raises what planning does."""
        start, device = perf_counter(), trainer.strategy.root_device
        if self.request.needs_batch and trainer.lightning_module.automatic_optimization:
            trainer.fit_loop.setup_data()  # draws as it does under ddp
        # Planning draws random numbers, and training goes on as if it had not.
        with isolate_rng():
            # what traces and searches is imported where a plan is made
            from lightning_topt.plugins import traced_planning  # noqa: PLC0415

            decision = traced_planning.decide_plan(self.request, trainer)
        self.plan, self.planning, self.planned_by, self._measurements = decision
        # Give back what planning has used, before memory is measured.
        if self.request.saves_memory or self.plan.saves_memory:
            release_free_memory()
            return_freed_memory(device)
        self.seconds = perf_counter() - start
        return self.plan

    def decide_by_clock(self, plan: ParallelPlan, seconds: float) -> None:
        """Know the plan that a clock has decided, which took `seconds`."""
        self.plan, self.planned_by, self.seconds = plan, "clock", seconds

    def begin_plan(self, trainer: pl.Trainer) -> None:
        """Know that the plan is applied and optimizers are made; what they take is there by now."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, StepMonitor) for callback in callbacks):
            device = trainer.strategy.root_device
            warm_up(device)
            self.memory_meter = MemoryMeter(device)
            # On CPUs buckets take no memory before the first backward pass writes to them.
            ddp, buckets = trainer.strategy.model, 0
            if isinstance(ddp, DistributedDataParallel) and device.type != "cpu":
                buckets = bytes_of_buckets(ddp)
            self.memory_meter.mark_base(
                trainer.lightning_module, trainer.strategy.optimizers, other_bytes=buckets
            )
        self._begin_comparison(trainer)

    # ---- the prediction and the first steps of its plan ------------------------------------------

    def begin_batch(self) -> None:
        """A batch begins, under the plan if there is one."""
        if self._compared is not None:
            self._compared.begin_batch()

    def end_batch(self, *, updates: bool) -> None:
        """A batch is over; where it `updates`, a step is."""
        if self._compared is not None:
            self._compared.end_batch(updates=updates)

    def _begin_comparison(self, trainer: pl.Trainer) -> None:
        """Compare the next steps with the plan's prediction on rank 0, if it is one of these."""
        assert self.plan is not None
        self._compared = None
        is_one = self.plan.predicted and self.plan.accumulate == trainer.accumulate_grad_batches
        if is_one and trainer.is_global_zero and self._interval is not None:
            self._compared = StepsOfPlan(
                trainer.strategy.root_device,
                ranks=trainer.world_size // trainer.num_nodes,
                then=self._compare,
            )

    @property
    def _interval(self) -> Interval | None:
        """In which a step's seconds are expected; None where nothing is known of that."""
        cluster = self.request.cluster
        assert self.plan is not None and self.plan.predicted is not None
        if self._measurements is not None:
            return interval_of(self.plan.predicted.step_seconds, error=USUAL_ERROR)
        if self.planning is None or cluster is None:
            return None
        return self.planning.intervals(cluster)[0]

    def _compare(self, seconds: float, was_busy: bool) -> None:
        """Say so where steps take other `seconds` than predicted; let the next fit measure again.

        `was_busy`: the machine was, in these steps.
        """
        expected = self._interval
        assert expected is not None
        low, high = expected.low, expected.high
        if low - _LEAST_SECONDS <= seconds <= high + _LEAST_SECONDS:
            return
        if was_busy and seconds > high:
            cause = "the machine is busy now, and a rank waits for a core"
        elif self.busy_share:
            cause = "the machine was busy when it was measured"
        elif self._measurements is not None and self._measurements.renew():
            cause = "the machine was another when it was measured, and the next fit measures again"
        else:
            cause = "rank 0 had its core: another rank is slow, or the cost model is wrong here"
        rank_zero_info(
            f"topt: a step takes {format_seconds(seconds)}, outside of the {format_seconds(low)} "
            f"to {format_seconds(high)} that were predicted: {cause}"
        )
