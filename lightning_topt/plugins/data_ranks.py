"""Ranks along tensor axes are one to the data: they get the same samples, and count once in what is averaged or gathered."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.engine_checkpoints import EngineCheckpoints
from lightning_topt.plugins.read_options import GivenPlan, MeshPlan

T = TypeVar("T")


class DataRanks(EngineCheckpoints):
    """A strategy whose mesh may have tensor axes: `_known_mesh` as soon as the plan is given, before there is an engine."""

    _given_plan: GivenPlan | None = None
    _metrics: tuple[Metric, ...] = ()

    @property
    def _known_mesh(self) -> Mesh | None:
        plan = self.parallel_plan or self._given_plan
        if isinstance(plan, MeshPlan):
            return plan.mesh(self.world_size, num_nodes=self.num_nodes)
        return plan.mesh if isinstance(plan, ParallelPlan) else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._known_mesh
        if mesh is None or not mesh.tensor_axes:
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank(self.global_rank)}

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        return self._engine.data_group if self._engine is not None and self._running else None

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return super().reduce(tensor, self._data_group if group is None else group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self._data_group if group is None else group, sync_grads)

    def _group_metrics(self, module: nn.Module) -> None:
        """Let metrics that are synchronized over all ranks count each sample once."""
        if (group := self._data_group) is not None:
            metrics = (metric for metric in module.modules() if isinstance(metric, Metric))
            self._metrics = tuple(metric for metric in metrics if metric.process_group is None)
            for metric in self._metrics:
                metric.process_group = group

    def _ungroup_metrics(self) -> None:
        for metric in self._metrics:
            metric.process_group = None
        self._metrics = ()

    # ---- steps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _around_step(self) -> Generator[None, None, None]:
        if self._engine is None or not self._running:
            yield
            return
        with self._engine.around_step():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._around_step():
            return self._whole(super().training_step(*args, **kwargs))

    def _whole(self, output: T) -> T:
        """Make what a step returns whole."""
        if self._engine is not None and self._running:
            output = self._engine.whole(output)
        return output
