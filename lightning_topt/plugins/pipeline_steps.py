"""Steps of a LightningModule under a plan with stages: its own code runs on every rank.

The ranks of a pipeline get one batch, which `PipelineRunner` splits into microbatches. The engine
takes these through the stages, forward and backward, and calls ``training_step`` for each; only the
last stage's rank gets to the end of it. What was returned, logged and counted there is combined to
what one step would give, and every rank of the pipeline logs it (`stage_steps`).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from typing_extensions import override

from lightning_topt.communication.value_exchange import value_of_rank, values_of_ranks
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.plugins.microbatches import (
    MicrobatchLoss,
    Parts,
    combined_calls,
    combined_output,
    first_samples,
    loss_problem,
    loss_weights,
    split_batch,
    weighted_losses,
    without_trace,
)
from lightning_topt.plugins.plan_run import Step
from lightning_topt.plugins.stage_steps import (
    EVALUATIONS,
    Found,
    MetricChanges,
    StageRunner,
    StageSteps,
    StepPasses,
    cleared_before_backward,
    index_in,
    loss_in,
    stashed_gradients,
    takes_index,
    with_gradients,
    with_loss,
)
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states


class PipelineRunner(StageRunner):
    """Runs one batch on the ranks of a pipeline, in microbatches."""

    def __init__(self, steps: StageSteps, loss: MicrobatchLoss = "mean") -> None:
        super().__init__(steps)
        self._loss, self._is_tested = loss, False

    @override
    def example(self, batch: Any) -> Example:
        """Return a training step on a microbatch of `batch`, for the engine to trace."""
        parts = split_batch(self._steps.agreed(batch), self.engine.plan.num_microbatches)
        passes = StepPasses(self._steps, batch_idx=0 if takes_index(self._module) else None)
        return Example(passes.loss, (parts.batches[0],))

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of the module's step, on every rank of the pipeline.

        Its loss has the gradients of the microbatches' losses, weighted by `microbatch_loss`.
        """
        args = (*args, *kwargs.values())
        batch, count = self._steps.agreed(args[0]), self.engine.plan.num_microbatches
        # Microbatches; a small batch has fewer.
        parts = split_batch(batch, count)
        if not self._is_tested and len(parts.batches) > 1:
            self._is_tested = self._test_loss(batch, parts, args[1:])
        # Targets are counted in memory of the host, where that has the batch.
        counts = self._loss not in ("mean", "sum")
        counted = split_batch(self._steps.on_host(batch), count) if counts else parts
        weights, scale = loss_weights(counted, self._loss), self._steps.loss_scale()
        counting = MetricChanges.begin(self._module)
        batches = [(each,) for each in parts.batches]
        passes = StepPasses(self._steps, batches, weights, batch_idx=index_in(args))
        with stashed_gradients(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            self.engine.run_step(
                batches, passes.loss, weights=[weight * scale for weight in weights]
            )
        found = _combined(passes, parts, weights) if passes.finished else None
        record = self._steps.shared(found, counting)
        device = self._steps.device
        return with_gradients(record.output, gradients, factor=1 / scale, device=device)

    def _test_loss(self, batch: Any, parts: Parts, rest: Sequence[Any]) -> bool:
        # Test whether two microbatches add up as `microbatch_loss` says, by three steps forward.
        # Nothing of the test is left. Returns False where the batch could not tell, as all ranks
        # know. Raises ValueError on every rank.
        # The first two microbatches, and both together, with the same random numbers.
        first = Parts(parts.batches[:2], parts.sizes[:2])
        tried, draws = [], False
        with without_trace(self._module):
            before = random_states()
            for part in (*first.batches, first_samples(batch, sum(first.sizes))):
                set_random_states(before)
                args = (part, *rest)
                step = EVALUATIONS["training_step"](self._steps, (part, *rest[1:]), index_in(args))
                self.engine.evaluate(step.batch, step)
                tried.append(step)
                draws |= pickle.dumps(random_states()) != pickle.dumps(before)
        # The last stage's rank has seen all three, and compares them.
        verdict: str | None = None
        if all(step.found is not None for step in tried):
            verdict = loss_problem(
                [float(loss_in(step.found[0])) for step in tried],
                loss_weights(first, self._loss),
                draws=draws,
                half=self._steps.precision.precision not in ("32-true", "64-true"),
            )
        verdict = value_of_rank(
            verdict, self._steps.group, place=self._steps.last_place, device=self._steps.device
        )
        # What one row of the pipelines finds is known to all.
        verdicts = [verdict]
        if (data := self.engine.data_group) is not None:
            verdicts = list(values_of_ranks(verdict, data, device=self._steps.device))
        for problem in filter(None, verdicts):
            raise ValueError(problem)
        return "" in verdicts

    @override
    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        return nullcontext()  # stashed gradients are exchanged by then, those of each batch


def _combined(passes: StepPasses, parts: Parts, weights: Sequence[float]) -> Found:
    # The output and the calls of the whole step, on the last stage's rank
    # In the order of microbatches, whatever the schedule.
    done = [passes.finished[index] for index in range(len(parts.batches))]
    outputs, calls = [output for output, _ in done], [calls for _, calls in done]
    if len(done) == 1:
        return outputs[0], tuple(calls[0])
    losses = [loss_in(output).reshape(()) for output in outputs]
    options: dict[str, Any] = {"sizes": parts.sizes, "weights": weights, "losses": losses}
    output = combined_output(outputs, **options)
    output = with_loss(output, weighted_losses(losses, weights))
    return output, combined_calls(calls, **options)
