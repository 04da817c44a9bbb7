"""When the plan of a fit is made, and of what: the way from a request to a decision.

    at setup           a plan that needs no batch (`decide`)
    the first batch    a plan that is made of a batch, before it runs (`decide`)
    watched steps      a plan made of real steps, beside training (`watch`, then `poll`); or the
                       blocks of a plan that was given by name

Which fit is planned when is the table in `plan_request`. What was decided stays until the next fit,
for whoever asks. What plans and searches is imported when it is first used. The first steps under a
plan are compared with its prediction, and a measurement that they do not bear out is renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt import plugins
from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.basics.units import format_seconds
from lightning_topt.costs.intervals import Interval, interval_of
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.monitors import StepMonitor
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import UNTIL_WATCHED, PlanDecision, Planning
from lightning_topt.plugins.watched_steps import StepsOfPlan, WatchedFit
from lightning_topt.techniques.ddp_wrapper import bytes_of_buckets

if TYPE_CHECKING:
    from lightning_topt.costs.measurements import Measurements

# by which predictions from a measured machine may be off (a factor, less 1); and seconds, beside it
USUAL_ERROR, _LEAST_SECONDS = 0.5, 2e-3


class PlanController:
    """Makes the plan of a fit, as `request` says; most methods are collective calls.

    Attributes:
        plan: what was decided, None before that.
        planning: what was searched, on rank 0.
        planned_by: ``"search"``, ``"given"``, or why the plan is ``ddp``.
        seconds: that planning has taken in this fit.
        memory_meter: of the plan's steps, where a `StepMonitor` measures them.
        waits_for_batch: whether a plan begins with the first batch.

    Args:
        request: what the user asked for.
        watch_steps: how many steps are watched.

    Raises ValueError for fewer than one step.
    """

    def __init__(self, request: PlanRequest, *, watch_steps: int) -> None:
        check_whole(watch_steps, name="watch_steps (at least one step is watched)")
        self.request, self._watch_steps = request, watch_steps
        self.plan: ParallelPlan | None = None
        self.planning: Planning | None = None
        self.planned_by: str | None = None
        self.seconds: float | None = None
        self.memory_meter: MemoryMeter | None = None
        self.waits_for_batch = False
        self._measurements: Measurements | None = None
        self._compared: StepsOfPlan | None = None
        self._watched: WatchedFit | None = None
        self._search: plugins.WatchedPlanning | None = None

    def begin_fit(self) -> None:
        """Forget the plan of the last fit, and what was measured of it.

        `planning` and `planned_by` are replaced with the next plan.
        """
        self.plan = self.memory_meter = self.seconds = None
        self._measurements = self._compared = None

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

    def begin_at_setup(self, trainer: pl.Trainer, *, may_shard: bool) -> bool:
        """Begin planning for a fit that is set up; return whether its plan is to begin now.

        Where the first steps are to be watched, watching begins. Else a plan that needs no batch is
        decided here, any other with the first batch (`waits_for_batch`).

        Args:
            trainer: of the fit.
            may_shard: whether unsharded gradients and states may take too much memory.
        """
        module, device = trainer.lightning_module, trainer.strategy.root_device
        if self.request.plans_from_watched_steps(module) and not may_shard:
            self.watch(trainer.strategy)
            return False
        self.waits_for_batch = True
        is_one_block = self.request.begins_as_one_block(module, device) and not may_shard
        if not is_one_block and self.request.needs_batch(module):
            return False
        # A plan that leaves ranks without full gradients is known now, but begins with the first
        # batch: until then hooks and the sanity check find the module's own parameters, as under
        # ddp, and stages need a batch to know what they send.
        return self.decide(trainer, None).keeps_gradients_whole

    def end_fit(self, *, failed: bool, world_size: int) -> None:
        """Stop planning. A fit that was shorter than what is watched has run as DDP."""
        if self._watched is not None and self.plan is None and not failed:
            self.plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(world_size))
            self.planned_by = "ddp: the fit was over before a plan was made"
        self._stop_watching()
        self.waits_for_batch, self._compared = False, None

    # ---- decisions -------------------------------------------------------------------------------

    def decide(self, trainer: pl.Trainer, batch: Any) -> ParallelPlan:
        """Return the plan that is made now, of `batch` or of none. Raises what planning does."""
        self._take(trainer, partial(plugins.decide_plan, self.request, trainer, batch))
        assert self.plan is not None
        return self.plan

    def poll(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> ParallelPlan | None:
        """Return the plan that takes over before this batch, None where none does."""
        # Are all watched steps done?
        fit = self._watched
        if fit is None or not fit.begin_batch(
            batch_idx, accumulate=trainer.accumulate_grad_batches
        ):
            return None
        if self._search is None:
            self._search = plugins.WatchedPlanning(self.request, trainer, fit)
        decide: Callable[[], PlanDecision | None] = partial(self._search.poll, batch)
        if self.request.plan is not None:
            decide = partial(plugins.refine_watched, self.request, trainer, fit)
        if not self._take(trainer, decide):
            return None
        self._stop_watching()
        return self.plan

    def _take(self, trainer: pl.Trainer, decide: Callable[[], PlanDecision | None]) -> bool:
        """Take over what `decide` returns; return whether there is a plan."""
        start, device = perf_counter(), trainer.strategy.root_device
        # Planning draws random numbers, and training goes on as if it had not.
        with isolate_rng():
            decision = decide()
        if decision is not None:
            self.plan, self.planning, self.planned_by, self._measurements = decision
            # Give back what planning has used, before memory is measured.
            if self.request.saves_memory or self.plan.saves_memory:
                release_free_memory()
                return_freed_memory(device)
        self.seconds = (self.seconds or 0.0) + perf_counter() - start
        if decision is None:
            return False
        # Measured memory is what the plan adds to the present state.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, StepMonitor) for callback in callbacks):
            self.memory_meter = self._new_meter(trainer, device)
        self._begin_comparison(trainer)
        return True

    def _new_meter(self, trainer: pl.Trainer, device: torch.device) -> MemoryMeter:
        warm_up(device)
        meter, buckets = MemoryMeter(device), 0
        ddp = trainer.strategy.model
        # On CPUs buckets take no memory before the first backward pass writes to them.
        has_buckets = self._watched is not None or device.type != "cpu"
        if isinstance(ddp, DistributedDataParallel) and has_buckets:
            buckets = bytes_of_buckets(ddp)
        meter.mark_base(trainer.lightning_module, trainer.strategy.optimizers, other_bytes=buckets)
        return meter

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

    # ---- watched steps ---------------------------------------------------------------------------

    def watch(self, strategy: Strategy, *, steps: int | None = None) -> None:
        """Watch the next `steps` steps of the fit, which is set up."""
        module, device = strategy.lightning_module, strategy.root_device
        assert module is not None
        if self.request.plan is None and self.request.saves_memory:
            return_freed_memory(device)  # as the plan will run
        optimizers = [getattr(each, "_optimizer", each) for each in strategy.optimizers]
        self._watched = WatchedFit(
            module,
            optimizers if self.request.plan is None else (),
            device=device,
            steps=self._watch_steps if steps is None else steps,
            records=self.request.records_first_step(device),
            is_rank_0=strategy.is_global_zero,
        )

    def watch_further(self, strategy: Strategy) -> None:
        """Watch steps where the plan that has begun is not the final one."""
        assert self.plan is not None
        if self.planned_by == UNTIL_WATCHED:
            self.watch(strategy)
        elif self.request.is_by_block and len(self.plan.blocks) == 1:
            self.watch(strategy, steps=1)

    def forward(self, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Return the context of a step's forward pass, inside of DDP."""
        return nullcontext() if self._watched is None else self._watched.forward(args)

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return the context of the backward pass from `loss`."""
        return nullcontext() if self._watched is None else self._watched.backward(loss)

    def step_without_batch(self) -> None:
        """Count a step that only other ranks have a batch for."""
        if self._watched is not None:
            self._watched.step_without_batch()

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return the context of a step of `optimizer`, in which its closure is called."""
        return nullcontext() if self._watched is None else self._watched.update(optimizer)

    def _stop_watching(self) -> None:
        watched, self._watched = self._watched, None
        search, self._search = self._search, None
        if search is not None:
            search.close()
        if watched is not None:
            watched.close()
