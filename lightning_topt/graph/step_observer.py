"""Watch real training steps of a live module. Nothing runs that would not run anyway.

    observer = StepObserver(module, batch)      # one step: its operator graph
    with observer.forward():
        loss = module.training_step(batch, 0)
    with observer.backward(loss):
        loss.backward()
    graph = observer.graph()

    timer = StepTimer(device)                   # later steps: seconds of every operator
    with timer:
        loss = module.training_step(batch, 0)
    with timer:
        loss.backward()
    timer.seconds()

A dispatch mode sees every operator with its real arguments, and hooks see calls of modules
(`recorder`). What runs beside the step (DDP's buckets, a loss scaler) is not recorded. The graph is
the one that `capture` makes on fake tensors, for batches of this size; only which operator saved a
tensor for backward is not known, since the step saves them in its own way.

[Note: pure calls] A module may run its forward again in the backward pass if its call, as it was
seen,
- read no tensor but its arguments, parameters, buffers, what it made itself, and constants that
  nobody writes to in the step;
- wrote to nothing that is older than the call (`ModuleCall.writes_outside`);
- drew from no generator but torch's default ones, which a recomputation sets back, and talked to no
  other rank;
- left its arguments, the attributes of its modules and the globals of their files as they were. A
  tensor in the place of one of the same shape counts as unchanged (a loss that each call stores).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload

from lightning_topt.graph.blocks import choose_blocks, mark_repeatable, repeat_candidates
from lightning_topt.graph.capture import call_training_step, loss_of
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.kernels import (
    ALLOCATIONS,
    QUERIES,
    encode_arguments,
    freeze,
    is_collective,
    is_strided,
    is_view,
)
from lightning_topt.graph.module_copy import filled_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import ModuleState, describe, host_random_state
from lightning_topt.graph.recorder import LiveMode, LiveStorages, Recorder
from lightning_topt.graph.recording import CallRecord, assemble
from lightning_topt.graph.structures import common_size, copied_batch, nbytes_of, tensors_in

_CYCLES_TO_ISSUE = 100_000  # of a device, about 50 us: what the host takes at most for a call
_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class StepObserver:
    """Watches one training step of `module` with the arguments `batch`.

    `name` is that of the model in the graph. Whatever goes wrong in watching never reaches the
    step: `graph` says so afterwards.
    """

    def __init__(self, module: nn.Module, batch: object, *, name: str | None = None) -> None:
        self.module, self.name = module, name or type(module).__name__
        leaves = list(tensors_in(batch))
        self._samples = common_size(batch)
        self._input_bytes = nbytes_of(leaves)
        # Python state and calls are compared beside the recording
        self._state = ModuleState(module)
        self._has_loss = False
        self._recorder = Recorder(module, leaves, live=True)
        self._calls = _CallPurity(
            self._recorder.memory, [*module.parameters(), *leaves], module.buffers()
        )
        self._recorder.calls = self._calls

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the forward pass."""
        with self._recorder.forward():
            yield

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Watch the backward pass from `loss`."""
        self._has_loss = loss.requires_grad
        with self._recorder.backward(loss):
            yield

    def close(self) -> None:
        """Stop watching: all hooks are taken off, no tensor is held."""
        self._recorder.close()

    def graph(self, *, changed: Iterable[str] | None = None) -> OpGraph:
        """Return the graph of the step that is over, cut into the default blocks.

        `changed` are paths of modules whose attributes a step leaves changed, where a later step
        has shown them; None: those that this one did. Raises CaptureError where the step was not
        seen completely.
        """
        recording, problem = self._recorder.recording, self._recorder.problem
        self.close()
        if problem is not None:
            raise CaptureError(
                f"watching the step failed ({type(problem).__name__}: {problem})"
            ) from problem
        if not self._has_loss or len(recording.kernel_ops) <= recording.backward_start:
            raise CaptureError("the step had no backward pass from a loss that needs gradients")
        graph = assemble(
            self.module,
            (recording, recording),
            name=self.name,
            sizes=(self._samples, self._samples),
            input_bytes=(self._input_bytes, self._input_bytes),
        )
        # which modules may run again: called once, pure as seen, nothing inside of them changed
        changed = self._state.changed() if changed is None else set(changed)
        impure = self._calls.impure()
        pure = {
            module
            for module in repeat_candidates(graph)
            if module not in impure
            and not any(path == module or path.startswith(f"{module}.") for path in changed)
        }
        graph = mark_repeatable(graph, pure)
        return graph.with_blocks(choose_blocks(graph))


def observe_step(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> OpGraph:
    """Run one real step of a copy of `module` on the CPU, and return its graph.

    The graph holds for batches of the size of `batch`. This is for commands, in a process of their
    own: the copy is silent, but its code runs, and may leave traces in this process. Raises
    CaptureError where the step was not seen completely, and whatever the step itself raises.
    """
    copied = filled_copy(module)
    observer = StepObserver(copied, (batch := copied_batch(batch)))
    try:
        with torch.enable_grad():
            with observer.forward(), forward_context():
                loss = loss_of(call_training_step(copied, batch))
            with observer.backward(loss):
                loss.backward()
        return observer.graph()
    finally:
        observer.close()


@dataclasses.dataclass(eq=False)
class _Open:
    """A call under way.

    `before` is how its `arguments` were, `drawn` where the generators of Python and NumPy were.
    `read` are the storages of this step that it read though they are older than the call.
    """

    call: CallRecord
    arguments: Callable[[], object] | None
    before: object
    drawn: object
    read: dict[int, object] = dataclasses.field(default_factory=dict)


class _CallPurity:
    """What calls read and do beside their arguments, while they are recorded.

    See [Note: pure calls]. `known` tensors may be read by anybody and are not written to in a step
    that a plan suits; `buffers` may be written to.
    """

    def __init__(
        self, memory: LiveStorages, known: Iterable[Tensor], buffers: Iterable[Tensor]
    ) -> None:
        self._memory = memory
        self._known = {tensor.untyped_storage()._cdata for tensor in known if is_strided(tensor)}
        self._buffers = {
            tensor.untyped_storage()._cdata for tensor in buffers if is_strided(tensor)
        } - self._known
        self._open: list[_Open] = []
        self._impure: set[str] = set()
        # paths of the calls that read memory older than the step, by address
        self._read: dict[int, set[str]] = {}
        self._written: set[int] = set()
        self._held: list[object] = []  # so that no address is used twice

    def impure(self) -> set[str]:
        """Return the paths of the modules whose calls may not run again."""
        return self._impure.union(
            *(paths for address, paths in self._read.items() if address in self._written)
        )

    def enter(self, call: CallRecord, module: nn.Module, args: tuple[object, ...]) -> None:
        """A call begins."""
        others = [value for value in args if not isinstance(value, _PLAIN)]
        arguments = (lambda: describe(others, identities=True)) if others else None
        drawn = None if type(module).__module__.startswith("torch.nn.") else host_random_state()
        self._open.append(_Open(call, arguments, arguments() if arguments else None, drawn))

    def leave(self, call: CallRecord, kwargs: Mapping[str, object]) -> None:
        """The innermost call under way ends."""
        ended = self._open.pop()
        path = ended.call.path
        if ended.arguments is not None and ended.arguments() != ended.before:
            self._impure.add(path)
        # what they were before is not known
        if any(not isinstance(value, _PLAIN) for value in kwargs.values()):
            self._impure.add(path)
        if ended.drawn is not None and ended.drawn != host_random_state():
            self._impure.update(each.call.path for each in (ended, *self._open))
        # read a tensor of this step that it was not given
        if ended.read.keys() - set(map(id, ended.call.inputs)):
            self._impure.add(path)

    def operator(
        self, func: OpOverload, values: Iterable[object], tensors: Iterable[Tensor]
    ) -> None:
        """An operator runs in all calls under way."""
        if not self._open:
            return
        if is_collective(func) or any(isinstance(value, torch.Generator) for value in values):
            self._impure.update(each.call.path for each in self._open)
            return
        for tensor in tensors:
            storage = self._memory.of(tensor)
            if storage is not None:
                for each in self._open:
                    # Made in this step and not by this call: an argument, or else impure.
                    if storage.made < each.call.enter:
                        each.read[id(storage)] = storage
                continue
            address = tensor.untyped_storage()._cdata
            if address not in self._known:
                if address not in self._read and address not in self._buffers:
                    self._held.append(tensor.untyped_storage())
                self._read.setdefault(address, set()).update(each.call.path for each in self._open)

    def write(self, tensor: Tensor) -> None:
        """An operator writes to `tensor`."""
        if self._memory.of(tensor) is None:
            self._written.add(tensor.untyped_storage()._cdata)


# ---- seconds of operators ------------------------------------------------------------------------


class StepTimer(LiveMode):
    """A mode that times every operator in place, with its own arguments and warm caches.

    Enter it around the forward and the backward pass of one or more steps. Kernels are named as in
    an `OpGraph`, so that a search finds them (`costs.compute.kernel_key`). On CPUs a call takes
    from its beginning to its end; on CUDA the device's time between two events counts. The device
    is kept busy before each call until the host has issued it: launches are no part of kernels.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_host = device.type == "cpu"
        self._times: dict[object, list[Any]] = {}
        self._names: dict[object, tuple[str, str]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` between two readings of the clock."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        name = func._schema.name
        if name in QUERIES or name in ALLOCATIONS or is_view(func) or is_collective(func):
            return func(*args, **kwargs)
        try:
            # What sets calls of one kernel apart. Its name is made once, before the call may change
            # its arguments.
            tensors: list[Tensor] = []
            key = func, freeze(args, tensors), freeze(tuple(kwargs.items()), tensors)
            if key not in self._times:
                self._times[key] = []
                encoded = json.dumps(encode_arguments(args, kwargs), sort_keys=True)
                self._names[key] = str(func), encoded
        except Exception:  # tensors of which not even the shape can be asked
            return func(*args, **kwargs)
        if self._on_host:
            start = perf_counter()
            out = func(*args, **kwargs)
            self._times[key].append(perf_counter() - start)
            return out
        # on the device: nothing waits, events are read in `seconds`
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_CYCLES_TO_ISSUE)
        first.record()
        out = func(*args, **kwargs)
        last.record()
        self._times[key].append((first, last))
        return out

    def seconds(self) -> Mapping[tuple[str, str], float]:
        """Return the median seconds of the calls of each kernel.

        Keys are its name and the JSON text of its arguments.
        """
        if not self._on_host and self._times:
            torch.cuda.synchronize()
        found: dict[tuple[str, str], float] = {}
        for key, times in self._times.items():
            if times:
                calls = (
                    times
                    if self._on_host
                    else [first.elapsed_time(last) / 1e3 for first, last in times]
                )
                found[self._names[key]] = statistics.median(calls)
        return found
