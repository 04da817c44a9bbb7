"""Ranks that share a model's parameters bring a batch each, as data ranks do, and run all of them.

A tensor group has slices of the parameters, a pipeline has stages: either way a batch needs all of
its ranks. `GroupRunner` exchanges the batches, and runs each as one microbatch: through the stages,
as the schedule says, or without stages one after the other.

A batch never meets another one, whatever the loss is. So the loss, its gradients and all that a
step logs, draws or counts are those of data parallelism: a microbatch runs with the random numbers
of the rank that brought it, and what it returns and logs goes to that rank. As the engine has done
backward by then, gradients are stashed until Lightning calls backward (`stage_steps`).

Evaluation, whose ranks may have different numbers of batches, runs on unsharded parameters, each
rank by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_topt.communication.value_exchange import (
    value_for_rank,
    value_of_rank,
    values_of_ranks,
)
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plugins.plan_run import Step, StepRunner
from lightning_topt.plugins.stage_steps import (
    LoggedCall,
    StageSteps,
    StepPasses,
    StepRecord,
    as_nonzero_rank,
    cleared_before_backward,
    index_in,
    loss_in,
    recorded_calls,
    replay,
    stashed_gradients,
    takes_index,
    uncounted,
    with_gradients,
)
from lightning_topt.techniques.ddp_wrapper import send_buffers
from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)


@dataclass(frozen=True)
class RankInput:
    """What a rank brings to a step: arguments, random generators."""

    args: tuple[Any, ...]
    states: RandomStates

    @property
    def batch(self) -> tuple[Any, ...]:
        """``(batch, dataloader_idx)``, or without the latter."""
        return (self.args[0], *self.args[2:])


class GroupRunner(StepRunner):
    """Runs the batches that the ranks of a tensor group or a pipeline bring.

    `engine` runs the module on `device`; a plan with stages has `steps`, too.
    """

    engine: Engine

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        device: torch.device,
        steps: StageSteps | None = None,
    ) -> None:
        self.engine, self._module, self._device, self._steps = engine, module, device, steps
        self._evaluation = ExitStack()  # while it evaluates
        self._evaluates = self._has_run = False

    @override
    def example(self, batch: Any) -> Example | None:
        """Return a training step on the batch of rank 0, for an engine that cuts it into stages."""
        if self._steps is None:
            return None
        everyone: Any = dist.group.WORLD
        batch = value_of_rank(batch, everyone, place=0, device=self._device)
        passes = StepPasses(self._steps, batch_idx=0 if takes_index(self._module) else None)
        return Example(passes.loss, (batch,))

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        """Raise PlanError where a step changes buffers, as far as that is known."""
        if self._steps is None:
            mesh = self.engine.plan.mesh
            self._group = self.engine.own_group(mesh.groups_along(mesh.tensor_axes))
        else:
            self._group = self._steps.group
            if changed := self.engine.stages.changed_buffers:
                raise refused_buffer(changed[0])
        self._place = dist.get_rank(self._group)

    @override
    def close(self, *, failed: bool) -> None:
        if failed:
            self.engine.abort()
        else:
            self.end_evaluation()

    # ---- training --------------------------------------------------------------------------------

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of this rank's own step, its loss with gradients of the mean loss."""
        # Everyone gets all batches, with the random states that their ranks have.
        own = RankInput((*args, *kwargs.values()), random_states())
        inputs = list(values_of_ranks(own, self._group, device=self._device))
        scale = 1.0 if self._steps is None else self._steps.loss_scale()
        with stashed_gradients(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            if self._steps is None:
                record, end = self._one_by_one(step, inputs)
            else:
                record, end = self._through_stages(self._steps, inputs, scale)
        # This rank goes on with its own random numbers, and logs what it would have.
        set_random_states(end)
        replay(self._module, record.calls)
        return with_gradients(record.output, gradients, factor=1 / scale, device=self._device)

    def _one_by_one(
        self, step: Step, inputs: Sequence[RankInput]
    ) -> tuple[StepRecord, RandomStates]:
        # Run the batches one after the other; return the record of the own one, and its end
        send_buffers(self._module.buffers())
        places = {id(each): place for place, each in enumerate(inputs)}
        ends, records, calls = list[RandomStates](), list[StepRecord](), list[LoggedCall]()

        def loss(_: nn.Module, each: object) -> Tensor:
            place = places[id(each)]
            if place:  # backward of the one before is over
                ends.append(random_states())
            set_random_states(inputs[place].states)
            is_own = place == self._place
            with ExitStack() as stack:
                if not is_own:  # nothing is left that rank 0 alone does, or that metrics count
                    stack.enter_context(as_nonzero_rank())
                    stack.enter_context(uncounted(self._module, unless=[]))
                stack.enter_context(recorded_calls(self._module, calls if is_own else None))
                output = self.engine.whole(step(*inputs[place].args))
            if is_own:
                records.append(StepRecord(map_tensors(output, Tensor.detach), tuple(calls)))
            return loss_in(output)

        # By value, too, in the first step: kernels of norms write without a new version.
        is_first, self._has_run = not self._has_run, True
        buffers = [
            (name, b, b._version, b.clone() if is_first else None)
            for name, b in self._module.named_buffers()
        ]
        self.engine.run_step(inputs, loss)
        for name, before, version, value in buffers:
            now = self._module.get_buffer(name)
            is_same = now is before and now._version == version
            if not is_same or (value is not None and not torch.equal(now, value)):
                raise refused_buffer(name)
        ends.append(random_states())
        return records[0], ends[self._place]

    def _through_stages(
        self, steps: StageSteps, inputs: Sequence[RankInput], scale: float
    ) -> tuple[StepRecord, RandomStates]:
        # Run the batches in stages; return the record of the own one, and its end
        is_last, weights = self._place == steps.last_place, [scale / len(inputs)] * len(inputs)
        batches = [each.batch for each in inputs]
        passes = StepPasses(steps, batches, weights, batch_idx=index_in(inputs[0].args))
        # Each pass draws as its rank would.
        with (
            self.engine.stages.flows.order.starting_from([each.states for each in inputs]) as ends,
            as_nonzero_rank(),
        ):
            self.engine.run_step(batches, passes.loss, weights=weights)
        # Each rank gets the record of its own batch.
        found = [passes.finished[place] for place in range(len(inputs))] if is_last else []
        records = [StepRecord(*each) for each in found] or None
        record: StepRecord = value_for_rank(
            records, self._group, source=steps.last_place, device=self._device
        )
        return record, ends[self._place]

    @override
    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        return nullcontext()  # stashed gradients are exchanged by then, those of each batch

    # ---- evaluation ------------------------------------------------------------------------------

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.unsharded(step(*args, **kwargs))

    @override
    def begin_evaluation(self) -> None:
        """Unshard the parameters. A collective call."""
        if not self._evaluates:
            if self._steps is None:
                send_buffers(self._module.buffers())
            # Those that come in inference mode could not be trained afterwards.
            with torch.inference_mode(False), torch.no_grad():
                self._evaluation.enter_context(self.engine.joined())
            self._evaluates = True

    @override
    def end_evaluation(self) -> None:
        """Let each rank keep its slices, or the parameters of its stages, alone again."""
        with torch.inference_mode(False):
            self._evaluation.close()
        self._evaluates = False


# ---- steps that change buffers -------------------------------------------------------------------


def refused_buffer(name: str) -> PlanError:
    """Return the error for a step that changes the buffer `name`."""
    return PlanError(
        f"training steps change the buffer {name!r}, of which ddp keeps what rank 0's batches make."
        " In a group of ranks that bring a batch each all would count: leave out own_batches or "
        "num_microbatches, or choose a plan without stages and tensor axes"
    )
