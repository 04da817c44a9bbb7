"""`ContinuousShape`: the ranks of a pipeline that never flushes, its minibatches in flight, and its
pace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from typing_extensions import override

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.schedule_rates import ScheduleRates
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape
from lightning_topt.prediction import Prediction
from lightning_topt.schedules.schedules import (
    CONTINUOUS_SCHEDULES,
    Schedule,
    continuous_schedule,
    lag_of,
)
from lightning_topt.schedules.staleness import staleness
from lightning_topt.schedules.timing import seconds_per_minibatch

_DRAWN = 6  # minibatches, in times those that fill the pipeline


@dataclass(frozen=True)
class ContinuousShape(PipelineShape):
    """`pipeline` ranks in a row with one stage each, which minibatches of `samples` samples follow
    one another through, with the lag of their schedule; stage s keeps ``copies[s]`` copies of its
    weights.
    """

    copies: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, ranks: int, data: int, *, samples: float, schedule: str, prediction: Prediction
    ) -> ContinuousShape:
        """Return the shape of `data` rows of `ranks` ranks; `prediction` is the rule of weights."""
        lag, stages = CONTINUOUS_SCHEDULES[schedule], range(ranks)
        copies = tuple(
            prediction.weight_copies(stage=s, num_stages=ranks, lag_per_hop=lag) for s in stages
        )
        return cls(ranks, data, schedule, 1, 1, samples, copies=copies)

    @classmethod
    def of_plan(cls, plan: ParallelPlan) -> ContinuousShape:
        """Return the shape of the pipeline of a plan that never flushes."""
        assert (
            plan.batch_size is not None
            and plan.schedule is not None
            and plan.weight_prediction is not None
        ), "plans that are found have both"
        sizes = plan.mesh.pipeline_size, plan.mesh.data_parallel_size
        samples = float(plan.batch_size)
        return cls.of(
            *sizes, samples=samples, schedule=plan.schedule, prediction=plan.weight_prediction
        )

    @property
    def lag_per_hop(self) -> int:
        """Minibatches for each hop by which backward passes are behind forward passes."""
        return CONTINUOUS_SCHEDULES[self.schedule]

    @override
    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.pipeline))

    @property
    @override
    def splits_backward(self) -> bool:
        return False

    @property
    @override
    def rates(self) -> ScheduleRates:
        held = tuple(self._lag(stage) + 1 for stage in range(self.pipeline))
        # With the fewest in flight stages wait for gradients: those of a round share the transfers
        # (Note: rounds).
        waits = (self.pipeline - 1) / self.pipeline if self.lag_per_hop == 1 else 0.0
        return ScheduleRates(0.0, 1.0, 0.0, waits, 0.5, held, ((),) * self.pipeline, 1)

    @property
    def missing_updates(self) -> tuple[int, ...]:
        """Updates of each stage before a minibatch's own one that its forward pass is too early
        for, once all are filled.
        """
        return tuple(each.forward[-1].missing for each in staleness(self.schedule_to_draw))

    @property
    def schedule_to_draw(self) -> Schedule:
        """The schedule of enough minibatches to see it filled."""
        count = _DRAWN * max(self._lag(0), 1)
        return continuous_schedule(
            num_ranks=self.pipeline, num_minibatches=count, lag_per_hop=self.lag_per_hop
        )

    def pace(self, passes: Array, updates: Array, transfers: Array) -> Array:
        """Return the seconds of a minibatch (n,) of n plans: arguments as of
        `seconds_per_minibatch`.
        """
        return seconds_per_minibatch(
            passes + 2 * PASS_SECONDS, updates, transfers, lag_per_hop=self.lag_per_hop
        )

    def copied_bytes(self, blocks: StageBlocks, *, stage: int, first: int, end: int) -> float:
        """Return the bytes of the copies of weights that a stage of blocks `first` to `end` - 1
        keeps.
        """
        return self.copies[stage] * sum(trained_bytes(blocks, place) for place in range(first, end))

    def _lag(self, stage: int) -> int:
        return lag_of(stage, num_ranks=self.pipeline, lag_per_hop=self.lag_per_hop)


def trained_bytes(blocks: StageBlocks, place: int) -> float:
    """Return the bytes of the parameters of a block that are trained."""
    return float(
        sum(parameter_bytes(parameter) for parameter in blocks.owned[place] if parameter.trainable)
    )
