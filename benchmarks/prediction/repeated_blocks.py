"""A chain of blocks with a captured block in several places.

So a model of any depth is priced from a step that was captured at another:

    captured     first   middle                     last
    repeated     first   middle   middle   middle   last       places 0 1 1 1 2

    repeat_blocks(StageBlocks(step), (0, 1, 1, 1, 2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.segments import BoundaryBytes
from lightning_topt.graph.op_graph import Parameter
from lightning_topt.plan.stage_blocks import Passes, StageBlocks


def repeat_blocks(base: StageBlocks, places: Sequence[int]) -> RepeatedBlocks:
    """Return the chain of the blocks `places` of `base`, which must be in order.

    No block that shares a parameter may repeat.
    """
    places = tuple(places)
    shared = {place for used in base.uses.values() if len(used) > 1 for place in used}
    assert [*places] == sorted(places) and set(places) == set(range(len(base.names))), (
        "every block in order"
    )
    assert all(places.count(place) == 1 for place in shared), "a shared parameter is there once"
    return RepeatedBlocks(base.step, base.whole, base.calls, base, places)


@dataclass(eq=False, repr=False)
class RepeatedBlocks(StageBlocks):
    """The chain `base` with its block ``places[n]`` at place n; made by `repeat_blocks`."""

    base: Any = None
    places: tuple[int, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The blocks in the order of forward; those of equal names are repetitions."""
        return tuple(self.base.names[place] for place in self.places)

    @cached_property
    def crossings(self) -> BoundaryBytes:
        """The tensors that cross each boundary."""
        found: BoundaryBytes = self.base.crossings
        forward, backward = (
            tuple(side[place] for place in self.places) for side in (found.forward, found.backward)
        )
        return replace(found, forward=forward, backward=backward)

    def gathered_bytes(self, samples: float) -> Array:
        """Return the bytes (block,) of slices that are gathered to cross a boundary."""
        return np.asarray(self.base.gathered_bytes(samples)[[*self.places]])

    def passes(self, samples: float) -> Passes:
        """Return the passes of a microbatch of so many samples."""
        if samples not in self._passes:
            known = self.base.passes(samples)
            rows = {
                field.name: getattr(known, field.name)[[*self.places]] for field in fields(Passes)
            }
            self._passes[samples] = Passes(**rows)
        return self._passes[samples]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, from 0 in order; equal for equal blocks."""
        known: dict[int, int] = {}
        return tuple(known.setdefault(self.base.kinds[place], len(known)) for place in self.places)

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """The places of the blocks that read each parameter."""
        # the first repetition of each block
        first = {place: n for n, place in reversed([*enumerate(self.places)])}
        return {
            name: tuple(sorted(first[place] for place in used))
            for name, used in self.base.uses.items()
        }

    @cached_property
    def owned(self) -> list[list[Parameter]]:
        """The parameters that each block is the first to read."""
        return [self.base.owned[place] for place in self.places]
