"""A mesh of ranks: named axes, and which ranks form the groups along each of them.

Ranks are numbered row by row, the last axis fastest, as in torch's `DeviceMesh`. A group along an
axis is every `stride`-th rank, where the stride is the number of ranks of all later axes together:
on two nodes of four devices the mesh

    data_replicate 2 x data_shard 4
        groups along data_shard       (0 1 2 3) (4 5 6 7)        stride 1, inside a node
        groups along data_replicate   (0 4) (1 5) (2 6) (3 7)    stride 4, between nodes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

SCOPES = ("intra", "inter")  # inside a node, between nodes
DATA_AXES = ("data", "data_replicate", "data_shard")  # the batch is split along these
TENSOR_AXES = ("tensor", "tensor_rows", "tensor_columns", "tensor_tokens")  # operators are split
PIPELINE_AXES = ("pipeline",)  # the stages of a model are spread along these


@dataclass(frozen=True)
class Axis:
    """One direction of a mesh: `size` ranks.

    `scope` says whether its groups lie inside a node (``"intra"``) or cross nodes (``"inter"``).
    Raises ValueError for a name that is no identifier, a size below 1 or another scope.
    """

    name: str
    size: int
    scope: str = "intra"

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(
                f"the name of an axis is an identifier such as 'data', got {self.name!r}"
            )
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"axis {self.name!r}: size must be at least 1, got {self.size!r}")
        if self.scope not in SCOPES:
            raise ValueError(
                f"axis {self.name!r}: scope must be one of {SCOPES}, got {self.scope!r}"
            )


@dataclass(frozen=True)
class Mesh:
    """The axes of a plan, outermost first.

    Raises ValueError when there is none or a name repeats.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.names)) != len(self.axes):
            raise ValueError(
                f"a mesh has at least one axis, and no two with the same name; got {self.names}"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def data_axes(self) -> tuple[int, ...]:
        """Indices of the axes along which the batch is split."""
        return tuple(index for index, name in enumerate(self.names) if name in DATA_AXES)

    @cached_property
    def tensor_axes(self) -> tuple[int, ...]:
        """Indices of the axes along which operators are split."""
        return tuple(index for index, name in enumerate(self.names) if name in TENSOR_AXES)

    @cached_property
    def pipeline_axes(self) -> tuple[int, ...]:
        """Indices of the axes along which the stages of a model are spread: one, or none."""
        return tuple(index for index, name in enumerate(self.names) if name in PIPELINE_AXES)

    @cached_property
    def pipeline_size(self) -> int:
        """Number of pipeline stages of one model; 1 without a pipeline axis."""
        return self.ranks_along(self.pipeline_axes)

    @cached_property
    def data_parallel_size(self) -> int:
        """Into how many parts the global batch is split."""
        return math.prod(self.shape[index] for index in self.data_axes)

    def data_rank(self, rank: int) -> int:
        """Return which part of the global batch `rank` gets.

        It is its position along the data axes, row by row.
        """
        return self._position(rank, self.data_axes)

    def pipeline_rank(self, rank: int) -> int:
        """Return the position of `rank` along the pipeline axis; 0 without one."""
        return self._position(rank, self.pipeline_axes)

    def pipeline_of(self, rank: int) -> list[int]:
        """Return the ranks of the pipeline that `rank` is in, in order of their positions."""
        return next(ranks for ranks in self.groups_along(self.pipeline_axes) if rank in ranks)

    def _position(self, rank: int, axes: Sequence[int]) -> int:
        # The position of `rank` along `axes`, the last one fastest
        position = 0
        # as digits of a number: the last axis counts single ranks
        for axis in axes:
            position = position * self.shape[axis] + rank // self.stride([axis]) % self.shape[axis]
        return position

    def groups_along(self, axes: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each group along `axes` (indices), in order.

        Without axes every rank is a group of its own.
        """
        # the axes of the group go last: each row of the reshaped array is then one group
        ranks = np.arange(self.size).reshape(self.shape)
        others = [axis for axis in range(len(self.axes)) if axis not in axes]
        rows: list[list[int]] = (
            ranks.transpose(*others, *axes).reshape(-1, self.ranks_along(axes)).tolist()
        )
        return rows

    def stride(self, axes: Iterable[int]) -> int:
        """Return the distance between neighbours of a group along `axes` (indices).

        It is the number of ranks of all axes after the last of them.
        """
        return math.prod(self.shape[max(axes, default=len(self.shape)) + 1 :])

    def ranks_along(self, axes: Iterable[int]) -> int:
        """Return the number of ranks of a group along `axes` (indices)."""
        return math.prod(self.shape[index] for index in axes)


def data_mesh(size: int, *, scope: str = "intra") -> Mesh:
    """Return the mesh of plain data parallelism: one axis over all ranks."""
    return Mesh((Axis("data", size, scope),))


def hybrid_mesh(
    replicate: int, shard: int, *, scopes: tuple[str, str] = ("inter", "intra")
) -> Mesh:
    """Return the mesh of hybrid sharding.

    Copies of the model lie along the first axis, pieces of a copy along the second.
    """
    return Mesh(
        (Axis("data_replicate", replicate, scopes[0]), Axis("data_shard", shard, scopes[1]))
    )
