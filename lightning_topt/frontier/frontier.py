"""Frontier: the plans that no other plan beats in both step time and peak memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier: `choice` maps every operator (or block) to the index of its
    configuration.
    """

    step_seconds: float
    peak_bytes: float
    choice: dict[str, int]


@dataclass(frozen=True, eq=False)
class Frontier:
    """Plans by memory ascending: `seconds` (n,), `bytes` (n,), and `configs` (n, operators) of
    `operators`.

    `error_bound` is what a search may have missed: for every plan y there is a point x here with
    ``x <= (1 + error_bound) * y`` in step seconds and in peak bytes. It is 0 for a complete search,
    and infinite where one was given up and plans may cost nothing, so that no relative error can be
    stated. `search_seconds` is its wall-clock time.
    """

    seconds: Array
    bytes: Array
    operators: tuple[str, ...]
    configs: Rows
    error_bound: float = 0.0
    search_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def exact(self) -> bool:
        """Whether no plan is missing: each is here, or is beaten or equalled in both costs by one
        that is.
        """
        return self.error_bound == 0.0

    @cached_property
    def points(self) -> list[FrontierPoint]:
        """The points with their decisions, in order."""
        rows = zip(self.seconds.tolist(), self.bytes.tolist(), self.configs.tolist(), strict=True)
        return [
            FrontierPoint(t, size, dict(zip(self.operators, row, strict=True)))
            for t, size, row in rows
        ]


def make_frontier(
    seconds: Array, size: Array, *, operators: tuple[str, ...], configs: Rows, error_bound: float
) -> Frontier:
    """Return the frontier of these plans; of plans with equal costs one is kept."""
    rows = pareto_rows_2(size, seconds)
    return Frontier(seconds[rows], size[rows], operators, configs[rows], error_bound)
