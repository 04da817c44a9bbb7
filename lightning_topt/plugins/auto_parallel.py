"""The strategy ``"topt"``, which searches a plan for a fit and runs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.clipping import clip_sharded
from lightning_topt.plugins.continuous_steps import ContinuousRunner
from lightning_topt.plugins.data_group import DataGroup, shared_mesh
from lightning_topt.plugins.ddp_options import known_options, name_own_strategy
from lightning_topt.plugins.exchange_guard import ExchangeGuard, scaler_of
from lightning_topt.plugins.lost_ranks import LostRankWatch
from lightning_topt.plugins.monitors import StepMonitor, add_monitor
from lightning_topt.plugins.pipeline_steps import OwnBatchPipeline, PipelineRunner, StageSteps
from lightning_topt.plugins.plan_checkpoints import (
    PlanCheckpoints,
    load_any_form,
    release_engine,
    with_full_module,
)
from lightning_topt.plugins.plan_options import (
    PipelinePlan,
    check_planner_options,
    read_cluster,
    read_memory_limit,
    read_plan_option,
)
from lightning_topt.plugins.plan_request import (
    Allow,
    AllowedExchanges,
    AllowedStaleness,
    AllowStaleness,
    PlanRequest,
)
from lightning_topt.plugins.planning import Decision, Planning, check_agreement, example_batches
from lightning_topt.plugins.register import register_names
from lightning_topt.plugins.sequential_batches import JointBatches, SequentialBatches
from lightning_topt.plugins.step_runner import PlainRunner, StepRunner
from lightning_topt.plugins.traced_planning import UNTIL_WATCHED, decide_plan
from lightning_topt.plugins.watched_planning import ObservedPlanning, refine_observed
from lightning_topt.plugins.watched_steps import WATCHED_STEPS, ObservedFit, WatchingRedirection
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.ddp_wrapper import bytes_of_buckets, register_hook, wrap_in_ddp
from lightning_topt.techniques.run_options import RunOptions
from lightning_topt.techniques.tensor_parallel.user_code import among_all_ranks


class AutoParallelStrategy(DDPStrategy):
    """Distributed data parallelism that plans before it runs: ``Trainer(strategy="topt")``.

    A fit begins as it does under Lightning's ``ddp``, hook by hook, and its first steps are real
    steps under DDP. They are watched: operators, lifetimes of tensors, kernel times, the optimizer.
    Then every combination of ZeRO level and activation checkpointing per block is searched. The
    plan that fits the limits best takes over between two steps, with parameters and optimizer
    states where they are. On CPUs tensor axes and stages are searched too, where they may pay and
    the watched steps changed nothing but tensors. User code runs exactly as often as under ``ddp``;
    with stages and tensor axes a rank also runs batches of others. All plans give the loss curve of
    ``ddp`` (in float32 up to the order of additions), unless you allow others. Where nothing can be
    gained DDP goes on.

    Args:
        memory_limit: most bytes a rank may use for the model's training state and activations, as a
            number or text such as ``"2GiB"``. None: the memory of the device.
        objective: ``"time"`` (fastest step within the limit) or ``"memory"`` (least memory). None:
            time, where it can be planned.
        plan: run this plan instead of searching: a `ParallelPlan`, a plan file, a mapping, or the
            name of a uniform plan: ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"tensor"``,
            ``"pipeline"``, each also with ``"+recompute"``. A mapping such as ``{"mesh": {"data":
            2, "tensor": 4}}`` searches on that mesh; beside one with an axis ``"pipeline"`` it may
            give ``"stages"``, ``"schedule"`` and ``"num_microbatches"``. Ranks along a tensor axis
            get the same samples, unless the plan has microbatches, and so do those along a
            pipeline.
        cluster: a `Cluster`, its YAML file, or a mapping; None measures the one it runs on (about
            two seconds, the first time).
        memory_margin: share by which a prediction must stay below the limit, for what the cost
            model does not see.
        allow_compression: whether a plan, searched or given, may exchange gradients compressed:
            another training, whose time per step is predicted, not its time to a given loss. True:
            searches top-k (1 %) and bf16 too. A method such as ``TopK(density=0.001)``, a name, a
            mapping such as ``{"method": "topk", "density": 0.001}``, or a list of these: searches
            those.
        allow_staleness: whether a plan with stages, searched on a mesh or given, may be a pipeline
            that never flushes: passes compute with weights that miss some updates. True, or the
            rule that predicts them, such as ``"spectrain"``.
        watch_steps: how many steps are watched before a plan takes over. The first
            shows what happens, the second how long kernels take, the third how long a step takes.
        checkpoint: ``"full"`` saves the plain file of ``ddp``, for which rank 0 collects the whole
            state; ``"sharded"`` a folder, to which every rank writes what it keeps. Both are
            loaded, under any plan and number of ranks.
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`.
            Options of the latter keep the search to plans that it runs (whole gradients). Under a
            `memory_limit`, or with the objective ``"memory"``, a plan may make gradients views of
            its buckets; ``gradient_as_bucket_view=False`` forbids that.

    On a device whose memory could not hold the whole module, planning comes before the module gets
    there: data loaders are then built, and a batch is read, when the fit is set up. After an
    exception a module that ran sharded keeps its parameters in shards; load a checkpoint into a new
    one. Manual optimization runs as ``ddp`` does (one plan, no search); it refuses `memory_limit`
    and other plans. Attributes after the first batch: `parallel_plan`, `planned_by` (``"search"``,
    ``"given"``, or why it is ``ddp``), `planning_seconds`, and on rank 0 `planning` (the frontier)
    when there was a search. Raises ValueError for wrong options, `NoPlanFitsError` when no plan
    meets the limit, `CaptureError` when `memory_limit`, `objective` or `plan` was given and the
    module cannot be captured.
    """

    def __init__(
        self,
        *,
        memory_limit: int | float | str | None = None,
        objective: str | None = None,
        plan: ParallelPlan | PipelinePlan | Mapping[str, Any] | str | Path | None = None,
        cluster: Cluster | Mapping[str, Any] | str | Path | None = None,
        memory_margin: float = 0.05,
        allow_compression: Allow = False,
        allow_staleness: AllowStaleness = False,
        watch_steps: int = WATCHED_STEPS,
        checkpoint: str = "full",
        **ddp_options: Any,
    ) -> None:
        super().__init__(**known_options(ddp_options, strategy=type(self).__name__))
        check_choice(checkpoint, name="checkpoint", allowed=("full", "sharded"))
        check_whole(watch_steps, name="watch_steps (one step is recorded)")
        self.watch_steps = watch_steps
        check_planner_options(
            memory_margin=memory_margin, objective="time" if objective is None else objective
        )
        self.request = PlanRequest(
            memory_limit=read_memory_limit(memory_limit),
            objective=objective or "time",
            objective_given=objective is not None,
            plan=read_plan_option(plan),
            cluster=read_cluster(cluster),
            memory_margin=memory_margin,
            only_replicated=bool(self._ddp_kwargs) or self._ddp_comm_hook is not None,
            allowed=AllowedExchanges.read(allow_compression),
            stale=AllowedStaleness.read(allow_staleness),
            own_hook=self._ddp_comm_hook is not None
            or self._ddp_kwargs.get("mixed_precision") is not None,
            gradients_are_views=self._ddp_kwargs.get("gradient_as_bucket_view"),
        )
        # What the user asked for stays as it is; the rest is of the present fit.
        self._given_plan = self.request.plan
        self.planning: Planning | None = None
        self.planned_by: str | None = None
        self.planning_seconds: float | None = None
        self.memory_meter: MemoryMeter | None = None
        self._waits_for_batch = False
        self._watched_fit: ObservedFit | None = None
        self._observed_planning: ObservedPlanning | None = None
        self._failed = False
        self.parallel_plan: ParallelPlan | None = None
        # What it has: who watches the ranks, the exchange, checkpoints, and how steps run.
        self.rank_watch = LostRankWatch()
        self._guard = ExchangeGuard(self.rank_watch)
        self._checkpoints = PlanCheckpoints(checkpoint, self._guard)
        self._data = DataGroup()
        self._runner: StepRunner = PlainRunner()
        self._unclip: Callable[[], None] | None = None
        self._accumulates = False
        self._example: Example | None = None  # of the last fit under a plan with stages

    @property
    def checkpoint_form(self) -> str:
        """Which checkpoints are written: ``"full"`` or ``"sharded"``."""
        return self._checkpoints.form

    @property
    def exchange(self) -> CompressedExchange | None:
        """The exchange of the plan's gradients, None where that has none."""
        return self._guard.exchange

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the last call; None without an exchange."""
        return self._guard.statistics()

    # ---- life cycle ------------------------------------------------------------------------------

    @property
    @override
    def launcher(self) -> Any:
        return self.rank_watch.launcher(self, super().launcher)

    @override
    def setup_distributed(self) -> None:
        self.rank_watch.meet(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.rank_watch.begin()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            self._set_up_evaluation(trainer)
            return
        # A new fit: nothing of the last one is left.
        check_agreement(self.request, self.lightning_module)
        self._checkpoints.begin_fit()
        self.parallel_plan = self.memory_meter = self.planning_seconds = None
        self._guard.open(None)
        # Whole gradients and optimizer state may be too much for what has to be sharded.
        self._checkpoints.holds_back = self.request.may_shard_for_memory(
            self.lightning_module, self.root_device
        )
        if self._checkpoints.holds_back and self.request.must_shard_first(
            self.lightning_module, self.root_device
        ):
            # Not even the parameters fit: shard them before they get to the device.
            self._plan_before_setup(trainer)
        else:
            # As ddp, so that loaders and hooks come in its order.
            super().setup(trainer)
            if self.request.observes(self.lightning_module) and not self._checkpoints.holds_back:
                self._observe(steps=self.watch_steps)
                return
            # Else a plan comes now, where it needs no batch, or with the first batch.
            self._waits_for_batch = True
            refines = self.request.refines(self.lightning_module, self.root_device)
            if (refines and not self._checkpoints.holds_back) or not self.request.needs_batch(
                self.lightning_module
            ):
                self._plan(trainer, partial(decide_plan, self.request, trainer, None))
            if self.parallel_plan is not None and self.parallel_plan.keeps_gradients_whole:
                self._start_plan(trainer, None)
                self._observe_more()

    def _set_up_evaluation(self, trainer: pl.Trainer) -> None:
        """Set up as ddp does, or in the shards of the last fit.

        The device is known to hold these.
        """
        self._guard.open(None)
        plan = self.parallel_plan
        if plan is None or plan.keeps_gradients_whole or plan.brings_batches:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.lightning_module
        self.precision_plugin.convert_module(self.model)
        self._apply_plan(trainer)
        self.setup_precision_plugin()

    def _plan_before_setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.lightning_module
        # All that DDPStrategy.setup does, but for wrapping the module.
        if self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self.optimizers = []  # those of an earlier fit
        batch = example_batches(trainer)[0]
        self._plan(trainer, partial(decide_plan, self.request, trainer, batch))
        # Optimizers are made of the sharded parameters.
        self._apply_plan(trainer, batch)
        self.setup_optimizers(trainer)
        self._checkpoints.attach_optimizers(self._runner, self.optimizers)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._observe_more()

    def _observe_more(self) -> None:
        """Watch steps where the plan that has begun is not the final one."""
        assert self.parallel_plan is not None
        if self.planned_by == UNTIL_WATCHED:
            self._observe(steps=self.watch_steps)
        elif self.request.is_by_block and len(self.parallel_plan.blocks) == 1:
            self._observe(steps=1)

    def _observe(self, *, steps: int) -> None:
        """Watch the next `steps` steps."""
        assert self.lightning_module is not None
        if self.request.plan is None and self.request.saves_memory:
            return_freed_memory(self.root_device)  # as the plan will run
        optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]
        self._watched_fit = ObservedFit(
            self.lightning_module,
            optimizers if self.request.plan is None else (),
            device=self.root_device,
            steps=steps,
            records=self.request.needs_graph(self.root_device),
            is_rank_0=self.global_rank == 0,
        )
        self._forward_redirection = WatchingRedirection(self._watched_fit.forward)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        trainer, fit = self.lightning_module.trainer, self._watched_fit
        # The first batch: planning, where it has waited for one.
        if fit is None and self._waits_for_batch:
            if self.parallel_plan is None:
                self._plan(trainer, partial(decide_plan, self.request, trainer, batch))
            self._start_plan(trainer, batch)
            self._observe_more()
            fit = self._watched_fit
        # All watched steps are done: plan, and switch before this step if there is a plan.
        if fit is not None and fit.begin_batch(
            batch_idx, accumulate=trainer.accumulate_grad_batches
        ):
            if self._observed_planning is None:
                self._observed_planning = ObservedPlanning(self.request, trainer, fit)
            decide: Callable[[], Decision | None] = partial(self._observed_planning.poll, batch)
            if self.request.plan is not None:
                decide = partial(refine_observed, self.request, trainer, fit)
            if self._plan(trainer, decide):
                self._stop_watching()
                self._switch_plan(trainer, batch)
        super().on_train_batch_start(batch, batch_idx)

    def _switch_plan(self, trainer: pl.Trainer, batch: Any) -> None:
        """Let the plan take over from what ran the steps before, between two steps.

        A collective call.
        """
        engine, plan = self._runner.engine, self.parallel_plan
        assert plan is not None
        # From DDP.
        if engine is None:
            self._start_plan(trainer, batch)
        # From the same plan with one block: only recomputation is new.
        elif plan.keeps_gradients_whole and self.request.plan is not None:
            engine.recompute(plan)
        else:
            # From another engine: unshard, and begin anew.
            self._unclip_gradients()
            self._data.end()
            engine.release()
            for optimizer in self.optimizers:
                engine.return_optimizer_state(optimizer)
            self.model, self._runner = self.lightning_module, PlainRunner()
            self._start_plan(trainer, batch)

    def _stop_watching(self) -> None:
        fit, self._watched_fit = self._watched_fit, None
        planning, self._observed_planning = self._observed_planning, None
        if planning is not None:
            planning.close()
        if fit is not None:
            fit.close()
            self._forward_redirection = _DDPForwardRedirection()

    def _plan(self, trainer: pl.Trainer, decide: Callable[[], Decision | None]) -> bool:
        """Take over what `decide` returns; return whether there is a plan."""
        start = perf_counter()
        # Planning draws random numbers, and training goes on as if it had not.
        with isolate_rng():
            decision = decide()
        if decision is None:
            self.planning_seconds = (self.planning_seconds or 0.0) + perf_counter() - start
            return False
        self.parallel_plan, self.planning, self.planned_by = decision
        # Give back what planning has used, before memory is measured.
        if self.request.saves_memory or self.parallel_plan.saves_memory:
            release_free_memory()
            return_freed_memory(self.root_device)
        self.planning_seconds = (self.planning_seconds or 0.0) + perf_counter() - start
        # Measured memory is what the plan adds to the present state.
        if any(isinstance(callback, StepMonitor) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            warm_up(self.root_device)
            self.memory_meter = MemoryMeter(self.root_device)
            ddp, buckets = self.model, 0
            # On CPUs buckets take no memory before the first backward pass writes to them.
            has_buckets = self._watched_fit is not None or self.root_device.type != "cpu"
            if isinstance(ddp, DistributedDataParallel) and has_buckets:
                buckets = bytes_of_buckets(ddp)
            self.memory_meter.mark_base(self.lightning_module, self.optimizers, other_bytes=buckets)
        return True

    def _apply_plan(self, trainer: pl.Trainer, batch: Any = None) -> None:
        plan, module = self.parallel_plan, self.lightning_module
        assert plan is not None and module is not None
        # DDP is made anew where gradients become views; its buckets are dropped.
        has_views = getattr(self.model, "gradient_as_bucket_view", True)
        if not plan.keeps_gradients_whole or (plan.gradient_views and not has_views):
            self.model = module
            release_free_memory()  # DDP's buckets
        wrapped = self.model if isinstance(self.model, DistributedDataParallel) else None
        engine = Engine(plan, module, device=self.root_device, options=self._run_options())
        self._checkpoints.begin_plan(engine)
        runner = choose_runner(
            engine, module, precision=self.precision_plugin, device=self.root_device
        )
        # Without a batch, in an evaluation, the step of the last fit is taken.
        if batch is not None:
            self._example = runner.example(batch)
        self.model = engine.apply(wrapped=wrapped, example=self._example)
        # The plan's own exchange of gradients, if it has one.
        self._guard.open(engine.exchange)
        if self.exchange is not None:
            add_monitor(trainer)
        # Clipping has to see the gradients of all ranks.
        if engine.has_shards:
            self._unclip = clip_sharded(self.precision_plugin, runner.clips)
        # Engine and module are there: steps run as the plan says.
        module.to(self.root_device)
        self._runner = runner
        runner.begin(trainer)
        self._data.begin(None if plan.brings_batches else engine.data_group, module)

    def _start_plan(self, trainer: pl.Trainer, batch: Any) -> None:
        """Apply the plan to a module and to optimizers that are set up."""
        self._waits_for_batch = False
        self._apply_plan(trainer, batch)
        self._checkpoints.attach_optimizers(self._runner, self.optimizers)
        self._checkpoints.load_resumed(self.optimizers, self.root_device)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if self._checkpoints.holds_back:
            # all that DDP would do by now, but for the memory of gradients
            _sync_module_states(self.model)
            return
        options = self._run_options()
        self.model = ddp = wrap_in_ddp(self.model, device=self.root_device, arguments=options.ddp)
        # On every device: torch runs hooks on gloo too, which Lightning drops silently.
        register_hook(ddp, options.hook, options.hook_state)

    def _run_options(self) -> RunOptions:
        """Return what Lightning's DDPStrategy would make of its options."""
        # As DDPStrategy registers it.
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        return RunOptions(
            ddp=self._ddp_kwargs,
            hook=hook,
            hook_state=self._ddp_comm_state,
            topology=Topology(self.num_nodes, self.world_size // self.num_nodes, self.global_rank),
            nonfinite="error" if scaler_of(self.precision_plugin) is None else "skip",
        )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        self._guard.give_up(exception)
        self.rank_watch.name(exception)
        super().on_exception(exception)
        name_own_strategy(exception, type(self).__name__)

    @override
    def teardown(self) -> None:
        # The fit was shorter than what is watched.
        if self._watched_fit is not None and self.parallel_plan is None and not self._failed:
            self.parallel_plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(self.world_size))
            self.planned_by = "ddp: the fit was over before a plan was made"
        self._stop_watching()
        self._waits_for_batch = False
        self._end_plan()
        if self._start_method != "popen":  # such ranks end without running what `atexit` holds
            self._guard.close()
        with self.rank_watch.last():
            super().teardown()

    def _end_plan(self) -> None:
        """Give the module back unsharded, to DDP, if a plan runs."""
        runner, engine = self._runner, self._runner.engine
        has_shards = engine is not None and engine.has_shards
        self._data.end()
        runner.close(failed=self._failed)
        self._unclip_gradients()
        self._runner = PlainRunner()
        # After an error the other ranks may be anywhere: collecting the parameters could wait for
        # them. They stay in shards.
        if engine is None or (self._failed and has_shards):
            return
        model, module = self.model, self.lightning_module
        assert module is not None
        self.model = module
        release_engine(
            engine, module, self.optimizers, device=self.root_device, failed=self._failed
        )
        if isinstance(model, DistributedDataParallel):
            self.model = model  # the superclass unwraps it

    def _unclip_gradients(self) -> None:
        if self._unclip is not None:
            self._unclip()
            self._unclip = None

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._runner.training_step(
            self._own_step, args, kwargs, exchanges=not self._accumulates
        )
        return output

    def _own_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._guard.errors():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fit = self._watched_fit
        with nullcontext() if fit is None else fit.backward(closure_loss):
            self._guard.begin_backward(self.precision_plugin)
            with self._guard.errors():
                return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulates = True
        try:
            with self._runner.block_backward_sync(super().block_backward_sync()):
                yield
        finally:
            self._accumulates = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        own_step = super().optimizer_step

        def step() -> Any:
            output = own_step(optimizer, closure, model, **kwargs)
            self._guard.end_step(self.precision_plugin)
            return output

        # Watching ends where the closure does, with forward and backward in it.
        fit = self._watched_fit
        with nullcontext() if fit is None else fit.update(optimizer):
            return self._runner.update(step, optimizer, closure)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._runner.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._runner.end_evaluation()
        super().on_validation_end()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.evaluate("predict_step", super().predict_step, args, kwargs)

    # ---- data ranks ------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # A loader may be made before a fit, when there is a plan but no engine.
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        is_fit = trainer is None or trainer.state.fn == TrainerFn.FITTING
        mesh = None
        # Evaluations before a fit run unsharded, each rank by itself.
        if self._runner.engine is not None or is_fit:
            plan = self.parallel_plan or self._given_plan
            mesh = shared_mesh(plan, world_size=self.world_size, num_nodes=self.num_nodes)
        if mesh is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank(self.global_rank)}

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return super().reduce(tensor, self._data.group if group is None else group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # All ranks of the run decide, not those of the data axes.
        votes = super().reduce(
            torch.tensor(int(decision), device=self.root_device), reduce_op="sum"
        )
        return int(votes) == self.world_size if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._data.replaces(group):
            return self._data.all_gather(self._runner.unsharded(tensor), sync_grads=sync_grads)
        # A step that is traced sends nothing.
        with among_all_ranks() if self._runner.engine is None else nullcontext():
            return super().all_gather(tensor, group, sync_grads)

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._runner.drain()  # for files that user code writes when it likes
        engine = self._runner.engine
        if engine is None:
            return super().lightning_module_state_dict()
        return engine.module_state(full=self._checkpoints.are_full)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._runner.engine is not None:
            self._runner.engine.load_module_state(checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(with_full_module(checkpoint), strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(
            optimizer, self.optimizers, without_plan=super().optimizer_state
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizer_states(
            checkpoint,
            self.optimizers,
            self.root_device,
            without_plan=super().load_optimizer_state_dict,
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked
        # ranks) stay bare.
        is_bare, module = "pytorch-lightning_version" not in checkpoint, self.lightning_module
        if self.parallel_plan is not None and not is_bare:
            checkpoint = self._checkpoints.with_plan(
                checkpoint, self.parallel_plan, self._runner, module
            )
        if self._checkpoints.are_full or is_bare:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        self._checkpoints.save_folder(
            checkpoint,
            filepath,
            module=module,
            checkpoint_io=self.checkpoint_io,
            storage_options=storage_options,
        )

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        own_load = super().load_checkpoint
        return load_any_form(checkpoint_path, lambda path: own_load(path, *args, **kwargs))

    # ---- registration ----------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(
            "topt", cls, registry=strategy_registry, description="Searches and runs a parallel plan"
        )


def choose_runner(
    engine: Engine, module: pl.LightningModule, *, precision: Precision, device: torch.device
) -> StepRunner:
    """Return the way of running steps that the plan of `engine` needs, before it is applied."""
    plan = engine.plan
    if plan.schedule is None:
        if not plan.brings_batches:
            return PlainRunner(engine)
        kind = JointBatches if plan.joint else SequentialBatches
        return kind(engine, module, device=device)
    steps = StageSteps(engine, module, precision=precision, device=device)
    if plan.own_batches:
        return OwnBatchPipeline(steps)
    return (
        ContinuousRunner(steps) if plan.schedule in CONTINUOUS_SCHEDULES else PipelineRunner(steps)
    )
