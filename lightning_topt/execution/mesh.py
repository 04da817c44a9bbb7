"""Whether a plan's mesh belongs to the ranks and nodes of a run."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from lightning_topt.communication.topology import Topology
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless the plan is for `world_size` ranks."""
    if plan.mesh.size != world_size:
        raise PlanError(
            f"the plan is for {plan.mesh.size} ranks, this run has {world_size}; start "
            f"{plan.mesh.size} ranks (devices x num_nodes) or make a plan for {world_size}"
        )


def layout_difference(mesh: Mesh, *, ranks_per_node: int) -> str | None:
    """Return how the nodes of a run differ from those that `mesh` was made for, as a sentence, or
    None.

    A plan runs correctly on any nodes, only at another speed. With a single axis there is nothing
    to choose between, and its scope is not compared.
    """
    if len(mesh.axes) == 1:
        return None
    for index, axis in enumerate(mesh.axes):
        # the group of rank 0
        neighbours = [rank * mesh.stride([index]) for rank in range(axis.size)]
        crosses = len({rank // ranks_per_node for rank in neighbours}) > 1
        if axis.size > 1 and crosses != (axis.scope == "inter"):
            made, here = (
                ("between nodes", "inside a node")
                if axis.scope == "inter"
                else ("inside a node", "between nodes")
            )
            return (
                f"the plan has its axis {axis.name} {made}, and in this run (nodes of "
                f"{ranks_per_node} ranks) it lies {here}: the plan runs as it is, and another may "
                "be faster here"
            )
    return None


def say_where_nodes_differ(plan: ParallelPlan, topology: Topology | None) -> None:
    """Warn on rank 0 where the nodes of this run are not those of the plan; `topology` None: from
    the environment.
    """
    if dist.get_rank() != 0 or len(plan.mesh.axes) == 1:
        return
    nodes = topology or Topology.from_environment(rank=0, world_size=dist.get_world_size())
    if difference := layout_difference(plan.mesh, ranks_per_node=nodes.ranks_per_node):
        warnings.warn(f"topt: {difference}", stacklevel=3)
