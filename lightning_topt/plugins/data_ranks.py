"""Ranks along tensor axes are one to the data: they get the same samples, and count once in what is averaged or gathered.

Under a plan with microbatches each of them has its own samples, as under ddp, and they run these in turns.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_topt.communication.topology import own_group
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.engine_checkpoints import EngineCheckpoints
from lightning_topt.plugins.read_options import GivenPlan, MeshPlan
from lightning_topt.plugins.turns import Turns

Output = TypeVar("Output")


class DataRanks(EngineCheckpoints):
    """A strategy whose mesh may have tensor axes: `_known_mesh` as soon as the plan is given, before there is an engine.

    It is None where every rank has its own samples; `_turns` are there while a plan of that kind runs.
    """

    _given_plan: GivenPlan | None = None
    _metrics: tuple[Metric, ...] = ()
    _turns: Turns | None = None
    _accumulates = False

    @property
    def _known_mesh(self) -> Mesh | None:
        plan = self.parallel_plan or self._given_plan
        if isinstance(plan, MeshPlan):
            return plan.mesh(self.world_size, num_nodes=self.num_nodes)
        return plan.mesh if isinstance(plan, ParallelPlan) and plan.num_microbatches == 1 else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._known_mesh
        if mesh is None or not mesh.tensor_axes:
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank(self.global_rank)}

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        runs = self._engine is not None and self._running and self._turns is None
        return self._engine.data_group if runs and self._engine is not None else None

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

    def _take_turns(self) -> None:
        """Begin to run a plan, which the engine has applied; in turns, if it has microbatches. A collective call."""
        plan, module, engine = self.parallel_plan, self.lightning_module, self._engine
        assert plan is not None and module is not None and engine is not None
        self._turns = None
        if plan.num_microbatches > 1:
            group = own_group(plan.mesh.groups_along(plan.mesh.tensor_axes))
            self._turns = Turns(engine, module, group, device=self.root_device)

    def _end_turns(self, *, failed: bool) -> None:
        if self._turns is not None and not failed:
            self._turns.end_evaluation()
        self._turns = None

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulates = True
        try:
            with super().block_backward_sync() if self._engine is None or not self._running else self._engine.no_sync():
                yield
        finally:
            self._accumulates = False

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._turns is not None:
            self._turns.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        if self._turns is not None:
            self._turns.end_evaluation()
        super().on_validation_end()

    @contextmanager
    def _around_step(self) -> Generator[None, None, None]:
        if self._engine is None or not self._running:
            yield
            return
        with self._engine.around_step():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._turns is None:
            return self._one_step(args, kwargs)
        output: STEP_OUTPUT = self._turns.training_step(self._one_step, (args, kwargs), exchanges=not self._accumulates)
        return output

    def _one_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        with self._around_step():
            return self._whole(super().training_step(*args, **kwargs))

    def _whole(self, output: Output) -> Output:
        """Hooks and predictions get whole tensors."""
        if self._engine is None or not self._running:
            return output
        whole: Output = self._engine.whole(output)
        return whole
