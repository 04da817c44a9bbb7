"""`SCHEDULES`, all schedules by name with the sizes that they take; and `make_schedule`, which
makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.schedules.breadth_first import gpipe, looped_bfs
from lightning_topt.schedules.continuous import LAGS, continuous_schedule
from lightning_topt.schedules.interleaved import interleaved, interleaved_zero_bubble, zero_bubble
from lightning_topt.schedules.one_forward_one_backward import one_f_one_b, one_f_one_b_overlapped
from lightning_topt.schedules.schedule import Schedule
from lightning_topt.schedules.stage_places import looped_ranks, v_shaped_ranks
from lightning_topt.schedules.v_shaped import zbv


@dataclass(frozen=True)
class ScheduleRule:
    """The sizes that a schedule takes: `least_stages` to `most_stages` per rank (None: any number),
    on a V or in a loop.

    All take any number of ranks and of microbatches. `splits_backward`: gradients of inputs and of
    parameters are passes of their own. `summary` says in a line when to choose it.
    """

    name: str
    summary: str
    build: Callable[..., Schedule]
    least_stages: int = 1
    most_stages: int | None = 1
    is_v_shaped: bool = False
    splits_backward: bool = False

    def problem(self, *, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
        """Return one sentence on why a schedule of this size is not legal, None where it is."""
        if num_ranks < 1:
            return f"schedule {self.name!r} has at least one rank, got {num_ranks}"
        if num_microbatches < 1:
            return f"schedule {self.name!r} has at least one microbatch, got {num_microbatches}"
        most = self.most_stages
        if stages_per_rank >= self.least_stages and (most is None or stages_per_rank <= most):
            return None
        stages = (
            f"at least {self.least_stages} stages" if most is None else _stages(self.least_stages)
        )
        return (
            f"schedule {self.name!r} runs {stages} on each rank, got "
            f"{stages_per_rank}{self._instead(stages_per_rank)}"
        )

    def _instead(self, stages_per_rank: int) -> str:
        others = [
            rule.name
            for rule in SCHEDULES.values()
            if rule.least_stages <= stages_per_rank <= (rule.most_stages or stages_per_rank)
        ]
        return f"; choose among {', '.join(others)} for that" if others else ""

    def rank_of_stage(self, *, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Return the rank of each stage, (stages,)."""
        if self.is_v_shaped:
            return v_shaped_ranks(num_ranks)
        return looped_ranks(num_ranks, stages_per_rank=stages_per_rank)


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return the schedule `name` of a training step; `stages_per_rank` is the least that it takes
    unless given.

    A continuous one (of `LAGS`) is that from one drained state to the next, with so many
    minibatches. Raises ValueError for a name that is in neither and for a size that the schedule
    does not take.
    """
    if name in LAGS:
        if stages_per_rank not in (None, 1):
            raise ValueError(f"schedule {name!r} runs 1 stage on each rank, got {stages_per_rank}")
        count = check_whole(num_microbatches, name="num_microbatches")
        return continuous_schedule(
            num_ranks=num_ranks, num_minibatches=count, lag_per_hop=LAGS[name]
        )
    rule = SCHEDULES[check_choice(name, name="schedule", allowed=SCHEDULES)]
    num_ranks = check_whole(num_ranks, name="num_ranks")
    num_microbatches = check_whole(num_microbatches, name="num_microbatches")
    stages_per_rank = check_whole(
        rule.least_stages if stages_per_rank is None else stages_per_rank, name="stages_per_rank"
    )
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "stages_per_rank": stages_per_rank,
    }
    if problem := rule.problem(**sizes):
        raise ValueError(problem)
    return _built(name, **sizes)


@lru_cache(maxsize=256)
def _built(name: str, **sizes: int) -> Schedule:
    """One object for equal schedules, which are compared at once."""
    return SCHEDULES[name].build(**sizes)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


_RULES = (
    ScheduleRule("gpipe", "the simplest; every microbatch is held", gpipe),
    ScheduleRule("1f1b", "GPipe's time with few microbatches in flight", one_f_one_b),
    ScheduleRule(
        "1f1b_overlapped", "1F1B that hides slow links behind more warm-up", one_f_one_b_overlapped
    ),
    ScheduleRule("interleaved", "smaller bubble for more transfers", interleaved, 2, None),
    ScheduleRule(
        "looped_bfs",
        "smaller bubble and few exchanges of parameters; every microbatch is held",
        looped_bfs,
        2,
        None,
    ),
    ScheduleRule(
        "zero_bubble",
        "1F1B with parameters' gradients in the bubble (ZB-H1)",
        zero_bubble,
        splits_backward=True,
    ),
    ScheduleRule(
        "interleaved_zero_bubble",
        "interleaved with parameters' gradients in the bubble",
        interleaved_zero_bubble,
        2,
        None,
        splits_backward=True,
    ),
    ScheduleRule(
        "zbv",
        "next to no bubble where passes take equal time",
        zbv,
        2,
        2,
        is_v_shaped=True,
        splits_backward=True,
    ),
)
SCHEDULES: Mapping[str, ScheduleRule] = MappingProxyType({rule.name: rule for rule in _RULES})
