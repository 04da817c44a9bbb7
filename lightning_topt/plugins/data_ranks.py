"""Which ranks share samples under a plan, and which way of running steps it needs.

Ranks along tensor axes, and those that run the stages of one pipeline, are one to the data: they
get the same samples, and count once in what is averaged or gathered. Where the plan says so, each
of them brings its own samples, as under ddp:

    _sequential          `sequential_batches`: sequentially, or in joint modules
    _own_batch_pipeline  `OwnBatchPipeline`: as microbatches of a pipeline

One batch for all ranks of a pipeline is run by

    _pipeline            `PipelineSteps`: in microbatches
    _continuous          `ContinuousSteps`, which is `_pipeline` then: stages never wait

At most one of these ways is there; without any, a step is the module's own, around which the engine
works.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_topt.communication.topology import own_group
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.continuous_steps import ContinuousSteps
from lightning_topt.plugins.engine_checkpoints import EngineCheckpoints
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY
from lightning_topt.plugins.pipeline_steps import OwnBatchPipeline, PipelineSteps
from lightning_topt.plugins.plan_options import GivenPlan, MeshPlan, PipelinePlan
from lightning_topt.plugins.sequential_batches import JointBatches, SequentialBatches
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.user_code import among_all_ranks

Output = TypeVar("Output")
PIPELINE_KEY = "pipeline"  # in checkpoints, of what is ours: the state of an asynchronous pipeline


class DataRanks(EngineCheckpoints):
    """A strategy whose mesh may have tensor axes or stages.

    `_known_mesh` is there as soon as the plan is given, before the engine. It is None where every
    rank has its own samples.
    """

    _given_plan: GivenPlan | None = None
    _metrics: tuple[Metric, ...] = ()
    _sequential: SequentialBatches | None = None
    _own_batch_pipeline: OwnBatchPipeline | None = None
    _pipeline: PipelineSteps | None = None
    _continuous: ContinuousSteps | None = None
    _accumulates = False
    _example: Example | None = None  # of the last fit under a plan with stages

    @property
    def _known_mesh(self) -> Mesh | None:
        plan = self.parallel_plan or self._given_plan
        if isinstance(plan, MeshPlan | PipelinePlan):
            return plan.mesh(self.world_size, num_nodes=self.num_nodes)
        return plan.mesh if isinstance(plan, ParallelPlan) and not plan.brings_batches else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._known_mesh
        # A loader may be made before a fit, when there is a plan but no engine.
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if not self._running and trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            mesh = None  # evaluations before a fit run unsharded, each rank by itself
        if mesh is None or not (mesh.tensor_axes or mesh.pipeline_axes):
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank(self.global_rank)}

    @property
    def _holds_parts(self) -> bool:
        """Whether this rank holds a part of the parameters only."""
        return self._pipeline is not None or (self._engine is not None and self._engine.has_shards)

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        runs = self._engine is not None and self._running and self._batch_runner is None
        return self._engine.data_group if runs and self._engine is not None else None

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return super().reduce(tensor, self._data_group if group is None else group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks of the run decide so, or any.

        All ranks count, not those of the data axes.
        """
        # A sum over all ranks, not over a data group.
        votes = super().reduce(
            torch.tensor(int(decision), device=self.root_device), reduce_op="sum"
        )
        return int(votes) == self.world_size if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        # Modules of Lightning give the group of all ranks for None.
        data, everyone = self._data_group, dist.group.WORLD
        if data is not None and (group is None or group is everyone):
            with nullcontext() if sync_grads else torch.no_grad():
                gathered: Tensor = _Gathered.apply(self._unsharded(tensor).contiguous(), data)  # type: ignore[no-untyped-call]
                return gathered
        # A step that is traced sends nothing.
        with nullcontext() if self._running else among_all_ranks():
            return super().all_gather(tensor, group, sync_grads)

    def _group_metrics(self, module: nn.Module) -> None:
        """Let metrics that are synchronized over all ranks count each sample once."""
        # Ranks that share samples would count them several times.
        if (group := self._data_group) is not None:
            metrics = (metric for metric in module.modules() if isinstance(metric, Metric))
            self._metrics = tuple(metric for metric in metrics if metric.process_group is None)
            for metric in self._metrics:
                metric.process_group = group

    def _ungroup_metrics(self) -> None:
        for metric in self._metrics:
            metric.process_group = None
        self._metrics = ()

    # ---- steps -----------------------------------------------------------------------------------

    def _example_of(self, batch: Any) -> Example | None:
        """Return a step for an engine that is to run stages; None for other plans.

        Gets ready for them. A collective call.
        """
        plan, module, engine = self.parallel_plan, self.lightning_module, self._engine
        assert plan is not None and module is not None and engine is not None
        # Of the plan before.
        self._pipeline, self._own_batch_pipeline, self._continuous = None, None, None
        if plan.schedule is None:
            return None
        if plan.own_batches:
            self._own_batch_pipeline = OwnBatchPipeline(
                engine, module, precision=self.precision_plugin, device=self.root_device
            )
            return self._own_batch_pipeline.example(batch)
        make = ContinuousSteps if plan.schedule in CONTINUOUS_SCHEDULES else PipelineSteps
        self._pipeline = make(
            engine, module, precision=self.precision_plugin, device=self.root_device
        )
        self._continuous = self._pipeline if isinstance(self._pipeline, ContinuousSteps) else None
        # Without a batch, in an evaluation, the step of the last fit is taken.
        if batch is not None:
            self._example = self._pipeline.example(batch)
        return self._example

    def _begin_plan(self) -> None:
        """Begin to run a plan that the engine has applied.

        Where ranks bring batches, they are run sequentially or in joint modules. A collective call.
        """
        plan, module, engine = self.parallel_plan, self.lightning_module, self._engine
        assert plan is not None and module is not None and engine is not None
        self._sequential = None
        if self._continuous is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._continuous.begin(module.trainer)
        for steps in (self._own_batch_pipeline, self._pipeline):
            if steps is not None:
                steps.check()
        if plan.brings_batches and plan.schedule is None:
            group = own_group(plan.mesh.groups_along(plan.mesh.tensor_axes))
            kind = JointBatches if plan.joint else SequentialBatches
            self._sequential = kind(engine, module, group, device=self.root_device)

    def _end_plan(self, *, failed: bool) -> None:
        # Other ranks may be anywhere after an error.
        if self._batch_runner is not None and not failed:
            self._batch_runner.end_evaluation()
        if self._continuous is not None:
            self._continuous.end()
        self._sequential = self._own_batch_pipeline = None
        self._pipeline = self._continuous = None

    @property
    def _batch_runner(self) -> SequentialBatches | OwnBatchPipeline | None:
        """What runs the batches of several ranks, which evaluate by themselves."""
        return self._sequential or self._own_batch_pipeline

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulates = True
        try:
            if self._continuous is not None:
                yield
                self._continuous.update(self.optimizers[0])
            elif self._pipeline is not None or self._own_batch_pipeline is not None:
                yield  # stashed gradients are exchanged by then, those of each batch
            elif self._engine is not None and self._running:
                with self._engine.no_sync():
                    yield
            else:
                with super().block_backward_sync():
                    yield
        finally:
            self._accumulates = False

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._batch_runner is not None:
            self._batch_runner.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        if self._batch_runner is not None:
            self._batch_runner.end_evaluation()
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
        if self._continuous is not None:
            output: STEP_OUTPUT = self._continuous.minibatch_step(
                (*args, *kwargs.values()), completes=not self._accumulates
            )
        elif pipeline := self._pipeline or self._own_batch_pipeline:
            output = pipeline.training_step(*args, *kwargs.values())
        elif self._sequential is not None:
            output = self._sequential.training_step(
                self._one_step, (args, kwargs), exchanges=not self._accumulates
            )
        else:
            output = self._one_step(args, kwargs)
        return output

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._continuous is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # Forward and backward of different batches; the update belongs to the latter.
        output = closure()
        self._continuous.update(optimizer)
        return output

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._continuous is not None:
            self._continuous.drain()  # for files that user code writes when it likes
        return super().lightning_module_state_dict()

    @override
    def _own_state(self) -> dict[str, Any]:
        assert self.parallel_plan is not None and self._engine is not None
        plan = {"plan": self.parallel_plan.to_dict()}
        return (
            plan
            if self._continuous is None
            else {**plan, PIPELINE_KEY: self._engine.continuous.state_dict()}
        )

    @override
    def _load_exchange(self, checkpoint: Mapping[str, Any]) -> None:
        super()._load_exchange(checkpoint)
        own = checkpoint.get(CHECKPOINT_KEY, {})
        if self._continuous is None or own.get(PIPELINE_KEY) is None:
            return
        assert self.parallel_plan is not None and self._engine is not None
        plan, before = self.parallel_plan, ParallelPlan.from_dict(own["plan"])
        # The pipeline's own state belongs to its stages and its rule of weights.
        if (len(before.stages), before.prediction) == (len(plan.stages), plan.prediction):
            self._engine.continuous.load_state_dict(own[PIPELINE_KEY])

    def _one_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        with self._around_step():
            return self._unsharded(super().training_step(*args, **kwargs))

    # ---- evaluation ------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("predict_step", super().predict_step, args, kwargs)

    def _evaluated(
        self, name: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._evaluation():
            if self._pipeline is not None:
                return self._pipeline.evaluation_step(name, *args, *kwargs.values())
            return self._unsharded(step(*args, **kwargs))

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        if self._engine is None or self._batch_runner is not None:
            yield
            return
        if not self._holds_parts:
            with self._around_step():
                yield
            return
        # Parameters gathered in inference mode would be inference tensors, which the next training
        # step cannot update.
        with torch.inference_mode(False), torch.no_grad(), self._around_step():
            yield

    def _unsharded(self, output: Output) -> Output:
        """Return `output` unsharded: hooks and predictions get full tensors."""
        if self._engine is None or not self._running:
            return output
        whole: Output = self._engine.whole(output)
        return whole


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
