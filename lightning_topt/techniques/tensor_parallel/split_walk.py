"""`walk_split` goes through the calls of a block whose parameters are at given placements, and says
what each of them does; `price_split` adds up what a step of the block takes then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.function_trace import TracedCall
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE
from lightning_topt.techniques.tensor_parallel.split_prices import (
    Collective,
    Move,
    Outcome,
    Saved,
    SplitPrices,
)


@dataclass(frozen=True)
class BlockSplit:
    """Placements of a block's parameters by name, those that are split, and what a step of the
    block then takes on one rank: seconds of forward and backward, bytes of parameters with
    gradients and optimizer state, bytes kept for backward.
    """

    placements: Mapping[str, Placement]
    seconds: float
    state_bytes: float
    activation_bytes: float


class PricedCall(NamedTuple):
    """A call with its tensors at `placements` before it, what it does, and its part of the seconds
    and of the bytes kept.
    """

    call: TracedCall
    placements: tuple[Placement, ...]
    outcome: Outcome
    seconds: float
    activation_bytes: float

    @property
    def is_split(self) -> bool:
        """Whether the call computes on slices; its result may be whole."""
        moved = {move.operand: move.target for move in self.outcome.moves}
        now = [moved.get(index, place) for index, place in enumerate(self.placements)]
        return any(isinstance(place, Shard) for place in (*now, *self.outcome.outputs))


def price_split(
    calls: Sequence[TracedCall],
    prices: SplitPrices,
    placements: Mapping[str, Placement],
    *,
    whole: Collection[int] = (),
    collectives: list[Collective] | None = None,
    priced: list[PricedCall] | None = None,
) -> BlockSplit | None:
    """Return what a step of the block takes with its parameters at `placements` (others whole), one
    call after another; None where that is not admitted. `collectives` gets those of the step,
    `priced` what every call takes of it.
    """
    state = activations = seconds = 0.0
    parameters: set[int] = set()
    for call, before, outcome, moves, saved in walk_split(calls, prices, placements, whole=whole):
        if outcome is None:
            return None
        for ref, place in zip(call.inputs, before, strict=True):
            if ref.parameter is not None and ref.number not in parameters:
                parameters.add(ref.number)
                state += prices.parameter_bytes(ref) / (
                    prices.group.size if isinstance(place, Shard) else 1
                )
        step = (
            outcome.seconds + sum(move.seconds for move in moves),
            float(sum(each.bytes for each in saved)),
        )
        seconds, activations = seconds + step[0], activations + step[1]
        if priced is not None:
            priced.append(PricedCall(call, before, outcome, *step))
        if collectives is not None:
            collectives += [
                *(each for move in moves for each in move.collectives),
                *outcome.collectives,
            ]
    return BlockSplit(dict(placements), seconds, state, activations)


class PlacedCall(NamedTuple):
    """A `PlacedCall` is a call with its arguments at `placements`: what it does (None: it is not
    admitted), and what of its moves and of what is saved was not there before.
    """

    call: TracedCall
    placements: tuple[Placement, ...]
    outcome: Outcome | None
    moves: tuple[Move, ...] = ()
    saved: tuple[Saved, ...] = ()


def walk_split(
    calls: Sequence[TracedCall],
    prices: SplitPrices,
    placements: Mapping[str, Placement],
    *,
    whole: Collection[int] = (),
) -> Iterator[PlacedCall]:
    """Yield the calls in order, parameters at `placements` (others whole); the last one is the
    first that is not admitted.
    """
    where: dict[int, Placement] = {}
    made: set[Any] = set()
    for call in calls:
        for ref in call.inputs:
            where.setdefault(ref.number, placements.get(ref.parameter or "", REPLICATE))
        before = tuple(where[ref.number] for ref in call.inputs)
        outcome = prices.outcome(call, before)
        if outcome is None or not stays_whole(call, outcome, whole):
            yield PlacedCall(call, before, None)
            return
        new = [_key_of(call, move) for move in outcome.moves]
        moves = [
            move
            for move, key in zip(outcome.moves, new, strict=True)
            if key is None or key not in made
        ]
        saved = [each for each in outcome.saved if each.memory is None or each[:2] not in made]
        made |= {*new, *(each[:2] for each in saved)}
        where |= {
            ref.number: place for ref, place in zip(call.outputs, outcome.outputs, strict=True)
        }
        yield PlacedCall(call, before, outcome, tuple(moves), tuple(saved))


def stays_whole(call: TracedCall, outcome: Outcome, whole: Collection[int]) -> bool:
    """Return whether no result of a call that has to be whole is split."""
    places = zip(call.outputs, outcome.outputs, strict=True)
    return not any(isinstance(place, Shard) and ref.number in whole for ref, place in places)


def _key_of(call: TracedCall, move: Any) -> Any:
    """Return the identity of a move that is remembered; None for one of a parameter, which is made
    at every use.
    """
    ref = call.inputs[move.operand]
    return None if ref.parameter is not None else (ref.number, move.target, move.enters)
