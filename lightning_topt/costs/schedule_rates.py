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

Every schedule of `schedules.SCHEDULES` has an entry in the table `_FORMULAS`; what else a new one
needs is listed in `schedules.schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from lightning_topt.schedules.schedules import SCHEDULES


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


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Formulas:
    """What the rates of one schedule are made of.

    Attributes:
        held: activations that a rank holds at most, of its rank, P, M and V.
        lead: of k t, with k = (P - 1) / (S - 1).
        weights: of k w, what the lead is less.
        busy: of M V - 1 passes, in how many a link is busy at least.
        waits: whether too few microbatches are in flight to hide transfers.
        least_count: of P, the fewest microbatches for which the rates hold.
        late: as `ScheduleRates.waits`, of the rank, P and what the rank holds.
    """

    held: Callable[[int, int, int, int], int]
    lead: float = 1.0
    weights: float = 0.0
    busy: float = 0.5
    waits: bool = False
    least_count: Callable[[int], int] = lambda ranks: ranks
    late: Callable[[int, int, int], Pairs] = lambda rank, ranks, held: ()


def _any_count(ranks: int) -> int:
    return 1


def _first_round(ranks: int, count: int) -> int:
    # The microbatches of the first round of an interleaved schedule
    return math.ceil(count / max(1, count // ranks))


def _late_weights(rank: int, ranks: int, held: int) -> Pairs:
    # What waits where a rank puts off the gradients of parameters by its own number
    return ((held, min(rank + 1, held)),)


def _late_weights_of_zbv(rank: int, ranks: int, held: int) -> Pairs:
    return ((held, 1), (ranks + rank, 2 * rank + 1))[: 1 + (rank > 0)]


_FORMULAS = {
    "gpipe": _Formulas(lambda rank, ranks, count, stages: count, busy=1.0, least_count=_any_count),
    "1f1b": _Formulas(
        lambda rank, ranks, count, stages: ranks - rank, waits=True, least_count=_any_count
    ),
    "1f1b_overlapped": _Formulas(
        lambda rank, ranks, count, stages: 2 * (ranks - 1 - rank) + 1,
        busy=1.0,
        least_count=_any_count,
    ),
    "interleaved": _Formulas(
        lambda rank, ranks, count, stages: (
            (stages - 1) * _first_round(ranks, count) + 2 * (ranks - 1 - rank) + 1
        )
    ),
    "looped_bfs": _Formulas(lambda rank, ranks, count, stages: count * stages, busy=1.0),
    "zero_bubble": _Formulas(
        lambda rank, ranks, count, stages: ranks, weights=2.0, waits=True, late=_late_weights
    ),
    "interleaved_zero_bubble": _Formulas(
        lambda rank, ranks, count, stages: (stages - 1) * _first_round(ranks, count) + ranks,
        weights=2.0,
        waits=True,
        late=_late_weights,
    ),
    "zbv": _Formulas(
        lambda rank, ranks, count, stages: 2 * ranks,
        lead=0.5,
        weights=0.5,
        waits=True,
        least_count=lambda ranks: 2 * ranks - 1,
        late=_late_weights_of_zbv,
    ),
}


def _formulas(name: str) -> _Formulas:
    if name not in _FORMULAS:
        raise NotImplementedError(
            f"schedule {name!r} has no rates, so plans under it have no price: give it an entry in "
            "costs.schedule_rates._FORMULAS"
        )
    return _FORMULAS[name]


def fits(name: str, *, num_ranks: int, num_microbatches: int) -> bool:
    """Return whether there are microbatches enough for the rates of `name` to hold.

    With fewer the schedule does not pay. Raises NotImplementedError for a schedule without rates.
    """
    return num_microbatches >= _formulas(name).least_count(num_ranks)


@lru_cache(maxsize=2**14)
def rates_of(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> ScheduleRates:
    """Return the rates of schedule `name`, of sizes that it takes.

    Raises NotImplementedError for a schedule without rates.
    """
    formulas = _formulas(name)
    ranks, count, stages = num_ranks, num_microbatches, num_ranks * stages_per_rank
    share = (ranks - 1) / (stages - 1) if stages > 1 else 1.0
    lead, total = formulas.lead * share, count * stages_per_rank
    waits = count - 1 - math.ceil((count - 1) / ranks) if formulas.waits else 0
    place = SCHEDULES[name].rank_of_stage(num_ranks=ranks, stages_per_rank=stages_per_rank)
    held = tuple(min(formulas.held(rank, ranks, count, stages_per_rank), total) for rank in place)
    late = tuple(formulas.late(rank, ranks, most) for rank, most in zip(place, held, strict=True))
    return ScheduleRates(
        lead=lead,
        load=total - lead,
        weights=formulas.weights * share,
        sent_load=float(waits),
        sent_floor=formulas.busy * (total - 1),
        held=held,
        waits=late,
        stages_per_rank=stages_per_rank,
    )
