"""Interleaved schedules: several stages per rank, stage s on rank s mod P, microbatches in rounds
of about P.

In a round a rank runs P microbatches through its first stage, then the same through its next.
Zero-bubble schedules are of this kind: they run the gradients of parameters later, where the rank
would wait.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from lightning_topt.schedules.schedule import Action, Schedule
from lightning_topt.schedules.stage_places import looped_ranks


class _Visits(NamedTuple):
    """Pairs (stage, microbatch) of a rank in the order of its forward and of its backward passes;
    size of the first round.
    """

    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    round_size: int


def interleaved(*, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return Megatron's interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2) for any
    number of microbatches.

    The bubble is that of 1F1B divided by the stages per rank where P divides M. Where it does not,
    rounds are as equal as they can be and the larger ones come first; torch.distributed.pipelining
    runs those M alone whose rounds are equal.
    """

    def of_rank(rank: int) -> tuple[Action, ...]:
        visits = _visits(rank, num_ranks, num_microbatches, stages_per_rank)
        warm_up = (stages_per_rank - 1) * visits.round_size + 2 * (num_ranks - 1 - rank)
        return tuple(
            action
            for forward, backward in _turns(visits, warm_up)
            for action in (*forward, *backward)
        )

    ranks = looped_ranks(num_ranks, stages_per_rank=stages_per_rank)
    return Schedule(
        "interleaved", num_microbatches, ranks, tuple(of_rank(rank) for rank in range(num_ranks))
    )


def zero_bubble(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return ZB-H1 (Qi et al., arXiv 2401.10241, section 2.1): 1F1B's memory on rank 0, a third of
    its bubble.

    Rank r puts the gradients of parameters off by r microbatches; the bubble is (P - 1) (F + B - W)
    seconds where F, B, W are those of forward, backward_input and backward_weight, and W <= B.
    """
    assert stages_per_rank == 1
    return _zero_bubble("zero_bubble", num_ranks, num_microbatches, stages_per_rank=1)


def interleaved_zero_bubble(
    *, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    """Return ZB-H1 over several stages per rank, as torch.distributed.pipelining does, for any
    number of microbatches.
    """
    return _zero_bubble(
        "interleaved_zero_bubble", num_ranks, num_microbatches, stages_per_rank=stages_per_rank
    )


def _zero_bubble(
    name: str, num_ranks: int, num_microbatches: int, *, stages_per_rank: int
) -> Schedule:
    def of_rank(rank: int) -> tuple[Action, ...]:
        visits = _visits(rank, num_ranks, num_microbatches, stages_per_rank)
        warm_up = (stages_per_rank - 1) * visits.round_size + num_ranks - 1 - rank
        actions: list[Action] = []
        weights = [Action("backward_weight", *visit) for visit in visits.backward]
        done = put_off = 0
        for forward, backward in _turns(visits, warm_up):
            actions += forward
            for action in backward:
                actions.append(
                    Action("backward_input", action.stage_index, action.microbatch_index)
                )
                put_off += 1
                if put_off > rank:
                    actions.append(weights[done])
                    done += 1
        return (*actions, *weights[done:])

    ranks = looped_ranks(num_ranks, stages_per_rank=stages_per_rank)
    return Schedule(
        name, num_microbatches, ranks, tuple(of_rank(rank) for rank in range(num_ranks))
    )


def _visits(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Visits:
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    rounds = _rounds(num_ranks, num_microbatches)
    forward = [(stage, index) for indices in rounds for stage in stages for index in indices]
    backward = [
        (stage, index) for indices in rounds for stage in reversed(stages) for index in indices
    ]
    return _Visits(forward, backward, len(rounds[0]))


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Rounds of at least P microbatches (or one of all, if these are fewer), larger ones first.

    The last rank's warm-up is made for the first round; a larger one after it would need a backward
    before its forward.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    starts = [size * index + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _turns(visits: _Visits, warm_up: int) -> list[tuple[list[Action], list[Action]]]:
    """Forward and backward passes (none or one of each per turn): forward alone, then both in turn,
    then backward alone.
    """
    total = len(visits.forward)
    warm_up = min(warm_up, total)
    forward = [[Action("forward", *visit)] for visit in visits.forward]
    backward = [[Action("backward", *visit)] for visit in visits.backward]
    return list(
        zip(
            [*forward, *([] for _ in range(warm_up))],
            [*([] for _ in range(warm_up)), *backward],
            strict=True,
        )
    )
