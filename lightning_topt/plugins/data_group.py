"""Which ranks share samples under a plan: who counts in what is averaged, gathered and sampled.

Ranks along tensor axes, and those that run the stages of one pipeline, get the same samples and
count once. Where the plan says so, each of them brings its own samples, as under ddp; then all
ranks count.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchmetrics import Metric

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_options import GivenPlan, MeshPlan, PipelinePlan


def shared_mesh(
    plan: ParallelPlan | GivenPlan | None, *, world_size: int, num_nodes: int
) -> Mesh | None:
    """Return the mesh whose data ranks have samples of their own; None where every rank has.

    Known as soon as the plan is given, before there is an engine.
    """
    if isinstance(plan, MeshPlan | PipelinePlan):
        mesh = plan.mesh(world_size, num_nodes=num_nodes)
    elif isinstance(plan, ParallelPlan) and not plan.brings_batches:
        mesh = plan.mesh
    else:
        return None
    return mesh if mesh.tensor_axes or mesh.pipeline_axes else None


class DataGroup:
    """The ranks of the present plan among which samples are split.

    `group` is their process group, None where these are all ranks, or no plan runs.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._metrics: tuple[Metric, ...] = ()

    def begin(self, group: dist.ProcessGroup | None, module: nn.Module) -> None:
        """Take the `group` of a plan; metrics of `module` count each sample once."""
        self.group = group
        # Ranks that share samples would count them several times.
        if group is not None:
            metrics = (metric for metric in module.modules() if isinstance(metric, Metric))
            self._metrics = tuple(metric for metric in metrics if metric.process_group is None)
            for metric in self._metrics:
                metric.process_group = group

    def end(self) -> None:
        """Let metrics, and all else, count over all ranks again."""
        for metric in self._metrics:
            metric.process_group = None
        self._metrics, self.group = (), None

    def replaces(self, group: Any) -> bool:
        """Return whether the data ranks are meant by `group`.

        Modules of Lightning give the group of all ranks for None.
        """
        return self.group is not None and (group is None or group is dist.group.WORLD)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor:
        """Return the tensors of all data ranks, stacked: (ranks, *shape)."""
        with nullcontext() if sync_grads else torch.no_grad():
            gathered: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
                tensor.contiguous(), self.group
            )
            return gathered


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks of a group, stacked, with gradients.

    torch's own knows backward among all ranks only, and on some backends.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # (ranks, *shape)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Each rank gets the sum of all gradients of its own part.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed[dist.get_rank(ctx.group)], None
