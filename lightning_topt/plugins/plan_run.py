"""The plan of a fit: applied before optimizers are made, how steps run under it, and its end.

    run.begin_fit()
    run.know(plan, ...)              what was decided (`planning`); it stays until the next fit
    run.apply(trainer, read_batch)   the model that the strategy calls
    run.attach(optimizers)           once they are made
    run.runner.training_step(...)    steps, and their update
    run.end(failed=False)            the module is unsharded again

How steps run under the plan is its `StepRunner`'s (`run.runner`), to which the strategy's hooks
delegate. It is chosen once, when the plan is applied (`choose_runner`):

    PlainRunner       a step is the module's own, around which the engine works (data axes)
    GroupRunner       ranks of a tensor group or a pipeline bring a batch each, and run all of them
    PipelineRunner    the ranks of a pipeline run one batch in microbatches
    ContinuousRunner  a pipeline without flush

Who shares samples is its `DataGroup`'s (`run.data`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric
from typing_extensions import override

from lightning_topt import plugins
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.memory import MemoryMeter, warm_up
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.optim.clipping import agree_on_overflow
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.data_parallel_hooks import ExchangeGuard
from lightning_topt.plugins.equal_batches import lent
from lightning_topt.plugins.monitors import StepMonitor, add_monitor
from lightning_topt.plugins.plan_options import MeshPlan, PipelinePlan
from lightning_topt.plugins.plan_request import MIXED, PlanRequest
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.ddp_wrapper import bytes_of_buckets
from lightning_topt.techniques.technique import RunOptions

if TYPE_CHECKING:
    from lightning_topt.execution.engine import Engine
    from lightning_topt.execution.pipeline.pipeline_run import Example
    from lightning_topt.plugins.searched_plan import Planning

Step = Callable[..., Any]
Output = TypeVar("Output")


class PlanRun:
    """Runs the plan of a fit, which `request` asked for, on the module of `strategy`.

    Without a plan that is DDP alone. Methods are collective calls.

    Attributes:
        plan: what was decided, None before that.
        planning: what was searched, on rank 0.
        planned_by: ``"search"``, ``"given"``, ``"clock"``, or why the plan is ``ddp``.
        seconds: until it was decided; by a clock, with the steps that it has timed.
        memory_meter: of the plan's steps, where a `StepMonitor` measures them.
        last_engine: that of the fit's plan, also once it is released: then it still has the states.
    """

    def __init__(self, request: PlanRequest, strategy: DDPStrategy, guard: ExchangeGuard) -> None:
        self.request = request
        self.plan: ParallelPlan | None = None
        self.planning: Planning | None = None
        self.planned_by: str | None = None
        self.seconds: float | None = None
        self.memory_meter: MemoryMeter | None = None
        self.runner: StepRunner = PlainRunner()
        self.data = DataGroup()
        self.last_engine: Engine | None = None
        self._strategy, self._guard = strategy, guard
        self._undo = ExitStack()  # of what this plan replaces in Lightning's objects
        self._averages: ShardedAverages | None = None

    # ---- decisions -------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Forget the plan of the last fit, and close its engine.

        `planning` and `planned_by` are replaced with the next plan.
        """
        self.plan = self.memory_meter = self.seconds = None
        if self.last_engine is not None:
            self.last_engine.close()
        self.last_engine = None

    def know(
        self,
        plan: ParallelPlan,
        planned_by: str,
        seconds: float,
        *,
        planning: Planning | None = None,
    ) -> None:
        """Know the plan of this fit, decided in `seconds`, and what was searched."""
        self.plan, self.planned_by, self.seconds = plan, planned_by, seconds
        self.planning = planning

    # ---- a plan begins and ends ------------------------------------------------------------------

    @property
    def engine(self) -> Engine | None:
        """The engine of the plan that runs."""
        return self.runner.engine

    @property
    def engine_of_module(self) -> Engine | None:
        """The same, or that of a fit before, in whose shards the module has stayed."""
        last, module = self.last_engine, self._strategy.lightning_module
        if last is not None and last.keeps_shards and last.module is module:
            return last
        return self.engine

    def evaluates_shards(self, module: pl.LightningModule) -> bool:
        """Return whether evaluations outside of a fit run in shards: `module` began on meta.

        It has stayed in those of a fit, or has no values yet, where a plan was asked for.
        """
        begins = is_on_meta(module) and not self.request.asks_nothing
        return begins or self.engine_of_module is not None

    def evaluate(self, trainer: pl.Trainer, make_plan: Callable[[], ParallelPlan]) -> None:
        """Let an evaluation outside of a fit run in shards. A collective call.

        `make_plan` is called for a module that is in no shards yet.
        """
        if (engine := self.engine_of_module) is not None:
            self.runner, self._strategy.model = PlainRunner(engine), engine.model
            return
        self.begin_fit()
        self.know(make_plan(), "given", 0.0)
        self.apply(trainer, lambda: None)

    def end(self, *, failed: bool) -> None:
        """Give the strategy its module back, unsharded, if a plan runs."""
        engine, strategy = self.engine, self._strategy
        has_shards = engine is not None and engine.has_shards
        self.data.end()
        self.runner.close(failed=failed)
        self._undo.close()
        self.runner = PlainRunner()
        # After an error the other ranks may be anywhere: collecting the parameters could wait for
        # them. They stay in shards.
        if engine is None or (failed and has_shards):
            return
        if engine.keeps_shards:
            assert strategy.lightning_module is not None
            if strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                rank_zero_info(
                    "topt: the model began on the meta device, so its parameters stay in shards: "
                    'checkpoint="sharded" saves them, read_sharded_checkpoint reads them whole'
                )
            return
        averages, self._averages = self._averages, None
        if averages is not None:
            averages.give_back()
        model, module = strategy.model, strategy.lightning_module
        assert module is not None
        strategy.model = module
        engine.release()
        if isinstance(model, DistributedDataParallel):
            strategy.model = model  # the superclass unwraps it

    def apply(self, trainer: pl.Trainer, read_batch: Callable[[], Any]) -> None:
        """Apply the plan to the module, for which there are no optimizers yet.

        `read_batch` returns an example of the batches.
        """
        # what applies plans is imported by fits that have one
        from lightning_topt.execution.engine import Engine  # noqa: PLC0415

        plan, strategy, module = self.plan, self._strategy, trainer.lightning_module
        assert plan is not None
        is_manual, device = not module.automatic_optimization, strategy.root_device
        options = replace(
            run_options(strategy), is_manual=is_manual, first_values=self.request.first_values
        )
        if is_manual and not plan.keeps_gradients_whole:
            # whether a loss needs what is in no block, which nobody can know beforehand
            options = replace(options, ddp={"find_unused_parameters": True, **options.ddp})
        engine = Engine(plan, module, device=device, options=options)
        self.last_engine = engine
        runner, example = choose_runner(engine, module, strategy), None
        # Stages have to know what they send.
        if plan.schedule is not None:
            example = runner.example(read_batch())
        strategy.model = engine.apply(example=example)
        # The plan's own exchange of gradients, if it has one.
        self._guard.open(engine.exchange)
        if engine.exchange is not None:
            add_monitor(trainer)
        # Clipping has to see the gradients of all ranks.
        if engine.has_shards:
            self._undo.callback(clip_sharded(strategy.precision_plugin, runner))
            log_full_values(trainer, self._undo)
        # Engine and module are there: steps run as the plan says.
        module.to(device)
        self._averages = shard_averages(trainer, engine)
        self.runner = runner
        runner.begin(trainer)
        self.data.begin(None if plan.brings_batches else engine.data_group, module)

    def meet(self) -> None:
        """Get ready for a collective call of Lightning that all ranks make."""
        if self.engine is not None:
            self.engine.meet()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the plan run the steps of `optimizers`, made of the module's present parameters."""
        assert self.engine is not None and self._strategy.lightning_module is not None
        from lightning_topt.plugins.requirements import CONTINUOUS, Fit, why_not  # noqa: PLC0415  (fits with a plan)

        # Schedulers of learning rates are there by now.
        is_continuous = self.engine.plan.schedule in CONTINUOUS_SCHEDULES
        fit = Fit(self._strategy.lightning_module.trainer)
        if is_continuous and (reason := why_not(fit, CONTINUOUS)):
            raise PlanError(f"this plan's stages never wait for an update, but {reason}")
        self.engine.attach_optimizers(optimizers)
        self._measure_memory(fit.trainer)

    def _measure_memory(self, trainer: pl.Trainer) -> None:
        # Let a `StepMonitor` measure from here on: what the plan and optimizers take is there
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, StepMonitor) for callback in callbacks):
            return
        device = self._strategy.root_device
        warm_up(device)
        self.memory_meter = MemoryMeter(device)
        # On CPUs buckets take no memory before the first backward pass writes to them.
        ddp, buckets = trainer.strategy.model, 0
        if isinstance(ddp, DistributedDataParallel) and device.type != "cpu":
            buckets = bytes_of_buckets(ddp)
        self.memory_meter.mark_base(
            trainer.lightning_module, trainer.strategy.optimizers, other_bytes=buckets
        )

    # ---- what others ask -------------------------------------------------------------------------

    def sampler_mesh(self) -> Mesh | None:
        """Return the mesh whose data ranks have samples of their own; None where every rank has.

        A loader may be made before a fit, when a plan was asked for but no engine is there.
        Evaluations before a fit run unsharded, each rank by itself.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        trainer = None if module is None else module.trainer
        if self.engine is None and trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            return None
        plan = self.plan or self.request.plan
        if isinstance(plan, MeshPlan | PipelinePlan):  # which is known before there is an engine
            mesh = plan.mesh(strategy.world_size, num_nodes=strategy.num_nodes)
        elif isinstance(plan, ParallelPlan) and not plan.brings_batches:
            mesh = plan.mesh
        else:
            return None
        return mesh if mesh.tensor_axes or mesh.pipeline_axes else None


def log_full_values(trainer: pl.Trainer, undo: ExitStack) -> None:
    """Let what is logged in shards be full: a progress bar reads it on one rank alone."""
    from lightning_topt.techniques.sharding_checks import whole_of  # noqa: PLC0415  (heavy)

    def log(
        own: Callable[..., None], fx: str, name: str, value: Any, *args: Any, **kw: Any
    ) -> None:
        own(fx, name, whole_of(value) if isinstance(value, DTensor) else value, *args, **kw)

    loop = trainer.fit_loop.epoch_loop
    for each in (loop, loop.val_loop, trainer.validate_loop, trainer.test_loop):
        results: Any = each._results
        undo.enter_context(lent(results, "log", log))


# ---- averages of weights -------------------------------------------------------------------------


def shard_averages(trainer: pl.Trainer, engine: Engine) -> ShardedAverages | None:
    """Shard the weights that averaging callbacks of `trainer` keep, as `engine` does the module's.

    None where there are no shards, or no such callbacks.
    """
    kept: list[nn.Module] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average: nn.Module | None = callback._average_model
            if isinstance(average, AveragedModel):
                average = average.module
            kept += [] if average is None else [average]
    named = engine.module.named_parameters(remove_duplicate=False)
    shards = {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}
    return ShardedAverages(trainer, engine, kept, shards) if kept and shards else None


class ShardedAverages(pl.Callback):
    """Copies of the module that callbacks average into, in shards as the module is.

    Averages are of element by element, so those of shards are the shards of the averages. Padding
    is in no DTensor. State dicts of the copies have full tensors, and take them.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        engine: Engine,
        kept: Sequence[nn.Module],
        shards: Mapping[str, DTensor],
    ) -> None:
        self._trainer, self._engine, self._kept = trainer, engine, kept
        for average in kept:
            _replace_parameters(average, lambda name, own: _placed(own, shards.get(name)))
        self._hooks = [average.register_state_dict_post_hook(_gather) for average in kept]
        for module in (engine.module, *kept):  # callbacks load full states into both
            self._hooks.append(module.register_load_state_dict_pre_hook(_place_loaded))
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def give_back(self) -> None:
        """Give the callbacks full weights. A collective call."""
        for hook in self._hooks:
            hook.remove()
        for average in self._kept:
            _replace_parameters(average, lambda _, own: _full(own))
        self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    # Before callbacks that average: what evaluation has gathered goes, so that they find shards.

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._engine.reshard()

    on_validation_epoch_start = on_validation_epoch_end = on_train_end = on_train_epoch_start


@torch.no_grad()
def _replace_parameters(module: nn.Module, by: Callable[[str, nn.Parameter], Tensor]) -> None:
    # Put what ``by(name, parameter)`` returns in the place of each parameter; ties stay
    known: dict[nn.Parameter, nn.Parameter] = {}
    for name, own in [*module.named_parameters(remove_duplicate=False)]:
        if own not in known:
            known[own] = nn.Parameter(by(name, own), requires_grad=own.requires_grad)
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._parameters[last] = known[own]


def _placed(value: Tensor, like: Tensor | None) -> Tensor:
    from lightning_topt.execution.states import place_like  # noqa: PLC0415  (of a plan)

    placed: Tensor = place_like(value.detach(), like) if isinstance(like, DTensor) else value
    return placed


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def _gather(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    # Put full tensors in the place of shards in the state dict of `module`. A collective call.
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            state[name] = value.full_tensor()


def _place_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # Cut full tensors in `state`, which `module` is about to load, into its shards
    for name, own in module.named_parameters(remove_duplicate=False):
        if isinstance(value := state.get(prefix + name), Tensor):
            state[prefix + name] = _placed(value, own)


# ---- how steps run -------------------------------------------------------------------------------


def choose_runner(engine: Engine, module: pl.LightningModule, strategy: DDPStrategy) -> StepRunner:
    """Return the way of running steps that the plan of `engine` needs, before it is applied."""
    plan, device = engine.plan, strategy.root_device
    if plan.schedule is None:
        if not plan.brings_batches:
            return PlainRunner(engine)
        return plugins.GroupRunner(engine, module, device=device)
    steps = plugins.StageSteps(engine, module, precision=strategy.precision_plugin, device=device)
    if plan.own_batches:
        return plugins.GroupRunner(engine, module, device=device, steps=steps)
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return plugins.ContinuousRunner(steps)
    loss: Any = getattr(strategy, "microbatch_loss", "mean")
    return plugins.PipelineRunner(steps, loss)


class StepRunner(ABC):
    """Runs the steps of a module under one plan, which `engine` has applied.

    Most methods are collective calls. Before a plan, and after it, there is no engine. Most
    runners have no need of what is empty here.
    """

    engine: Engine | None

    # ---- the plan begins and ends ----------------------------------------------------------------

    def example(self, batch: Any) -> Example | None:
        """Return a step on `batch` for an engine that is to run stages, before it is applied.

        None for other plans.
        """
        return None

    def begin(self, trainer: pl.Trainer) -> None:  # noqa: B027
        """Begin to run steps, once the engine has applied the plan. Raises PlanError."""

    def begin_training(self, trainer: pl.Trainer) -> None:  # noqa: B027
        """Begin to train, with signals and loaders of the fit in hand."""

    def close(self, *, failed: bool) -> None:  # noqa: B027
        """End to run steps. Where the run has `failed`, other ranks may be anywhere."""

    # ---- training --------------------------------------------------------------------------------

    @abstractmethod
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of ``training_step``, with a loss for Lightning's backward.

        Args:
            step: runs the module's own one, as Lightning does.
            args: of `step`.
            kwargs: of `step`.
            exchanges: whether the optimizer steps after this batch, so that gradients are
                exchanged.
        """

    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return the context of a batch after which the optimizer does not step.

        Args:
            of_ddp: the context that Lightning's strategy takes.
        """
        assert self.engine is not None
        return self.engine.no_sync()

    def update(
        self, step: Callable[[], Any], optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Any:
        """Run an optimizer step; return what the closure returned.

        Args:
            step: Lightning's own way, which calls `closure`.
            optimizer: that steps.
            closure: forward and backward.
        """
        return step()

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients to a common norm of at most `max_norm`; return the norm before."""
        assert self.engine is not None
        return self.engine.clip_norm(parameters, max_norm)

    def drain(self) -> None:
        """Wait for all that is in flight, before anybody looks at parameters."""
        if self.engine is not None:
            self.engine.synchronize()

    # ---- evaluation ------------------------------------------------------------------------------

    @property
    def gathers_in_evaluation(self) -> bool:
        """Whether an evaluation step is a collective call of all ranks."""
        return False

    @abstractmethod
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of an evaluation step: ``step(*args, **kwargs)``, named `name`."""

    def begin_evaluation(self) -> None:
        """Get ready for validation within a fit."""
        self.drain()

    def end_evaluation(self) -> None:  # noqa: B027
        """Go back to training."""

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints have of this runner, beside the plan."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load what a runner of any plan has saved, beside that plan, as far as it is usable."""

    def unsharded(self, output: Output) -> Output:
        """Return what a step returned, with full tensors, which hooks and predictions get."""
        if self.engine is None:
            return output
        full: Output = self.engine.whole(output)
        return full


class PlainRunner(StepRunner):
    """Steps are the module's own; `engine` works around them, where there is one."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        if self.engine is None:
            return step(*args, **kwargs)
        with self.engine.around_step():
            return self.engine.whole(step(*args, **kwargs))

    @override
    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        return of_ddp if self.engine is None else self.engine.no_sync()

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.engine is None:
            return step(*args, **kwargs)
        with evaluating(self.engine):
            return self.unsharded(step(*args, **kwargs))

    @override
    def end_evaluation(self) -> None:
        # Level 2 keeps what evaluation has gathered; hooks may have changed the shards since, as
        # schedule-free optimizers do.
        if self.engine is not None:
            self.engine.reshard()

    @property
    @override
    def gathers_in_evaluation(self) -> bool:
        return self.engine is not None and self.engine.has_shards


@contextmanager
def evaluating(engine: Engine) -> Generator[None]:
    """Return the context of an evaluation step of a module that `engine` runs."""
    if not engine.has_shards:
        with engine.around_step():
            yield
        return
    # Parameters gathered in inference mode would be inference tensors, which the next training
    # step cannot update.
    with torch.inference_mode(False), torch.no_grad(), engine.around_step():
        yield


# ---- clipping over all ranks ---------------------------------------------------------------------


def clip_sharded(precision: Precision, runner: StepRunner) -> Callable[[], None]:
    """Let `precision` clip, and look for overflows, over all ranks; return what undoes that.

    Lightning clips what the rank holds, in ``clip_grad_by_norm`` and ``clip_grad_by_value``.
    These are replaced, so that norms of DTensors, and of a pipeline's stages, are those of all
    ranks together. A plugin of the user's with clipping of its own keeps it.
    """
    engine = runner.engine
    assert engine is not None

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        runner.clip_norm(parameters_of(optimizer), clip_val)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        engine.clip_value(parameters_of(optimizer), clip_val)

    replaced = {
        name: own
        for name, own in (("clip_grad_by_norm", by_norm), ("clip_grad_by_value", by_value))
        if getattr(type(precision), name) is getattr(Precision, name)  # not the user's own
    }
    vars(precision).update(replaced)
    scaler = getattr(precision, "scaler", None)
    restore_scaler = agree_on_overflow(scaler, engine.device) if scaler is not None else None

    def restore() -> None:
        for name, own in replaced.items():
            if vars(precision).get(name) is own:  # nobody has replaced it since
                del vars(precision)[name]
        if restore_scaler is not None:
            restore_scaler()

    return restore


# ---- what a run brings ---------------------------------------------------------------------------


def run_options(strategy: DDPStrategy) -> RunOptions:
    """Return what Lightning's DDPStrategy would make of its options."""
    # As DDPStrategy registers it, which drops hooks on CPUs.
    hook = strategy._ddp_comm_hook
    if hook is not None and strategy.root_device.type == "cpu":
        hook = None
    if hook is not None and strategy._ddp_comm_wrapper is not None:
        hook = strategy._ddp_comm_wrapper(hook)
    nodes = strategy.num_nodes
    return RunOptions(
        ddp=strategy._ddp_kwargs,
        hook=hook,
        hook_state=strategy._ddp_comm_state,
        topology=Topology(nodes, strategy.world_size // nodes, strategy.global_rank),
        # a scaler skips such a step
        nonfinite="skip" if getattr(strategy.precision_plugin, "scaler", None) else "error",
        watch=strategy.rank_watch.ranks,  # type: ignore[attr-defined]
        gather_dtype=MIXED.get(strategy.precision_plugin.precision),
    )


# ---- ranks that share samples --------------------------------------------------------------------
#
# Ranks along tensor axes, and those that run the stages of one pipeline, get the same samples and
# count once in averages. Where each of them brings its own samples, as under ddp, all ranks count.


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
