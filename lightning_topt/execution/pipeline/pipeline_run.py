"""`PipelineRun`: a plan with stages, on one rank. The engine applies it before all techniques, and
steps through it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.execution.applied_techniques import AppliedTechniques
from lightning_topt.execution.gathered_state import load_module_state, module_state
from lightning_topt.execution.pipeline.foreign_parameters import place_parameters
from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups
from lightning_topt.execution.pipeline.random_order import OneStageOrder, RandomOrder
from lightning_topt.execution.pipeline.runtime import run_actions
from lightning_topt.execution.pipeline.shared_values import share_value
from lightning_topt.execution.pipeline.stage_buffers import StageBuffers, average_over_data_ranks
from lightning_topt.execution.pipeline.stage_gradients import StageExchanges
from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.execution.pipeline.stage_norms import StageNorms
from lightning_topt.execution.pipeline.stage_peers import Peers
from lightning_topt.execution.pipeline.step_flows import StageFlow, Step, StepFlows
from lightning_topt.execution.pipeline.step_losses import loss_of_step, share_losses
from lightning_topt.execution.pipeline.step_programs import StepPrograms
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.random_states import RandomStates, draw_alike
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor


class Example(NamedTuple):
    """A step of a run, ``step(module, microbatch)``, and a microbatch to try it on: from it follows
    what each stage needs.
    """

    step: Step
    microbatch: Any


class PipelineRun:
    """The stages of `plan` that this rank runs of `module`, on `device`. Making it is a collective
    call, as all methods are.

    All ranks get the parameters and buffers of rank 0; each keeps the parameters that its stages
    need. Raises ValueError for a schedule that does not exist or take these sizes, CaptureError
    (one as well) for a step that cannot be cut like this.
    """

    def __init__(
        self, plan: ParallelPlan, module: nn.Module, *, device: torch.device, example: Example
    ) -> None:
        self.plan, self.module, self.device = plan, module, device
        self.lag_per_hop = CONTINUOUS_SCHEDULES.get(
            plan.schedule or ""
        )  # of a schedule that never flushes
        self._programs = StepPrograms(plan)
        self.schedule = self._programs.schedule(plan.num_microbatches, backward=True)
        self.groups = PipelineGroups.of_mesh(plan.mesh)
        if not plan.own_batches:
            draw_alike(self.groups.row)  # functional operators draw on every rank
        names = [[block.block for block in stage.blocks if block.block] for stage in plan.stages]
        order = RandomOrder(device) if self.lag_per_hop is None else OneStageOrder(device)
        self.flows = StepFlows(module, names, device=device, order=order)
        (first,) = self.flows.of(example.step, [example.microbatch])
        ranks = self.schedule.rank_of_stage
        self._carried = first.flow.carried
        self.layout = StageLayout.of_flow(
            first.flow, first.stage_of_call, module, rank_of_stage=ranks
        )
        pipelines = plan.mesh.groups_along(plan.mesh.pipeline_axes)
        self._peers = Peers.of_pipelines(
            pipelines, self.schedule, rank=dist.get_rank(), device=device
        )
        self._originals = dict(module.named_parameters())
        self.foreign = place_parameters(module, self.layout, self.groups, device=device)
        self.buffers = StageBuffers(module, self.layout, self.groups)
        self._averaged = average_over_data_ranks(module, self.groups)
        self._synchronizes, self._failed = True, False
        self.is_drained: Callable[[], bool] = lambda: True  # a run that never flushes
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._split: Callable[[], Mapping[str, SplitTensor]] = dict
        self.exchanges: StageExchanges
        self.norms: StageNorms

    @classmethod
    def start(
        cls, plan: ParallelPlan, module: nn.Module, *, device: torch.device, example: Example | None
    ) -> PipelineRun:
        """Return it, or raise PlanError for all that is wrong with the plan, and without an
        example.
        """
        if example is None:
            raise PlanError(
                "a plan with stages needs an example of its steps: apply(example=Example(loss_fn, "
                "microbatch))"
            )
        try:
            return cls(plan, module, device=device, example=example)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def follow(self, applied: AppliedTechniques) -> None:
        """Take up what techniques did to the parameters that this rank keeps, before the first
        step.
        """
        self.around = applied.around_step if applied.split else nullcontext
        self._split, self.flows.joined, self.flows.whole = (
            applied.split_names,
            applied.joined,
            applied.whole,
        )
        named, by_first = dict(self.module.named_parameters()), self.lag_per_hop is not None
        self.exchanges = StageExchanges(named, self.layout, self.groups, by_first=by_first)
        self.norms = StageNorms(
            self.groups, self.device, self.exchanges.counted_elsewhere, applied.slices_of
        )

    def kept_of(
        self, named: Mapping[str, Mapping[str, nn.Parameter]]
    ) -> dict[str, dict[str, nn.Parameter]]:
        """Return those of the parameters, by block and name, that this rank keeps."""
        kept = self.own_parameters()
        return {
            block: {name: p for name, p in of_block.items() if p in kept}
            for block, of_block in named.items()
        }

    def own_parameters(self) -> frozenset[nn.Parameter]:
        """Return the parameters that this rank keeps."""
        return frozenset(p for name, p in self._originals.items() if name not in self.foreign.names)

    def updated_parameters(self) -> frozenset[nn.Parameter]:
        """Return those of them that optimizers step here: all, but for those that an earlier stage
        updates for this one.
        """
        if self.lag_per_hop is None:
            return self.own_parameters()
        owners = self.foreign.owners
        return frozenset(
            p
            for name, p in self._originals.items()
            if owners.get(name, self.groups.rank) == self.groups.rank
        )

    def owners(self) -> dict[Tensor, int]:
        """Return the rank of the pipeline whose state of each parameter is saved."""
        return {p: self.foreign.owners.get(name, 0) for name, p in self._originals.items()}

    # ---- steps -----------------------------------------------------------------------------------

    def run_step(
        self,
        microbatches: Sequence[Any],
        step: Step,
        *,
        weights: Sequence[float] | None = None,
        divisor: Callable[[], float] | None = None,
        kind: Hashable = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches; gradients are those of the losses' sum with
        `weights`, divided by what `divisor` returns on the last stage when all have run.

        `weights` are those of the mean unless given. Returns the losses (n,) without weights, on
        every rank.
        """
        if self.lag_per_hop is not None:
            raise ValueError(
                f"the schedule {self.plan.schedule!r} has no steps: minibatches go in by "
                "`engine.continuous.advance`"
            )
        count = len(microbatches)
        factors = [1 / count] * count if weights is None else list(weights)
        if len(factors) != count:
            raise ValueError(
                f"weights are one for each of the {count} microbatches, got {len(factors)}"
            )
        flows = self.flows.of(step, microbatches, kind=kind)
        self.buffers.begin_step(flows)
        results = self._run(microbatches, step, flows, factors=factors, exchanges=divisor is None)
        losses = torch.ones(count + 1, device=self.device)  # the divisor is the last one
        for index, loss in results.items():
            losses[index] = loss.detach()
        if results and divisor is not None:
            losses[count] = divisor()
        share_losses(losses, self.groups, source=self.layout.rank_of_stage[-1])
        if divisor is not None:
            self._divide_gradients(losses[count])
        if self._synchronizes:
            self.exchanges.finish()
        return losses[:count]

    @torch.no_grad()
    def _divide_gradients(self, divisor: Tensor) -> None:
        """Divide all gradients, and begin to exchange them."""
        found = [
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        ]
        if divisor != 1:
            for gradient in found:
                gradient.div_(divisor.to(gradient.dtype))
        if self._synchronizes:
            for stage, rank in enumerate(self.layout.rank_of_stage):
                if rank == self.groups.rank:
                    self.exchanges.stage_ended(stage)

    def evaluate(self, batch: Any, step: Step, *, kind: Hashable = None) -> Any:
        """Run ``step(module, batch)`` forward; what it returns on the last stage is returned on all
        ranks of the pipeline.
        """
        return self.evaluate_all([batch], step, kind=kind)[0]

    def evaluate_all(
        self, microbatches: Sequence[Any], step: Step, *, kind: Hashable = None
    ) -> list[Any]:
        """Do what `evaluate` does for several microbatches, one stage beside the others."""
        self.check_drained()
        with torch.no_grad():
            flows = self.flows.of(step, microbatches, kind=kind)
            results = self._run(microbatches, step, flows, factors=None)
            last = self.layout.rank_of_stage[-1]
            own = [results.get(index) for index in range(len(microbatches))]
            shared: list[Any] = share_value(
                own, group=self.groups.row, source=last, device=self.device
            )
            return shared

    def check_drained(self) -> None:
        """Raise AssertionError while minibatches of a run that never flushes are in flight: ranks
        are at different ones.
        """
        assert self.is_drained(), "minibatches are in flight: drain the run first"

    def _run(
        self,
        microbatches: Sequence[Any],
        step: Step,
        flows: Sequence[StageFlow],
        *,
        factors: Sequence[float] | None,
        exchanges: bool = True,
    ) -> dict[int, Any]:
        if self._failed:
            raise RuntimeError(
                "a step of this pipeline has failed, and its ranks are out of step: start the run "
                "again"
            )
        schedule = self._programs.schedule(len(microbatches), backward=factors is not None)
        program = self._programs.around_actions(schedule, flows, rank=self.groups.rank)
        passes = [flow.passes for flow in flows]
        try:
            return run_actions(
                program,
                passes,
                self._peers,
                [partial(step, self.module, microbatch) for microbatch in microbatches],
                around=self.around,
                last_stage=schedule.num_stages - 1,
                loss_of=None
                if factors is None
                else lambda index, result: loss_of_step(result) * factors[index],
                ended=self.exchanges.stage_ended
                if exchanges and self._synchronizes and factors is not None
                else _nothing,
            )
        except BaseException:
            self._failed = True
            self._peers.forget()
            for of_microbatch in passes:
                of_microbatch.forget()
            self.exchanges.forget()
            raise

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Within it gradients are accumulated, and their exchange is left to a later step."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def random_starts(
        self, states: Sequence[RandomStates]
    ) -> AbstractContextManager[dict[int, RandomStates]]:
        """Return a context in which microbatch m of a step draws from ``states[m]``; it gives those
        at the end of each.
        """
        return self.flows.order.starting_from(states)

    @property
    def changed_buffers(self) -> list[str]:
        """Return the buffers that a step changes."""
        return sorted(self.layout.buffers)

    @property
    def carried_buffers(self) -> list[str]:
        """Return those of them that it also computes with: one microbatch depends on the one
        before.
        """
        return sorted(self._carried)

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients of all stages to a common norm of at most `max_norm`; returns the
        norm before.
        """
        if self.lag_per_hop is not None:
            raise ValueError(
                f"stages are at different minibatches under {self.plan.schedule!r}: "
                "`engine.continuous.clip_norm`"
            )
        return self.norms.clip(parameters, max_norm, norm_type=norm_type)

    @contextmanager
    def joined(self) -> Generator[None, None, None]:
        """Within it all ranks have all parameters, and the buffers that stages have changed."""
        self.check_drained()
        self.buffers.sync()
        with self.foreign.joined():
            yield

    def sync_buffers(self) -> None:
        """Give all ranks the buffers that stages have changed."""
        self.check_drained()
        self.buffers.sync()

    # ---- states ----------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the whole module's state on rank 0, an empty one elsewhere."""
        self.check_drained()
        self.buffers.sync()
        with self.flows.joined():
            if not self.groups.saves:
                return {}
            with self.foreign.whole_on_first():
                return self.module.state_dict() if self.groups.rank == 0 else {}

    def own_module_state(self) -> dict[str, Any]:
        """Return the part of the module's state that this rank keeps, slices of it where it is
        cut.
        """
        self.check_drained()
        self.buffers.sync()
        parameters = self.foreign.parameters
        foreign = {id(parameters[name]) for name in self.foreign.names}
        named = self.module.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if id(parameter) in foreign}
        state = module_state(self.module, self._split(), full=False)
        return {name: value for name, value in state.items() if name not in names}

    def load_module_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load a whole state, or a stored one, each rank its part."""
        self.check_drained()
        with self.foreign.skipped_by_loading():
            load_module_state(self.module, state, self._split() or None, strict=strict)

    def release(self) -> None:
        """Let every rank have the whole module again."""
        self.check_drained()
        self.buffers.sync()
        self.foreign.restore()
        for each, group in self._averaged:
            each.process_group = group


def _nothing(stage: int) -> None:
    """Gradients stay where they are."""
