"""Rates of schedules turn the seconds and bytes of stages into those of a step (`StageTable`).

P ranks run V stages each, S = P V, with M microbatches. A rank counts as V times its dearest stage.
t are the seconds of a microbatch in a stage, w those of them that are gradients of parameters, in
passes of their own; c those of a transfer into it.

    step = sum of lead + largest load

    schedule                                lead             load           exact where
    gpipe, 1f1b, 1f1b_overlapped            t                (M - 1) t      always
    interleaved, looped_bfs                 k t              M V t - lead   M >= P
    zero_bubble, interleaved_zero_bubble    k (t - 2 w)      M V t - lead   M >= P, passes of t / 3
    zbv                                     k (t - w) / 2    M V t - lead   M >= 2 P - 1, the same

with k = (P - 1) / (S - 1). Exact means equal to the simulation of equal stages. 1F1B waits for M -
1 - ceil((M - 1) / P) transfers there and back; the others hide them behind passes unless links are
the bottleneck. For unequal stages these are estimates: plans are priced by the simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lightning_topt.schedules.schedules import SCHEDULES

# too few in flight to hide transfers
_WAITING = ("1f1b", "zero_bubble", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class ScheduleRates:
    """Rates of a schedule.

    Attributes:
        lead: seconds of lead of a second of t.
        load: seconds of load of a second of t.
        weights: of the lead, what a second of w saves.
        sent_load: of a second of transfers there and back.
        sent_floor: the same, for what a link is busy at least.
        held: ``held[s]`` are the activations that the rank of stage s holds at most, counted in
            those of this stage.
        waits: ``waits[s]`` are pairs of activations that it holds, and how many of them are there
            for gradients of parameters alone; no other time is worse than all of these.
        stages_per_rank: V.
    """

    lead: float
    load: float
    weights: float
    sent_load: float
    sent_floor: float
    held: tuple[int, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    stages_per_rank: int


def fits(name: str, *, num_ranks: int, num_microbatches: int) -> bool:
    """Return whether there are microbatches enough for the rates of `name` to hold.

    With fewer the schedule does not pay.
    """
    least = 2 * num_ranks - 1 if name == "zbv" else num_ranks
    return name in ("gpipe", "1f1b", "1f1b_overlapped") or num_microbatches >= least


@lru_cache(maxsize=2**14)
def rates_of(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> ScheduleRates:
    """Return the rates of schedule `name`, of sizes that it takes."""
    ranks, count, stages = num_ranks, num_microbatches, num_ranks * stages_per_rank
    share = (ranks - 1) / (stages - 1) if stages > 1 else 1.0
    if name == "zbv":
        lead, weights = share / 2, share / 2
    elif SCHEDULES[name].splits_backward:
        lead, weights = share, 2 * share
    else:
        lead, weights = share, 0.0
    total = count * stages_per_rank
    waits = count - 1 - math.ceil((count - 1) / ranks) if name in _WAITING else 0
    busy = total - 1 if name in ("gpipe", "looped_bfs", "1f1b_overlapped") else (total - 1) / 2
    place = SCHEDULES[name].rank_of_stage(num_ranks=ranks, stages_per_rank=stages_per_rank)
    held = tuple(min(_held(name, rank, ranks, count, stages_per_rank), total) for rank in place)
    waiting = tuple(_waits(name, rank, ranks, most) for rank, most in zip(place, held, strict=True))
    return ScheduleRates(
        lead, total - lead, weights, float(waits), float(busy), held, waiting, stages_per_rank
    )


def _held(name: str, rank: int, ranks: int, count: int, stages: int) -> int:
    behind, first_round = ranks - 1 - rank, math.ceil(count / max(1, count // ranks))
    return {
        "gpipe": count,
        "looped_bfs": count * stages,
        "1f1b": behind + 1,
        "1f1b_overlapped": 2 * behind + 1,
        "zero_bubble": ranks,
        "interleaved": (stages - 1) * first_round + 2 * behind + 1,
        "interleaved_zero_bubble": (stages - 1) * first_round + ranks,
        "zbv": 2 * ranks,
    }[name]


def _waits(name: str, rank: int, ranks: int, held: int) -> tuple[tuple[int, int], ...]:
    if not SCHEDULES[name].splits_backward:
        return ()
    if name == "zbv":
        return ((held, 1), (ranks + rank, 2 * rank + 1))[: 1 + (rank > 0)]
    return ((held, min(rank + 1, held)),)
