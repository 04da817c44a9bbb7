"""Groups say which ranks exchange with one another: every `stride`-th one; here are also the groups
that the meshes of so many ranks have.

On two nodes of four devices:

    Group(8)       (0 1 2 3 4 5 6 7)               packed: the ring enters each node once
    Group(4)       (0 1 2 3) (4 5 6 7)             inside a node
    Group(2, 4)    (0 4) (1 5) (2 6) (3 7)         between nodes: four groups share a node's network
    Group(2, 2)    (0 2) (1 3) (4 6) (5 7)         inside a node
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_topt.graph.mesh_axes import Mesh

_MOST_GROUPS = 32


@dataclass(frozen=True)
class Group:
    """A group is `size` ranks of distance `stride`; the groups of a mesh axis fill all ranks and
    work at the same time.

    Raises ValueError for numbers below 1.
    """

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if (
            type(self.size) is not int
            or type(self.stride) is not int
            or min(self.size, self.stride) < 1
        ):
            raise ValueError(
                f"a group has a size and a stride of at least 1, got {self.size!r} and "
                f"{self.stride!r}"
            )

    @property
    def span(self) -> int:
        """Ranks from one such group to the next that shares none of its positions: `stride` groups
        lie side by side in it.
        """
        return self.size * self.stride

    def is_inside(self, devices_per_node: int) -> bool:
        """Return whether all its ranks share a node of so many devices, where a node begins with a
        group.
        """
        return self.span <= devices_per_node

    def ranks_on_node(self, devices_per_node: int) -> int:
        """Return the number of its ranks that share a node."""
        return (
            self.size
            if self.is_inside(devices_per_node)
            else max(devices_per_node // self.stride, 1)
        )

    def groups_on_node(self, devices_per_node: int) -> int:
        """Return the number of groups of this kind that a node has ranks of, where the group
        crosses nodes.
        """
        return min(self.stride, devices_per_node)


def group_along(mesh: Mesh, axes: Iterable[int]) -> Group:
    """Return the group along `axes` (indices) of a mesh. Raises ValueError unless they are
    neighbours.
    """
    axes = sorted(axes)
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise ValueError(
            f"ranks along the axes {[mesh.names[index] for index in axes]} are not equally far "
            "apart"
        )
    return Group(mesh.ranks_along(axes), mesh.stride(axes))


def ranks_of_groups(group: Group, world_size: int) -> list[list[int]]:
    """Return the ranks of every group of this kind among `world_size` ranks, which their span must
    divide.
    """
    assert world_size % group.span == 0
    firsts = (
        start + offset
        for start in range(0, world_size, group.span)
        for offset in range(group.stride)
    )
    return [list(range(first, first + group.span, group.stride)) for first in firsts]


def mesh_groups(ranks: int, *, devices_per_node: int) -> tuple[Group, ...]:
    """Return the groups of all ranks, and of every outer x inner mesh whose inner axis divides a
    node or is made of nodes.

    Kinds of more than 32 groups are left out, since it takes long to make so many, but for those of
    a node's ranks.
    """
    found = {Group(ranks): None}
    for inner in range(2, ranks):
        if ranks % inner == 0 and (devices_per_node % inner == 0 or inner % devices_per_node == 0):
            kinds = Group(inner), Group(ranks // inner, inner)
            found |= {
                k: None
                for k in kinds
                if inner == devices_per_node or ranks // k.size <= _MOST_GROUPS
            }
    return tuple(found) if ranks > 1 else ()
