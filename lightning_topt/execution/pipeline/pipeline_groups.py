"""Process groups of a pipeline: its ranks, the data ranks of a stage, and the ranks that share a
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_topt.communication.rank_watch import time_limit
from lightning_topt.communication.topology import own_group
from lightning_topt.graph.mesh_axes import Mesh


@dataclass(frozen=True)
class PipelineGroups:
    """This rank's place in the `mesh`: `rank` along the pipeline, `pipeline` its ranks, `row` their
    group.

    `data` are the ranks that run the same stages on other parts of the batch; None where there is
    one part. `data_rank` is this rank's part. `tensor` are the ranks that hold slices of the same
    stages; None without tensor axes.
    """

    mesh: Mesh
    rank: int
    pipeline: tuple[int, ...]
    row: dist.ProcessGroup
    data: dist.ProcessGroup | None
    data_rank: int
    tensor: dist.ProcessGroup | None

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> PipelineGroups:
        """Return those of this rank. A collective call of all ranks."""
        rank, parts = dist.get_rank(), mesh.groups_along(mesh.data_axes)
        row = own_group(mesh.groups_along(mesh.pipeline_axes))
        data = own_group(parts) if mesh.data_parallel_size > 1 else None
        pipeline = tuple(mesh.pipeline_of(rank))
        tensor = own_group(mesh.groups_along(mesh.tensor_axes)) if mesh.tensor_axes else None
        return cls(
            mesh, mesh.pipeline_rank(rank), pipeline, row, data, mesh.data_rank(rank), tensor
        )

    @property
    def saves(self) -> bool:
        """Whether this rank's pipeline is that of rank 0, which writes checkpoints."""
        return 0 in self.pipeline

    def sharing(self, holders: Iterable[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return for each set of ranks of a pipeline that this rank is in the group of these ranks
        of all data ranks.

        A collective call of all ranks, with equal `holders`.
        """
        mesh, found = self.mesh, {}
        for places in sorted({tuple(sorted(places)) for places in holders}):
            for ranks in mesh.groups_along([*mesh.pipeline_axes, *mesh.data_axes]):
                members = [rank for rank in ranks if mesh.pipeline_rank(rank) in places]
                group = dist.new_group(members, timeout=time_limit())
                if dist.get_rank() in members:
                    found[places] = group
        return found
