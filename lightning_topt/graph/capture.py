"""LightningModule + example batch -> `OpGraph`: one training step on tensors without memory.

    graph = capture(module, batch)

How it goes:
1. `StepRun.record` runs ``training_step`` and its backward pass on a fake copy, under a `Recorder`,
   at two batch sizes. Of equal layers five are run, and the others written (`repetition`).
2. `assemble` makes one graph of both recordings: what differs scales with the batch.
3. `find_repeatable` calls modules a second time, to learn which may be recomputed.
4. `choose_blocks` cuts the graph into the modules that a plan decides about.

`topt plan` calls it in `cli.example_step`, a fit in `plugins.searched_plan`: in a process that is
thrown away, since nothing that user code leaves behind is put back.
`techniques.tensor_parallel.split_model` captures the step on slices. The graph goes to
`costs.training_step`, which prices it, in a `SearchRequest`.

[Note: second calls] A forward pass runs on a fresh copy. When it is over, every candidate is called
again with the arguments of its first call, the last one first, as in a backward pass. Its forward
may be recomputed if this call
- runs the same operators on the same memory: tensors that the call makes count as the same when
  they are made at the same place; a tensor left by the first call, or memory that was written to
  meanwhile, does not;
- leaves attributes, arguments and the globals of its file as they were; a new tensor of the same
  shape counts as the same (a loss that each call stores);
- draws no random numbers but those of torch's default generators, which a recomputation sets back;
- talks to no other rank, and raises nothing.
Candidates inside of a candidate that passes are called by it: of them only what they leave behind
is compared. Where it does not pass they are called by themselves.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_topt.graph.blocks import choose_blocks, mark_repeatable, repeat_candidates
from lightning_topt.graph.errors import (
    WAY_OUT,
    CaptureError,
    PlanError,
    explain,
    explain_transform,
    raised_by_user,
)
from lightning_topt.graph.kernels import (
    QUERIES,
    Frozen,
    freeze,
    is_collective,
    is_strided,
    skip_collective,
    written_tensors,
)
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.graph.python_state import describe, host_random_state
from lightning_topt.graph.recorder import Recorder
from lightning_topt.graph.recording import (
    PRIME,
    GraphValues,
    OneRecording,
    Recording,
    assemble,
    changed,
)
from lightning_topt.graph.repetition import (
    Stack,
    find_stacks,
    outline,
    short_copy,
    with_all_layers,
)
from lightning_topt.graph.structures import (
    batch_sizes,
    common_size,
    fake_batch,
    nbytes_of,
    tensors_in,
)

CPU = torch.device("cpu")
Adapt = Callable[[nn.Module], AbstractContextManager[object]]


def capture(
    module: nn.Module,
    batch: object,
    *,
    second_batch: object | None = None,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | str = "cpu",
    batch_scaling: bool = True,
    adapt: Adapt | None = None,
    like: OpGraph | None = None,
    one_recording: bool = False,
    stacks: Sequence[Stack] | None = None,
) -> OpGraph:
    """Return the operator graph of one training step of `module`.

    ``module.training_step(batch, 0)`` and the backward pass of its loss run on fake tensors (shapes
    without memory) at two batch sizes; what differs between the two runs scales with the batch.
    Any Python control flow is followed as this one step takes it. It runs on a copy of `module`;
    what it does elsewhere stays, so call this in a process that is thrown away.

    Args:
        module: a LightningModule with automatic optimization.
        batch: what `training_step` takes; tensors anywhere inside. One sample is captured as two.
        second_batch: a batch of another size; None doubles dimension 0 of every tensor of `batch`.
        forward_context: makes a context around `training_step`, such as autocast.
        device: the type of device that will train. It decides which kernels run and what autocast
            casts; a type other than ``"cpu"`` needs such a device in this machine, but none of its
            memory.
        batch_scaling: whether to learn how amounts grow with the batch. False captures one step of
            `batch` as it is, of any structure, and the graph holds for batches of its size only.
        adapt: is called with every copy of `module` that runs, on fake tensors, may change it, and
            returns a context around its forward, inside of `forward_context`.
        like: the graph of the same module without `adapt`: its blocks are taken, and what it says
            of second calls.
        one_recording: of fake tensors, at a large batch size, instead of two where that says as
            much; for `like` that `one_is_enough`.
        stacks: what `repeated_layers` says of the step; None: it is asked.

    Raises:
        CaptureError: the step raises an error, depends on values of tensors or uses an operator
            without a shape-only implementation (`needs_values` is then true, and `observe_step` may
            help); it runs other operators on a larger batch, returns no loss, has no trainable
            parameter or lazy ones, or the module optimizes manually. The message names the
            operator, the line and a way out.
        ValueError: this machine has no such `device`, or the options contradict one another.
    """
    check_can_run(module)
    # Without the device autograd does not raise, it ends the process.
    kind = torch.device(device).type
    if kind != "cpu" and not torch.get_device_module(kind).is_available():
        raise ValueError(
            f"a capture for {kind!r} needs such a device in this machine; capture for 'cpu' here"
        )
    if second_batch is not None and not batch_scaling:
        raise ValueError("batch_scaling=False captures one batch; leave out second_batch")
    step = StepRun(module, forward_context, torch.device(device), adapt)
    if stacks is None:
        stacks = repeated_layers(module, batch, forward_context=forward_context, device=device)
    made = partial(
        _captured,
        batch=batch,
        second_batch=second_batch,
        batch_scaling=batch_scaling,
        like=like,
        one_recording=one_recording,
    )
    with no_collection():
        if stacks:
            try:
                return made(replace(step, stacks=tuple(stacks)))
            except Exception:
                pass  # perhaps for want of its layers
        return made(step)


def _captured(
    step: StepRun,
    *,
    batch: object,
    second_batch: object | None,
    batch_scaling: bool,
    like: OpGraph | None,
    one_recording: bool,
) -> OpGraph:
    if not batch_scaling:
        return graph_of_one_size(step, batch, like)
    # two sizes from one recording, where that is enough
    if like is not None and one_recording:
        found = _from_one_recording(step, batch, like)
        if found is not None:
            return found
    return _capture_two_sizes(step, batch, second_batch, like)


def one_is_enough(
    module: nn.Module,
    batch: object,
    like: OpGraph,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | str = "cpu",
    stacks: Sequence[Stack] = (),
) -> bool:
    """Return whether one recording of a step says all that `like` does.

    `like` is what `capture` made of two, given the same module, batch, context and device.
    """
    if not like.batch_scaling:
        return False
    step = StepRun(module, forward_context, torch.device(device), stacks=tuple(stacks))
    with no_collection():
        return _from_one_recording(step, batch, like) == like


def repeated_layers(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | str = "cpu",
) -> tuple[Stack, ...]:
    """Return the stacks of layers of which a step on `batch` does the same with five as with all.

    See [Note: repetition] in `repetition`. There is none where the step does not run on fake
    tensors, which `capture` explains.
    """
    if not (stacks := find_stacks(module)):
        return ()
    step = StepRun(module, forward_context, torch.device(device))

    def outlined(left_out: tuple[Stack, ...]) -> list[object]:
        eager = torch.compiler.set_stance("force_eager")
        with replace(step, stacks=left_out).prepared(batch) as prepared, eager, forward_context():
            run = partial(call_training_step, prepared.module, prepared.batch)
            return outline(prepared.module, stacks, run)

    try:
        return stacks if outlined(()) == outlined(stacks) else ()
    except Exception:
        return ()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A collection takes long, and would end the life of tensors in cycles at no moment of the step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_of_one_size(step: StepRun, batch: object, like: OpGraph | None = None) -> OpGraph:
    """Return the graph of `step` on `batch`, which holds for batches of its size.

    `like` is as in `capture`.
    """
    # one recording, taken for two
    copied, recording, input_bytes = step.record(batch)
    size = common_size(batch)
    graph = assemble(
        copied,
        (recording, recording),
        name=type(step.module).__name__,
        sizes=(size, size),
        input_bytes=(input_bytes, input_bytes),
    )
    return _finish(graph, step, batch, like=like)


def _capture_two_sizes(
    step: StepRun, batch: object, second_batch: object | None, like: OpGraph | None
) -> OpGraph:
    sizes = batch_sizes(batch, second_batch)
    # each run: a batch, and the samples in it
    small = batch, sizes[0]
    large = small if second_batch is None else (second_batch, sizes[1])
    if sizes[0] == 1:
        # a dim of size one is special to operators (views instead of copies): use larger batches
        small, sizes = large, (2, 4)
    copied, first, first_bytes = step.record(small[0], samples=(small[1], sizes[0]))
    _, second, second_bytes = step.record(large[0], samples=(large[1], sizes[1]))
    graph = assemble(
        copied,
        (first, second),
        name=type(step.module).__name__,
        sizes=sizes,
        input_bytes=(first_bytes, second_bytes),
    )
    return _finish(graph, step, small[0], samples=(small[1], sizes[0]), like=like)


def _from_one_recording(step: StepRun, batch: object, like: OpGraph) -> OpGraph | None:
    # The graph at the sizes of `like`; None where one recording does not say
    sizes = like.step.batch_sizes
    try:
        many = batch_sizes(batch, None)[0], PRIME * sizes[0]
        copied, recording, _ = step.record(batch, samples=many, resizes=True)
        values = GraphValues(sizes, OneRecording(recording))
    except Exception:
        # torch refuses some large sizes; errors of the step itself are raised for a batch that
        # users know
        return None
    small, large = (int(like.input_bytes.at(size)) for size in sizes)
    graph = assemble(
        copied,
        (recording, recording),
        name=type(step.module).__name__,
        sizes=sizes,
        input_bytes=(small, large),
        values=values,
        repeatable={m.path for m in like.step.modules if m.repeatable},
        blocks=_blocks_in(copied, like),
    )
    return step.with_all_layers(graph)


def _finish(
    graph: OpGraph,
    step: StepRun,
    batch: object,
    *,
    samples: tuple[int, int] = (1, 1),
    like: OpGraph | None = None,
) -> OpGraph:
    """Return the graph cut into its default blocks, with what second calls of its modules did.

    With `like` both are taken from there.
    """
    if like is not None:
        graph = step.with_all_layers(graph)
        repeatable = {m.path for m in like.step.modules if m.repeatable}
        return mark_repeatable(graph, repeatable).with_blocks(like.blocks)
    found = find_repeatable(step, batch, candidates=repeat_candidates(graph), samples=samples)
    graph = step.with_all_layers(mark_repeatable(graph, found))
    return graph.with_blocks(choose_blocks(graph))


def _blocks_in(module: nn.Module, like: OpGraph) -> tuple[Block, ...]:
    # The blocks of `like` that `module` has
    paths = {path for path, _ in module.named_modules()}
    return tuple(block for block in like.blocks if block.name in paths)


def check_can_run(module: nn.Module) -> None:
    """Raise CaptureError for a module that optimizes manually, or has nothing to train."""
    if not getattr(module, "automatic_optimization", True):
        raise CaptureError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False): its "
            "training_step decides when backward passes and optimizer steps run, and a plan "
            f"cannot. {WAY_OUT}"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise CaptureError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to plan"
        )


# ---- one step on fake copies ---------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Copies of a module and of a batch, and the mode under which a step of fake ones runs."""

    module: nn.Module
    batch: object
    mode: FakeTensorMode | None = None


@dataclass(eq=False)
class StepRun:
    """Training steps of `module` on fake copies.

    Args:
        module: whose step runs.
        forward_context: makes a context around the step.
        device: the type of device that trains.
        adapt: may change the copy that is recorded before anything reads it, and returns a context
            around its forward, inside of the other.
        stacks: layers of which five are recorded.
    """

    module: nn.Module
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    device: torch.device = CPU
    adapt: Adapt | None = None
    stacks: tuple[Stack, ...] = ()

    @contextmanager
    def prepared(self, batch: object, *, samples: tuple[int, int] = (1, 1)) -> Iterator[Prepared]:
        """Give copies of the module and of `batch`, and enter the modes under which a step can run.

        `samples` resizes the batch, see `fake_batch`.
        """
        with torch.enable_grad():
            copied, mode = short_copy(self.module, self.stacks, device=self.device)
            with mode:
                yield Prepared(copied, fake_batch(batch, samples=samples, device=self.device), mode)

    def with_all_layers(self, graph: OpGraph) -> OpGraph:
        """Return `graph` with the layers that were not recorded."""
        if not self.stacks:
            return graph
        size = sum(buffer.nbytes for buffer in self.module.buffers())
        return changed(with_all_layers(graph, self.stacks), buffer_bytes=size)

    def record(
        self, batch: object, *, samples: tuple[int, int] = (1, 1), resizes: bool = False
    ) -> tuple[nn.Module, Recording, int]:
        """Return the copy that ran, what it did with `batch`, and the bytes of this batch.

        Raises CaptureError, with `needs_values` where real tensors would help.

        Args:
            batch: what `training_step` takes.
            samples: resizes it, see `fake_batch`.
            resizes: the batch is of `PRIME` batches, see [Note: one recording] in `recording`.
        """
        recorder: Recorder | None = None
        try:
            with self.prepared(batch, samples=samples) as prepared:
                copied, leaves = prepared.module, list(tensors_in(prepared.batch))
                inner = nullcontext() if self.adapt is None else self.adapt(copied)
                recorder = Recorder(copied, leaves, resizes=prepared.mode if resizes else None)
                # the step itself; compiled modules run eagerly
                with torch.compiler.set_stance("force_eager"):
                    with recorder.forward(), self.forward_context(), inner:
                        output = call_training_step(copied, prepared.batch)
                    loss = loss_of(output)
                    with recorder.backward(loss):
                        loss.backward()
            return copied, recorder.recording, nbytes_of(leaves)
        except (CaptureError, PlanError):
            raise
        except Exception as error:
            explained = explain_transform(error)
            if explained is None:
                explained = explain(error, recorder.failed if recorder else None)
            raise explained or raised_by_user(error) from error


def call_training_step(module: Any, batch: object) -> Any:
    """Call ``module.training_step`` with `batch` and the arguments that Lightning gives it.

    Returns what it returns.
    """
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CaptureError(
            "training_step(dataloader_iter) fetches its own batches, unknown before it runs. "
            f"{WAY_OUT}"
        )
    # Lightning gives `batch_idx` where there is a second positional argument, or one of this name
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    takes_index = rest or len(positional) > 1 or "batch_idx" in positional
    return module.training_step(batch, 0) if takes_index else module.training_step(batch)


def loss_of(output: object) -> Tensor:
    """Return the loss in what `training_step` returned.

    Raises CaptureError where there is none to differentiate.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss; for a capture it has "
            f"to return the loss tensor, or a dict with it under 'loss'. {WAY_OUT}"
        )
    if not loss.requires_grad or loss.numel() != 1:
        raise CaptureError(
            "the loss that training_step returned must be one number that depends on trainable "
            f"parameters; it has shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}. "
            f"{WAY_OUT}"
        )
    return loss


# ---- second calls --------------------------------------------------------------------------------


def find_repeatable(
    step: StepRun, batch: object, *, candidates: Iterable[str], samples: tuple[int, int]
) -> set[str]:
    """Return those of `candidates` whose second call does what the first did.

    See [Note: second calls]. A step that runs only once has none.

    Args:
        step: what runs.
        batch: what `training_step` takes.
        candidates: paths of modules.
        samples: resizes the batch, see `fake_batch`.
    """
    wanted = list(candidates)
    # which kernels run holds for second calls too, unlike the rest of the context (`OnAccelerator`)
    kernels = getattr(step.forward_context, "kernels", nullcontext)
    if not wanted:
        return set()
    try:
        eager = torch.compiler.set_stance("force_eager")
        with step.prepared(batch, samples=samples) as prepared, eager:
            copied, inputs = prepared.module, prepared.batch
            outside = [*copied.parameters(), *copied.buffers(), *tensors_in(inputs)]
            trace = CallTracer(outside)
            # first calls: one forward pass, with hooks of ours in the place of `forward`
            run = _Run()
            calls = {path: _Candidate(copied.get_submodule(path)) for path in wanted}
            for candidate in calls.values():
                candidate.watch(trace, run)
            with step.forward_context(), trace:
                call_training_step(copied, inputs)
            # second calls, of the modules that were called once
            counts = Counter(map(id, run.order))
            run.is_over = True
            with kernels(), trace:
                _repeat([candidate for candidate in run.order if counts[id(candidate)] == 1], trace)
            return {path for path, candidate in calls.items() if candidate.passed}
    except Exception:
        return set()  # a step that runs only once


def _repeat(candidates: list[_Candidate], trace: CallTracer) -> None:
    """Call the outermost of `candidates` again, the last one first.

    Those inside of one are called by themselves only where it does not pass.
    """
    numbers = {*map(id, candidates)}
    nested = {id(inner) for outer in candidates for inner in outer.inside}
    for candidate in reversed(candidates):
        if id(candidate) in nested:
            continue
        inside = [inner for inner in candidate.inside if id(inner) in numbers]
        # what ran inside counts for the inner candidates, if this one passes
        for inner in inside:
            inner.calls, inner.leaves = 0, False
        if candidate.repeats(trace):
            candidate.passed = True
            for inner in inside:
                inner.passed = inner.calls == 1 and not inner.leaves
        else:
            _repeat(inside, trace)


@dataclass(eq=False)
class _Run:
    """One forward pass.

    `order` are the first calls in the order of time, `under_way` those that have not ended.
    """

    order: list[_Candidate] = field(default_factory=list)
    under_way: list[_Candidate] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class _Candidate:
    """A module, its first call and the candidates called inside of it.

    `calls` counts the calls by a second call around it, `leaves` says whether they left anything.
    """

    module: nn.Module
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    first: CallTrace | None = None
    around: _Around | None = None
    forward: Any = None
    inside: list[_Candidate] = field(default_factory=list)
    calls: int = 0
    leaves: bool = False
    passed: bool = False

    def watch(self, trace: CallTracer, run: _Run) -> None:
        """Note every call of the module in `run`, and its arguments."""
        self.forward = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if run.is_over:
                # the operators are compared in the call around: here only what is left behind
                self.calls += 1
                roots = [self.module, args, kwargs]
                before = describe(roots)
                out = self.forward(*args, **kwargs)
                self.leaves |= describe(roots) != before
                return out
            for outer in run.under_way:
                outer.inside.append(self)
            run.order.append(self)
            run.under_way.append(self)
            self.args, self.kwargs, self.around = args, kwargs, _Around()
            try:
                with trace.call() as self.first:
                    return self.forward(*args, **kwargs)
            finally:
                run.under_way.pop()

        # hooks stay outside, as in a recomputation
        self.module.forward = forward

    def repeats(self, trace: CallTracer) -> bool:
        """Return whether a call with the same arguments does the same."""
        assert self.first is not None and self.around is not None
        roots = [self.module, self.args, self.kwargs]
        before, drawn = describe(roots), host_random_state()
        try:
            with self.around.again(), torch.enable_grad(), trace.call() as second:
                self.forward(*self.args, **self.kwargs)
        except Exception:
            return False
        same_python = describe(roots) == before and host_random_state() == drawn
        return same_python and not second.has_effects and second.equals(self.first)


class _Around:
    """What `torch.utils.checkpoint` sets back before it calls again: autocast, random numbers."""

    def __init__(self) -> None:
        uses_cuda = torch.cuda.is_initialized()
        kinds = ("cpu", "cuda") if uses_cuda else ("cpu",)
        self.casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        with _disable_current_modes():
            self.drawn = torch.get_rng_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        with _disable_current_modes():
            torch.set_rng_state(self.drawn)
        with ExitStack() as stack:
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            yield


# ---- what one call does, to be compared ----------------------------------------------------------


class Source(NamedTuple):
    """Memory that an operator reads.

    Args:
        kind: ``"made"`` by this call, ``"met"`` in it first, or ``"known"`` before.
        place: counts what a call makes, or what it meets.
        serial: counts all memory.
        version: counts the writes to it.
        offset: of the tensor in its storage.
    """

    kind: str
    place: int
    serial: int
    version: int
    offset: int

    def equals(self, other: Source) -> bool:
        """Return whether two calls read the same.

        Memory of their own at the same place, or the very same memory.
        """
        if self.offset != other.offset:
            return False
        # made by the calls themselves, at the same place
        if "made" in (self.kind, other.kind):
            return (self.kind, self.place) == (other.kind, other.place)
        # the very same memory, with no write in between
        if (self.serial, self.version) == (other.serial, other.version):
            return True
        # constants that every call writes anew
        return self.kind == other.kind == "met" and self.place == other.place


@dataclass
class CallTrace:
    """The operators that one call runs, and the memory that each of them reads.

    `own` are (kind, place) by serial, `places` counts them by kind. `has_effects`: it drew from a
    generator of its own or talked to other ranks.
    """

    operators: list[tuple[OpOverload, Frozen]] = field(default_factory=list)
    sources: list[list[Source]] = field(default_factory=list)
    own: dict[int, tuple[str, int]] = field(default_factory=dict)
    places: Counter[str] = field(default_factory=Counter)
    has_effects: bool = False

    def equals(self, other: CallTrace) -> bool:
        """Return whether both calls ran the same operators on the same memory."""
        return self.operators == other.operators and all(
            len(mine) == len(others) and all(a.equals(b) for a, b in zip(mine, others, strict=True))
            for mine, others in zip(self.sources, other.sources, strict=True)
        )


class CallTracer(TorchDispatchMode):
    """A mode that traces the calls within `call`; `outside` are tensors that exist before."""

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[CallTrace] = []
        self._serials: dict[int, int] = {}
        self._references: dict[int, object] = {}
        self._versions: dict[int, int] = {}
        self._count = 0
        self._outside = [tensor for tensor in outside if is_strided(tensor)]
        for tensor in self._outside:
            self._serial(tensor, "met")

    @contextmanager
    def call(self) -> Iterator[CallTrace]:
        """Trace what runs inside, also what runs in calls inside of it."""
        self._open.append(CallTrace())
        try:
            yield self._open[-1]
        finally:
            self._open.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note what it reads and writes."""
        kwargs = kwargs or {}
        if func._schema.name in QUERIES:  # made by some calls of a module and not by others
            return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        if self._open:
            self._note(func, args, kwargs)
        out = skip_collective(func, args, kwargs) if is_collective(func) else func(*args, **kwargs)
        # a write makes a new version of the memory
        for tensor in written:
            serial = self._serial(tensor, "made")
            self._versions[serial] = self._versions.get(serial, 0) + 1
        for tensor in tensors_in(out):
            if is_strided(tensor):
                self._serial(tensor, "made")
        return out

    def _note(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensors: list[Tensor] = []
        operator = func, freeze((args, tuple(kwargs.items())), tensors)
        has_effects = is_collective(func) or any(
            isinstance(v, torch.Generator) for v in (*args, *kwargs.values())
        )
        for call in self._open:
            call.operators.append(operator)
            call.sources.append([self._source(call, tensor) for tensor in tensors])
            call.has_effects |= has_effects

    def _source(self, call: CallTrace, tensor: Tensor) -> Source:
        serial = self._serial(tensor, "met")
        kind, place = call.own.get(serial, ("known", 0))
        return Source(
            kind, place, serial, self._versions.get(serial, 0), int(tensor.storage_offset())
        )

    def _serial(self, tensor: Tensor, kind: str) -> int:
        # The number of the memory of `tensor`; new memory is noted as `kind`
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self._serials:  # known: made or met before
            return self._serials[address]
        self._count += 1
        self._serials[address] = self._count
        # new for all calls under way, at the next place in each
        for call in self._open:
            call.own[self._count] = kind, call.places[kind]
            call.places[kind] += 1

        def freed(_: object) -> None:
            del self._serials[address], self._references[address]

        self._references[address] = weakref.ref(memory, freed)
        return self._count
