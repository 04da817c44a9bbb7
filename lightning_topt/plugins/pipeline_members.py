"""Ranks of a pipeline that bring a batch each, as data ranks do, run these together: each batch is
a microbatch of its own.

The loss, its gradients and all that a step logs, draws or counts are those of data parallelism,
whatever the loss is: a batch meets no other one. Every rank takes part in the step of each member
of its row as that member would run it: with its random numbers, and at the end of the pipeline with
what its metrics have counted. What the step returns and logs goes to the member.

Evaluation, whose ranks may have different numbers of batches, runs on whole parameters, each rank
by itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plugins.former_gradients import cleared_before_backward, gradients_aside
from lightning_topt.plugins.member_batches import (
    value_for_member,
    value_of_member,
    values_of_members,
)
from lightning_topt.plugins.metric_states import (
    MetricChanges,
    States,
    count_from,
    states_in_use,
    take_over,
    uncounted,
)
from lightning_topt.plugins.pipeline_steps import PipelineSteps, joint_loss, loss_in
from lightning_topt.plugins.pipeline_values import Told, replay
from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)


@dataclass(frozen=True)
class Member:
    """A `Member` of a row brings a `batch`, which is ``(batch, dataloader_idx)``, or without the
    latter, the states of its random generators, and what its metrics have `counted`.
    """

    batch: tuple[Any, ...]
    states: RandomStates
    counted: States


class PipelineMembers(PipelineSteps):
    """The steps of `module` on the batches of all ranks of a pipeline, which `engine` runs on
    `device`.

    Made before the plan is applied; methods are collective calls.
    """

    evaluates = False

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        precision: Precision,
        device: torch.device,
    ) -> None:
        super().__init__(engine, module, precision=precision, device=device)
        self._place, self._size = dist.get_rank(self._row), dist.get_world_size(self._row)
        self._evaluation = ExitStack()

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on the batch of rank 0."""
        everyone: Any = dist.group.WORLD
        batch = value_of_member(batch, everyone, member=0, device=self._device)
        batch_idx = 0 if takes_index(self._module) else None
        return Example(
            _MemberPasses(self, [], is_last=False, scale=1.0, batch_idx=batch_idx).loss, (batch,)
        )

    def check(self) -> None:
        """Raise PlanError where a step changes buffers: DDP keeps those of rank 0's batch, a
        pipeline has all batches'.
        """
        if changed := self._engine.stages.changed_buffers:
            raise PlanError(
                f"training steps change the buffer {changed[0]!r}, of which ddp keeps what rank "
                "0's batches make; in a pipeline whose ranks bring a batch each they would all "
                "count: leave out own_batches, or choose a plan without stages"
            )

    # ---- training --------------------------------------------------------------------------------

    def members_step(self, *args: Any) -> Any:
        """Return the output of this rank's own step on its batch, whose loss has the gradients of
        the row's mean loss.
        """
        own = Member((args[0], *args[2:]), random_states(), states_in_use(self._module))
        members = list(values_of_members(own, self._row, device=self._device))
        passes = _MemberPasses(
            self,
            members,
            is_last=self._place == self._teller,
            scale=self._loss_scale(),
            batch_idx=args[1] if len(args) > 1 else None,
        )
        starts = self._engine.stages.random_starts([member.states for member in members])
        with (
            gradients_aside(
                self._module, dropped=cleared_before_backward(self._module)
            ) as gradients,
            starts as ends,
            _as_other_rank(),
        ):
            self._engine.run_step(passes.microbatches, passes.loss)
        values = (
            [passes.finished[index] for index in range(self._size)] if passes.finished else None
        )
        told: Told = value_for_member(values, self._row, source=self._teller, device=self._device)
        set_random_states(ends[self._place])
        take_over(self._module, told.counted)
        replay(self._module, told.calls)
        joint = joint_loss(loss_in(told.output), gradients, scale=passes.scale, device=self._device)
        return {**told.output, "loss": joint} if isinstance(told.output, Mapping) else joint

    def member_pass(
        self, member: Member, batch: Any, batch_idx: int | None, *, is_last: bool
    ) -> Told:
        """Return what the step of `member` told, if it reached the end here; nothing of it is
        left.
        """
        with uncounted(self._module, unless=[]):
            if is_last:
                count_from(self._module, member.counted)
            counting = MetricChanges.begin(self._module)
            output, calls = self.observed("training_step", batch, batch_idx)
            return Told(output, calls, counting.since(self._module))

    # ---- evaluation ------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Make the parameters whole."""
        if not self.evaluates:
            # Those that come in inference mode could not be trained afterwards.
            with torch.inference_mode(False), torch.no_grad():
                self._evaluation.enter_context(self._engine.joined())
            self.evaluates = True

    def end_evaluation(self) -> None:
        """Let each rank keep the parameters of its stages again."""
        with torch.inference_mode(False):
            self._evaluation.close()
        self.evaluates = False


class _MemberPasses:
    """The passes of one training step on the batches of `members`; `finished` has what those that
    reached the end found.
    """

    def __init__(
        self,
        steps: PipelineMembers,
        members: Sequence[Member],
        *,
        is_last: bool,
        scale: float,
        batch_idx: int | None,
    ) -> None:
        self._steps, self._members, self._is_last, self._batch_idx = (
            steps,
            members,
            is_last,
            batch_idx,
        )
        self.scale = scale
        self.microbatches = [member.batch for member in members]
        self._places = {id(batch): index for index, batch in enumerate(self.microbatches)}
        self.finished: dict[int, Told] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a member's batch, scaled; or of a copy of it by a copy of the module,
        to see what they need.
        """
        index = self._places.get(id(microbatch))
        if index is None:
            return loss_in(self._steps.step("training_step", model, microbatch, self._batch_idx))
        told = self._steps.member_pass(
            self._members[index], microbatch, self._batch_idx, is_last=self._is_last
        )
        loss = loss_in(told.output)
        self.finished[index] = Told(
            map_tensors(told.output, Tensor.detach), told.calls, told.counted
        )
        return loss if self.scale == 1 else loss * self.scale


def takes_index(module: pl.LightningModule) -> bool:
    """Return whether Lightning gives ``training_step`` the index of the batch."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


@contextmanager
def _as_other_rank() -> Generator[None, None, None]:
    """Run as a rank other than 0: what rank 0 alone does would be done by another one."""
    only = cast(Any, rank_zero_only)
    rank = getattr(only, "rank", None)
    only.rank = rank or 1
    try:
        yield
    finally:
        only.rank = rank
