"""Ranks on which stages are placed: in a loop (stage s on rank s mod P), or along a V."""

from __future__ import annotations


def looped_ranks(num_ranks: int, *, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round the ranks, (stages,)."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_shaped_ranks(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each of 2P stages that go down the ranks and up again: rank r has stages r
    and 2P - 1 - r.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
