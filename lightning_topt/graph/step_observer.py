"""Watch one real training step of a live module, and return its operator graph. Nothing runs that
would not run anyway.

    observer = StepObserver(module, batch)
    with observer.forward():
        loss = module.training_step(batch, 0)
    with observer.backward(loss):
        loss.backward()
    graph = observer.graph()

A dispatch mode sees every operator with its real arguments, and hooks see calls of modules
(`record`). What runs beside the step (DDP's buckets, a loss scaler) is left out. The graph is the
one that `capture` makes on fake tensors, for batches of this size; only which operator saved a
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
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lightning_topt.graph.assemble import assemble
from lightning_topt.graph.blocks import choose_blocks, may_repeat
from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.live_storages import LiveStorages
from lightning_topt.graph.module_copy import filled_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import describe, describe_surroundings
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import Call
from lightning_topt.graph.sample_counts import common_size
from lightning_topt.graph.step_run import call_training_step, loss_of
from lightning_topt.graph.structures import copied_batch, tensors_in
from lightning_topt.graph.writes import is_strided

_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules"])


class StepObserver:
    """Watches one training step of `module` with the arguments `batch`; `name` is that of the model
    in the graph.

    Whatever goes wrong in watching never reaches the step: `graph` says so afterwards.
    """

    def __init__(self, module: nn.Module, batch: Any, *, name: str | None = None) -> None:
        self.module, self.name = module, name or type(module).__name__
        leaves = list(tensors_in(batch))
        self._samples = common_size(batch)
        self._input_bytes = sum(
            t.nbytes if is_strided(t) else t.numel() * t.element_size() for t in leaves
        )
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
        """Return the graph of the step that is over, with the blocks that are chosen where nobody
        says otherwise.

        `changed` are paths of modules whose attributes a step leaves changed, where a later step
        has shown them; None: those that this one did.

        Raises CaptureError where the step was not seen whole.
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
        changed = self._state.changed() if changed is None else set(changed)
        calls = Counter(call.module for call in graph.step.calls)
        impure = self._calls.impure()
        pure = {
            call.module
            for call in graph.step.calls
            if calls[call.module] == 1
            and may_repeat(call)
            and call.module not in impure
            and not any(
                path == call.module or path.startswith(f"{call.module}.") for path in changed
            )
        }
        modules = tuple(
            dataclasses.replace(m, repeatable=m.path in pure) for m in graph.step.modules
        )
        graph = dataclasses.replace(graph, step=dataclasses.replace(graph.step, modules=modules))
        return graph.with_blocks(choose_blocks(graph))


def observe_step(
    module: nn.Module,
    batch: Any,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> OpGraph:
    """Run one real step of a copy of `module` on the CPU, and return its graph, for batches of the
    size of `batch`.

    For commands, in a process of their own: the copy is silent, but its code runs, and may leave
    traces in this process. Raises CaptureError where the step was not seen whole, and whatever the
    step itself raises.
    """
    copied = filled_copy(module)
    observer = StepObserver(copied, (batch := copied_batch(batch)))
    try:
        with torch.enable_grad():
            with observer.forward(), forward_context():
                loss = loss_of(call_training_step(copied, batch))
            with observer.backward(loss):
                loss.backward()  # type: ignore[no-untyped-call]
        return observer.graph()
    finally:
        observer.close()


class ModuleState:
    """The attributes of each part of `module`, and the globals of the files that their classes are
    in, at one moment.

    Nothing is copied or called: values are described (`python_state`), tensors by their shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts, self._files = _attributes_of(module), _files_of(module)

    def changed(self) -> set[str]:
        """Return the paths of the modules that have changed since."""
        now, files = _attributes_of(self._module), _files_of(self._module)
        paths = {
            path
            for path in self._parts.keys() | now.keys()
            if self._parts.get(path) != now.get(path)
        }
        classes = {
            name
            for name, (cls, state) in files.items()
            if self._files.get(name, (cls, None))[1] != state
        }
        return paths | {
            path
            for path, part in self._module.named_modules()
            if _class_name(type(part)) in classes
        }


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    found = {}
    for path, part in module.named_modules():
        if path:  # the root is no block, and Lightning keeps its own notes there
            own = {
                name: value
                for name, value in vars(part).items()
                if name not in _REGISTRIES and "_hooks" not in name
            }
            found[path] = describe([own])
    return found


def _files_of(module: nn.Module) -> dict[str, tuple[type, Any]]:
    classes = {_class_name(type(part)): type(part) for path, part in module.named_modules() if path}
    return {name: (cls, describe_surroundings([cls])) for name, cls in classes.items()}


@dataclasses.dataclass(eq=False)
class _Open:
    """A call under way: how its arguments looked, where the generators of Python and NumPy were,
    and the storages of this step that it read though they are older than the call.
    """

    call: Call
    arguments: Callable[[], Any] | None
    before: Any
    drawn: Any
    read: dict[int, Any] = dataclasses.field(default_factory=dict)


class _CallPurity:
    """See [Note: pure calls]: what calls read and do beside their arguments, while they are
    recorded.

    `known` tensors may be read by anybody and are not written to in a step that a plan suits;
    `buffers` may be written to.
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
        # paths of the calls that read memory older than the step, by its address
        self._read: dict[int, set[str]] = {}
        self._written: set[int] = set()
        self._held: list[Any] = []  # so that no address is used twice

    def impure(self) -> set[str]:
        """Return the paths of the modules whose calls may not run again."""
        return self._impure.union(
            *(paths for address, paths in self._read.items() if address in self._written)
        )

    def enter(self, call: Call, module: nn.Module, args: Any) -> None:
        """A call begins."""
        others = [value for value in args if not isinstance(value, _PLAIN)]
        arguments = (lambda: describe(others, identities=True)) if others else None
        drawn = None if type(module).__module__.startswith("torch.nn.") else _drawn()
        self._open.append(_Open(call, arguments, arguments() if arguments else None, drawn))

    def leave(self, call: Call, kwargs: Any) -> None:
        """The innermost call under way ends."""
        ended = self._open.pop()
        path = ended.call.path
        if ended.arguments is not None and ended.arguments() != ended.before:
            self._impure.add(path)
        # how they looked before is not known
        if any(not isinstance(value, _PLAIN) for value in kwargs.values()):
            self._impure.add(path)
        if ended.drawn is not None and ended.drawn != _drawn():
            self._impure.update(each.call.path for each in (ended, *self._open))
        if ended.read.keys() - set(map(id, ended.call.inputs)):
            self._impure.add(path)

    def operator(self, func: OpOverload, values: Iterable[Any], tensors: Iterable[Tensor]) -> None:
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


def _drawn() -> Mapping[str, Any]:
    """The states of the generators that a recomputation does not set back."""
    state: Any = np.random.get_state()
    return {"python": random.getstate(), "numpy": (state[1].tobytes(), *state[2:])}
