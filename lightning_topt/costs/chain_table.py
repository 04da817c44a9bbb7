"""Costs of a chain of blocks, each under several configurations: of a step, and of stages.

Blocks run forward in order and backward in reverse. Computation does not wait for the network;
exchanges of gradients run on one network in the order in which they become ready, beside the
backward of earlier blocks. For blocks n = 0 ... N-1

    step_seconds   when both are done: computation takes the sum of seconds; an exchange starts
                   when its block's backward is over and the one before it has finished; backward
                   passes are the last part of computation, in reverse
    peak_bytes     sum of static + the largest of
                   held of j < n + forward_hump of n + late of j > n     forward of n
                   held of all                                           forward is over
                   kept of j < n + hump of n + late of j > n             backward of n
                   late of all + update_bytes                            the optimizer step

The search folds blocks from the last to the first with five numbers (`search_chain`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.schedules.schedules import SCHEDULES

Array = NDArray[np.float64]

_FORWARD = {"held": "kept", "forward_hump": "hump"}  # what they are where they are not given


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs of one block under each of its `configs`, arrays (config,); inf forbids.

    Args:
        configs: names of the configurations.
        seconds: computation of the whole step: forward, backward, update, and exchanges that it has
            to wait for.
        backward: the part of `seconds` during which exchanges of later blocks run: its backward.
        exchange: seconds of the network for its gradients, from when its backward is over.
        static: bytes that are there all the step.
        kept: bytes while later blocks run backward.
        late: bytes from the end of its backward to the end of the step, and in the next step until
            its forward: its gradients.
        hump: peak bytes while it runs backward, above what is listed for it and other blocks.
        held: bytes from its forward to the end of all forwards; None: as `kept`.
        forward_hump: peak bytes while it runs forward, like `hump`; None: as `hump`.
    """

    configs: tuple[Any, ...]
    seconds: Array
    backward: Array
    exchange: Array
    static: Array
    kept: Array
    late: Array
    hump: Array
    held: Array | None = None
    forward_hump: Array | None = None

    def cost(self, name: str) -> Array:
        """Return the costs (config,) of this name.

        Where `held` and `forward_hump` are not given, what stands for them.
        """
        given: Array | None = getattr(self, name)
        return self.cost(_FORWARD[name]) if given is None else given


@dataclass(frozen=True, eq=False)
class ChainTable:
    """A chain of blocks, in the order of forward.

    `blocks` are the distinct ones, ``order[n]`` says which of them block n is. Every plan also pays
    `fixed_seconds` and `fixed_bytes`, and `update_bytes` while the optimizer steps. `names` of the
    blocks of the chain are for the answer; left out, they are numbers.
    """

    blocks: tuple[BlockCosts, ...]
    order: tuple[int, ...]
    fixed_seconds: float = 0.0
    fixed_bytes: float = 0.0
    update_bytes: float = 0.0
    names: tuple[str, ...] = ()


# ---- stages of a pipeline
#
# Costs of a chain of blocks whose runs of neighbours are the stages of a pipeline.
#
# A block takes one configuration. With M microbatches, w how many of them a stage holds activations
# of at most (its schedule says how many), everything else sums over the blocks of a stage:
#
#     step_seconds   sum over stages of lead  +  the largest load of a stage
#                    lead = lead_rate * seconds + constants
#                    load = load_rate * seconds + once_rate * once + constants
#     peak_bytes     the largest of
#                    static + w * kept + the largest hump                   while passes run
#                    static + h * kept + g * waiting + the largest hump     while passes run
#                    static + v * kept + update                         while the optimizer steps
#
# The lead is what the first microbatch takes on its way through, the load what the slowest stage
# takes besides. A backward pass in two parts leaves `waiting` bytes between them: of h microbatches
# that are held, g are there for these alone.
#
# 1F1B and GPipe have lead_rate 1, load_rate M - 1; v is 0 but in a pipeline that never flushes (w -
# 1), which has lead_rate 0, load_rate 1. A stage that begins with block n pays for what it receives
# (`StageLink`).

COLUMNS = ("seconds", "once", "static", "kept", "hump")


@dataclass(frozen=True, eq=False)
class StageBlock:
    """Costs of one block under each of its `configs`, arrays (config,).

    Args:
        configs: names of the configurations.
        seconds: forward and backward of one microbatch.
        once: seconds once per step: its exchange of gradients, its update.
        static: bytes that are there all the step.
        kept: bytes from its forward to its backward, for each microbatch in flight.
        hump: peak bytes above these while it runs.
    """

    configs: tuple[Any, ...]
    seconds: Array
    once: Array
    static: Array
    kept: Array
    hump: Array


@dataclass(frozen=True, eq=False)
class StageChain:
    """A chain of blocks; several tables may share one.

    `blocks` are the distinct ones, ``order[n]`` says which of them block n is.
    """

    blocks: tuple[StageBlock, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageExtras:
    """What blocks take in a stage beside the costs of their chain, arrays (distinct block,).

    `lead`, `load` and `static` are as in the table; `update` are bytes that the optimizer takes
    while it steps, `waiting` those of a microbatch between the two parts of its backward.
    """

    lead: Array
    load: Array
    static: Array
    update: Array
    waiting: Array


@dataclass(frozen=True, eq=False)
class StageLink:
    """What a stage pays that begins with block n, arrays (block,); the first stage pays nothing.

    `lead` and `load` are seconds as in the table; its load is at least `floor`, what the link is
    busy; `kept` are the bytes that it receives, for each microbatch in flight.
    """

    lead: Array
    load: Array
    floor: Array
    kept: Array


@dataclass(frozen=True)
class StageKind:
    """What one stage is.

    Attributes:
        extras: the index of what its blocks take besides.
        in_flight: microbatches that it holds at most.
        link: what it receives through.
        waits: (h, g): h microbatches held, g of which between the two parts of their backward.
        in_update: microbatches that it holds while its optimizer steps.
    """

    extras: int
    in_flight: float
    link: int = 0
    waits: tuple[tuple[float, float], ...] = ()
    in_update: float = 0.0

    @property
    def held(self) -> tuple[tuple[float, float], ...]:
        """All times that may be the worst, as in `waits`."""
        return (self.in_flight, 0.0), *self.waits


@dataclass(frozen=True, eq=False)
class StageTable:
    """A pipeline to be cut: its `stages` in order, each of at least one block.

    `shared` (3, first block, end): seconds of load, static bytes and those of the update that a
    stage of these blocks pays besides, None: none. Every plan also pays `fixed_seconds` and
    `fixed_bytes`. Raises ValueError for fewer blocks than stages.
    """

    chain: StageChain
    extras: tuple[StageExtras, ...]
    stages: tuple[StageKind, ...]
    links: tuple[StageLink, ...]
    lead_rate: float
    load_rate: float
    once_rate: float = 1.0
    shared: Array | None = None
    fixed_seconds: float = 0.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        if len(self.stages) > len(self.order):
            raise ValueError(
                f"{len(self.order)} blocks cannot be cut into {len(self.stages)} stages"
            )

    @property
    def order(self) -> tuple[int, ...]:
        """The place of each block among the distinct ones."""
        return self.chain.order


# ---- rates of schedules: they turn the seconds and bytes of stages into those of a step
#
# P ranks run V stages each, S = P V, with M microbatches. A rank counts as V times its dearest
# stage. t are the seconds of a microbatch in a stage, w those of them that are gradients of
# parameters, in passes of their own; c those of a transfer into it.
#
#     step = sum of lead + largest load
#
#     schedule                                lead             load           exact where
#     gpipe, 1f1b, 1f1b_overlapped            t                (M - 1) t      always
#     interleaved, looped_bfs                 k t              M V t - lead   M >= P
#     zero_bubble, interleaved_zero_bubble    k (t - 2 w)      M V t - lead   M >= P, passes t / 3
#     zbv                                     k (t - w) / 2    M V t - lead   M >= 2 P - 1, the same
#
# with k = (P - 1) / (S - 1). Exact means equal to the simulation of equal stages. 1F1B waits for
# M - 1 - ceil((M - 1) / P) transfers there and back; the others hide them behind passes unless
# links are the bottleneck. For unequal stages these are estimates: plans are priced by the
# simulation.
#
# Every schedule of `schedules.SCHEDULES` has an entry in the table `_FORMULAS`; what else a new one
# needs is listed in `schedules.schedules`.


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
            "costs.chain_table._FORMULAS"
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
