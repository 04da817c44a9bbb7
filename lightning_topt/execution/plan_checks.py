"""Checks of a plan before it runs: does it belong to this module, these ranks, these nodes?

`checked_parameters` and `check_world_size` raise. Where the nodes of a run are not those that the
plan was made for, the plan runs as well, only at another speed: `layout_difference`.
"""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn

from lightning_topt.communication.topology import Topology
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.techniques.registry import (
    check_blocks,
    check_runs,
    check_tied,
    parameters_by_block,
)


def checked_parameters(plan: ParallelPlan, module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each block of `plan`, by all their names in `module`.

    Raises PlanError where the plan does not belong to the module, or nothing runs it.
    """
    configs = plan.configs
    try:
        check_runs(plan.mesh, configs, plan.gradient_exchange)
        check_blocks(configs, module, made_for=plan.model)
        parameters = parameters_by_block(module, configs)
        check_tied(parameters, configs)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return parameters


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless the plan is for `world_size` ranks."""
    if plan.mesh.size != world_size:
        raise PlanError(
            f"the plan is for {plan.mesh.size} ranks, this run has {world_size}; start "
            f"{plan.mesh.size} ranks (devices x num_nodes) or make a plan for {world_size}"
        )


def layout_difference(mesh: Mesh, *, ranks_per_node: int) -> str | None:
    """Return how a run's nodes differ from those that `mesh` was made for: a sentence, or None.

    With a single axis there is nothing to choose between, and its scope is not compared.
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


def warn_where_nodes_differ(plan: ParallelPlan, topology: Topology | None) -> None:
    """Warn on rank 0 where the nodes of this run are not those of the plan.

    `topology` None: from the environment.
    """
    if dist.get_rank() != 0 or len(plan.mesh.axes) == 1:
        return
    nodes = topology or Topology.from_environment(rank=0, world_size=dist.get_world_size())
    if difference := layout_difference(plan.mesh, ranks_per_node=nodes.ranks_per_node):
        warnings.warn(f"topt: {difference}", stacklevel=3)
