"""A training step on fake tensors -> `StepFlow`: its calls of units, and what each needs of others.

    flow = trace_flow(module, run, batch, units=["embed", "blocks.0", "blocks.1", "head"])

`FlowRecorder`, a dispatch mode, follows every tensor from the calls that returned it through
functional operators to the calls that take it (`Provenance`).

[Note: values] Parameters, buffers and the batch are fake at first. Where this fails the batch is
real. What is computed of the batch alone then has values, which Python code may read, as it does on
every rank; the flow holds for this batch alone. Values that come from units cannot be read before
the last call, since stages without them could not follow. After it they read as zero here.

[Note: origins] Every tensor object has an `Origin`; views share that of their base. All tensors on
one memory belong to one `Memory`. A call may return a tensor that is older than itself (its
argument, or a view of it). It then begins another origin on the same memory: on a stage that does
not run the call the two are different tensors. Where one of them is then written to, the others are
out of date there. What reads them must run on the stage of that call. The same holds for memory
that is made inside a call and read outside without being returned.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_topt.graph.errors import (
    CaptureError,
    check_no_reentrant_checkpoint,
    explain,
    line_of_caller,
)
from lightning_topt.graph.kernels import is_collective, is_strided, is_view, written_tensors
from lightning_topt.graph.module_copy import PACKS, fake_copy, runs_metrics
from lightning_topt.graph.second_calls import host_random_state
from lightning_topt.graph.step_flow import (
    Draw,
    LeafSpec,
    SameStageConstraint,
    StepFlow,
    TensorRef,
    UnitCall,
    draw_of,
)
from lightning_topt.graph.structures import CONTAINERS, copied_batch, fake_batch, tensors_in

ADVICE = "Give a plan without a pipeline, or move this code into a submodule with what reads it."
READS_VALUES = {Tensor.__format__, Tensor.numpy, Tensor.tolist, Tensor.__array__}
LIGHTNING_LOGS = ("log", "log_dict")
METRIC_METHODS = ("update", "forward", "compute")
READS_A_VALUE = torch.ops.aten._local_scalar_dense.default
DEVICE_OF = torch.ops.prim.device.default
HOST = "Python's or NumPy's random numbers"
UNSEEN = ("_parameters", "_modules", "_trainer", "_fabric")
BETWEEN = -1  # the index outside of all calls


def trace_flow(
    module: nn.Module,
    run: Callable[[nn.Module, Any], Any],
    batch: object,
    *,
    units: Collection[str],
    device: torch.device | str = "cpu",
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> StepFlow:
    """Return the flow of ``run(module, batch)``.

    It runs on a copy of `module` without memory, in the process of every rank. Random states stay
    as they are; what else user code changes beside the copy is changed, as in the passes of stages.

    Args:
        module: whose step it is.
        run: the step: calls a method of the module that it is given, not of `module`, and returns
            what that returns.
        batch: one microbatch, on `device`; it is copied.
        units: paths of the named blocks, none of them inside of another.
        device: where the step will run.
        forward_context: makes a context around `run`, such as autocast. Whether gradients are
            computed is as at the call.

    Raises:
        CaptureError: the step cannot be run by stages or on fake tensors; the message names the
            line or the unit.
        ValueError: units do not exist or are inside of one another.
        Exception: whatever the step itself raises.
    """
    check_units(module, units)
    attempt = partial(
        _attempt,
        module,
        run,
        batch,
        units=units,
        device=torch.device(device),
        context=forward_context,
    )
    # without values first: only then is the flow that of every batch
    try:
        return attempt(has_values=False)
    except Exception:
        return attempt(has_values=True)


def _attempt(
    module: nn.Module,
    run: Callable[[nn.Module, Any], Any],
    batch: object,
    *,
    units: Collection[str],
    device: torch.device,
    context: Callable[[], AbstractContextManager[object]],
    has_values: bool,
) -> StepFlow:
    with _as_it_was(device), torch.compiler.set_stance("force_eager"):
        copied, mode = fake_copy(module, device=device)
        # a copy of the real batch, or a fake one of the same shapes
        own_batch = copied_batch(batch)
        if not has_values:
            with mode:
                own_batch = fake_batch(batch, samples=(1, 1), device=device)
        recorder = FlowRecorder(copied, list(tensors_in(own_batch)), units=units)
        _record_logs(copied, recorder)
        # a cast kept from one unit to the next would be a tensor that it hides
        torch.set_autocast_cache_enabled(False)
        try:
            with recorder, _Readable(recorder), context():
                result = run(copied, own_batch)
            recorder.finish(result, copied)
        except CaptureError:
            raise
        except Exception as error:
            if (explained := _explained(error, recorder)) is not None:
                raise explained from error
            raise
    return recorder.flow()


@contextmanager
def _as_it_was(device: torch.device) -> Iterator[None]:
    # Put back random states and the cache of autocast; `print` shows no tensors of a copy
    python, numpy, caches = (
        random.getstate(),
        np.random.get_state(),
        torch.is_autocast_cache_enabled(),
    )
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices), redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_autocast_cache_enabled(caches)


class _Readable(TorchFunctionMode):
    """Let fake tensors be printed and become lists and arrays, as which they hold zeros."""

    def __init__(self, recorder: FlowRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS_VALUES and (values := self._recorder.values(args[0])) is not None:
            args = (values, *args[1:])
        return func(*args, **(kwargs or {}))


def _explained(error: Exception, recorder: FlowRecorder) -> CaptureError | None:
    explained = explain(error, recorder.running)
    if explained is None:
        return None
    unit = recorder.unit_name
    place = f"inside of block {unit!r}" if unit else "between blocks"
    text = str(explained).rsplit("\n", 1)[0]
    return CaptureError(
        f"{text}\nThis is {place}, and stages of a pipeline know the shapes of each other's "
        f"tensors only. {ADVICE}"
    )


def _record_logs(module: nn.Module, recorder: FlowRecorder) -> None:
    # Let values that are logged, and what metrics are given, be needed at the end

    def log(*args: object, **kwargs: object) -> None:
        recorder.need_at_end((args, kwargs))

    for name in LIGHTNING_LOGS:
        if hasattr(module, name):
            vars(module)[name] = log
    # what metrics are given is needed where they run, at the end
    for path, submodule in module.named_modules():
        if runs_metrics(submodule):
            recorder.metrics.append(path)
            for name in METRIC_METHODS:
                vars(submodule)[name] = _needing(getattr(submodule, name), recorder)


def _needing(method: Callable[..., Any], recorder: FlowRecorder) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.need_at_end((args, kwargs))
        was_inside, recorder.in_metric = recorder.in_metric, True
        try:
            return method(*args, **kwargs)
        finally:
            recorder.in_metric = was_inside

    return run


# ---- units ---------------------------------------------------------------------------------------


def check_units(module: nn.Module, units: Collection[str]) -> None:
    """Raise ValueError for `units` that cannot be run by stages.

    `module` does not have them, or they lie inside of one another.
    """
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    for unit in units:
        if not unit or unit not in paths:
            raise ValueError(
                f"{type(module).__name__} has no module {unit!r} that a stage could run; name its "
                "submodules"
            )
        for outer in parents(unit):
            if outer in units:
                raise ValueError(
                    f"block {unit!r} lies inside of block {outer!r}; a stage runs one or the other"
                )


def parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules around the one at `path`, innermost first, no root."""
    while path := path.rpartition(".")[0]:
        yield path


def unit_modules(module: nn.Module, units: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return, with their paths, all modules whose calls may be calls of units.

    These are the ones that contain no named block.
    """
    # modules around named blocks are opened, all others run as one
    opened = {""}
    for unit in units:
        opened.update(parents(unit))
    found: list[tuple[str, nn.Module]] = []
    named = {id(module.get_submodule(unit)): unit for unit in units}
    for path, submodule in module.named_modules():
        if path not in opened and not runs_metrics(submodule):
            found.append((named.get(id(submodule), path), submodule))
    return found


# ---- recording -----------------------------------------------------------------------------------


class FlowRecorder(TorchDispatchMode):
    """A mode that watches a step run on a copy, and notes what its calls need of one another.

    Enter it, run the step of `module`, leave it, call `finish` and take the `flow`.

    Args:
        module: a fake copy, whose calls of units are watched.
        batch: the tensors of the batch, which are real.
        units: paths of the named blocks.
    """

    def __init__(
        self, module: nn.Module, batch: Iterable[Tensor], *, units: Collection[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.metrics: list[str] = []
        self.in_metric = False  # what it reads of the batch only the last stage reads
        self.running: OpOverload | None = None
        self.unit_name = ""
        self._at = BETWEEN
        self._origins = Provenance()
        self._calls: list[FlowReader] = []
        self._end = FlowReader()
        self._bonds: dict[tuple[int, int], str] = {}
        self._draws: list[Draw] = []
        self._rewritten: set[TensorRef] = set()
        # by buffer: the call that reads it before all others, or follows the read
        self._read_first: dict[str, int] = {}
        # by buffer: the call that changes it after all others, or comes before the change
        self._written_last: dict[str, int] = {}
        # by address of a storage: the buffers whose values are in it
        self._made_of: dict[int, set[str]] = {}
        self._read_out: set[str] = set()  # buffers whose values units return, or the step
        self._replaced: set[str] = set()  # buffers that are other tensors at the end
        self._value_read = ""
        self._reads_values = False
        self._has_gradients = torch.is_grad_enabled()
        self._host_state, self._draws_on_host = host_random_state(), False
        self._begin(module, batch)
        self._units = unit_modules(module, units)
        for path, submodule in self._units:
            vars(submodule)["_compiled_call_impl"] = partial(self._call, path, submodule)

    def _begin(self, module: nn.Module, batch: Iterable[Tensor]) -> None:
        # parameters by name, buffers as constants, the batch as what varies
        for name, parameter in module.named_parameters():
            self._origins.begin(parameter, Origin(parameter=name))
        for name, buffer in module.named_buffers():
            if is_strided(buffer):
                self._origins.begin(buffer, Origin())
                self._origins.memory(buffer).buffer = name
        for tensor in batch:
            if is_strided(tensor):
                self._origins.begin(tensor, Origin(varies=True, is_batch=True))

    # ---- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # a question, and no operator
        if func is DEVICE_OF:
            return func(*args)
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if is_strided(tensor)]
        if is_collective(func):
            raise CaptureError(
                f"the step calls {func}, in which ranks that run other stages would not take "
                f"part.\n{line_of_caller()}"
                "Give a plan without a pipeline."
            )
        if func is READS_A_VALUE and (value := self._value(inputs[0])) is not None:
            return value
        # run it, and note: what it reads, writes, makes and draws
        self.running = func
        draw = draw_of(func, args, kwargs)
        result = func(*args, **kwargs)
        self.running = None
        # The call that reads each buffer first.
        for tensor in inputs:
            if (buffer := self._origins.memory(tensor).buffer) is not None:
                self._read_first.setdefault(buffer, self._at if self._at >= 0 else len(self._calls))
        # autograd repeats views of an old base where a view is written to
        if self._at >= 0 and not is_view(func):
            self._consume(self._calls[self._at], inputs)
        for tensor in written_tensors(func, args, kwargs):
            self._write(tensor, inputs)
        outputs = [tensor for tensor in tensors_in(result) if is_strided(tensor)]
        if func is PACKS:  # sequences per step depend on the values of lengths alone
            self._value(inputs[1])
            self._origins.made(outputs[1:], inputs[1:], inside=self._at, varies=False)
        self._origins.made(outputs, inputs, inside=self._at, varies=draw is not None)
        # Outputs made of buffers: in training batch norm only changes its averages.
        is_norm = "batch_norm" in func._schema.name
        names = {name for tensor in inputs for name in self._buffers_in(tensor, itself=not is_norm)}
        for tensor in outputs if names else ():
            if self._origins.memory(tensor).buffer is None:
                self._made_of.setdefault(tensor.untyped_storage()._cdata, set()).update(names)
        if draw is not None:
            (self._draws if self._at < 0 else self._calls[self._at].draws).append(draw)
        return result

    def _buffers_in(self, tensor: Tensor, *, itself: bool = True) -> set[str]:
        buffer = self._origins.memory(tensor).buffer
        if buffer is not None:
            return {buffer} if itself else set()
        return self._made_of.get(tensor.untyped_storage()._cdata, set())

    def _write(self, tensor: Tensor, inputs: list[Tensor]) -> None:
        buffer = self._origins.memory(tensor).buffer
        if buffer is not None:
            self._written_last[buffer] = self._at if self._at >= 0 else len(self._calls) - 1
        self._rewritten |= set(self._origins.written(tensor, inputs, inside=self._at))
        if buffer is not None and self._at >= 0:
            self._calls[self._at].writes.add(buffer)
        elif buffer is not None:
            self._end.writes.add(buffer)
            self._consume(self._end, [tensor])

    def _value(self, tensor: Tensor) -> object:
        # What a value reads as here; None to let it be read
        # of the batch alone: read as it is, on a real batch
        origin = self._origins.origin(tensor)
        if origin.is_batch and not (origin.refs or origin.reads):
            # a metric may read it as zero: gradients do not depend on that
            if self.in_metric and isinstance(tensor, FakeTensor):
                return torch.zeros((), dtype=tensor.dtype).tolist()
            if isinstance(tensor, FakeTensor):
                raise CaptureError("the step reads values of the batch", needs_values=True)
            self._reads_values = True
            return None
        if isinstance(tensor, FakeTensor):
            if self._at >= 0:
                return None
        elif not origin.varies:
            return None
        # of units: only the end of the step may read it, as zero
        self._consume(self._end, [tensor])
        self._value_read = self._value_read or line_of_caller()
        return (
            torch.zeros((), dtype=tensor.dtype).tolist() if isinstance(tensor, FakeTensor) else None
        )

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor as which `tensor` reads outside of operators; None to let it be read."""
        if not isinstance(tensor, FakeTensor) or self._at >= 0:
            return None
        self._value(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    # ---- calls of units --------------------------------------------------------------------------

    def _call(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Run a call of a unit; calls inside of another one are part of that
        # inside of another call, or while nothing is recorded
        if self._at >= 0 or self not in list(
            torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ):
            return module._call_impl(*args, **kwargs)
        if self._value_read:
            raise CaptureError(
                "the step reads the value of a tensor before its last block has run, and stages "
                "of a pipeline know only "
                f"the shapes of what others compute.\n{self._value_read}Move this to the end of "
                "the step, or into a block, or "
                "give a plan without a pipeline."
            )
        if self._has_gradients and not torch.is_grad_enabled():
            check_no_reentrant_checkpoint(path)
        # what the call needs: its arguments, apart from its own parameters
        at = len(self._calls)
        tensors = (t for t in (*module.parameters(), *module.buffers()) if is_strided(t))
        own = {id(self._origins.origin(tensor)) for tensor in tensors}
        call = FlowReader(path, at, own)
        # random numbers drawn since the last call
        self._note_host_draws()
        call.draws_before, self._draws = tuple(self._draws), []
        self._calls.append(call)
        self._consume(call, _leaves((args, kwargs)))
        self._at, self.unit_name = at, path
        result = module._call_impl(*args, **kwargs)
        self._at, self.unit_name = BETWEEN, ""
        if host_random_state() != self._host_state:
            self._host_state = host_random_state()
            call.draws.append(Draw(None, (), (), problem=HOST))
        return self._returned(call, result)

    def _returned(self, call: FlowReader, result: object) -> Any:
        # Note what a call returned, and return the same with other tensor objects. What is seen of
        # them inside of the call is kept apart in this way.
        leaves, call.structure = tree_flatten(result)
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                call.leaves.append(leaf)
                continue
            call.leaves.append(leaf_spec(call.module, leaf, seen.get(id(leaf))))
            self._read_out |= self._buffers_in(leaf)
            # what is returned twice is one object afterwards as well
            if (first := seen.setdefault(id(leaf), number)) != number:
                leaves[number] = leaves[first]
                continue
            # a view of all of it: another object with an origin of its own
            ref = TensorRef(call.index, number)
            is_older = self._origins.memory(leaf).made_in != call.index
            leaves[number] = leaf[...]
            self._origins.begin(
                leaves[number],
                Origin({ref}, leaf=ref, varies=True, alias_call=call.index if is_older else -1),
            )
        return tree_unflatten(leaves, call.structure)

    # ---- needs -----------------------------------------------------------------------------------

    def need_at_end(self, value: object) -> None:
        """Note that the end of the step needs the tensors in `value`."""
        self._consume(self._end, _leaves(value))

    def _consume(self, reader: FlowReader, tensors: Iterable[Tensor]) -> None:
        # Note that `reader` needs what `tensors` are made of
        combined, at = Origin(), reader.index
        for tensor in tensors:
            # made inside of this very call
            if not is_strided(tensor) or (at >= 0 and self._origins.memory(tensor).made_in == at):
                continue
            origin = self._origins.origin(tensor)
            if id(origin) in reader.own:
                combined.same_stage.update(origin.same_stage)
            else:
                self._origins.join(combined, [tensor], inside=at)
        reader.needs |= combined.refs
        reader.reads |= combined.reads
        for call, reason in combined.same_stage.items():
            if call != at:
                self._bonds.setdefault((call, at), reason)

    def finish(self, result: object, module: nn.Module) -> None:
        """Note what the step returned, and left in attributes of modules that no unit contains.

        Call it at the end.
        """
        self.need_at_end(result)
        self._read_out.update(
            *(self._buffers_in(tensor) for tensor in _leaves(result) if is_strided(tensor))
        )
        # buffers in whose place is another tensor now
        named = ((name, buffer) for name, buffer in module.named_buffers() if is_strided(buffer))
        self._replaced = {
            name for name, buffer in named if self._origins.memory(buffer).buffer is None
        }
        # tensors that are left in attributes, where code after the step may read them
        units = {path for path, _ in self._units}
        for path, submodule in module.named_modules():
            if path in units:
                continue
            left = [
                v
                for name, v in vars(submodule).items()
                if name not in UNSEEN and isinstance(v, CONTAINERS)
            ]
            known = (t for t in tensors_in(left) if is_strided(t) and self._origins.knows(t))
            self.need_at_end([t for t in known if not self._origins.hidden_in(t)])
        self._note_host_draws()
        # A buffer that is read, then changed: the next step reads it where it is changed.
        for name, last in self._written_last.items():
            if (first := self._read_first.get(name, last)) < last:
                is_after = last == len(self._calls) - 1 and name not in self._calls[last].writes
                second = BETWEEN if is_after else last
                self._bonds.setdefault(
                    (first, second), f"reads buffer {name!r} in the next step as it is changed"
                )

    def _note_host_draws(self) -> None:
        if host_random_state() == self._host_state:
            return
        self._host_state = host_random_state()
        if self._calls:
            self._draws.append(Draw(None, (), (), problem=HOST))
        self._draws_on_host = True

    def flow(self) -> StepFlow:
        """Return the flow of the step."""
        calls = tuple(call.unit_call(self._rewritten) for call in self._calls)
        same_stage = tuple(
            # BETWEEN, as the second of a pair, is the end of the step
            SameStageConstraint(a, len(calls) if b < 0 else b, why)
            for (a, b), why in sorted(self._bonds.items())
        )
        return StepFlow(
            calls,
            frozenset(self._end.needs),
            end_reads=frozenset(self._end.reads),
            end_draws=tuple(self._draws),
            end_writes=frozenset(self._end.writes),
            same_stage=same_stage,
            carried=frozenset(self._read_out & {*self._written_last, *self._replaced}),
            metrics=tuple(self.metrics),
            reads_values=self._reads_values,
            draws_on_host=self._draws_on_host,
        )


def _leaves(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(eq=False)
class FlowReader:
    """A call of a unit, or the end of the step, and what it needs.

    `own` are identities of the origins of its parameters.
    """

    module: str = ""
    index: int = BETWEEN
    own: set[int] = field(default_factory=set)
    needs: set[TensorRef] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    draws: list[Draw] = field(default_factory=list)
    draws_before: tuple[Draw, ...] = ()
    structure: Any = None
    leaves: list[Any] = field(default_factory=list)

    def unit_call(self, rewritten: Collection[TensorRef]) -> UnitCall:
        """Return the call as the flow has it.

        `rewritten` are the results, of all calls, that the step writes to later.
        """
        leaves = (
            replace(leaf, is_rewritten=True) if TensorRef(self.index, number) in rewritten else leaf
            for number, leaf in enumerate(self.leaves)
        )
        return UnitCall(
            self.module,
            self.index,
            self.structure,
            tuple(leaves),
            needs=frozenset(ref for ref in self.needs if ref.call != self.index),
            reads=frozenset(self.reads),
            draws=tuple(self.draws),
            draws_before=self.draws_before,
            writes=frozenset(self.writes),
        )


def leaf_spec(unit: str, tensor: Tensor, same_as: int | None) -> LeafSpec:
    """Return the shape and kind of a tensor that a call of `unit` returned.

    `same_as` is the number of an earlier leaf that is the same tensor.
    """
    if not is_strided(tensor):
        raise CaptureError(
            f"block {unit!r} returns a tensor with layout {tensor.layout}, which cannot pass from "
            "stage to stage; give a plan without a pipeline, or a block that contains what reads it"
        )
    # a stand-in is dense: overlapping or sparse strides become contiguous ones
    stride = tensor.stride()
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(tensor):
        stride = torch.empty(tensor.shape, device="meta").stride()
    return LeafSpec(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.requires_grad, same_as)


# ---- where tensors come from ---------------------------------------------------------------------


@dataclass(eq=False)
class Origin:
    """What a tensor is made of; see [Note: origins].

    Args:
        refs: outputs of calls that functional operators made it of.
        reads: parameters that they made it of.
        parameter: its name if it is one.
        made_in: the call inside of which it was made, -1 for none.
        alias_call: the call that began it, -1 for none.
        leaf: which output of a call it is.
        same_stage: calls on whose stage its readers must be, with the reason.
        varies: it depends on more than constants.
        is_batch: it depends on the batch and nothing else.
    """

    refs: set[TensorRef] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    parameter: str | None = None
    made_in: int = -1  # the call inside of which it was made, -1 for none
    alias_call: int = -1  # the call that began it, -1 for none
    leaf: TensorRef | None = None
    same_stage: dict[int, str] = field(default_factory=dict)
    varies: bool = False
    is_batch: bool = False  # of nothing else


@dataclass(eq=False)
class Memory:
    """The storage of tensors: inside which call it was made (-1 outside of all), its origins."""

    made_in: int = -1
    buffer: str | None = None
    origins: list[Origin] = field(default_factory=list)


class Provenance:
    """The origin of every tensor that it was shown.

    Tensors are kept alive, so that none is mistaken for another.
    """

    def __init__(self) -> None:
        self._origins: dict[int, Origin] = {}
        self._memories: dict[int, Memory] = {}
        self._held: list[object] = []

    def memory(self, tensor: Tensor) -> Memory:
        """Return the memory of `tensor`."""
        storage = tensor.untyped_storage()
        if (found := self._memories.get(storage._cdata)) is None:
            found = self._memories[storage._cdata] = Memory()
            self._held.append(storage)
        return found

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` has been seen."""
        return tensor.untyped_storage()._cdata in self._memories

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of `tensor`.

        That of the last tensor on its memory where it came without an operator.
        """
        if (found := self._origins.get(id(tensor))) is None:
            origins = self.memory(tensor).origins
            found = self.begin(tensor, origins[-1] if origins else Origin())
        return found

    def begin(self, tensor: Tensor, origin: Origin) -> Origin:
        """Let `tensor` have `origin` from now on."""
        self._origins[id(tensor)] = origin
        self._held.append(tensor)
        memory = self.memory(tensor)
        # tensors with the same origin are one entry
        if all(origin is not other for other in memory.origins):
            memory.origins.append(origin)
        return origin

    def made(
        self, outputs: Iterable[Tensor], inputs: list[Tensor], *, inside: int, varies: bool
    ) -> None:
        """Note that an operator made `outputs` of `inputs`.

        It ran inside of call `inside`, -1 for a functional one between calls.
        """
        combined: Origin | None = None
        by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in reversed(inputs)}
        for tensor in outputs:
            if id(tensor) in self._origins:
                continue
            # a view has the origin of its base
            base = by_storage.get(tensor.untyped_storage()._cdata)
            if base is not None:
                self.begin(tensor, self.origin(base))
                continue
            if combined is None:
                combined = Origin(made_in=inside, varies=varies)
                self.join(combined, inputs, inside=inside)
            self.memory(tensor).made_in = inside
            self.begin(tensor, combined)

    def join(self, origin: Origin, inputs: Iterable[Tensor], *, inside: int) -> None:
        """Add what `inputs` are made of to `origin`."""
        # of the batch alone, as long as all that varies in it is
        only_batch = origin.is_batch or not origin.varies
        for tensor in inputs:
            other = self.origin(tensor)
            memory = self.memory(tensor)
            origin.varies |= other.varies or other.parameter is not None
            only_batch &= other.is_batch or not other.varies
            if inside >= 0 and memory.made_in == inside:
                continue
            origin.refs |= other.refs
            origin.reads |= other.reads
            if other.parameter is not None:
                origin.reads.add(other.parameter)
            origin.same_stage.update(other.same_stage)
            if hidden := self.hidden_in(tensor):
                origin.same_stage.setdefault(*hidden)
        origin.is_batch = only_batch and origin.varies

    def hidden_in(self, tensor: Tensor) -> tuple[int, str] | None:
        """Return the call that made `tensor` without returning it, and why readers must be with it.

        None for other tensors.
        """
        origin = self.origin(tensor)
        if origin.made_in < 0 or not origin.varies:
            return None
        return (
            origin.made_in,
            "hands on a tensor without returning it (by attribute, hook or torch.autograd.grad), "
            "which is read",
        )

    def written(self, tensor: Tensor, sources: list[Tensor], *, inside: int) -> list[TensorRef]:
        """Note a write to `tensor`; return the outputs of calls that have its memory.

        Inside of a call all that is older becomes out of date; the call's own results begin anew
        (see `begin`).
        """
        # memory of the call's own: nobody else has it yet
        memory, origin = self.memory(tensor), self.origin(tensor)
        if inside >= 0 and memory.made_in == inside:
            self.join(origin, sources, inside=inside)
            return []
        # between calls all stages that need the tensor repeat the write
        if inside < 0:
            self.join(origin, sources, inside=inside)
        for other in memory.origins:
            if inside >= 0:
                other.same_stage.setdefault(
                    inside, "writes in place to a tensor that it was given, and the old one is read"
                )
            elif other is not origin and (call := max(origin.alias_call, other.alias_call)) >= 0:
                other.same_stage.setdefault(
                    call, "returns its own argument, which is then written to and read"
                )
        return [other.leaf for other in memory.origins if other.leaf is not None]
