"""Collectives of a step as rows of a table: as the techniques of a plan say, and as they are
called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_topt.costs.communication import Collective, Group
from lightning_topt.graph.mesh_axes import Mesh

PASSES = ("forward", "backward", "update")


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective in a step: `count` calls of `op` that start in the pass `during`, on
    `nbytes` bytes in all.

    `axis` names the axes of the mesh that the groups of `ranks` ranks lie along, and ``"other"``
    where they lie along none. Bytes are those of the whole tensors: what goes into an all-reduce or
    a reduce-scatter, what comes out of an all-gather.
    """

    during: str
    op: str
    axis: str
    ranks: int
    count: int
    nbytes: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """All but count and bytes."""
        return self.during, self.op, self.axis, self.ranks

    def __str__(self) -> str:
        return f"{self.op} over {self.axis} ({self.ranks} ranks) in {self.during}"


def rows_of(collectives: Iterable[Collective], mesh: Mesh) -> tuple[CollectiveRow, ...]:
    """Return equal collectives as one row each, in the order of passes. Groups of one rank exchange
    nothing.
    """
    counts: dict[tuple[str, str, Group], list[float]] = defaultdict(lambda: [0, 0.0])
    for each in collectives:
        if each.group.size > 1 and each.size:
            entry = counts[each.during, each.op, each.group]
            entry[0], entry[1] = entry[0] + 1, entry[1] + each.size
    rows = [
        CollectiveRow(during, op, axis_name(mesh, group), group.size, int(count), round(size))
        for (during, op, group), (count, size) in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (PASSES.index(row.during), row.key)))


def axis_name(mesh: Mesh, group: Group) -> str:
    """Return the names of the axes of `mesh` that groups like this lie along."""
    real = [index for index, size in enumerate(mesh.shape) if size > 1]
    for length in range(1, len(real) + 1):
        for axes in combinations(real, length):
            if mesh.ranks_along(axes) == group.size and mesh.stride(axes) == group.stride:
                return " x ".join(mesh.names[index] for index in axes)
    return "other"


def differences_of_rows(
    said: Sequence[CollectiveRow], called: Sequence[CollectiveRow]
) -> list[str]:
    """Return a sentence for every kind of collective whose count or bytes are not as said."""
    expected, found = ({row.key: row for row in rows} for rows in (said, called))
    sentences = []
    for key in dict.fromkeys((*expected, *found)):
        row, other = expected.get(key), found.get(key)
        if row is None or other is None:
            one, text = (
                (other, "called, but not expected")
                if row is None
                else (row, "expected, but not called")
            )
            sentences.append(f"{one}: {one.count} {text}" if one is not None else "")
        elif (row.count, row.nbytes) != (other.count, other.nbytes):
            sentences.append(
                f"{row}: {row.count} of {row.nbytes:,} bytes in all expected, {other.count} of "
                f"{other.nbytes:,} called"
            )
    return sentences
