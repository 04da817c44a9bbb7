"""`Schedule`: for every rank of a pipeline the passes that it runs, in order.

Stages are numbered along the forward pass, 0 to S - 1; a rank may run several of them. Sends and
receives are not among the actions: they follow from which rank runs which stage and what stages
need of one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["forward", "backward", "backward_input", "backward_weight", "update"]


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one stage, or an update of its parameters.

    ``"backward"`` computes the gradients of what the stage received and of its parameters;
    ``"backward_input"`` the former alone, with which the stage before can go on, and
    ``"backward_weight"`` the latter later (zero bubble; Qi et al., arXiv 2401.10241). ``"update"``,
    in schedules that never flush, is a step of the stage's optimizer with the gradients of all
    microbatches since the one before, of which `microbatch_index` is the last; it is told apart
    from passes in what follows.
    """

    kind: Kind
    stage_index: int
    microbatch_index: int


@dataclass(frozen=True)
class Schedule:
    """A `Schedule` has the `actions` of each rank of a pipeline, (rank, action); stage s runs on
    rank ``rank_of_stage[s]``.

    Ranks are positions along the pipeline axis. Nothing is checked here: see `schedule_check`.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        """Hash without the actions: schedules are looked up often, and others of the same name and
        size are rare.
        """
        return hash((self.name, self.num_microbatches, self.rank_of_stage))

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the pipeline."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` runs, in order of the forward pass."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, rank in enumerate(self.rank_of_stage):
            found[rank] = (*found.get(rank, ()), stage)
        return found


def single_stage_schedule(num_microbatches: int) -> Schedule:
    """Return data parallelism's schedule: one rank, one stage, forward and backward of each
    microbatch in turn.

    Raises ValueError for less than one microbatch.
    """
    if num_microbatches < 1:
        raise ValueError(f"a step has at least one microbatch, got {num_microbatches}")
    kinds: tuple[Kind, ...] = ("forward", "backward")
    actions = tuple(Action(kind, 0, index) for index in range(num_microbatches) for kind in kinds)
    return Schedule("single_stage", num_microbatches, (0,), (actions,))
