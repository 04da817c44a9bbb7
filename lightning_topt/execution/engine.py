"""The engine runs one plan on one rank: it applies the plan, steps, saves, loads, and undoes it.

A plain object that knows torch, not Lightning; ten lines of plain PyTorch drive it:

    engine = Engine(plan, module, device=device)
    model = engine.apply()                        # call the model through this
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach_optimizers([optimizer])
    for batch in loader:
        engine.run_step(batch.chunk(4), lambda model, microbatch: model(microbatch))
        optimizer.step(); optimizer.zero_grad()
    engine.release()                              # the module is unsharded again
    engine.close()                                # its process groups, once states are saved

How a block is run is the techniques' knowledge: the engine applies them in the order of the
registry and undoes them in the reverse order. Stages come first: `PipelineRun` runs those of this
rank, and techniques are applied to the parameters that it keeps.

In a fit `plugins.plan_run` makes the engine and releases it, and saves and loads the module by it.
A `StepRunner` runs the steps by it, and `plugins.plan_checkpoints` saves and loads optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import abort_groups, destroy_groups, own_group
from lightning_topt.execution.attached_optimizer import AttachedOptimizer, StageOptimizer
from lightning_topt.execution.pipeline.continuous_run import ContinuousRun
from lightning_topt.execution.pipeline.pipeline_run import (
    Example,
    PipelineRun,
    exchange_between_rows,
)
from lightning_topt.execution.pipeline.stage_layout import PipelineGroups
from lightning_topt.execution.states import load_module_state, module_state
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.optim import clipping
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.techniques.first_values import give_first_values
from lightning_topt.techniques.registry import (
    TECHNIQUES,
    check_blocks,
    check_runs,
    check_tied,
    parameters_by_block,
)
from lightning_topt.techniques.technique import (
    Applied,
    AppliedTechniques,
    ParallelModel,
    RunOptions,
    forget_meshes,
)

if TYPE_CHECKING:
    from lightning_topt.communication.local_sgd import OuterSteps


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
        plan.check_world_size(dist.get_world_size())
        self.plan, self.module, self.device = plan, module, device
        options = options or RunOptions()
        if isinstance(plan.float32_gathers, bool):
            options = replace(options, gather_dtype=None)
        self._options = _with_views(options) if plan.gradient_views else options
        self._model: nn.Module = module
        self._optimizers: dict[Optimizer, AttachedOptimizer | StageOptimizer] = {}
        self._groups: PipelineGroups | None = None  # of a plan with stages, once made
        self._made_groups: list[dist.ProcessGroup] = []  # beside those of stages
        self._stages: PipelineRun | None = None  # the same, once applied
        self._continuous: ContinuousRun | None = None  # where their schedule never flushes
        # that the batch is split among, once applied; None: all ranks
        self.data_group: dist.ProcessGroup | None = None
        # of the plan's gradients, or of replicas that train alone, once applied
        self.exchange: CompressedExchange | OuterSteps | None = None
        self.began_on_meta = is_on_meta(module)
        self._parameters = _checked_parameters(plan, module)
        self._applied = AppliedTechniques(self._parameters)

    @property
    def has_shards(self) -> bool:
        """Whether parameters are in shards, slices or stages, so that `release` needs all ranks."""
        return self._stages is not None or self._applied.has_shards

    @property
    def keeps_shards(self) -> bool:
        """Whether `release` leaves shards: those of a module that began on the meta device."""
        return self.began_on_meta and self.has_shards

    @property
    def model(self) -> nn.Module:
        """What forward must be called through, once the plan is applied."""
        return self._model

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all parameters and all of the optimizers' states."""
        trains_alone = self.plan.local_steps is not None
        return not (self.has_shards or trains_alone) and all(
            isinstance(each, AttachedOptimizer) and each.is_replicated
            for each in self._optimizers.values()
        )

    def apply(self, *, example: Example | None = None) -> nn.Module:
        """Apply the plan to the module in place. A collective call.

        After an error it cannot be called again.

        Args:
            example: of the steps, for a plan with stages, which runs in `run_step` and `evaluate`
                only.

        Returns:
            What forward must be called through.
        """
        try:
            return self._apply(example)
        except BaseException:
            self.abort()
            raise

    def _apply(self, example: Example | None) -> nn.Module:
        parameters: dict[str, dict[str, nn.Parameter]] = {
            block: {**named} for block, named in self._parameters.items()
        }
        # Stages: this rank keeps the parameters of its own.
        if self.plan.schedule is not None:
            if example is None:
                raise PlanError(
                    "a plan with stages needs an example of its steps: "
                    "apply(example=Example(loss_fn, microbatch))"
                )
            groups, device = self.make_stage_groups(), self.device
            try:
                self._stages = stages = PipelineRun(
                    self.plan, self.module, groups=groups, device=device, example=example
                )
            except ValueError as error:
                raise PlanError(str(error)) from error
            self._applied.add(Applied(undo=stages.release, no_sync=stages.no_sync))
            parameters = stages.kept_of(parameters)
        # Techniques, in the order of the registry: slices, recomputation, DDP, shared steps, the
        # exchange of gradients, FSDP2.
        gathers = self.plan.float32_gathers
        model = ParallelModel(
            module=self.module,
            mesh=self.plan.mesh,
            configs=self.plan.configs,
            parameters=parameters,
            device=self.device,
            root=self.module,
            exchange=self.plan.gradient_exchange,
            local_steps=self.plan.local_steps,
            options=self._options,
            float32_gathers=() if isinstance(gathers, bool) else gathers,
            num_microbatches=1 if self.plan.schedule is not None else self.plan.num_microbatches,
            stage_group=None if self._stages is None else self._stages.groups.data_group,
            made_groups=self._made_groups,
        )
        if self.began_on_meta:
            give_first_values(model)
        for technique in TECHNIQUES:
            if (applied := technique.apply(model)) is not None:
                self._applied.add(applied)
                # At most one technique exchanges gradients by a method of the plan.
                self.exchange = applied.exchange or self.exchange
        self._model, self.data_group = model.root, model.data_group
        if self._stages is not None:
            # What techniques did is known now: gradients can be exchanged, steps be run.
            self._stages.follow(self._applied)
            if self._stages.lag_per_hop is not None:
                self._continuous = ContinuousRun(self._stages)
            applied = exchange_between_rows(self._stages, self._options)
            if applied is not None:
                self._applied.add(applied)
                self.exchange = applied.exchange
        return self._model

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make ``step`` of optimizers over the module's parameters follow the plan.

        The parameters may be those from before `apply`. A collective call.
        """
        replaced, split, attach = self._applied.replaced, self._applied.split, self._applied.attach
        for optimizer in optimizers:
            # Under a plan with stages a rank has states of its own parameters alone.
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
        microbatches: Sequence[object],
        loss_fn: LossFunction,
        *,
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the losses (n,).

        A collective call. Gradients are those of the mean loss.

        Args:
            microbatches: n of them.
            loss_fn: is called with the model and a microbatch.
            weights: of the losses, one for each microbatch, in place of those of the mean: the
                shares of samples where these differ, 1 each for losses that are sums.
        """
        # The mean, unless the caller weights losses.
        factors = [1 / len(microbatches)] * len(microbatches) if weights is None else list(weights)
        if self._stages is not None:
            return self._stages.run_step(microbatches, loss_fn, weights=factors)
        return run_one_by_one(
            microbatches,
            partial(loss_fn, self._model),
            factors,
            around=self._applied.around_microbatch,
        )

    def make_stage_groups(self) -> PipelineGroups:
        """Return the groups of a plan with stages, made at the first call, which is collective."""
        if self._groups is None:
            self._groups = PipelineGroups(self.plan.mesh)
        return self._groups

    @property
    def stages(self) -> PipelineRun:
        """The run of a plan with stages, once applied."""
        assert self._stages is not None, "the plan has no stages, or is not applied"
        return self._stages

    @property
    def continuous(self) -> ContinuousRun:
        """The run of a plan with an asynchronous schedule, once applied."""
        assert self._continuous is not None, "the plan's schedule flushes, or it is not applied"
        return self._continuous

    def evaluate(self, batch: object, function: LossFunction) -> Any:
        """Return what ``function(model, batch)`` returns without gradients.

        Under a plan with stages it is a collective call of the ranks of a pipeline, each of which
        gets what the last stage returns. Call `sync_buffers` first, if training steps came before.
        """
        if self._stages is not None:
            return self._stages.evaluate(batch, function)
        with torch.no_grad(), self.around_step():
            return self.whole(function(self._model, batch))

    def synchronize(self) -> None:
        """Let ranks that train alone meet, before anybody looks at parameters. A collective call.

        Nothing is to be done under other plans.
        """
        if self.exchange is not None:
            self.exchange.synchronize()

    def sync_buffers(self) -> None:
        """Give all ranks the buffers that stages have changed. A collective call.

        They are those of the first data rank. Ranks that train alone meet (`synchronize`).
        """
        self.synchronize()
        if self._stages is not None:
            self._stages.sync_buffers()

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context required around any forward or backward that the caller runs itself.

        `run_step` and `evaluate` enter it.
        """
        return self._applied.around_step()

    def whole(self, value: object) -> Any:
        """Return what a step returned, with unsharded tensors; within `around_step`.

        A collective call where some are split.
        """
        return self._applied.whole(value)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without their exchange.

        A later backward exchanges them. Gradients that are sharded over all ranks are exchanged all
        the same: to keep them unsharded until then would need the very memory that such a plan was
        chosen to save.
        """
        return self._applied.no_sync()

    @contextmanager
    def joined(self) -> Generator[None]:
        """Unshard parameters in slices or stages within: each rank may run the module by itself.

        Entering is a collective call.
        """
        # Slices first, then the parameters of other stages.
        stages = nullcontext() if self._stages is None else self._stages.unsharded()
        with self._applied.joined(), stages:
            yield

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`; return the norm before.

        A collective call.
        """
        if self._stages is not None:
            return self._stages.clip_norm(parameters, max_norm)
        return clipping.clip_norm_(parameters, max_norm, slices=self.slices_of)

    def slices_of(self, parameter: Tensor) -> int:
        """Return into how many slices along tensor axes a present parameter is cut."""
        return self._applied.slices_of(parameter)

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-`clip_value`, `clip_value`]."""
        clipping.clip_value_(parameters, clip_value)

    # ---- states ----------------------------------------------------------------------------------

    def state_dict(self, *, full: bool = True) -> State:
        """Return ``{"module", "optimizers", "exchange"}``: `full` on rank 0, or in shards.

        A collective call.
        """
        # In this order on all ranks: each is a collective call.
        return {
            "module": self.module_state(full=full),
            "optimizers": [
                self.optimizer_state(optimizer, full=full) for optimizer in self._optimizers
            ],
            "exchange": None if self.exchange is None else self.exchange.state_dict(),
        }

    def load(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load what `state_dict` returned on rank 0 in full form, given to all ranks.

        A collective call.
        """
        self.load_module_state(state["module"], strict=strict)
        for optimizer, of_optimizer in zip(self._optimizers, state["optimizers"], strict=True):
            self.load_optimizer_state(optimizer, of_optimizer)
        if self.exchange is not None and state.get("exchange") is not None:
            self.exchange.load_state_dict(state["exchange"])

    def reshard(self) -> None:
        """Free gathered parameters; the next forward gathers what the shards then hold."""
        self._applied.reshard()

    def meet(self) -> None:
        """Get ready for a collective call that all ranks make in a step, by this rank's call."""
        self._applied.meet()

    def module_state(self, *, full: bool = True) -> State:
        """Return the module's state, `full` on rank 0, or in shards. A collective call.

        Other ranks may return a part of the full state.
        """
        self.synchronize()
        if self._stages is not None:
            return self._stages.module_state() if full else self._stages.own_module_state()
        self._applied.reshard()
        # Plain tensors under plain keys already.
        if not self.has_shards:
            return self.module.state_dict()
        return module_state(self.module, self._applied.split_names(), full=full)

    def load_module_state(self, state: Mapping[str, object], *, strict: bool = True) -> None:
        """Load a full state, each rank its part, or a stored one, of which it reads its part."""
        if self._stages is not None:
            return self._stages.load_module_state(state, strict=strict)
        self._applied.reshard()
        split = self._applied.split_names() if self.has_shards else None
        load_module_state(self.module, state, split, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, full: bool = True) -> State:
        """Return the optimizer's state, also after `release`, as `module_state` does."""
        attached = self._optimizers.get(optimizer)
        if attached is None:
            return optimizer.state_dict()
        return attached.full_state() if full else attached.own_state()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Load a full state, each rank its part, or a stored one, of which it reads its part."""
        self._optimizers[optimizer].load(state)

    # ---- the end ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Undo `apply` and `attach_optimizers`. A collective call.

        Every rank has the full, plain module then. One that began on the meta device may be larger
        than that: it keeps its shards, and stays under the plan.
        """
        if self.keeps_shards:
            return
        for attached in self._optimizers.values():
            attached.release()
        # Techniques in the reverse order, stages last.
        self._applied.undo()
        self._model, self._stages, self._continuous = self.module, None, None

    def own_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the one of `parts` (ranks) that this rank is in, as a group of the plan.

        It lasts until `close`, and ends with `abort`. A collective call.
        """
        self._made_groups.append(group := own_group(parts))
        return group

    def abort(self) -> None:
        """End what is under way in the plan's groups, after an error, by this rank alone.

        `apply` and steps of stages do so where they fail; else the process may wait for others.
        """
        if self._stages is not None:
            self._stages.abort()
        elif self._groups is not None:
            self._groups.abort()
        self._made_groups[:] = abort_groups(self._made_groups)

    def close(self) -> None:
        """End what outlives `release`: the gradient exchange, and process groups.

        A collective call.
        """
        if self._groups is not None:
            self._groups.close()
        if self._made_groups:
            destroy_groups(self._made_groups, meets=True)
            forget_meshes()
            self._made_groups.clear()
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None


# The parameters of each block of `plan`, by all their names in `module`; a PlanError where the plan
# does not belong to the module, or nothing runs it.
def _checked_parameters(
    plan: ParallelPlan, module: nn.Module
) -> dict[str, dict[str, nn.Parameter]]:
    configs = plan.configs
    try:
        check_runs(plan.mesh, configs, plan.gradient_exchange)
        check_blocks(configs, module, made_for=plan.model)
        parameters = parameters_by_block(module, configs)
        check_tied(parameters, configs)
        if isinstance(plan.float32_gathers, tuple):
            known = {name for named in parameters.values() for name in named}
            if unknown := sorted({*plan.float32_gathers} - known):
                raise ValueError(f"float32_gathers names {unknown[0]!r}, which is no parameter")
    except ValueError as error:
        raise PlanError(str(error)) from error
    return parameters


def run_one_by_one(
    microbatches: Sequence[object],
    loss_of: Callable[[Any], Tensor],
    weights: Sequence[float],
    *,
    around: Callable[[bool], AbstractContextManager[None]],
) -> Tensor:
    """Run forward and backward of each microbatch, one after the other; return the losses (n,).

    Gradients are those of the losses' sum with `weights`. ``around(is_last)`` is the context of
    each pass.
    """
    losses = []
    for index, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
        with around(index == len(microbatches) - 1):
            loss = loss_of(microbatch)
            (loss * weight).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _with_views(options: RunOptions) -> RunOptions:
    # Return the options of a plan whose gradients are views of DDP's buckets.
    # Raises PlanError where they say something else.
    asked = {"gradient_as_bucket_view": True, **options.ddp}
    if not asked["gradient_as_bucket_view"]:
        raise PlanError(
            "the plan has gradient_views: leave it out of the plan, or "
            "gradient_as_bucket_view=False of the strategy"
        )
    return replace(options, ddp=asked)
