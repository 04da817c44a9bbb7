"""The strategy ``"topt"``: `ddp` with shared updates, or the plan that was asked for.

A fit that asks for a plan, in the order of Lightning's hooks:

    setup              what was asked is equal on all ranks (`plan_request`)
    configure_ddp      the plan is decided, of a traced step (`planning`), and applied to the
                       module (`plan_run`, `execution.engine`)
    setup_optimizers   the engine follows the optimizers, made of what the plan left of parameters
    training_step, backward, optimizer_step
                       run as the plan says (`plan_run.StepRunner`)
    teardown           the module is unsharded

One that asks for none is Lightning's ``ddp``, with updates that ranks may share (`shared_updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt import plugins
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.costs.accuracy import LEVEL
from lightning_topt.costs.cluster import Cluster
from lightning_topt.execution.memory import MemoryMeter
from lightning_topt.graph.errors import explain_compiled, explain_shards
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.data_parallel_hooks import DataParallelHooks, known_options
from lightning_topt.plugins.microbatches import MicrobatchLoss, check_microbatch_loss
from lightning_topt.plugins.plan_checkpoints import PlanCheckpoints
from lightning_topt.plugins.plan_options import PipelinePlan
from lightning_topt.plugins.plan_request import Allow, check_values, needs_plan, read_request
from lightning_topt.plugins.plan_run import PlanRun, run_options
from lightning_topt.plugins.shared_updates import Hint, SharedUpdates
from lightning_topt.techniques.ddp_wrapper import wrap_in_ddp
from lightning_topt.techniques.technique import FirstValues

if TYPE_CHECKING:
    from lightning_topt.communication.local_sgd import OuterSteps
    from lightning_topt.plugins.compiled_steps import CompiledSteps
    from lightning_topt.plugins.elastic import ElasticRun
    from lightning_topt.plugins.searched_plan import Planning


_WAY_OUT = "AutoParallelStrategy(memory_limit=...) searches a plan that needs less memory."


class AutoParallelStrategy(DataParallelHooks):
    """Distributed data parallelism, or the plan that is asked for: ``Trainer(strategy="topt")``.

    Where nothing is asked, a fit is that of Lightning's ``ddp``. What may change is who computes
    the update: ranks share it where a clock says that this pays (`SharedUpdates`). `hint` then says
    where the time of a step goes, and which word would treat that.

    Where anything is asked, the step is traced when the fit is set up, in a copy of rank 0's
    process. Plans are searched, and one is applied before `configure_optimizers`, as Lightning's
    ``ModelParallelStrategy`` does. Optimizers are made of the parameters in shards; what these show
    to your code is in docs/concepts/sharding_and_your_code.md. With stages and tensor axes a rank
    also runs batches of others. All plans give the loss curve of ``ddp`` (in float32 up to the
    order of additions), unless you allow others.

    Args:
        memory_limit: most bytes a rank may use for the model's training state and activations, as a
            number or text such as ``"2GiB"``. A search compares it with the predicted peaks, plus
            `memory_margin` of them; nothing stops a step that takes more. Refused beside a plan
            that is not searched: a complete one, or a name other than ``"pipeline"``. None: the
            memory of the device.
        objective: ``"time"`` (fastest step within the limit), ``"memory"`` (least memory) or
            ``"time_to_loss"`` (least time to the loss of dense training, by the measured steps that
            compressed and stale plans need; docs/how_to/slow_network.md). None: time, where
            something is searched. Beside a plan that is not searched ``"memory"`` gives freed
            memory back to the system, and chooses nothing, as a warning says.
        plan: ``"search"`` searches all plans that keep the loss curve (``strategy="topt_full"``).
            Else run this plan instead of searching: a `ParallelPlan`, a plan file, a mapping, or a
            name: ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"hybrid_zero2"``,
            ``"hybrid"``, ``"tensor"``, ``"tensor_sequence"``, ``"context"``, ``"tensor_2d"``,
            ``"tensor_3d"``, ``"pipeline"``, each also with ``"+recompute"``, those of data axes
            with ``"+compile"`` (without a trial; what the compiler refuses runs as written). A
            mapping such as ``{"mesh": {"data": 2, "tensor": 4}}`` searches on that mesh; beside one
            with an axis ``"pipeline"`` it may give ``"stages"``, ``"schedule"`` and
            ``"num_microbatches"``. Ranks along a tensor axis get the same samples, unless the plan
            has microbatches, and so do those along a pipeline.
        cluster: a `Cluster`, its YAML file, or a mapping; None measures the one it runs on (about
            two seconds, the first time).
        memory_margin: share by which a prediction must stay below the limit, for what the cost
            model does not see. None: as much as keeps the limit at `confidence`: what the file of
            the cluster says (`accuracy`), else 5 %.
        confidence: share of the runs that intervals of predictions are for, and that keep a limit
            of memory where `memory_margin` is None.
        equal_within: share within which predicted times count as equally fast; 0 chooses the
            fastest. None: what the ratio of two predictions may be off by (docs/concepts/
            plan_and_frontier.md).
        allow: what a plan, searched or given, may change beyond speed and memory. A name, a list of
            names, or a mapping from names to options, of which True is that of a name alone:

            - ``"compression"``: gradients may be exchanged compressed, another training whose time
              per step is predicted, not its time to a given loss. True: bf16, top-k (1 %) and top-k
              in 2 bits are searched, those that hold for the optimizer
              (docs/concepts/compression_quality.md). Or a method such as ``TopK(density=0.001)``, a
              name, ``{"method": "topk", "density": 0.001}``, or a list of these: those.
            - ``"local_steps"``: ranks may train alone and meet once in many steps. They are
              searched with the objective ``"time_to_loss"``. True: those whose steps were measured.
              Or methods, as above (``LocalSteps``, ``SparseLoCo``): those.
            - ``"staleness"``: a plan with stages, searched on a mesh or given, may be a pipeline
              that never flushes: passes compute with weights that miss some updates. True, or the
              rule that predicts them, such as ``"spectrain"``.
            - ``"compile"``: blocks run compiled code once a trial beside the fit, and then its own
              steps, have shown that this is faster. Sums have another order (1e-5 of the losses).

            ``[]``: nothing. None: nothing; with the objective ``"time_to_loss"`` all compression
            and local steps that were measured with as many ranks and this optimizer.
        checkpoint: ``"full"`` saves the plain file of ``ddp``, for which rank 0 collects the whole
            state; ``"sharded"`` a folder, to which every rank writes what it keeps. Both are
            loaded, under any plan and number of ranks.
        first_values: a safetensors file, or a folder of such files: weights for a model that
            `configure_model` makes on the meta device. Names are those of the module, or of the
            submodule that has most of them; ``{"net": folder}`` says which one. Each rank reads
            what it keeps. What no file has is filled as without them
            (docs/how_to/larger_than_memory.md).
        microbatch_loss: how the losses of a pipeline's microbatches make that of the batch:
            ``"mean"`` over samples, ``"sum"``, ``"tokens"`` (a mean over targets that are not
            -100), or a function of a batch that returns what its mean is over. It is tested with
            the first batch (docs/concepts/pipelines.md).
        uneven: ``"stop"``: all ranks end an epoch with the first whose training data are over;
            None: ranks wait for one another, as under ``ddp`` (docs/robustness.md).
        elastic: whether a fit goes on when a rank is lost, under torchrun, from the memory of the
            others: experimental, on CPUs with gloo (docs/how_to/elastic.md).
        ddp_options: arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`.
            Options of the latter keep the search to plans that it runs (whole gradients), but for
            ``find_unused_parameters=True``: under shards, too, ranks may then use different modules
            (docs/how_to/modules_on_some_ranks.md). Under a
            `memory_limit`, or with the objective ``"memory"``, a plan may make gradients views of
            its buckets; ``gradient_as_bucket_view=False`` forbids that.

    A model whose parameters, gradients, buckets of DDP and two moments exceed what a rank may use
    is planned as if that were the limit, which a message says. After an exception a module that ran
    sharded keeps its parameters in shards; load a checkpoint into a new one. One that began on the
    meta device keeps them always (docs/how_to/larger_than_memory.md). Manual optimization
    runs under data axes (docs/how_to/manual_optimization.md). Attributes, once a plan is decided:
    `parallel_plan`, `planned_by` (``"search"``, ``"given"``, ``"clock"``, or why it is ``ddp``),
    `planning_seconds`, and on rank 0 `planning` (the frontier) when there was a search.
    Raises ValueError for wrong options. Rank 0 raises `NoPlanFitsError` when no plan meets the
    limit, and `CaptureError` when the module cannot be captured; the others raise
    `RemotePlanningError` with its message. Where neither `memory_limit`, ``objective="memory"`` nor
    `plan` was given, what cannot be captured goes on under DDP, with a warning.
    """

    def __init__(
        self,
        *,
        memory_limit: int | float | str | None = None,
        objective: str | None = None,
        plan: ParallelPlan | PipelinePlan | Mapping[str, Any] | str | Path | None = None,
        cluster: Cluster | Mapping[str, Any] | str | Path | None = None,
        memory_margin: float | None = None,
        confidence: float = LEVEL,
        equal_within: float | None = None,
        allow: Allow = None,
        checkpoint: str = "full",
        first_values: FirstValues = None,
        microbatch_loss: MicrobatchLoss = "mean",
        uneven: str | None = "stop",
        elastic: bool = False,
        **ddp_options: Any,
    ) -> None:
        super().__init__(
            known_options(ddp_options, strategy=type(self).__name__),
            # ranks that are lost and come again count their batches themselves
            uneven=None if elastic else uneven,
            gathers=self._gathers_in_evaluation,
        )
        self.request = read_request(
            memory_limit=memory_limit,
            objective=objective,
            plan=plan,
            cluster=cluster,
            memory_margin=memory_margin,
            confidence=confidence,
            equal_within=equal_within,
            allow=allow,
            first_values=first_values,
            ddp_kwargs=self._ddp_kwargs,
            has_hook=self._ddp_comm_hook is not None,
        )
        self._run = PlanRun(self.request, self, self._guard)
        self._checkpoints = PlanCheckpoints(checkpoint, self._run, self._guard)
        self._updates: SharedUpdates | None = None  # of a fit that asks for no plan
        self._compiled: CompiledSteps | None = None  # of one that allows it
        self._is_asked = self._evaluates = False
        self._elastic: ElasticRun | None = None
        if elastic:
            plugins.check_elastic(
                checkpoint=checkpoint != "full",
                staleness=bool(self.request.allowed.staleness),
                start_method=self._start_method != "popen",
            )
            self._elastic = plugins.ElasticRun(
                self, self.rank_watch, self._training_data, self._run
            )
            self._runs = self._elastic.run
        self.microbatch_loss = check_microbatch_loss(microbatch_loss)
        self._accumulates = self._failed = False

    # ---- what was decided ------------------------------------------------------------------------

    @property
    def parallel_plan(self) -> ParallelPlan | None:
        """The plan of the last fit, None until it is decided."""
        return self._run.plan

    @property
    def planning(self) -> Planning | None:
        """What was searched, on rank 0."""
        return self._run.planning

    @property
    def planned_by(self) -> str | None:
        """What the plan comes from: ``"search"``, ``"given"``, ``"clock"``, or why it is ddp."""
        return self._run.planned_by

    @property
    def hint(self) -> Hint | None:
        """Where the time of this rank's steps goes, and what treats it; of a fit without a plan."""
        return None if self._updates is None else self._updates.hint

    @property
    def planning_seconds(self) -> float | None:
        """Seconds until the plan of the last fit was decided; a clock's include its steps."""
        return self._run.seconds

    @property
    def decided(self) -> Mapping[str, Any]:
        """What was decided, for the process that has started the ranks by fork or spawn.

        Plain values: all but what was searched.
        """
        run, plan = self._run, self.parallel_plan
        plain = None if plan is None else plan.to_dict()
        return {"plan": plain, "planned_by": run.planned_by, "seconds": run.seconds}

    @decided.setter
    def decided(self, values: Mapping[str, Any]) -> None:
        run, plan = self._run, values["plan"]
        run.plan = None if plan is None else ParallelPlan.from_dict(plan)
        run.planned_by, run.seconds = values["planned_by"], values["seconds"]

    @property
    def is_elastic(self) -> bool:
        """Whether a fit goes on when a rank is lost."""
        return self._elastic is not None

    @property
    def memory_meter(self) -> MemoryMeter | None:
        """Measures the plan's steps, where a `StepMonitor` asks for that."""
        return self._run.memory_meter

    @property
    def checkpoint_form(self) -> str:
        """Which checkpoints are written: ``"full"`` or ``"sharded"``."""
        return self._checkpoints.form

    @property
    def exchange(self) -> CompressedExchange | OuterSteps | None:
        """The exchange of the plan's gradients or replicas, None where that has none."""
        return self._guard.exchange

    # ---- life cycle ------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._is_asked = self._evaluates = False  # evaluations are those of ddp, but in shards
        if trainer.state.fn == TrainerFn.FITTING:
            # A new fit: nothing of the last one is left.
            self._failed, self._updates = False, None
            self.request.check_local_steps()
            self._run.begin_fit()
        self._guard.open(None)
        super().setup(trainer)
        if self._evaluates:
            from lightning_topt.plugins.planning import plan_of_evaluation  # noqa: PLC0415  (heavy)

            self._run.evaluate(trainer, partial(plan_of_evaluation, self.request, trainer))

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # what is on the meta device takes no values; asked before setup, and after it
        module, engine = self.lightning_module, self._run.engine_of_module
        return module is not None and (engine.began_on_meta if engine else is_on_meta(module))

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        # Asking is consent; and what cannot fit under DDP, in the dtypes of the fit, needs a plan.
        is_fit = module.trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            ranks = self.world_size // self.num_nodes
            self._is_asked = needs_plan(self.request, module, self.root_device, ranks=ranks)
        elif not self._failed and self._start_method == "popen":
            self._evaluates = self._run.evaluates_shards(module)
        if self._evaluates:
            self.model = nn.Module()  # of which Lightning has nothing to send: `setup` goes on
            return
        # Ranks by fork or spawn would send shards back, which their parent cannot load.
        is_planned = self._is_asked and self._start_method == "popen"
        is_given = is_fit and self.request.first_values is not None
        check_values(module, is_planned=is_planned, is_given=is_given)
        # Under a plan each tensor gets there once it is in shards.
        if not self._is_asked:
            super().model_to_device()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None and self.lightning_module is not None
        if self._is_asked:
            start, trainer = perf_counter(), self.lightning_module.trainer
            # what traces and searches is imported where a plan is made
            from lightning_topt.plugins.planning import decide_plan, example_batch  # noqa: PLC0415
            from lightning_topt.techniques.first_values import draw_first_values, drawn_from  # noqa: PLC0415

            self.optimizers = []  # those of an earlier fit are not of the step that is traced
            # Planning begins the loaders, which draw after a whole model has drawn its values.
            request = self.request
            draws_before = request.needs_batch and request.first_values is None
            state = draw_first_values(self.lightning_module) if draws_before else None
            made = decide_plan(request, trainer)
            seconds = perf_counter() - start
            self._run.know(made.plan, made.planned_by, seconds, planning=made.planning)
            with drawn_from(state):
                self._run.apply(trainer, partial(example_batch, trainer))
            return
        self.model = wrap_in_ddp(self.model, run_options(self), device=self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._is_asked:
            self._run.attach(self.optimizers)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._elastic is not None:
            self._elastic.begin_batch()
        super().on_train_batch_start(batch, batch_idx)
        if self._updates is not None:
            self._updates.begin_batch(batch)
        if self._compiled is not None:
            self._compiled.begin_batch(batch)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if isinstance(exception, torch.OutOfMemoryError) and not self._is_asked:
            exception.args = (f"{exception}\n{_WAY_OUT}",)
        explain_shards(exception)
        explain_compiled(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._compiled is not None:
            self._compiled.end()
            self._compiled = None
        if self._elastic is not None:
            self._elastic.end_training()
        if self._updates is not None:
            self._updates.end(failed=self._failed)
        self._run.end(failed=self._failed)
        super().teardown()

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._run.runner.training_step(
            super().training_step, args, kwargs, exchanges=not self._accumulates
        )
        return output

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        clock = None if self._updates is None else self._updates.clock
        with nullcontext() if clock is None else clock.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _gathers_in_evaluation(self) -> bool:
        return self._run.runner.gathers_in_evaluation

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        self._accumulates = True
        try:
            with self._run.runner.block_backward_sync(super().block_backward_sync()):
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
        if self._elastic is not None:
            closure = self._elastic.watched(closure)
        clock = None if self._updates is None else self._updates.clock
        with nullcontext(closure) if clock is None else clock.update(closure) as closure:
            plain_step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
            step = partial(self._guard.step, plain_step, self.precision_plugin)
            result = self._run.runner.update(step, optimizer, closure)
        if self._elastic is not None:
            self._elastic.end_update()
        return result

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._run.runner.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._run.runner.end_evaluation()
        super().on_validation_end()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.runner.evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.runner.evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.runner.evaluate("predict_step", super().predict_step, args, kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        self._run.runner.begin_training(self.lightning_module.trainer)
        if not self._is_asked:
            self._updates = SharedUpdates(
                self, self._run, waited=lambda: self._training_data.waited_seconds
            )
            self._updates.begin(self.lightning_module.trainer)
        if self.request.allowed.compile:
            # what compiles is imported where it may be needed
            from lightning_topt.plugins.compiled_steps import CompiledSteps  # noqa: PLC0415

            plan = self._run.plan
            self._compiled = CompiledSteps(self, plan, room=self.request.room_beside(plan))
        if self._elastic is not None:
            self._elastic.begin_training()

    # ---- data ranks ------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._run.sampler_mesh()
        if mesh is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank(self.global_rank)}

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        self._run.meet()
        return super().reduce(tensor, self._run.data.group if group is None else group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # All ranks of the run decide, not those of the data axes.
        votes = super().reduce(
            torch.tensor(int(decision), device=self.root_device), reduce_op="sum"
        )
        return int(votes) == self.world_size if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._run.meet()
        if self._run.data.replaces(group):
            return self._run.data.all_gather(
                self._run.runner.unsharded(tensor), sync_grads=sync_grads
            )
        own = super().all_gather
        if self._is_asked and self._run.engine is None:  # a step that is traced sends nothing
            from lightning_topt.techniques.tensor_parallel.user_code import among_all_ranks  # noqa: PLC0415

            with among_all_ranks():
                return own(tensor, group, sync_grads)
        return own(tensor, group, sync_grads)

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        read = super().lightning_module_state_dict
        if self._elastic is not None and self._elastic.is_alone:
            return read()
        return self._checkpoints.module_state(self.lightning_module, without_plan=read)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load = super().load_model_state_dict
        self._checkpoints.load_module_state(checkpoint, without_plan=load, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        read = super().optimizer_state
        if self._elastic is not None and self._elastic.is_alone:
            return read(optimizer)
        return self._checkpoints.optimizer_state(optimizer, without_plan=read)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load = super().load_optimizer_state_dict
        self._checkpoints.load_optimizer_states(checkpoint, self, without_plan=load)

    @override
    def add_state(self, checkpoint: dict[str, Any]) -> None:
        if self._checkpoints.are_full:
            super().add_state(checkpoint)

    @override
    def write_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, as_file: Any
    ) -> None:
        self._checkpoints.save(checkpoint, path, storage_options, self, as_file=as_file)

    @override
    def read_checkpoint(self, path: Any, load: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint = None if self._elastic is None else self._elastic.load(path)
        if checkpoint is None:
            checkpoint = self._checkpoints.load(path, load, weights_only)
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, super().remove_checkpoint, self)

    @override
    def on_train_end(self) -> None:
        self._run.runner.drain()
        super().on_train_end()
        if self._updates is not None:
            self._updates.end(failed=False)
