"""The phases of a training step in the order of time, and what is alive in them.

Lightning's automatic optimization runs forward, zero_grad, backward, step, so that the last step's
gradients are alive in forward. Everything in memory is a lifetime: some bytes from one phase to
another. Lifetimes add, so those of a block under each configuration are all that a search needs to
know of memory.

    phase                segments            what happens
    rebuild_buckets      -                   once, before the second forward: DDP makes new buckets
    gather_forward       0, 1, ..., K - 1    parameters are gathered
    forward              (the same)          the segment's forward
    forward_over         -                   the loss is there, and all that backward needs
    gather_backward      K - 1, ..., 1, 0    parameters are gathered
    prefetch_backward    (the same)          those of the next block are asked for
    backward             (the same)          the segment's backward
    reduce               (the same)          gradients are reduced
    reduce_last          -                   what is reduced when all backwards are over
    update               -                   the optimizer's step

A plan uses the phases that its techniques name; in the others nothing begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import Array

Phase = tuple[str, int]  # what happens, in which segment
REBUILD: Phase = ("rebuild_buckets", 0)
FORWARD_OVER: Phase = ("forward_over", 0)
REDUCE_LAST: Phase = ("reduce_last", 0)
UPDATE: Phase = ("update", 0)
ONCE = (REBUILD, FORWARD_OVER, REDUCE_LAST, UPDATE)  # phases that belong to no segment
FORWARD = ("gather_forward", "forward")
BACKWARD = ("gather_backward", "prefetch_backward", "backward", "reduce")


@dataclass(frozen=True)
class Lifetime:
    """`bytes` of `kind`, alive from the phase `first` to `last`, both included.

    Never alive when `last` is earlier.
    """

    kind: str
    bytes: float
    first: Phase
    last: Phase


@dataclass(frozen=True, eq=False)
class Changes:
    """Lifetimes as arrays (n,).

    `sizes` come (below 0: go) at the phases with the indices `places`. These move by `moves` for
    each segment that their block stands later.
    """

    sizes: Array
    places: NDArray[np.intp]
    moves: NDArray[np.intp]


@dataclass(frozen=True)
class Phases:
    """The phases of a step over `count` segments."""

    count: int

    @cached_property
    def order(self) -> tuple[Phase, ...]:
        """The phases in the order of time."""
        forward = ((kind, k) for k in range(self.count) for kind in FORWARD)
        backward = ((kind, k) for k in range(self.count - 1, -1, -1) for kind in BACKWARD)
        return (REBUILD, *forward, FORWARD_OVER, *backward, REDUCE_LAST, UPDATE)

    @cached_property
    def position(self) -> dict[Phase, int]:
        """The index of each phase."""
        return {phase: index for index, phase in enumerate(self.order)}

    @cached_property
    def segment(self) -> NDArray[np.intp]:
        """The segment of each phase (phase,), -1 for those that belong to none."""
        return np.array([-1 if phase in ONCE else phase[1] for phase in self.order])

    @cached_property
    def is_forward(self) -> NDArray[np.bool_]:
        """Whether each phase (phase,) is in forward, or at its end."""
        return np.array([phase[0] in FORWARD or phase == FORWARD_OVER for phase in self.order])

    def shifted(self, lifetimes: Iterable[Lifetime], by: int) -> list[Lifetime]:
        """Return `lifetimes` of a block that stands `by` segments later."""
        if by == 0:
            return [*lifetimes]
        return [
            Lifetime(e.kind, e.bytes, _shifted(e.first, by), _shifted(e.last, by))
            for e in lifetimes
        ]

    def before(self, phase: Phase) -> Phase:
        """Return the phase before; `phase` must not be the first."""
        return self.order[self.position[phase] - 1]

    def after(self, phase: Phase) -> Phase:
        """Return the phase after; `phase` must not be the last."""
        return self.order[self.position[phase] + 1]

    def always(self, kind: str, size: float) -> Lifetime:
        """Return a lifetime that spans the whole step."""
        return Lifetime(kind, size, REBUILD, UPDATE)

    def add_up(self, lifetimes: Iterable[Lifetime]) -> Array:
        """Return the live bytes in each phase (phase,)."""
        steps, position = np.zeros(len(self.order) + 1), self.position
        for lifetime in lifetimes:
            first, last = position[lifetime.first], position[lifetime.last]
            if last >= first:
                steps[first] += lifetime.bytes
                steps[last + 1] -= lifetime.bytes
        return np.asarray(np.cumsum(steps)[:-1])

    def changes(self, lifetimes: Iterable[Lifetime]) -> Changes:
        """Return `lifetimes` of one block as arrays."""
        position, rows = self.position, []
        for lifetime in lifetimes:
            first, last = position[lifetime.first], position[lifetime.last]
            if last >= first:
                rows.append((lifetime.bytes, first, _indices_per_segment(lifetime.first)))
                rows.append((-lifetime.bytes, last + 1, _indices_per_segment(lifetime.last)))
        sizes, places, moves = zip(*rows, strict=True) if rows else ((), (), ())
        return Changes(np.array(sizes, float), np.array(places, np.intp), np.array(moves, np.intp))

    def add_up_moved(self, changes: Changes, by: int) -> Array:
        """Return the live bytes in each phase (phase,) of a block that stands later.

        `by` segments later.
        """
        count = len(self.order) + 1
        steps = np.bincount(changes.places + by * changes.moves, changes.sizes, minlength=count)
        return np.asarray(np.cumsum(steps)[:-1])

    def by_kind(self, lifetimes: Iterable[Lifetime]) -> dict[str, Array]:
        """Return the live bytes in each phase (phase,), by kind."""
        kinds: dict[str, list[Lifetime]] = {}
        for lifetime in lifetimes:
            kinds.setdefault(lifetime.kind, []).append(lifetime)
        return {kind: self.add_up(some) for kind, some in kinds.items()}


@lru_cache(maxsize=16)
def phases_of(count: int) -> Phases:
    """Return the phases of a step over `count` segments, the same object for the same number."""
    return Phases(count)


def _shifted(phase: Phase, by: int) -> Phase:
    return phase if phase in ONCE else (phase[0], phase[1] + by)


def _indices_per_segment(phase: Phase) -> int:
    # By how many indices the phase of the next segment is later. Backward runs from the last
    # segment to the first.
    if phase in ONCE:
        return 0
    return len(FORWARD) if phase[0] in FORWARD else -len(BACKWARD)
