"""Frontier: a Pareto set of cost vectors with back-pointers, and its algebra as array operations.

A point is a partial plan: its cost is a vector of `seconds` (one per path) and `bytes` (one per moment) that add up
when partial plans are joined (see `costs.cost_table`), and its `history` says which configurations it chose.

    reduce(A)       the Pareto-minimal points                       TensorOpt, arXiv 2004.10856 [recalled]
    product(A, B)   reduce of all pairwise sums                     both parts are used
    union(A, B)     reduce(A and B)                                 a choice between alternatives
    thin(A, e)      fewer points, none of the others much better    epsilon-dominance, Papadimitriou & Yannakakis 2000

Symbols: n points, p paths, m moments. Nothing is modified in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.pareto import Array, Rows, pareto_rows, pareto_rows_2, thin_rows

_CHUNK = 2**18
SMALLEST_EPSILON = 2.0**-20


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a final frontier: `choice` maps every operator to the index of its configuration."""

    step_seconds: float
    peak_bytes: float
    choice: dict[str, int]


@dataclass(frozen=True, eq=False)
class Decided:
    """History of points that decide `operators`: `configs` (n, operators) are indices of configurations."""

    operators: tuple[str, ...]
    configs: Rows

    def take(self, rows: Rows) -> Decided:
        """The history of these points only."""
        return Decided(self.operators, self.configs[rows])


@dataclass(frozen=True, eq=False)
class Summed:
    """History of points that are sums: point i is the sum over j of point ``rows[i, j]`` of ``parts[j]``."""

    parts: tuple[Frontier, ...]
    rows: Rows

    def take(self, rows: Rows) -> Summed:
        """The history of these points only."""
        return Summed(self.parts, self.rows[rows])


@dataclass(frozen=True, eq=False)
class Picked:
    """History of points that are alternatives: point i is point ``row[i]`` of ``parts[part[i]]``."""

    parts: tuple[Frontier, ...]
    part: Rows
    row: Rows

    def take(self, rows: Rows) -> Picked:
        """The history of these points only."""
        return Picked(self.parts, self.part[rows], self.row[rows])


@dataclass(frozen=True, eq=False)
class Frontier:
    """A set of points: `seconds` (n, p), `bytes` (n, m) and where they come from.

    `error_bound` is what thinning may have cost: for every plan y that was considered there is a point x here with
    ``x <= (1 + error_bound) * y`` in the step's seconds and in its peak bytes (a fraction; 0 when nothing was thinned).
    `search_seconds` is the wall-clock time of the search that made it.
    """

    seconds: Array
    bytes: Array
    history: Decided | Summed | Picked
    error_bound: float = 0.0
    search_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def exact(self) -> bool:
        """Whether no plan was given up by thinning."""
        return self.error_bound == 0.0

    @property
    def costs(self) -> Array:
        """All columns, (n, p + m)."""
        return np.concatenate([self.seconds, self.bytes], axis=1)

    def take(self, rows: Rows) -> Frontier:
        """The points with these indices."""
        history = self.history.take(rows)
        return dataclasses.replace(self, seconds=self.seconds[rows], bytes=self.bytes[rows], history=history)

    def choices(self) -> dict[str, Rows]:
        """For every operator decided here, the index of its configuration in each point (n,)."""
        found: dict[str, Rows] = {}
        for operators, configs, where in _decisions(self):
            for operator, column in zip(operators, configs.T, strict=True):
                found.setdefault(operator, np.full(len(self), -1, dtype=np.intp))[where] = column
        return found

    @cached_property
    def points(self) -> list[FrontierPoint]:
        """The points with their decisions, in order: the slowest path and the worst moment count."""
        choices = self.choices()
        rows = np.stack(list(choices.values()), axis=1).tolist() if choices else [[] for _ in range(len(self))]
        values = zip(self.seconds.max(axis=1).tolist(), self.bytes.max(axis=1).tolist(), rows, strict=True)
        return [FrontierPoint(t, size, dict(zip(choices, row, strict=True))) for t, size, row in values]


def decide(operator: str, seconds: Array, bytes: Array, *, first_config: int = 0) -> Frontier:
    """The points of one operator, one per configuration, not reduced: `seconds` (n, p), `bytes` (n, m)."""
    configs = first_config + np.arange(len(seconds))[:, None]
    return Frontier(seconds, bytes, Decided((operator,), configs))


def constant(seconds: Array, bytes: Array) -> Frontier:
    """One point that decides nothing: `seconds` (p,), `bytes` (m,)."""
    return Frontier(seconds[None], bytes[None], Decided((), np.zeros((1, 0), np.intp)))


def reduce(frontier: Frontier) -> Frontier:
    """The Pareto-minimal points; equal points are kept once. O(n log n) for one path and one moment."""
    if len(frontier) <= 1:
        return frontier
    if frontier.seconds.shape[1] == frontier.bytes.shape[1] == 1:
        return frontier.take(pareto_rows_2(frontier.bytes[:, 0], frontier.seconds[:, 0]))
    return frontier.take(pareto_rows(frontier.costs))


def product(left: Frontier, right: Frontier) -> Frontier:
    """All sums of a point of `left` and a point of `right`, reduced; memory is bounded by working in chunks."""
    if len(left) == 0 or len(right) == 0:
        return dataclasses.replace(pairs(left, right, np.zeros((0, 2), np.intp)))
    if len(left) == 1 or len(right) == 1:  # adding one vector to all keeps a reduced frontier reduced
        rows = np.indices((len(left), len(right))).reshape(2, -1).T
        return reduce(pairs(left, right, rows))
    held, held_size = [], 0
    step = max(1, _CHUNK // len(right))
    for start in range(0, len(left), step):
        rows = np.indices((min(step, len(left) - start), len(right))).reshape(2, -1).T
        rows[:, 0] += start
        held.append(reduce(pairs(left, right, rows)))
        held_size += len(held[-1])
        if held_size > _CHUNK:
            held = [_reduce_sums(held)]
            held_size = len(held[0]) // 2  # the next round comes after as many new points again
    return _reduce_sums(held)


def pairs(left: Frontier, right: Frontier, rows: Rows) -> Frontier:
    """The sums of the points ``left[rows[i, 0]]`` and ``right[rows[i, 1]]``, not reduced."""
    return Frontier(
        left.seconds[rows[:, 0]] + right.seconds[rows[:, 1]],
        left.bytes[rows[:, 0]] + right.bytes[rows[:, 1]],
        Summed((left, right), rows),
        left.error_bound + right.error_bound,
    )


def union(*parts: Frontier) -> Frontier:
    """The points of all `parts` (at least one) as alternatives, reduced."""
    return reduce(gather(parts))


def gather(parts: Sequence[Frontier]) -> Frontier:
    """The points of all `parts` (at least one) as alternatives, not reduced."""
    if len(parts) == 1:
        return parts[0]
    lengths = [len(part) for part in parts]
    return Frontier(
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.bytes for part in parts]),
        Picked(
            tuple(parts),
            np.repeat(np.arange(len(parts)), lengths),
            np.concatenate([np.arange(length) for length in lengths]),
        ),
        max(part.error_bound for part in parts),
    )


def dominates(left: Frontier, right: Frontier) -> NDArray[np.bool_]:
    """(n,) for each point of `right`: whether some point of `left` is at most it in every column."""
    mine, theirs = left.costs, right.costs
    step = max(1, _CHUNK // max(1, len(left)))
    found = np.zeros(len(theirs), bool)
    for start in range(0, len(theirs), step):
        below: NDArray[np.bool_] = np.all(mine <= theirs[start : start + step, None], axis=2)
        found[start : start + step] = below.any(axis=1)
    return found


def thin(frontier: Frontier, epsilon: float, *, seconds_scale: float, bytes_scale: float) -> Frontier:
    """Fewer points: for every point y of `frontier` a point x is kept with, in every column,

        x.seconds <= y.seconds + epsilon * seconds_scale    and    x.bytes <= y.bytes + epsilon * bytes_scale

    `error_bound` grows by `epsilon`; so when the scales are lower bounds of the seconds and bytes of every whole plan,
    bounds add up over the steps of a search to a relative error of its answer. Raises ValueError unless
    epsilon and both scales are positive.
    """
    if not (epsilon > 0 and seconds_scale > 0 and bytes_scale > 0):
        raise ValueError(f"epsilon and scales must be positive, got {epsilon}, {seconds_scale} and {bytes_scale}")
    kinds = [frontier.seconds.shape[1], frontier.bytes.shape[1]]
    widths = np.repeat([epsilon * seconds_scale, epsilon * bytes_scale], kinds)
    kept = frontier.take(thin_rows(frontier.costs, widths=widths))
    return dataclasses.replace(kept, error_bound=frontier.error_bound + epsilon)


def thin_to(frontier: Frontier, max_points: int, *, seconds_scale: float, bytes_scale: float) -> Frontier:
    """`frontier`, thinned with the smallest sufficient power of two if it has more than `max_points`."""
    thinned, epsilon = frontier, SMALLEST_EPSILON
    while len(thinned) > max_points:
        thinned = thin(frontier, epsilon, seconds_scale=seconds_scale, bytes_scale=bytes_scale)
        epsilon *= 2
    return thinned


def _reduce_sums(parts: Sequence[Frontier]) -> Frontier:
    """Reduce of the chunks of one product: their histories have the same parts, so one history holds them all."""
    if len(parts) == 1:
        return parts[0]
    histories = [part.history for part in parts if isinstance(part.history, Summed)]
    assert len(histories) == len(parts)
    return reduce(
        dataclasses.replace(
            parts[0],
            seconds=np.concatenate([part.seconds for part in parts]),
            bytes=np.concatenate([part.bytes for part in parts]),
            history=Summed(histories[0].parts, np.concatenate([history.rows for history in histories])),
        )
    )


def _decisions(frontier: Frontier) -> Iterator[tuple[tuple[str, ...], Rows, Rows]]:
    """Follow the back-pointers: (operators, configs (k, operators), the points (k,) that decided so)."""
    everything = np.arange(len(frontier))
    waiting = [(frontier, everything, everything)]  # a stack: a chain of operators may be deeper than Python recurses
    while waiting:
        current, rows, where = waiting.pop()
        history = current.history
        if isinstance(history, Decided):
            yield history.operators, history.configs[rows], where
        elif isinstance(history, Summed):
            waiting.extend((part, history.rows[rows, j], where) for j, part in enumerate(history.parts))
        else:
            for j, part in enumerate(history.parts):
                mine = history.part[rows] == j
                if mine.any():
                    waiting.append((part, history.row[rows[mine]], where[mine]))
