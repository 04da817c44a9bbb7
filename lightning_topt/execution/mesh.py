"""The device mesh and the process groups of a plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError


def build_mesh(plan: ParallelPlan, device: torch.device) -> DeviceMesh:
    """The plan's mesh over all ranks.

    Raises PlanError when the plan was made for another number of ranks.
    """
    check_world_size(plan, dist.get_world_size())
    return init_device_mesh(device.type, plan.mesh.shape, mesh_dim_names=plan.mesh.names)


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless the plan is for `world_size` ranks."""
    if plan.mesh.size != world_size:
        raise PlanError(
            f"the plan is for {plan.mesh.size} ranks, this run has {world_size}; start "
            f"{plan.mesh.size} ranks (devices x num_nodes) or make a plan for {world_size}"
        )
