"""The actions of a continuous schedule in one process, stage by stage in an order that ranks could
take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_topt.schedules.check import Edges, run_order
from lightning_topt.schedules.schedules import continuous_schedule, lag_of
from lightning_topt.schedules.staleness import StageStaleness, staleness
from lightning_topt.weight_prediction import StagePrediction


class SegmentTwin:
    """A twin of `count` stages has methods `forward`, `backward` and `update` (stage, minibatch)
    and a rule for each stage.
    """

    count: int
    lag: int
    rules: Sequence[StagePrediction]
    start: int
    stop: int
    known: Sequence[StageStaleness]
    crossing: dict[tuple[int, int], tuple[Tensor, Tensor]]  # what a stage received, what it made

    def segment(self, start: int, stop: int, completes: Callable[[int], bool]) -> None:
        """Train from one drained state to the next; `completes` tells the last minibatch of each
        update.
        """
        schedule = continuous_schedule(
            num_ranks=self.count,
            num_minibatches=stop - start,
            lag_per_hop=self.lag,
            completes=lambda index: completes(index + start),
        )
        order, waiting = run_order(schedule, Edges(self.count, needs=None))
        assert not waiting
        self.start, self.stop, self.known, self.crossing = start, stop, staleness(schedule), {}
        for stage, action in order:
            getattr(self, action.kind)(stage, action.microbatch_index + start)
        for rule in self.rules:
            rule.drained()

    def iteration(self, stage: int, index: int) -> int:
        """The iteration in which a stage runs backward of a minibatch."""
        return min(index + lag_of(stage, num_ranks=self.count, lag_per_hop=self.lag), self.stop - 1)
