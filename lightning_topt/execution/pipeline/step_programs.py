"""`StepPrograms`: what the ranks of a pipeline do in the steps of a plan, made once for each kind
of step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_topt.execution.pipeline.messages import Around, around_actions
from lightning_topt.execution.pipeline.step_flows import StageFlow
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import Schedule, forward_schedule, make_schedule

_KEPT = 64  # sequences of flows whose messages are known


class StepPrograms:
    """A `StepPrograms` makes schedules for numbers of microbatches, and the messages around their
    actions for flows of these.

    Methods are no collective calls.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._programs: dict[Hashable, tuple[Around, ...]] = {}

    def schedule(self, num_microbatches: int, *, backward: bool) -> Schedule:
        """Return the schedule of a step, or without `backward` of an evaluation.

        Raises ValueError for one that does not exist or take these sizes.
        """
        if num_microbatches < 1:
            raise ValueError("a step has at least one microbatch")
        key = backward, num_microbatches
        if key not in self._schedules:
            self._schedules[key] = self._made(num_microbatches, backward=backward)
        return self._schedules[key]

    def around_actions(
        self, schedule: Schedule, flows: Sequence[StageFlow], *, rank: int
    ) -> tuple[Around, ...]:
        """Return the actions of `rank` of the pipeline with the messages around them; `flows` are
        those of the microbatches.
        """
        key = (schedule.name, tuple(flows))
        if (known := self._programs.get(key)) is None:
            known = around_actions(schedule, [flow.crossings for flow in flows], rank=rank)
            if all(flow.is_kept for flow in flows):
                if len(self._programs) >= _KEPT:
                    del self._programs[next(iter(self._programs))]
                self._programs[key] = known
        return known

    def _made(self, num_microbatches: int, *, backward: bool) -> Schedule:
        if not backward:
            ranks = self.schedule(self._plan.num_microbatches, backward=True).rank_of_stage
            return forward_schedule(ranks, num_microbatches)
        assert self._plan.schedule is not None
        return make_schedule(
            self._plan.schedule,
            num_ranks=self._plan.mesh.pipeline_size,
            num_microbatches=num_microbatches,
            stages_per_rank=self._plan.stages_per_rank,
        )
