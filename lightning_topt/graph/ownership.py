"""Which rank owns which parameter: longest processing time first (Graham, SIAM J. Appl. Math. 17(2), 1969)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def assign_owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Assign every name whole to one rank so that the largest share is small; at most 4/3 of the best possible.

    Args:
        sizes: number of elements by name.
        world_size: number of ranks.

    Deterministic: equal sizes go by name, equal loads to the lowest rank. Raises ValueError for `world_size` < 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    loads = [(0, rank) for rank in range(world_size)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners
