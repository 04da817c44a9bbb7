"""Which parameters to split, and along which dims: Pareto sets of seconds and bytes.

`search_totals` finds the splits of a whole model out of those of its regions, `choose_totals` the
few of them to try. Blocks of a group are split alike, so one of them is searched (`ModelRegions`).

`search_splits` searches one region: the calls of its forward are walked in order. A state is where
the tensors are that later calls read: placements of activations, of parameters that were met, and
the moves that were made already. At a call that meets parameters first, every row of its kind says
where they could be. What the call then does is said by `decide`, as in the run. Of equal states the
Pareto set of (seconds, bytes of state, bytes of activations) is kept. So the result is exact: what
no state dominates is there.

Two things are given. Tensors that cross the border of the block are replicated. No parameter
travels in a step: parameters that rest in slices and are gathered for their use are what ZeRO 3
does, on data axes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace, Ref, TracedCall
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, Layout
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.reductions import NORM
from lightning_topt.techniques.tensor_parallel.op_rules.rules import Argument, call_of
from lightning_topt.techniques.tensor_parallel.split_prices import (
    BlockSplit,
    CallOutcome,
    SplitPrices,
    stays_whole,
)

_CLOSE = 0.02


def search_totals(regions: ModelRegions, prices: SplitPrices) -> list[Point]:
    """Return the costs of the Pareto set, fastest first.

    Their choices are the splits of each region.
    """
    # one region after another: every total with every split, and of these the Pareto set
    totals = [Point(0.0, 0.0, 0.0, ())]
    for region in regions.all:
        calls, whole = regions.traced(region[0])
        found = search_splits(calls, prices, whole=whole)
        totals = pareto(
            _with_region(t, split, len(region)) for t, split in itertools.product(totals, found)
        )
    return totals


def model_split(regions: ModelRegions, total: Point) -> BlockSplit:
    """Return the split of all blocks that `total` has chosen."""
    placements: dict[str, Placement] = {}
    for region, split in zip(regions.all, total.chosen, strict=True):
        for block in region:
            # found for the first block of the region, renamed for each
            own = split.placements.items()
            placements |= {
                f"{block}{name.removeprefix(region[0])}": placement for name, placement in own
            }
    return BlockSplit(placements, *total[:3])


def choose_totals(totals: Sequence[Point]) -> list[Point]:
    """Return the few of `totals`, fastest first, that are tried.

    These are the fastest that splits anything, the one with the least state, and the one with the
    fewest bytes in all. One that is within 2 % of an earlier one of these in every cost is left
    out.
    """
    found = [total for total in totals if any(split.placements for split in total.chosen)]
    if not found:
        return []
    chosen = (
        found[0],
        min(found, key=lambda split: (split.state_bytes, split.seconds)),
        min(found, key=lambda split: (split.state_bytes + split.activation_bytes, split.seconds)),
    )
    kept: list[Point] = []
    for split in chosen:
        if not any(_is_close(split, other) for other in kept):
            kept.append(split)
    return kept


def _is_close(split: Point, other: Point) -> bool:
    pairs = zip(split[:3], other[:3], strict=True)
    return all(abs(a - b) <= _CLOSE * max(a, b) for a, b in pairs)


def _with_region(total: Point, split: BlockSplit, times: int) -> Point:
    # `total` with one more region, of `times` blocks
    return Point(
        total.seconds + times * split.seconds,
        total.state_bytes + times * split.state_bytes,
        total.activation_bytes + times * split.activation_bytes,
        (*total.chosen, split),
    )


@dataclass(frozen=True, eq=False)
class ModelRegions:
    """The parts of a model that are split alike, with the traced calls of each.

    The model's step was captured as `graph`, under `trace`.
    """

    graph: OpGraph
    trace: FunctionTrace
    _known: dict[str, tuple[list[TracedCall], set[int]]] = field(default_factory=dict)

    @cached_property
    def repeated(self) -> list[str]:
        """Blocks of which there are several in their group."""
        groups = Counter(block.group for block in self.graph.blocks)
        return [block.name for block in self.graph.blocks if groups[block.group] > 1]

    @cached_property
    def all(self) -> list[list[str]]:
        """Blocks that are split alike, the one that is searched first.

        First the region of all that is there once, then every group.
        """
        groups: dict[int, list[str]] = {}
        for block in self.graph.blocks:
            if block.name in self.repeated:
                groups.setdefault(block.group, []).append(block.name)
        return [[""], *groups.values()]

    def traced(self, block: str) -> tuple[list[TracedCall], set[int]]:
        """Return the calls of a block, and the numbers of tensors that have to be replicated.

        ``""`` stands for all that is there once.
        """
        if block not in self._known:
            calls = self.trace.calls_of(block, self.repeated)
            whole = self.trace.whole_at(block, self.repeated)
            self._known[block] = calls, whole
        return self._known[block]


_MOST = 256  # points of a state
# a new dim of a reshape up to this size may be parts of it: queries, keys and values
_SMALL = 4


def search_splits(
    calls: Sequence[TracedCall], prices: SplitPrices, *, whole: Collection[int] = ()
) -> list[BlockSplit]:
    """Return the Pareto set of splits of `calls`, fastest first.

    `whole` are numbers of tensors that have to be replicated.
    """
    return _SplitSearch(calls, prices, whole).run()


Entry = tuple[Placement, frozenset[Any]]  # where a tensor is, and its moves so far


class Point(NamedTuple):
    """What a choice takes, and the choice."""

    seconds: float
    state_bytes: float
    activation_bytes: float
    chosen: Any


class _State(NamedTuple):
    # All that later calls depend on.
    # `entries` are those of the tensors alive, by number; `saved` is what is kept of memory that is
    # alive.

    entries: tuple[tuple[int, Entry], ...]
    saved: frozenset[tuple[int, bool]]


class _SplitSearch:
    # The walk along the calls of one region.

    def __init__(
        self, calls: Sequence[TracedCall], prices: SplitPrices, whole: Collection[int]
    ) -> None:
        self.calls, self.prices, self.whole = calls, prices, whole
        self._known: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {}

    def run(self) -> list[BlockSplit]:
        # Walk all calls.
        # from one state without tensors, call after call
        states = {_State((), frozenset()): [Point(0.0, 0.0, 0.0, None)]}
        for index, call in enumerate(self.calls):
            reached: dict[_State, list[Point]] = {}
            for state, points in states.items():
                for after, step, chosen in self._steps(index, call, state):
                    reached.setdefault(after, []).extend(
                        _later(point, step, chosen) for point in points
                    )
            states = {state: pareto(points) for state, points in reached.items()}
        ends = pareto(point for points in states.values() for point in points)
        return [BlockSplit(_choices(point.chosen), *point[:3]) for point in ends]

    def _steps(
        self, index: int, call: TracedCall, state: _State
    ) -> Iterator[tuple[_State, tuple[float, float, float], tuple[tuple[str, Placement], ...]]]:
        # Yield each next state, what the step to it takes, and the placements it chooses
        # tensors met for the first time are replicated; parameters are what is chosen
        entries = dict(state.entries)
        new = {ref.number: ref for ref in call.inputs if ref.number not in entries}
        for ref in new.values():
            entries[ref.number] = REPLICATE, frozenset()
        parameters = {number: ref for number, ref in new.items() if ref.parameter is not None}
        for chosen in self._candidates(index, parameters):
            for number, place in zip(parameters, chosen, strict=True):
                entries[number] = place, frozenset()
            outcome = self.prices.outcome(call, [entries[ref.number][0] for ref in call.inputs])
            if outcome is None or not stays_whole(call, outcome, self.whole):
                continue
            # bytes of parameters that are met here, split or replicated
            ranks = self.prices.group.size
            held = sum(
                self.prices.parameter_bytes(ref) / (ranks if isinstance(place, Shard) else 1)
                for ref, place in zip(parameters.values(), chosen, strict=True)
            )
            after, seconds, kept = self._after(index, call, dict(entries), state.saved, outcome)
            names = (ref.parameter or "" for ref in parameters.values())
            split = tuple(
                (n, p) for n, p in zip(names, chosen, strict=True) if isinstance(p, Shard)
            )
            yield after, (seconds, held, kept), split

    def _after(
        self,
        index: int,
        call: TracedCall,
        entries: dict[int, Entry],
        saved: frozenset[Any],
        outcome: CallOutcome,
    ) -> tuple[_State, float, float]:
        # The next state, the seconds until then, and the bytes that are kept more
        # a move is paid once, but for parameters, which move at every use
        seconds = outcome.seconds
        for move in outcome.moves:
            ref, key = call.inputs[move.operand], (move.target, move.enters)
            place, moved = entries[ref.number]
            if ref.parameter is not None or key not in moved:
                seconds += move.seconds
                entries[ref.number] = place, moved if ref.parameter is not None else moved | {key}
        # what is saved for backward is kept once
        kept = 0.0
        for each in outcome.saved:
            if each.memory is None or each[:2] not in saved:
                kept += each.bytes
                saved = saved if each.memory is None else saved | {each[:2]}
        for ref, place in zip(call.outputs, outcome.outputs, strict=True):
            known = entries.get(ref.number)
            if known is None or known[0] != place:
                entries[ref.number] = place, frozenset()
        # what no later call reads is forgotten, so that states become equal
        last, memories = self._last_uses, self._last_memories
        alive = tuple(
            sorted(
                (number, entry) for number, entry in entries.items() if last.get(number, -1) > index
            )
        )
        return (
            _State(alive, frozenset(each for each in saved if memories[each[0]] > index)),
            seconds,
            kept,
        )

    # ---- what is known of the calls --------------------------------------------------------------

    @cached_property
    def _last_uses(self) -> dict[int, int]:
        return {ref.number: index for index, call in enumerate(self.calls) for ref in call.inputs}

    @cached_property
    def _last_memories(self) -> dict[int, int]:
        return {
            ref.memory: index
            for index, call in enumerate(self.calls)
            for ref in (*call.inputs, *call.outputs)
        }

    @cached_property
    def _parts(self) -> dict[int, set[int]]:
        # Numbers of parts that dims may be cut into, with the sizes of such dims.
        # If nothing takes a dim apart or puts it together, parts are no better than one.
        found: dict[int, set[int]] = {}
        for call in self.calls:
            for parts, sizes in _parts_of(call):
                found.setdefault(parts, set()).update(sizes)
        return found

    def _candidates(
        self, index: int, parameters: Mapping[int, Ref]
    ) -> Sequence[tuple[Placement, ...]]:
        # Placements that the kind of the call allows its new parameters, together
        if not parameters:
            return [()]
        # which parameters are new depends on the state, what may be done with them does not
        key = index, *parameters
        if key not in self._known:
            self._known[key] = [*self._new_candidates(self.calls[index], parameters)]
        return self._known[key]

    def _new_candidates(
        self, call: TracedCall, parameters: Mapping[int, Ref]
    ) -> Iterable[tuple[Placement, ...]]:
        found: dict[tuple[Placement, ...], None] = {(REPLICATE,) * len(parameters): None}
        kind = KINDS.get(call.func)
        if kind is None or kind is NORM:  # a norm has too few numbers to split
            return found
        known = [
            Argument(Layout(ref.shape, (REPLICATE,)), False, False, ref.is_mask)
            for ref in call.inputs
        ]
        made = replace(
            call_of(call.func, call.args, call.kwargs, known, of=Ref),
            parts=(1, *sorted(self._parts)),
        )
        places = [
            next(i for i, ref in enumerate(call.inputs) if ref.number == number)
            for number in parameters
        ]
        # placements of the new parameters in each row; what else it says is for `decide`
        for row in kind.rows(made, self.prices.group.size):
            along = tuple(row.inputs[place] for place in places)
            if all(
                self._is_sensible(ref, p) for ref, p in zip(parameters.values(), along, strict=True)
            ):
                found[along] = None
        return found

    def _is_sensible(self, ref: Ref, placement: Placement) -> bool:
        parts = placement.parts if isinstance(placement, Shard) else 1
        return parts == 1 or (
            isinstance(placement, Shard) and ref.shape[placement.dim] in self._parts[parts]
        )


def _parts_of(call: TracedCall) -> Iterator[tuple[int, Iterable[int]]]:
    # Yield numbers of parts, and sizes of dims that the call may take apart or put together so
    kind = KINDS.get(call.func)
    if kind is None or not call.inputs:
        return
    # several results or arguments of one dim, and small new or old dims of a reshape
    old, new = call.inputs[0].shape, call.outputs[0].shape
    if len(call.outputs) > 1:
        yield len(call.outputs), old
    if len(call.inputs) > 1 and kind.name == "cat":
        yield len(call.inputs), new
    if kind.name == "reshape":
        yield from ((size, old) for size in new if size not in old and 1 < size <= _SMALL)
        yield from ((size, new) for size in old if size not in new and 1 < size <= _SMALL)
    if kind.name in ("getitem", "select"):
        pairs = zip(old, new, strict=False)
        yield from (
            (a // b, (a,)) for a, b in pairs if 0 < b < a and a % b == 0 and a // b <= _SMALL
        )


def _later(
    point: Point, step: tuple[float, float, float], chosen: tuple[tuple[str, Placement], ...]
) -> Point:
    seconds, held, kept = step
    # a linked list: points share what they have in common
    choices = (point.chosen, chosen) if chosen else point.chosen
    return Point(
        point.seconds + seconds, point.state_bytes + held, point.activation_bytes + kept, choices
    )


def _choices(chosen: Any) -> dict[str, Placement]:
    found: list[tuple[str, Placement]] = []
    while chosen is not None:
        chosen, last = chosen
        found = [*last, *found]
    return dict(found)


def pareto(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one is at least as good as, fastest first.

    Of equal ones the first. Of more than 256, every so many-th is kept, and the ends.
    """
    found: list[Point] = []
    # of the points found, those that none beats in both bytes: state ascends, activations descend
    state: list[float] = []
    activations: list[float] = []
    for point in sorted(points, key=lambda point: point[:3]):
        place = bisect_right(state, point.state_bytes)
        if place and activations[place - 1] <= point.activation_bytes:
            continue
        found.append(point)
        first = bisect_left(state, point.state_bytes)
        last = next(
            (n for n in range(first, len(state)) if activations[n] < point.activation_bytes),
            len(state),
        )
        state[first:last], activations[first:last] = [point.state_bytes], [point.activation_bytes]
    # too many points of one state: thin them out
    if len(found) <= _MOST:
        return found
    ends = (
        found[0],
        min(found, key=lambda p: p.state_bytes),
        min(found, key=lambda p: p.activation_bytes),
    )
    return sorted(
        {id(p): p for p in (*found[:: -(-len(found) // _MOST)], *ends)}.values(),
        key=lambda point: point[:3],
    )
