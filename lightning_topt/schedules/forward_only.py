"""The schedule of an evaluation: forward passes alone, on whatever ranks the stages are."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_topt.schedules.schedule import Action, Schedule


def forward_schedule(rank_of_stage: Sequence[int], num_microbatches: int) -> Schedule:
    """Return forward passes in an order in which no rank waits longer than it must, were all stages
    equal.

    Each rank goes on with the earliest microbatch that has reached it. A stage is taken to need the
    stage before it. Raises ValueError for no microbatch, and where ranks are not 0 to P - 1, each
    with a stage.
    """
    ranks = tuple(rank_of_stage)
    num_ranks = max(ranks, default=-1) + 1
    if not ranks or set(ranks) != set(range(num_ranks)):
        raise ValueError(
            f"rank_of_stage gives each rank from 0 on at least one stage; got {list(ranks)}"
        )
    if num_microbatches < 1:
        raise ValueError(f"a step has at least one microbatch, got {num_microbatches}")
    waiting = [0] * len(ranks)  # the next microbatch of each stage
    actions: list[list[Action]] = [[] for _ in range(num_ranks)]
    while waiting[-1] < num_microbatches:
        chosen: dict[int, int] = {}
        for stage, rank in enumerate(ranks):
            limit = waiting[stage - 1] if stage else num_microbatches
            if waiting[stage] < limit and (
                rank not in chosen or waiting[stage] < waiting[chosen[rank]]
            ):
                chosen[rank] = stage
        for rank, stage in chosen.items():
            actions[rank].append(Action("forward", stage, waiting[stage]))
            waiting[stage] += 1
    return Schedule("forward", num_microbatches, ranks, tuple(map(tuple, actions)))
