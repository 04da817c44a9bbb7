"""The Lightning strategy ``"topt"``: capture the module, search the frontier, choose a plan, run it."""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.units import parse_bytes
from lightning_topt.execution.allocator import return_freed_memory, warm_up
from lightning_topt.execution.engine import Engine, ShardedEngine, build_engine
from lightning_topt.execution.memory import MemoryMeter
from lightning_topt.plan.choose import check_objective
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.allowed_exchanges import Allow, AllowedExchanges
from lightning_topt.plugins.ddp_parts import CHECKPOINT_KEY, destroy_process_group, register_names
from lightning_topt.plugins.exchange_monitor import add_monitor
from lightning_topt.plugins.exchange_steps import ExchangeSteps
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.read_options import checked_options, read_cluster, read_plan_option
from lightning_topt.plugins.run_plan import PlanRequest, decide_plan


class AutoParallelStrategy(ExchangeSteps):
    """Distributed data parallelism that plans before it runs: ``Trainer(strategy="topt")``.

    Before the first fit it captures the module's `training_step` on fake tensors, measures this cluster, searches every
    combination of ZeRO stage and activation checkpointing per block, and runs the one that fits the limits best. All of
    them give the loss curve of Lightning's ``ddp`` (in float32 up to the order of additions), unless you allow others.

    Args:
        memory_limit: most bytes a rank may use for the model's training state and activations, as a number or text such
            as ``"2GiB"``. None: the memory of the device.
        objective: ``"time"`` (fastest step within the limit) or ``"memory"`` (least memory).
        plan: run this plan instead of searching: a `ParallelPlan`, a plan file, a mapping, or the name of a uniform plan:
            ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, each also with ``"+recompute"``.
        cluster: a `Cluster`, its YAML file, or a mapping; None measures the one it runs on (about two seconds).
        memory_margin: share by which a prediction must stay below the limit, for what the cost model does not see.
        allow_compression: whether a plan, searched or given, may exchange gradients compressed: another training, whose time
            per step is predicted, not its time to a given loss. True: searches top-k (1 %) and bf16 too. A method, a mapping
            such as ``{"method": "topk", "density": 0.001}`` (see `ExchangeOptions`), or a list of these: searches those.
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`. Options of the latter
            keep the search to plans that it runs (whole gradients). Gradients are views of its buckets unless
            ``gradient_as_bucket_view=False``.

    After an exception a module that ran sharded keeps its parameters in shards; load a checkpoint into a new one.
    Manual optimization runs as ``ddp`` does (one plan, no search); it refuses `memory_limit` and other plans.
    Attributes after setup: `parallel_plan` and `planning_seconds`, and on rank 0 `planning` (the frontier) when there was
    a search.
    Raises ValueError for wrong options, `NoPlanFitsError` when no plan meets the limit, `CaptureError` when the module
    cannot be captured.
    """

    def __init__(
        self,
        *,
        memory_limit: int | float | str | None = None,
        objective: str = "time",
        plan: ParallelPlan | Mapping[str, Any] | str | Path | None = None,
        cluster: Cluster | Mapping[str, Any] | str | Path | None = None,
        memory_margin: float = 0.05,
        allow_compression: Allow = False,
        **ddp_options: Any,
    ) -> None:
        super().__init__(**checked_options(ddp_options))
        check_objective(objective, allowed=("time", "memory"))
        if not 0 <= memory_margin < 1:
            raise ValueError(f"memory_margin is a share between 0 and 1, got {memory_margin}")
        self.request = PlanRequest(
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            objective=objective,
            plan=read_plan_option(plan),
            cluster=read_cluster(cluster),
            memory_margin=memory_margin,
            only_replicated=bool(self._ddp_kwargs) or self._ddp_comm_hook is not None,
            allowed=AllowedExchanges.read(allow_compression),
            own_hook=self._ddp_comm_hook is not None or self._ddp_kwargs.get("mixed_precision") is not None,
        )
        self.parallel_plan: ParallelPlan | None = None
        self.planning: Planning | None = None
        self.planning_seconds: float | None = None
        self.memory_meter: MemoryMeter | None = None
        self._early_warnings: list[warnings.WarningMessage] = []
        self._engine: Engine | None = None
        self._running = False
        self._failed = False

    # ---- life cycle -----------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        atexit.register(destroy_process_group)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.model = self.lightning_module
        self.precision_plugin.convert_module(self.model)
        if fitting:
            # Before layers are synchronized: SyncBatchNorm talks to other ranks, which a capture on one rank cannot.
            self._plan(trainer)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        self._parallelize(fitting)
        if self.exchange is not None:
            add_monitor(trainer)
        if fitting:
            self.setup_optimizers(trainer)
            assert self._engine is not None
            self._engine.attach_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _plan(self, trainer: pl.Trainer) -> None:
        if self.request.memory_limit is not None:
            return_freed_memory(self.root_device)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as self._early_warnings:
            warnings.simplefilter("always")
            self.parallel_plan, self.planning = decide_plan(self.request, trainer)
        self.planning_seconds = time.perf_counter() - start
        warm_up(self.root_device)
        self.memory_meter = MemoryMeter(self.root_device)
        self.memory_meter.mark_base(self.lightning_module)

    def _parallelize(self, fitting: bool) -> None:
        plan, module = self.parallel_plan, self.lightning_module
        assert module is not None
        self._open_exchange(None)
        if plan is None or not (fitting or plan.is_sharded):
            # Evaluation of whole parameters needs no exchange: as under ddp, every rank starts from rank 0's.
            self.model_to_device()
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), 0)
            return
        topology = Topology(self.num_nodes, self.world_size // self.num_nodes, self.global_rank)
        nonfinite = "error" if self._scaler is None else "skip"
        device, wrap = self.root_device, self._wrap_ddp
        self._engine = build_engine(plan, module, device=device, wrap=wrap, topology=topology, nonfinite=nonfinite)
        self.model = self._engine.parallelize()
        self._open_exchange(self._engine.exchange)
        module.to(self.root_device)
        self._running = True

    def _wrap_ddp(self, module: nn.Module) -> nn.Module:
        self.model_to_device()
        self.configure_ddp()
        assert self.model is not None
        return self.model

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        options, self._ddp_kwargs = self._ddp_kwargs, {"gradient_as_bucket_view": True, **self._ddp_kwargs}
        try:
            return super()._setup_model(model)
        finally:
            self._ddp_kwargs = options

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only and drops them silently elsewhere; torch runs them on gloo too.
        if self._ddp_comm_hook is not None and self.root_device.type != "cuda":
            assert isinstance(self.model, DistributedDataParallel)
            hook = (
                self._ddp_comm_hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(self._ddp_comm_hook)
            )
            self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)
            return
        super()._register_ddp_hooks()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._failed and isinstance(self._engine, ShardedEngine):
            # The other ranks may be anywhere: collecting the parameters could wait for them. They stay in shards.
            self._running = False
        if self._engine is not None and self._running:
            if self.root_device.type != "cpu":
                self._engine.optimizer_state_to_host()
            self._running = False
            model, self.model = self.model, self.lightning_module
            self._engine.release()
            if isinstance(model, DistributedDataParallel):
                self.model = model  # the superclass unwraps it
        super().teardown()

    @override
    def on_train_start(self) -> None:
        # Planning loads the training data earlier than the loop would; what it warned of belongs here, after on_fit_start.
        for warning in self._early_warnings:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        self._early_warnings = []
        super().on_train_start()

    # ---- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._running and self._engine is not None:
            self._engine.before_forward()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        if not (self._running and isinstance(self._engine, ShardedEngine)):
            yield
            return
        self._engine.before_forward()
        # Parameters gathered in inference mode would be inference tensors, which the next training step cannot update.
        with torch.inference_mode(False), torch.no_grad():
            yield

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is not None and self._running:
            return self._engine.module_state()
        return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._engine is not None and self._running:
            self._engine.load_module_state(checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._engine is None or hasattr(optimizer, "consolidate_state_dict"):
            return super().optimizer_state(optimizer)
        return self._engine.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._engine.load_optimizer_state(optimizer, state)
        self._load_exchange(checkpoint)
        _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked ranks) stay bare.
        if self.parallel_plan is not None and "pytorch-lightning_version" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = {"plan": self.parallel_plan.to_dict()}
            self._save_exchange(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    # ---- registration ---------------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names("topt", cls, registry=strategy_registry, description="Searches and runs a parallel plan")
