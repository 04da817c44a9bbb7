"""The place of this rank on the tensor axes of a mesh, and the process groups along them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_topt.communication.topology import own_group
from lightning_topt.graph.collective_ops import show_collective
from lightning_topt.graph.mesh_axes import Mesh


@dataclass(frozen=True)
class CollectiveCall:
    """One call of `op` along an axis (index), on a tensor of `size` bytes: what one rank gives or,
    for a gather, gets.
    """

    op: str
    axis: int
    size: int


@dataclass(frozen=True)
class TensorAxes:
    """The tensor axes of a mesh, outermost first, as one rank sees them: `sizes`, its
    `coordinates`, the `groups` it is in.

    Without groups (None) collectives only have shapes: a rank that is looked at, not run. `calls`,
    where it is a list, gets every collective call of a step, forward and backward.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    calls: list[CollectiveCall] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.sizes)

    def note(self, op: str, axis: int, whole: torch.Tensor) -> None:
        """Remember a call on `whole`, the larger one of what is given and what is got; without a
        group a capture may see it.
        """
        if self.groups[axis] is None:
            show_collective(whole, op=op, axis=axis)
        if self.calls is not None:
            self.calls.append(CollectiveCall(op, axis, whole.numel() * whole.element_size()))

    @classmethod
    def of_mesh(cls, mesh: Mesh, *, rank: int) -> TensorAxes:
        """Return the axes as `rank` sees them, without groups."""
        axes = mesh.tensor_axes
        coordinates = tuple(rank // mesh.stride([axis]) % mesh.shape[axis] for axis in axes)
        return cls(
            tuple(mesh.names[axis] for axis in axes),
            tuple(mesh.shape[axis] for axis in axes),
            coordinates,
            (None,) * len(axes),
        )

    @classmethod
    def with_groups(cls, mesh: Mesh) -> TensorAxes:
        """Return the axes as this rank sees them. A collective call: groups are made in the same
        order on all ranks.
        """
        alone = cls.of_mesh(mesh, rank=dist.get_rank())
        groups = tuple(own_group(mesh.groups_along([axis])) for axis in mesh.tensor_axes)
        return cls(alone.names, alone.sizes, alone.coordinates, groups)
