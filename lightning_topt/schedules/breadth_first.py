"""Schedules that run all forward passes, then all backward passes: GPipe, and looped BFS with
several stages per rank.

Both hold the activations of every microbatch at once.
"""

from __future__ import annotations

from lightning_topt.schedules.schedule import Action, Schedule
from lightning_topt.schedules.stage_places import looped_ranks


def gpipe(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return GPipe's schedule (Huang et al., arXiv 1811.06965): the bubble is (P - 1) / (M + P - 1)
    of the step for P equal stages and M microbatches.
    """
    assert stages_per_rank == 1
    actions = tuple(
        tuple(
            Action(kind, rank, index)
            for kind in ("forward", "backward")
            for index in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, tuple(range(num_ranks)), actions)


def looped_bfs(*, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return the breadth-first schedule (Lamy-Poirier, arXiv 2211.05953), stage s on rank s mod P.

    A rank runs all microbatches through its first stage, then all through its next; backward in
    reverse, last microbatch first. The bubble is that of GPipe divided by the stages per rank.
    """

    def of_rank(rank: int) -> tuple[Action, ...]:
        stages, indices = (
            range(rank, num_ranks * stages_per_rank, num_ranks),
            range(num_microbatches),
        )
        forward = [Action("forward", stage, index) for stage in stages for index in indices]
        backward = [
            Action("backward", stage, index)
            for stage in reversed(stages)
            for index in reversed(indices)
        ]
        return (*forward, *backward)

    ranks = looped_ranks(num_ranks, stages_per_rank=stages_per_rank)
    return Schedule(
        "looped_bfs", num_microbatches, ranks, tuple(of_rank(rank) for rank in range(num_ranks))
    )
