"""The engine runs one plan on one rank: it applies the plan to the module, steps, saves, loads, and
takes the plan back.

A plain object that knows torch, not Lightning; ten lines of plain PyTorch drive it:

    engine = Engine(plan, module, device=device)
    model = engine.apply()                        # call the model through this
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach_optimizers([optimizer])
    for batch in loader:
        engine.run_step(batch.chunk(4), lambda model, microbatch: model(microbatch))
        optimizer.step(); optimizer.zero_grad()
    engine.release()                              # the module is whole again
    engine.close()                                # of a plan with a gradient exchange: once
                                                  # `exchange_state` is saved

How a block is run is the techniques' knowledge: the engine applies them in the order of the
registry and undoes them in the reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.execution.applied_techniques import AppliedTechniques, parallel_model
from lightning_topt.execution.attached_optimizer import AttachedOptimizer
from lightning_topt.execution.gathered_state import load_module_state, module_state
from lightning_topt.execution.mesh import check_world_size, say_where_nodes_differ
from lightning_topt.execution.microbatches import run_in_turn
from lightning_topt.execution.pipeline.continuous_run import ContinuousRun
from lightning_topt.execution.pipeline.pipeline_run import Example, PipelineRun
from lightning_topt.execution.pipeline.stage_compression import compress_gradients
from lightning_topt.execution.pipeline.stage_optimizer import StageOptimizer
from lightning_topt.execution.plan_problems import checked_parameters
from lightning_topt.optim import clipping
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.techniques.recomputation import apply_recomputation, remove_recomputation
from lightning_topt.techniques.registry import TECHNIQUES
from lightning_topt.techniques.technique import Applied, RunOptions

State = dict[str, Any]
LossFunction = Callable[[nn.Module, Any], Tensor]


@final
class Engine:
    """Runs `plan` on `module`. Methods that talk to other ranks are collective calls, and say so.

    Raises PlanError when the plan does not belong to this module or this number of ranks, or
    nothing runs it.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        module: nn.Module,
        *,
        device: torch.device,
        options: RunOptions | None = None,
    ) -> None:
        check_world_size(plan, dist.get_world_size())
        self.plan, self.module, self.device = plan, module, device
        options = options or RunOptions()
        self._options = _with_views(options) if plan.gradient_views else options
        self._model: nn.Module = module
        self._optimizers: dict[Optimizer, AttachedOptimizer | StageOptimizer] = {}
        self._stages: PipelineRun | None = None  # of a plan with stages, once applied
        self._continuous: ContinuousRun | None = None  # where their schedule never flushes
        # that the batch is split among, once applied; None: all ranks
        self.data_group: dist.ProcessGroup | None = None
        self.exchange: CompressedExchange | None = None  # of the plan's gradients, once applied
        self._parameters = checked_parameters(plan, module)
        self._applied = AppliedTechniques(self._parameters)

    @property
    def has_shards(self) -> bool:
        """Whether parameters are in shards, slices or stages now, so that taking the plan back
        needs every rank.
        """
        return self._stages is not None or self._applied.has_shards

    @property
    def foreign_parameters(self) -> frozenset[nn.Parameter]:
        """Parameters of the module that this rank does not keep, since only stages of other ranks
        need them.
        """
        names = frozenset[str]() if self._stages is None else self._stages.foreign.names
        return frozenset(
            parameter for name, parameter in self.module.named_parameters() if name in names
        )

    def apply(
        self, *, wrapped: DistributedDataParallel | None = None, example: Example | None = None
    ) -> nn.Module:
        """Apply the plan to the module in place; returns what forward must be called through. A
        collective call.

        `wrapped` is the module in a DistributedDataParallel that exists: it is used where all
        gradients are whole, and must not be there otherwise. A plan with stages needs an `example`
        of its steps, and runs in `run_step` and `evaluate` only.
        """
        assert wrapped is None or self.plan.keeps_gradients_whole, (
            "DDP would average gradients that are to be sharded"
        )
        parameters: dict[str, dict[str, nn.Parameter]] = {
            block: {**named} for block, named in self._parameters.items()
        }
        if self.plan.schedule is not None:
            self._stages = stages = PipelineRun.start(
                self.plan, self.module, device=self.device, example=example
            )
            self._applied.add(Applied(undo=stages.release, no_sync=stages.no_sync))
            parameters = stages.kept_of(parameters)
        root = self.module if wrapped is None else wrapped
        model = parallel_model(
            self.plan, self.module, parameters, device=self.device, root=root, options=self._options
        )
        for technique in TECHNIQUES:
            if (applied := technique.apply(model)) is not None:
                self._applied.add(applied)
                self.exchange = applied.exchange or self.exchange
        self._model, self.data_group = model.root, model.data_group
        if self._stages is not None:
            self._stages.follow(self._applied)
            if self._stages.lag_per_hop is not None:
                self._continuous = ContinuousRun(self._stages)
                self.exchange = compress_gradients(self._stages, self._options)
        say_where_nodes_differ(self.plan, self._options.topology)
        return self._model

    def recompute(self, plan: ParallelPlan) -> None:
        """Go on by `plan`, which is the present one but for blocks that it recomputes."""
        blocks = [block.block for block in plan.blocks if block.config.recompute]
        self.plan = plan
        apply_recomputation(self.module, blocks)
        self._applied.add(Applied(undo=lambda: remove_recomputation(self.module)))

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make ``step`` of optimizers over the module's parameters, old or new, follow the plan. A
        collective call.
        """
        replaced, split, attach = self._applied.replaced, self._applied.split, self._applied.attach
        for optimizer in optimizers:
            make = (
                AttachedOptimizer
                if self._stages is None
                else partial(StageOptimizer, run=self._stages)
            )
            self._optimizers[optimizer] = make(
                optimizer, replaced=replaced, split=split, attach=attach
            )
        if self._continuous is not None:
            self._continuous.attach(optimizers)

    # ---- steps -----------------------------------------------------------------------------------

    def run_step(
        self,
        microbatches: Sequence[Any],
        loss_fn: LossFunction,
        *,
        weights: Sequence[float] | None = None,
        divisor: Callable[[], float] | None = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches; gradients are those of the mean loss.
        Returns losses (n,).

        `loss_fn` is called with the model and a microbatch. `weights` of the losses, one for each
        microbatch, are those of the mean unless given: the shares of samples where these differ, 1
        each for losses that are sums. Under a plan with stages, gradients are divided by what
        `divisor` returns at the end of the step on the last stage. A collective call.
        """
        factors = [1 / len(microbatches)] * len(microbatches) if weights is None else list(weights)
        if self._stages is not None:
            return self._stages.run_step(microbatches, loss_fn, weights=factors, divisor=divisor)
        assert divisor is None, "microbatches in turn have weights"
        return run_in_turn(
            microbatches,
            partial(loss_fn, self._model),
            factors,
            around=self._applied.around_microbatch,
        )

    @property
    def stages(self) -> PipelineRun:
        """Return what runs the stages of a plan that has some, once applied."""
        assert self._stages is not None, "the plan has no stages, or is not applied"
        return self._stages

    @property
    def continuous(self) -> ContinuousRun:
        """Return what runs minibatches one by one under a schedule that never flushes, once
        applied.
        """
        assert self._continuous is not None, "the plan's schedule flushes, or it is not applied"
        return self._continuous

    def evaluate(self, batch: Any, function: LossFunction) -> Any:
        """Return what ``function(model, batch)`` returns without gradients; a collective call of
        the ranks of a pipeline, each of which gets what the last stage returns. Call `sync_buffers`
        first, if steps of training came before.
        """
        if self._stages is not None:
            return self._stages.evaluate(batch, function)
        with torch.no_grad(), self.around_step():
            return self.whole(function(self._model, batch))

    def sync_buffers(self) -> None:
        """Give all ranks the buffers that stages have changed, as the first data rank has them. A
        collective call.
        """
        if self._stages is not None:
            self._stages.sync_buffers()

    def around_step(self) -> AbstractContextManager[None]:
        """Return a context in which forward and backward run where `run_step` does not call them;
        evaluation too.
        """
        return self._applied.around_step()

    def whole(self, value: Any) -> Any:
        """Return what a step returned, with whole tensors; within `around_step`. A collective call
        where some are split.
        """
        return self._applied.whole(value)

    def take_turns(self, turns: bool) -> None:
        """From now on all ranks of a tensor group run the same batch, or not, under a plan by which
        each runs its own.
        """
        self._applied.take_turns(turns)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients and leaves the exchange to a
        later one, where that helps.

        Gradients that are sharded over all ranks are exchanged all the same: to keep them whole
        until the last backward would need the very memory that such a plan was chosen to save.
        """
        return self._applied.no_sync()

    @contextmanager
    def joined(self) -> Generator[None, None, None]:
        """Within it parameters in slices or stages are whole, so that ranks may run the module by
        themselves.

        Entering is a collective call.
        """
        with (
            self._applied.joined(),
            nullcontext() if self._stages is None else self._stages.joined(),
        ):
            yield

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a common norm of at most `max_norm`; returns the norm before. A
        collective call.
        """
        if self._stages is not None:
            return self._stages.clip_norm(parameters, max_norm, norm_type=norm_type)
        return clipping.clip_norm_(parameters, max_norm, norm_type=norm_type, slices=self.slices_of)

    def slices_of(self, parameter: Tensor) -> int:
        """Return into how many slices along tensor axes `parameter`, one that the module has now,
        is cut.
        """
        return self._applied.slices_of(parameter)

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-`clip_value`, `clip_value`]."""
        clipping.clip_value_(parameters, clip_value)

    # ---- states ----------------------------------------------------------------------------------

    def state_dict(self, *, full: bool = True) -> State:
        """Return ``{"module", "optimizers", "exchange"}``, whole on rank 0 or, not `full`, in
        shards. A collective call.
        """
        return {
            "module": self.module_state(full=full),
            "optimizers": [
                self.optimizer_state(optimizer, full=full) for optimizer in self._optimizers
            ],
            "exchange": self.exchange_state(),
        }

    def load(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over what `state_dict` returned on rank 0 in full form, given to all ranks. A
        collective call.
        """
        self.load_module_state(state["module"], strict=strict)
        for optimizer, of_optimizer in zip(self._optimizers, state["optimizers"], strict=True):
            self.load_optimizer_state(optimizer, of_optimizer)
        if self.exchange is not None and state.get("exchange") is not None:
            self.load_exchange_state(state["exchange"])

    def module_state(self, *, full: bool = True) -> State:
        """Return the module's state: whole on rank 0 (other ranks may return a part), or in shards.
        A collective call.
        """
        if self._stages is not None:
            return self._stages.module_state() if full else self._stages.own_module_state()
        self._applied.reshard()
        if not self.has_shards:
            return self.module.state_dict()
        return module_state(self.module, self._applied.split_names(), full=full)

    def load_module_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a whole state, each rank its part, or a stored one, of which each rank reads its
        part.
        """
        if self._stages is not None:
            return self._stages.load_module_state(state, strict=strict)
        self._applied.reshard()
        split = self._applied.split_names() if self.has_shards else None
        load_module_state(self.module, state, split, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, full: bool = True) -> State:
        """Return the optimizer's state, also after `release`; as `module_state`. A collective
        call.
        """
        attached = self._optimizers.get(optimizer)
        if attached is None:
            return optimizer.state_dict()
        return attached.full_state() if full else attached.own_state()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a whole state, each rank its part, or a stored one, of which each rank reads its
        part.
        """
        self._optimizers[optimizer].load(state)

    def optimizer_state_to_host(self) -> None:
        """Take the optimizers' state off the device for good: `optimizer_state` still returns it. A
        collective call.
        """
        for attached in self._optimizers.values():
            attached.to_host()

    def exchange_state(self) -> State | None:
        """Return what the exchange holds back on all ranks, whole on rank 0, also after `release`.
        A collective call.
        """
        return None if self.exchange is None else self.exchange.state_dict()

    def load_exchange_state(self, state: Mapping[str, Any]) -> None:
        """Take over what rank 0 saved, given to all ranks. Raises ValueError for the state of
        another method or model.
        """
        assert self.exchange is not None, "the plan has no gradient exchange"
        self.exchange.load_state_dict(state)

    # ---- the end ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Undo `apply` and `attach_optimizers`: the module is whole and plain on every rank. A
        collective call.
        """
        for attached in self._optimizers.values():
            attached.release()
        self._applied.undo()
        self._model, self._stages, self._continuous = self.module, None, None

    def return_optimizer_state(self, optimizer: Optimizer) -> None:
        """Give an optimizer that is used again after `release` its whole state, on every rank. A
        collective call.
        """
        if optimizer in self._optimizers:
            self._optimizers[optimizer].give_back()

    def close(self) -> None:
        """End what outlives `release`: the thread and the memory of the gradient exchange."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None


def _with_views(options: RunOptions) -> RunOptions:
    """The options for a plan whose gradients are views of DDP's buckets. Raises PlanError where
    they say something else.
    """
    asked = {"gradient_as_bucket_view": True, **options.ddp}
    if not asked["gradient_as_bucket_view"]:
        raise PlanError(
            "the plan has gradient_views: leave it out of the plan, or "
            "gradient_as_bucket_view=False of the strategy"
        )
    return replace(options, ddp=asked)
