"""`StagePass`: the user's own step on one microbatch, of which one stage runs its calls of units;
and their backward pass.

[Note: a pass of a stage] The step runs from its beginning. A call of an earlier stage returns a
stand-in, in which are the tensors that this stage received; calls of this stage run; the first call
of a later stage ends the pass. Functional operators run wherever their inputs are real, and on
shapes elsewhere. The last stage runs to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from lightning_topt.execution.pipeline.pass_checks import check_real, read_of_shape
from lightning_topt.execution.pipeline.random_order import RandomOrder
from lightning_topt.execution.pipeline.split_backward import SplitBackward
from lightning_topt.execution.pipeline.stage_forward import StageForward
from lightning_topt.execution.pipeline.stand_ins import Received, StandIns
from lightning_topt.execution.pipeline.unit_calls import replaced, silenced, taken_over
from lightning_topt.graph.draws import draw_again
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.flow_units import unit_modules
from lightning_topt.graph.step_flow import StepFlow, TensorRef


class StageDone(BaseException):
    """Ends a pass at the first call of a later stage; user code that catches `Exception` lets it
    through.
    """


@dataclass(frozen=True)
class StageOutput:
    """A `StageOutput` has the tensors `sent` that later stages need, without a graph, and the last
    stage's `result`.
    """

    sent: dict[TensorRef, Tensor]
    result: Any = None


class StagePass:
    """A `StagePass` runs passes of the stages of one rank on microbatches that have one flow.

    Args:
        module: the whole module, of which this rank holds the parameters that its stages need.
        flow: what the step calls, traced with `units`.
        stage_of_call: the stage of each call of the flow (see `assign_calls`).
        units: the named blocks.
        order: of random numbers; one object for all passes of a rank.
        whole: makes whole tensors of those that are in slices, in what later stages need and in
            what the step returns.
    """

    def __init__(
        self,
        module: nn.Module,
        flow: StepFlow,
        stage_of_call: Sequence[int],
        *,
        units: Sequence[str],
        device: torch.device | str = "cpu",
        order: RandomOrder | None = None,
        whole: Callable[[Any], Any] | None = None,
    ) -> None:
        self._whole = whole or (lambda value: value)
        self.flow, self.stage_of_call = flow, tuple(stage_of_call)
        self._last = max(stage_of_call, default=0)
        self._stand_ins = StandIns(torch.device(device))
        self._order = order if order is not None else RandomOrder(torch.device(device))
        self._units = taken_over(unit_modules(module, units), self._call)
        self._silenced = silenced(module, self._nothing_measured)
        self._draws_after = [
            flow.draws_from(self._first_call(stage + 1)) for stage in range(self._last + 1)
        ]
        self._crossings = flow.crossings(stage_of_call)
        self._passes: dict[tuple[int, int], StageForward] = {}
        self._current: StageForward | None = None

    def _first_call(self, stage_index: int) -> int:
        """Return the first call of this stage or a later one."""
        return sum(stage < stage_index for stage in self.stage_of_call)

    # ---- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        stage_index: int,
        microbatch_index: int,
        run: Callable[[], Any],
        received: Mapping[TensorRef, Tensor],
    ) -> StageOutput:
        """Run the forward pass of a stage: `run` is the user's step on the microbatch.

        `received` has the tensors of earlier stages that this stage needs; they become the pass's
        own. Where gradients are computed, `backward` has to follow.

        Raises CaptureError, a ValueError, where the step does not do what its flow says, or reads
        values of other stages.
        """
        state = self._begin(stage_index, received)
        is_last = stage_index == self._last
        attributes = self._units if is_last else [*self._units, *self._silenced]
        with self._order.microbatch(microbatch_index, stage_index, on_host=self.flow.draws_on_host):
            self._current, result = state, None
            try:
                with replaced(attributes):
                    result = self._whole(run())
                if state.is_done:
                    raise CaptureError(
                        "the step catches BaseException (or has a bare except), by which a stage "
                        "of a pipeline ends its pass; catch Exception"
                    )
            except StageDone:
                if not state.is_done:
                    raise
            except Exception as error:
                if (explained := read_of_shape(error, stage_index)) is not None:
                    raise explained from error
                raise
            finally:
                self._current = None
            self._check_end(state, is_last, result)
            draw_again(self._draws_after[stage_index], self._stand_ins.device)
        if torch.is_grad_enabled() and (state.leaves or state.edges or is_last):
            self._passes[stage_index, microbatch_index] = state
        return StageOutput(state.sent, result)

    def _begin(self, stage_index: int, received: Mapping[TensorRef, Tensor]) -> StageForward:
        state = StageForward(stage_index)
        for ref, stages in self._crossings.items():
            if stage_index in stages:
                assert ref in received, f"stage {stage_index} needs {ref} and did not receive it"
                tensor = received[ref].detach()
                if self.flow.spec(ref).requires_grad and torch.is_grad_enabled():
                    state.leaves[ref] = tensor.requires_grad_()
                    tensor = Received.apply(tensor)  # type: ignore[no-untyped-call]
                state.received[ref] = tensor
        return state

    def _call(
        self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state = self._current
        if state is None or state.is_inside:
            return call(*args, **kwargs)
        if state.is_backward:
            return self._again(state, path, call, args, kwargs)
        if (
            state.next_call >= len(self.flow.calls)
            or self.flow.calls[state.next_call].module != path
        ):
            raise self._surprise(state, path)
        unit = self.flow.calls[state.next_call]
        stage = self.stage_of_call[unit.index]
        if stage > state.stage_index:
            state.is_done = True
            raise StageDone
        state.next_call += 1
        if stage < state.stage_index:
            draw_again(unit.draws, self._stand_ins.device)
            return self._stand_ins.result(unit, state.received)
        check_real((args, kwargs), f"block {path!r} is given")
        state.is_inside = True
        try:
            result = call(*args, **kwargs)
        finally:
            state.is_inside = False
        self._keep(state, unit.index, result)
        return result

    def _again(
        self,
        state: StageForward,
        path: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Let a call of this stage run that is recomputed in the backward pass."""
        stages = {self.stage_of_call[unit.index] for unit in self.flow.calls if unit.module == path}
        if stages and state.stage_index not in stages:  # others are inside of blocks
            raise CaptureError(
                f"the backward pass of stage {state.stage_index} recomputes a part of the step "
                f"that calls block {path!r}, which other stages run; let torch.utils.checkpoint "
                "hold single blocks, or give a plan without a pipeline"
            )
        return call(*args, **kwargs)

    def _keep(self, state: StageForward, index: int, result: Any) -> None:
        """Keep what a call of this stage returned where later stages need it."""
        unit = self.flow.calls[index]
        leaves = tree_leaves(result)
        check_real(leaves, f"block {unit.module!r} returns")
        if len(leaves) != len(unit.leaves):
            raise self._surprise(state, unit.module)
        for number, tensor in enumerate(leaves):
            ref = TensorRef(index, number)
            if ref not in self._crossings:
                continue
            spec, tensor = self.flow.spec(ref), self._whole(tensor)
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise self._surprise(state, unit.module)
            if tensor.requires_grad and spec.requires_grad:
                state.edges[ref] = get_gradient_edge(tensor)
            sent = tensor.detach()
            if spec.is_rewritten or sent.stride() != spec.stride:
                sent = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device=sent.device
                ).copy_(sent)
            state.sent[ref] = sent

    def _nothing_measured(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=self._stand_ins.device)

    def _check_end(self, state: StageForward, is_last: bool, result: Any) -> None:
        if not is_last and not state.is_done:
            raise self._surprise(state, "")
        if is_last:
            if state.next_call != len(self.flow.calls):
                raise self._surprise(state, "")
            check_real(result, "the step returns")

    def _surprise(self, state: StageForward, path: str) -> CaptureError:
        done, calls = state.next_call, self.flow.calls
        expected = f"block {calls[done].module!r}" if done < len(calls) else "no further block"
        found = f"calls {path!r}, or it returned something else," if path else "ends"
        return CaptureError(
            f"on this microbatch the step {found} where stage {state.stage_index} of the pipeline "
            f"expected {expected} as in its trace; a step whose calls depend on more than the "
            "shapes of its batch needs a plan without a pipeline"
        )

    # ---- backward --------------------------------------------------------------------------------

    def backward(
        self,
        stage_index: int,
        microbatch_index: int,
        gradients: Mapping[TensorRef, Tensor],
        *,
        loss: Tensor | None = None,
    ) -> dict[TensorRef, Tensor]:
        """Run the backward pass of a stage, add to the gradients of parameters, and forget the
        microbatch.

        Args:
            gradients: of what the stage sent, summed over the stages that received it.
            loss: of the last stage, already weighted.

        Returns the gradients of what was received, for every tensor that requires one; zeros where
        it had no influence.
        """
        state = self._passes.pop((stage_index, microbatch_index), None) or StageForward(stage_index)
        roots, given = state.roots(gradients, loss)
        if roots:
            with self._recomputing(state):
                torch.autograd.backward(roots, given)
        return state.gradients({ref: leaf.grad for ref, leaf in state.leaves.items()})

    def backward_input(
        self,
        stage_index: int,
        microbatch_index: int,
        gradients: Mapping[TensorRef, Tensor],
        *,
        loss: Tensor | None = None,
    ) -> dict[TensorRef, Tensor]:
        """Do what `backward` does but for the gradients of parameters; `backward_weight` has to
        follow.
        """
        state = self._passes.get((stage_index, microbatch_index)) or StageForward(stage_index)
        roots, given = state.roots(gradients, loss)
        state.weights = SplitBackward(roots, given, list(state.leaves.values()))
        with self._recomputing(state):
            found = dict(zip(state.leaves, state.weights.inputs(), strict=True))
        made = state.gradients(found)
        state.leaves, state.edges, state.received, state.sent = {}, {}, {}, {}
        return made

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        """Add the gradients of parameters that `backward_input` left out, and forget the
        microbatch.

        It takes no gradients and returns none, as the other backward passes do: nothing is received
        for it, and nothing sent.
        """
        state = self._passes.pop((stage_index, microbatch_index), None)
        if state is not None:
            assert state.weights is not None, "backward_weight before backward_input"
            with self._recomputing(state):
                state.weights.parameters()

    @contextmanager
    def _recomputing(self, state: StageForward) -> Iterator[None]:
        state.is_backward, self._current = True, state
        try:
            with replaced(self._units):
                yield
        finally:
            self._current = None

    def forget(self) -> None:
        """Drop all microbatches whose backward pass has not come."""
        self._passes.clear()
