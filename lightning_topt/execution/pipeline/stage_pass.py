"""The user's own step on one microbatch, of which one stage runs its part, and its backward pass.

    passes = StagePass(module, flow, stage_of_call, units=units)
    output = passes.forward(stage, microbatch, run, received)       # output.sent goes on
    gradients = passes.backward(stage, microbatch, of_what_was_sent)

[Note: a pass of a stage] The step runs from its beginning. A call of an earlier stage returns a
stand-in: the tensors that this stage received, and shapes for all others. Calls of this stage run.
The first call of a later stage ends the pass. Functional operators run wherever their inputs are
real, and on shapes elsewhere. The last stage runs to the end.

[Note: casts] Under autocast each forward pass rounds parameters to 16 bits, and autograd keeps
these casts for backward. With n microbatches in flight that would be n equal copies of a stage's
weights. Graphs keep the first instead, as long as one of them needs it. It costs calls of Python
for each tensor that is kept, so small blocks are left alone.

[Note: random numbers] One process runs forward of microbatch 0, then of 1, and so on. A rank runs
the stages of a microbatch with passes of others in between, so generators are put to where the
microbatch began before each of its passes (`RandomOrder`, one for all passes of a rank).

In the order of this module: passes, their state, casts, stand-ins, how calls of modules are
intercepted, random numbers, checks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_unflatten

from lightning_topt.execution.pipeline.split_backward import SplitBackward
from lightning_topt.graph.errors import CaptureError, explain, user_line
from lightning_topt.graph.flow_trace import unit_modules
from lightning_topt.graph.module_copy import ShapeMode, empty_fake, runs_metrics
from lightning_topt.graph.step_flow import (
    LEAST_SHARED_BYTES,
    LeafSpec,
    StepFlow,
    TensorRef,
    UnitCall,
    draw_again,
    draw_of,
)
from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)

ABSENT: Any = object()
Attribute = tuple[dict[str, Any], str, Any]  # a namespace, a name in it, the value
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
LOGS = ("log", "log_dict", "print")
METRIC_METHODS = ("update", "compute", "forward", "_compiled_call_impl")
HALVES = (torch.bfloat16, torch.float16)
VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")


class StageDone(BaseException):
    """Ends a pass at the first call of a later stage.

    User code that catches `Exception` lets it through.
    """


@dataclass(frozen=True)
class StageOutput:
    """The tensors that later stages need, without a graph, and the last stage's result."""

    sent: dict[TensorRef, Tensor]
    result: Any = None


class StagePass:
    """Passes of the stages of one rank, on microbatches whose steps have the same flow.

    Args:
        module: that of all stages; this rank holds the parameters that its stages need.
        flow: what the step calls, traced with `units`.
        stage_of_call: the stage of each call of the flow (see `assign_calls`).
        units: the named blocks.
        order: of random numbers; one object for all passes of a rank.
        whole: makes split tensors full, in what later stages need and in what the step
            returns.
        shares_casts: see [Note: casts]. Not where parameters change while passes are open.
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
        shares_casts: bool = True,
    ) -> None:
        self._whole = whole or (lambda value: value)
        self._casts = SavedCasts() if shares_casts else None
        # units with casts that are worth sharing; here they have their parameters of any stage
        self._large = {
            path
            for path, unit in unit_modules(module, units)
            if 2 * sum(p.numel() for p in unit.parameters()) >= LEAST_SHARED_BYTES
        }
        self.flow, self.stage_of_call = flow, tuple(stage_of_call)
        self._last = max(stage_of_call, default=0)
        self._stand_ins = StandIns(torch.device(device))
        self._order = order if order is not None else RandomOrder()
        self._units = _intercepted(unit_modules(module, units), self._call)
        self._silenced = _silenced(
            module, lambda *_, **__: torch.zeros((), device=self._stand_ins.device)
        )
        # Random numbers that each stage leaves to later ones: it draws them at its end, so that
        # generators are where one process would have them.
        first_after = [
            sum(stage <= each for stage in stage_of_call) for each in range(self._last + 1)
        ]
        self._draws_after = [flow.draws_from(first) for first in first_after]
        self._crossings = flow.crossings(stage_of_call)
        self._passes: dict[tuple[int, int], StageForward] = {}
        self._current: StageForward | None = None

    # ---- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        stage_index: int,
        microbatch_index: int,
        run: Callable[[], Any],
        received: Mapping[TensorRef, Tensor],
    ) -> StageOutput:
        """Run the forward pass of a stage. Where gradients are computed, `backward` must follow.

        Args:
            stage_index: of a stage of this rank.
            microbatch_index: in the step.
            run: the user's step on the microbatch.
            received: the tensors of earlier stages that this stage needs; they become the pass's.

        Raises:
            CaptureError: a ValueError, where the step does not do what its flow says, or reads
                values of other stages.
        """
        state = self._begin(stage_index, received)
        is_last = stage_index == self._last
        attributes = self._units if is_last else [*self._units, *self._silenced]
        # Generators stand where this microbatch begins; the module's calls are intercepted.
        with self._order.microbatch(microbatch_index, stage_index):
            self._current, result = state, None
            try:
                with replaced_attributes(attributes):
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
                if (explained := _explain_value_read(error, stage_index)) is not None:
                    raise explained from error
                raise
            finally:
                self._current = None
            # The pass must have come to its end: to a later stage's call, or through all calls.
            if state.next_call != len(self.flow.calls) if is_last else not state.is_done:
                raise self._unlike_trace(state, "")
            if is_last:
                _check_real(result, "the step returns")
            draw_again(self._draws_after[stage_index], self._stand_ins.device)
        # Keep the graph for the backward pass, if there is anything to differentiate.
        if torch.is_grad_enabled() and (state.leaves or state.edges or is_last):
            self._passes[stage_index, microbatch_index] = state
        return StageOutput(state.sent, result)

    def _begin(self, stage_index: int, received: Mapping[TensorRef, Tensor]) -> StageForward:
        # The state of a new pass, with what was received as leaves of its graph
        state = StageForward(stage_index)
        for ref, stages in self._crossings.items():
            if stage_index in stages:
                assert ref in received, f"stage {stage_index} needs {ref} and did not receive it"
                tensor = received[ref].detach()
                if self.flow.spec(ref).requires_grad and torch.is_grad_enabled():
                    # A leaf ends the graph here: its gradient is sent back.
                    state.leaves[ref] = tensor.requires_grad_()
                    tensor = Received.apply(tensor)  # type: ignore[no-untyped-call]
                state.received[ref] = tensor
        return state

    def _call(
        self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Do what this stage does where the step calls the unit `path`
        state = self._current
        if state is None or state.is_inside:  # outside of a pass; a unit within a unit
            return call(*args, **kwargs)
        if state.is_backward:  # activations are recomputed
            stages = {
                self.stage_of_call[unit.index] for unit in self.flow.calls if unit.module == path
            }
            if stages and state.stage_index not in stages:  # others are inside of blocks
                raise CaptureError(
                    f"the backward pass of stage {state.stage_index} recomputes a part of the step "
                    f"that calls block {path!r}, which other stages run; let "
                    "torch.utils.checkpoint hold single blocks, or give a plan without a pipeline"
                )
            return call(*args, **kwargs)
        if (
            state.next_call >= len(self.flow.calls)
            or self.flow.calls[state.next_call].module != path
        ):
            raise self._unlike_trace(state, path)
        unit = self.flow.calls[state.next_call]
        stage = self.stage_of_call[unit.index]
        # A later stage's call ends the pass, an earlier one's returns what was received.
        if stage > state.stage_index:
            state.is_done = True
            raise StageDone
        state.next_call += 1
        if stage < state.stage_index:
            draw_again(unit.draws, self._stand_ins.device)
            return self._stand_ins.result(unit, state.received)
        # A call of this stage.
        _check_real((args, kwargs), f"block {path!r} is given")
        state.is_inside = True
        try:
            with self._sharing_casts(path):
                result = call(*args, **kwargs)
        finally:
            state.is_inside = False
        self._keep(state, unit.index, result)
        return result

    def _sharing_casts(self, path: str) -> AbstractContextManager[Any]:
        is_on = torch.is_autocast_enabled(self._stand_ins.device.type)
        if self._casts is None or not is_on or path not in self._large:
            return nullcontext()
        return self._casts.shared()

    def _keep(self, state: StageForward, index: int, result: object) -> None:
        # Keep what a call of this stage returned and later stages need
        unit = self.flow.calls[index]
        leaves = tree_leaves(result)
        _check_real(leaves, f"block {unit.module!r} returns")
        if len(leaves) != len(unit.leaves):
            raise self._unlike_trace(state, unit.module)
        for number, tensor in enumerate(leaves):
            ref = TensorRef(index, number)
            if ref not in self._crossings:
                continue
            spec, tensor = self.flow.spec(ref), self._whole(tensor)
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise self._unlike_trace(state, unit.module)
            if tensor.requires_grad and spec.requires_grad:
                state.edges[ref] = get_gradient_edge(tensor)
            # Receivers expect these strides. What the step writes to in place later is sent as it
            # is now.
            sent = tensor.detach()
            if spec.is_rewritten or sent.stride() != spec.stride:
                sent = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device=sent.device
                ).copy_(sent)
            state.sent[ref] = sent

    def _unlike_trace(self, state: StageForward, path: str) -> CaptureError:
        # The error for a step that calls `path` (empty: nothing more) unlike its trace
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
        """Run the backward pass of a stage, and forget the microbatch.

        It adds to the gradients of parameters.

        Args:
            stage_index: of a stage of this rank.
            microbatch_index: in the step; its forward pass has been run.
            gradients: of what the stage sent, summed over the stages that received it.
            loss: of the last stage, already weighted.

        Returns:
            The gradients of what was received, for every tensor that requires one; zeros where it
            had no influence.
        """
        state = self._passes.pop((stage_index, microbatch_index), None) or StageForward(stage_index)
        roots, given = state.roots(gradients, loss)
        # None of what was sent had an influence on the loss otherwise.
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
        """Do what `backward` does but for the gradients of parameters.

        `backward_weight` must follow.
        """
        state = self._passes.get((stage_index, microbatch_index)) or StageForward(stage_index)
        roots, given = state.roots(gradients, loss)
        # The graph to parameters is kept in `weights` until `backward_weight`.
        state.weights = SplitBackward(roots, given, list(state.leaves.values()))
        with self._recomputing(state):
            found = dict(zip(state.leaves, state.weights.inputs(), strict=True))
        made = state.gradients(found)
        # What is left is in `weights`: let go of the rest now.
        state.leaves, state.edges, state.received, state.sent = {}, {}, {}, {}
        return made

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        """Add the gradients of parameters that `backward_input` left out.

        The microbatch is forgotten. Nothing is received for this pass, and nothing sent.
        """
        state = self._passes.pop((stage_index, microbatch_index), None)
        if state is not None:
            assert state.weights is not None, "backward_weight before backward_input"
            with self._recomputing(state):
                state.weights.parameters()

    @contextmanager
    def _recomputing(self, state: StageForward) -> Iterator[None]:
        # Watch the calls of units that activation recomputation makes
        state.is_backward, self._current = True, state
        try:
            with replaced_attributes(self._units):
                yield
        finally:
            self._current = None

    def forget(self) -> None:
        """Drop all microbatches whose backward pass has not come."""
        self._passes.clear()


# ---- state of a pass -----------------------------------------------------------------------------


@dataclass(eq=False)
class StageForward:
    """A forward pass of a stage that is under way, or waits for its backward pass.

    `leaves` are the tensors `received` that require gradients, as they came. `edges` lead to those
    of the tensors `sent`.
    """

    stage_index: int
    received: dict[TensorRef, Tensor] = field(default_factory=dict)
    leaves: dict[TensorRef, Tensor] = field(default_factory=dict)
    sent: dict[TensorRef, Tensor] = field(default_factory=dict)
    edges: dict[TensorRef, GradientEdge] = field(default_factory=dict)
    next_call: int = 0
    is_inside: bool = False
    is_done: bool = False
    is_backward: bool = False
    weights: SplitBackward | None = None

    def roots(
        self, gradients: Mapping[TensorRef, Tensor], loss: Tensor | None
    ) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Return where backward starts (what was sent, a loss), and the gradients there."""
        roots = [self.edges[ref] for ref in self.edges if ref in gradients]
        given: list[Tensor | None] = [gradients[ref] for ref in self.edges if ref in gradients]
        if loss is not None and loss.requires_grad:
            roots.append(get_gradient_edge(loss))
            given.append(torch.ones_like(loss))
        return roots, given

    def gradients(self, found: Mapping[TensorRef, Tensor | None]) -> dict[TensorRef, Tensor]:
        """Return those of the leaves as `found`; zeros where there is none."""
        made = {}
        for ref, leaf in self.leaves.items():
            gradient = found[ref]
            made[ref] = torch.zeros_like(leaf) if gradient is None else gradient
        return made


# ---- stand-ins -----------------------------------------------------------------------------------


class SavedCasts:
    """What autograd keeps of casts of parameters: one copy for all graphs, see [Note: casts].

    It shares casts whose parameter has not changed in between. Their values are equal then.
    """

    def __init__(self) -> None:
        # by parameter: what it held, and a cast that graphs keep
        self._casts: dict[tuple[int, torch.dtype], tuple[Hashable, weakref.ref[_Cast]]] = {}

    def shared(self) -> AbstractContextManager[Any]:
        """Return a context in whose graphs casts are shared."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | tuple[_Cast, Any]:
        if (parameter := _cast_parameter(tensor)) is None:
            # detached: the graph must not keep itself alive
            return tensor.detach(), tensor._version
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        key, holds = (id(parameter), tensor.dtype), (parameter._version, parameter.data_ptr())
        known = self._casts.get(key)
        cast = known[1]() if known is not None and known[0] == holds else None
        if cast is None:
            cast = _Cast(tensor.detach(), parameter)
            self._casts[key] = holds, weakref.ref(cast)
        return cast, view


@dataclass(eq=False)
class _Cast:
    """A cast, and its parameter, which keeps its identity as long."""

    tensor: Tensor
    parameter: Tensor


def _unpack(packed: tuple[Any, Any]) -> Tensor:
    kept, rest = packed
    is_cast = isinstance(kept, _Cast)
    tensor: Tensor = kept.tensor if is_cast else kept
    if tensor._version != (0 if is_cast else rest):  # autograd leaves this check to hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} of shape {tuple(tensor.shape)} is at version "
            f"{tensor._version}; expected version {0 if is_cast else rest} instead"
        )
    return tensor.as_strided(*rest) if is_cast else tensor


def _cast_parameter(tensor: Tensor) -> Tensor | None:
    # The parameter of which `tensor` is a cast, or a view of one; None for all else
    node = tensor.grad_fn
    if tensor.dtype not in HALVES or node is None or tensor._version:
        return None
    while node.name() in VIEWS:
        node = node.next_functions[0][0]
        if node is None:
            return None
    if node.name() != "ToCopyBackward0":
        return None
    leaf = node.next_functions[0][0]
    parameter: Tensor | None = getattr(leaf, "variable", None)
    return parameter


class StandIns(ShapeMode):
    """Makes what calls of units return where they are not run.

    That are the tensors that were received, and shapes for all others. Functional operators on
    shapes compute shapes, and draw their random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device
        self._is_inside = False

    def dispatch(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the shape of a result, and draw the random numbers that `func` would draw."""
        if self._is_inside:
            return super().dispatch(func, types, args, kwargs)
        self._is_inside = True
        try:
            if torch.Tag.nondeterministic_seeded in func.tags:
                draw = draw_of(func, args, kwargs or {})
                if draw is not None and not draw.problem:
                    with torch.utils._python_dispatch._disable_current_modes():
                        draw_again([draw], self.device)
            return super().dispatch(func, types, args, kwargs)
        finally:
            self._is_inside = False

    def result(self, call: UnitCall, received: Mapping[TensorRef, Tensor]) -> Any:
        """Return what `call` returned, with the tensors that are `received` in their places."""
        # Leaves in the order of the flow: values, other leaves again, tensors.
        leaves: list[Any] = []
        for number, leaf in enumerate(call.leaves):
            if not isinstance(leaf, LeafSpec):
                leaves.append(leaf)
            elif leaf.same_as is not None:
                leaves.append(leaves[leaf.same_as])
            else:
                given = received.get(TensorRef(call.index, number))
                leaves.append(self.absent(leaf) if given is None else given)
        return tree_unflatten(leaves, call.structure)

    def absent(self, spec: LeafSpec) -> Tensor:
        """Return a tensor without elements."""
        return empty_fake(self, like=(spec.shape, spec.stride, spec.dtype, self.device))


class Received(torch.autograd.Function):
    """The identity: user code may write to its result in place, which a leaf forbids."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return another tensor on the same memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it came."""
        return gradients[0]


# ---- intercepted calls ---------------------------------------------------------------------------


@contextmanager
def replaced_attributes(attributes: Iterable[Attribute]) -> Iterator[None]:
    """Set attributes of instances for the time of the context, and put back what was there."""
    # In the reverse order at the end, so that a name that is set twice is put back.
    before: list[Attribute] = []
    try:
        for namespace, name, value in attributes:
            before.append((namespace, name, namespace.get(name, ABSENT)))
            namespace[name] = value
        yield
    finally:
        for namespace, name, value in reversed(before):
            if value is ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = value


def _intercepted(units: Iterable[tuple[str, nn.Module]], handler: Handler) -> list[Attribute]:
    # Return the attributes that let ``handler(path, call, args, kwargs)`` run calls of `units`.
    # ``call(*args, **kwargs)`` is what the module would have done. No hook is used, since user code
    # can see hooks: `nn.Module.__call__` asks ``_compiled_call_impl`` before anything else.
    def intercept(path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return handler(path, call, args, kwargs)

    found: list[Attribute] = []
    for path, module in units:
        # A compiled module keeps its own call.
        own = vars(module).get("_compiled_call_impl") or module._call_impl
        found.append((vars(module), "_compiled_call_impl", partial(intercept, path, own)))
    return found


def _silenced(module: nn.Module, make: Callable[..., Any]) -> list[Attribute]:
    # The attributes that drop logs of `module`, and let its metrics return `make()`
    found: list[Attribute] = [
        (vars(module), name, lambda *_, **__: None) for name in LOGS if hasattr(module, name)
    ]
    for submodule in module.modules():
        if runs_metrics(submodule):
            found += [(vars(submodule), name, make) for name in METRIC_METHODS]
    return found


# ---- random numbers ------------------------------------------------------------------------------


class RandomOrder:
    """Puts the generators to where a microbatch begins, for every stage of a rank.

    The first pass of each microbatch must draw all of its random numbers, and these passes must
    come in order.
    """

    def __init__(self) -> None:
        self._starts: list[RandomStates] = []
        self._seen: set[tuple[int, int]] = set()
        self._given: Sequence[RandomStates] | None = None
        self._ends: dict[int, RandomStates] = {}

    @contextmanager
    def starting_from(self, states: Sequence[RandomStates]) -> Iterator[dict[int, RandomStates]]:
        """Let microbatch m of the step within begin at ``states[m]``.

        Yields the states at the end of each microbatch's passes.
        """
        before = random_states()
        self.begin_step()
        self._given, self._ends = states, {}
        try:
            yield self._ends
        finally:
            self._given = None
            self.begin_step()
            set_random_states(before)

    @contextmanager
    def microbatch(self, microbatch_index: int, stage_index: int) -> Iterator[None]:
        """Run a pass of a microbatch; the same one again begins another step."""
        if self._given is not None:
            set_random_states(self._given[microbatch_index])
            yield
            self._ends[microbatch_index] = random_states()
            return
        # The same pass again is that of another step.
        if (stage_index, microbatch_index) in self._seen:
            self.begin_step()
        self._seen.add((stage_index, microbatch_index))
        assert microbatch_index <= len(self._starts), (
            f"microbatch {microbatch_index} runs before those in front of it"
        )
        # The first pass of a microbatch moves the generators on; later ones draw the same again.
        now = random_states()
        if microbatch_index == len(self._starts):
            self._starts.append(now)
            yield
            return
        # A later stage of this rank: the same numbers again, and then on from where it was.
        set_random_states(self._starts[microbatch_index])
        try:
            yield
        finally:
            set_random_states(now)

    def begin_step(self) -> None:
        """Forget the microbatches of the last step."""
        self._starts.clear()
        self._seen.clear()


class OneStageOrder(RandomOrder):
    """The order of a rank with one stage that takes minibatches in order.

    Generators are right as they are, but for given starts.
    """

    @contextmanager
    def microbatch(self, microbatch_index: int, stage_index: int) -> Iterator[None]:
        """Run a forward pass of a minibatch."""
        if self._given is not None:
            with super().microbatch(microbatch_index, stage_index):
                yield
            return
        yield


# ---- checks --------------------------------------------------------------------------------------


def _check_real(value: object, what: str) -> None:
    # Raise CaptureError where `value` holds a tensor without elements.
    # `what` is the beginning of the sentence: who does what with the value.
    for leaf in tree_leaves(value):
        if isinstance(leaf, FakeTensor):
            raise CaptureError(
                f"{what} a tensor that this stage did not receive: on this microbatch the step "
                "computes it from other tensors than in its trace; a step whose data flow depends "
                "on values needs a plan without a pipeline"
            )


def _explain_value_read(error: Exception, stage_index: int) -> CaptureError | None:
    # Return the error that names the line which reads a value that the stage does not have.
    # None for other errors.
    if isinstance(error, CaptureError) or explain(error, None) is None:
        return None
    return CaptureError(
        f"stage {stage_index} of the pipeline knows only the shape of a tensor whose value is read "
        f"here.\n{user_line(error)}"
        "Move this to the end of the step, or into a block, or give a plan without a pipeline."
    )
