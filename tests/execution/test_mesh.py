"""Meshes against the nodes of a run, without ranks."""

from __future__ import annotations

import pytest

from lightning_topt.execution.plan_checks import layout_difference
from lightning_topt.graph.mesh_axes import Mesh, data_mesh, hybrid_mesh


@pytest.mark.parametrize(
    ("mesh", "ranks_per_node", "found"),
    [
        (hybrid_mesh(2, 4), 4, None),
        (hybrid_mesh(2, 4), 8, "lies inside"),
        (hybrid_mesh(2, 4), 2, "lies between"),
        (hybrid_mesh(1, 4), 4, None),
        (data_mesh(8), 2, None),
    ],
)
def test_nodes_other_than_the_plan_was_made_for(
    mesh: Mesh, ranks_per_node: int, found: str | None
) -> None:
    difference = layout_difference(mesh, ranks_per_node=ranks_per_node)
    assert difference is None if found is None else found in (difference or "")
