"""The strategies that run a plan: ``"topt"``, which searches one, and ``"topt_pipeline"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan, rule_from_value
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.clipping import clip_sharded
from lightning_topt.plugins.data_ranks import DataRanks
from lightning_topt.plugins.ddp_options import known_options
from lightning_topt.plugins.exchange_guard import scaler_of
from lightning_topt.plugins.monitors import StepMonitor, add_monitor
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
from lightning_topt.plugins.traced_planning import UNTIL_WATCHED, decide_plan
from lightning_topt.plugins.watched_planning import ObservedPlanning, refine_observed
from lightning_topt.plugins.watched_steps import WATCHED_STEPS, ObservedFit, WatchingRedirection
from lightning_topt.prediction import Prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.ddp_wrapper import bytes_of_buckets, register_hook, wrap_in_ddp
from lightning_topt.techniques.run_options import RunOptions


class AutoParallelStrategy(DataRanks):
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
        self.checkpoint_form = checkpoint
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
        self._unclip: Callable[[], None] | None = None

    # ---- life cycle ------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            self._set_up_evaluation(trainer)
            return
        # A new fit: nothing of the last one is left.
        check_agreement(self.request, self.lightning_module)
        self._engine, self._fitted, self._resumed, self.parallel_plan, self.memory_meter = (
            None,
            None,
            None,
            None,
            None,
        )
        self.planning_seconds = None
        self._guard.open(None)
        # Whole gradients and optimizer state may be too much for what has to be sharded.
        self._holds_back = self.request.may_shard_for_memory(
            self.lightning_module, self.root_device
        )
        if self._holds_back and self.request.must_shard_first(
            self.lightning_module, self.root_device
        ):
            # Not even the parameters fit: shard them before they get to the device.
            self._plan_before_setup(trainer)
        else:
            # As ddp, so that loaders and hooks come in its order.
            super().setup(trainer)
            if self.request.observes(self.lightning_module) and not self._holds_back:
                self._observe(steps=self.watch_steps)
                return
            # Else a plan comes now, where it needs no batch, or with the first batch.
            self._waits_for_batch = True
            refines = self.request.refines(self.lightning_module, self.root_device)
            if (refines and not self._holds_back) or not self.request.needs_batch(
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
        self._attach_optimizers()
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
        engine, plan = self._engine, self.parallel_plan
        assert plan is not None
        # From DDP.
        if engine is None or not self._running:
            self._start_plan(trainer, batch)
        # From the same plan with one block: only recomputation is new.
        elif plan.keeps_gradients_whole and self.request.plan is not None:
            engine.recompute(plan)
        else:
            # From another engine: unshard, and begin anew.
            self._unclip_gradients()
            engine.release()
            for optimizer in self.optimizers:
                engine.return_optimizer_state(optimizer)
            self.model, self._engine, self._running = self.lightning_module, None, False
            self._start_plan(trainer, batch)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fit = self._watched_fit
        with nullcontext() if fit is None else fit.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        # Watching ends where the closure does, with forward and backward in it.
        fit = self._watched_fit
        with nullcontext() if fit is None else fit.update(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

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
        self._engine = Engine(plan, module, device=self.root_device, options=self._run_options())
        self.model = self._engine.apply(wrapped=wrapped, example=self._example_of(batch))
        # The plan's own exchange of gradients, if it has one.
        self._guard.open(self._engine.exchange)
        if self.exchange is not None:
            add_monitor(trainer)
        # Clipping has to see the gradients of all ranks.
        if self._holds_parts:
            self._unclip = clip_sharded(self.precision_plugin, self._continuous or self._engine)
        # Engine and module are there: begin the way of running steps that the plan needs.
        module.to(self.root_device)
        self._running = True
        self._begin_plan()
        self._group_metrics(module)

    def _start_plan(self, trainer: pl.Trainer, batch: Any) -> None:
        """Apply the plan to a module and to optimizers that are set up."""
        self._waits_for_batch = False
        self._apply_plan(trainer, batch)
        self._attach_optimizers()
        self._load_resumed()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if self._holds_back:
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
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # The fit was shorter than what is watched.
        if self._watched_fit is not None and self.parallel_plan is None and not self._failed:
            self.parallel_plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(self.world_size))
            self.planned_by = "ddp: the fit was over before a plan was made"
        self._stop_watching()
        self._waits_for_batch, holds_parts = False, self._holds_parts
        self._ungroup_metrics()
        self._end_plan(failed=self._failed)
        self._unclip_gradients()
        if self._failed and holds_parts:
            # The other ranks may be anywhere: collecting the parameters could wait for them. They
            # stay in shards.
            self._running = False
        self._release_engine(failed=self._failed)
        super().teardown()

    def _unclip_gradients(self) -> None:
        if self._unclip is not None:
            self._unclip()
            self._unclip = None

    # ---- registration ----------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(
            "topt", cls, registry=strategy_registry, description="Searches and runs a parallel plan"
        )


class PipelineStrategy(AutoParallelStrategy):
    """A pipeline for any LightningModule, as it is.

    ``Trainer(strategy=PipelineStrategy(stages=4, microbatches=8))``

    At the first training batch the step is captured, and its blocks are cut into the stages whose
    step is fastest. From then on a rank holds the parameters of its stages alone. It runs the
    module's own `training_step` on each microbatch, in which only its own blocks compute. Losses
    and gradients are those of the batch in one process. They are means of those of microbatches,
    weighted by what their means are over; or sums, where the loss is one. Which it is, is tested at
    the first batch. Ranks of one pipeline get the same batches. What the last stage returns and
    logs is returned and logged on every rank.

    Args:
        stages: number of stages; None: as many as fit on all ranks. With fewer, ranks that are left
            form a data axis.
        schedule: the order of passes: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"looped_bfs"``,
            ``"zero_bubble"``, ``"interleaved_zero_bubble"``, ``"zbv"`` (see `schedules`). Under
            ``"continuous"``, and ``"continuous_overlapped"`` for slow links, stages never wait for
            an update, and compute with weights that miss some: another training.
        microbatches: parts that a rank's batch is split into; a batch of fewer samples has as many
            as samples. None: four per rank of the pipeline, fewer where the batch does not divide.
        prediction: with these two, the rule of the weights that passes compute with: a name such as
            ``"spectrain"``, a mapping ``{"rule": name, option: value}`` or a `Prediction`; None:
            the optimizer's (docs/weight_prediction.md).
        stages_per_rank: None: the fewest that the schedule takes, 1 or 2.
        recompute: whether blocks run forward again in the backward pass, instead of keeping
            activations.
        cluster: as in `AutoParallelStrategy`: the machines that stages are balanced for.
        checkpoint: as there.
        ddp_options: arguments of Lightning's `DDPStrategy`, such as ``timeout`` and
            ``process_group_backend``.

    For other cuts, ZeRO-1 and recomputation of single blocks give `AutoParallelStrategy` a plan
    with stages. Raises ValueError for sizes that the schedule does not take and for a loss that
    depends on the batch as a whole, PlanError for fewer blocks than stages, and for modules whose
    step the ranks cannot run together, saying why.
    """

    def __init__(
        self,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        *,
        prediction: Prediction | Mapping[str, Any] | str | None = None,
        stages_per_rank: int | None = None,
        recompute: bool = False,
        cluster: Cluster | Mapping[str, Any] | str | Path | None = None,
        checkpoint: str = "full",
        **ddp_options: Any,
    ) -> None:
        for name in (
            "plan",
            "memory_limit",
            "objective",
            "memory_margin",
            "allow_compression",
            "allow_staleness",
        ):
            if name in ddp_options:
                raise TypeError(
                    f"PipelineStrategy searches no plan, so it does not take {name!r}; "
                    "AutoParallelStrategy does"
                )
        given = PipelinePlan(
            stages,
            schedule,
            microbatches,
            stages_per_rank,
            recompute,
            prediction=rule_from_value(prediction),
        )
        stale = schedule in CONTINUOUS_SCHEDULES
        super().__init__(
            plan=given, allow_staleness=stale, cluster=cluster, checkpoint=checkpoint, **ddp_options
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(
            "topt_pipeline", cls, registry=strategy_registry, description="Pipelines", unused=False
        )
