"""1F1B: after a warm-up, ranks run one forward and one backward pass in turn, so that few
microbatches are in flight.
"""

from __future__ import annotations

from lightning_topt.schedules.schedule import Action, Schedule


def one_f_one_b(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return PipeDream-Flush's schedule (Narayanan et al., arXiv 2006.09503; 1F1B in arXiv
    2104.04473).

    The bubble is that of GPipe; rank r has at most P - r microbatches in flight.
    """
    assert stages_per_rank == 1
    return _alternating("1f1b", num_ranks, num_microbatches, hops=1)


def one_f_one_b_overlapped(
    *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """Return 1F1B with twice the warm-up, which hides transfers (1F1B-SO of BaPipe, Zhao et al.,
    arXiv 2012.12544).

    Rank r has at most 2 (P - 1 - r) + 1 microbatches in flight.
    """
    assert stages_per_rank == 1
    return _alternating("1f1b_overlapped", num_ranks, num_microbatches, hops=2)


def _alternating(name: str, num_ranks: int, num_microbatches: int, *, hops: int) -> Schedule:
    """Forward passes before the first backward: `hops` for every rank behind, and one."""

    def of_rank(rank: int) -> tuple[Action, ...]:
        ahead = min(hops * (num_ranks - 1 - rank), num_microbatches)
        actions = [Action("forward", rank, index) for index in range(ahead)]
        for index in range(num_microbatches):
            if index + ahead < num_microbatches:
                actions.append(Action("forward", rank, index + ahead))
            actions.append(Action("backward", rank, index))
        return tuple(actions)

    ranks = tuple(range(num_ranks))
    return Schedule(name, num_microbatches, ranks, tuple(of_rank(rank) for rank in ranks))
