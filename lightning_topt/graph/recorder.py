"""Record one forward and backward pass: operators, calls of modules, lifetimes of memory.

    recorder = Recorder(copied, tensors_of_the_batch)
    with recorder.forward():
        loss = copied.training_step(batch, 0)
    with recorder.backward(loss):
        loss.backward()
    recorder.recording

Where it comes from:
    operators         a dispatch mode below autograd sees every low-level call
    their module      hooks on modules; in the backward pass sequence numbers of autograd nodes
                      (`AutogradNodes`)
    what is saved     hooks on saved tensors
    when it is freed  weak references to storages (`LiveStorages`)

A recorder watches a copy, on fake tensors or, where a step reads values, on real ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.graph.kernels import (
    ALLOCATIONS,
    QUERIES,
    Frozen,
    Measured,
    freeze,
    hidden_bytes,
    is_collective,
    is_strided,
    is_view,
    measure,
    skip_collective,
    written_tensors,
)
from lightning_topt.graph.module_copy import fake_device, runs_metrics
from lightning_topt.graph.recording import (
    OUTSIDE,
    CallRecord,
    OpRecord,
    Recording,
    Shape,
    StorageRecord,
)
from lightning_topt.graph.structures import tensors_in

SUM_OF_GRADIENTS = "aten::add"
_CAST = torch.ops.aten._to_copy.default


class _Frame:
    """A module call that is under way; `op` is its operator when the module is a leaf."""

    def __init__(self, call: CallRecord, op: int | None) -> None:
        self.call, self.op = call, op


class Recorder(TorchDispatchMode):
    """A mode that records a step; `recording` has the result.

    Args:
        module: what will run; hooks are put on its submodules and its parameters.
        outside: further tensors that exist before the pass (the batch).

    Attributes:
        failed: the operator that was running when an error was raised.
        current: the operator that runs, or ran last.
        autocast: the dtype of autocast around the step, if it is on.
    """

    def __init__(self, module: nn.Module, outside: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.failed: OpOverload | None = None
        self.autocast: torch.dtype | None = None
        # where the step is
        self.is_backward, self.current = False, 0
        outside = list(outside)
        self.memory = LiveStorages(
            self.recording, [*module.parameters(), *module.buffers(), *outside]
        )
        # parameters by address; of tied ones the first name counts
        self._parameters = {
            p.untyped_storage()._cdata: name
            for name, p in reversed(list(module.named_parameters()))
            if is_strided(p)
        }
        self._copies: dict[StorageRecord, str] = {}  # in 16 bits, of parameters
        # weights of recurrent layers have one dtype with their biases
        recurrent = (part for part in module.modules() if isinstance(part, nn.RNNBase))
        weights = (p for part in recurrent for p in part.parameters(recurse=False))
        self.recording.read = {self._parameters[p.untyped_storage()._cdata] for p in weights}
        self._measured: dict[Frozen, Measured] = {}  # by operator and arguments
        self._counts: Counter[str] = Counter()  # how often a name was given
        self._frames: list[_Frame] = []
        self.nodes = AutogradNodes()
        self._unclaimed: list[StorageRecord] = []  # saved by an operator that is not known yet
        self._hook(module)

    # ---- life cycle ------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap the forward pass."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with self, saved:
            yield
        self._claim_saved(self.current)
        self.nodes.claim(self.current)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Wrap the backward pass from `loss`."""
        self.is_backward = True
        # the first kernel of the pass has no node of its own: it belongs to the loss
        self.current = self.nodes.op_of(loss.grad_fn, self.current)
        self.recording.backward_start = len(self.recording.kernel_ops)
        with self:
            yield

    def _hook(self, module: nn.Module) -> None:
        # gradients of parameters, then calls of modules; the root and metrics are no blocks
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # after autograd has added to ``.grad``
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
        for path, submodule in module.named_modules():
            if path and not runs_metrics(submodule):
                enter, leave = partial(self._enter, path), partial(self._exit, path)
                submodule.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                submodule.register_forward_hook(leave, with_kwargs=True)

    def _enter(
        self, path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self.is_backward:
            return
        self.nodes.claim(self.current)
        # storages made from this tick on are the call's own
        tick = len(self.recording.kernel_ops)
        call = CallRecord(path, tick, tick, self.memory.within((args, kwargs)))
        self.recording.calls.append(call)
        # a leaf module is one operator, whatever runs inside of it
        is_leaf = next(module.children(), None) is None
        op = self._new_op(path, type(module).__name__, (*self.stack(), path)) if is_leaf else None
        self._frames.append(_Frame(call, op))

    def _exit(
        self,
        path: str,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> None:
        if self.is_backward:
            return
        # A call that raised, and whose error somebody caught, has left its frame behind.
        while (frame := self._frames.pop()).call.path != path:
            frame.call.exit = len(self.recording.kernel_ops)
        tensors, call = list(tensors_in(output)), frame.call
        call.exit, call.outputs = len(self.recording.kernel_ops), self.memory.within(tensors)
        call.needs_grad = any(tensor.requires_grad for tensor in tensors)
        if frame.op is not None:
            self.recording.ops[frame.op].outputs = [shape_of(tensor) for tensor in tensors]
            self.nodes.claim(frame.op)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.recording.with_gradient.add(name)
            # the gradient itself, and the parts that autograd added to get it
            todo = self.memory.within(parameter.grad)
            for storage in todo:
                storage.is_left = True
            while todo:
                storage = todo.pop()
                if storage.gradient_of is None:
                    storage.gradient_of = name
                    todo += storage.parts

    # ---- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and record it."""
        kwargs = kwargs or {}
        if func._schema.name in QUERIES:
            device = fake_device(func, args)  # autograd asks for it all the time
            return func(*args, **kwargs) if device is None else device
        # The operator is found before the call, since its autograd nodes follow.
        index = self._backward_op() if self.is_backward else self._forward_op(func)
        self.failed = func
        if is_collective(func):
            self.recording.has_collectives = True
            out = skip_collective(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self.failed = None
        self._record(index, func, args, kwargs, out)
        return out

    def _record(
        self,
        index: int,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: object,
    ) -> None:
        if is_view(func):
            op = self.recording.ops[index]
            if not self.is_backward and not op.outputs:
                op.outputs = [shape_of(tensor) for tensor in tensors_in(out)]
        else:
            self._record_kernel(index, func, args, kwargs, out)

    def _forward_op(self, func: OpOverload) -> int:
        # The operator that a call belongs to: its leaf module, or one of its own
        # inside of a leaf module its operator, else a new one, named after the innermost module
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.op is not None:
            index = frame.op
        else:
            path = frame.call.path if frame is not None else ""
            kind = func._schema.name.replace("::", ".")
            name = f"{path}:{kind.rpartition('.')[2]}"
            self._counts[name] += 1
            index = self._new_op(f"{name}_{self._counts[name]}", kind, self.stack())
        # The newest node was made for this call, all before it for the last one.
        self.nodes.claim(self.current, keep_last=True)
        self.nodes.claim(index)
        self._claim_saved(index)
        self.current = index
        return index

    def _backward_op(self) -> int:
        # The operator whose autograd node runs
        self.current = self.nodes.op_of(torch._C._current_autograd_node(), self.current)
        self.nodes.claim(self.current)
        return self.current

    def _new_op(self, name: str, kind: str, stack: tuple[str, ...]) -> int:
        self._counts[name] += 1
        suffix = f":{self._counts[name]}" if self._counts[name] > 1 else ""
        self.recording.ops.append(OpRecord(name + suffix, kind, stack))
        return len(self.recording.ops) - 1

    def stack(self) -> tuple[str, ...]:
        """Return the modules whose calls are under way, outermost first."""
        return tuple(frame.call.path for frame in self._frames)

    # ---- kernels and memory ----------------------------------------------------------------------

    def _record_kernel(
        self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        # one `Measured` for all equal calls
        tensors: list[Tensor] = []
        key = frozen_call(func, args, kwargs, tensors)
        kernel = self._measured.get(key)
        if kernel is None:
            kernel = self._measured[key] = measure(func, args, kwargs, out)
        record, op, tick = self.recording, self.recording.ops[index], len(self.recording.kernel_ops)
        # allocations take no time, but their memory counts
        if func._schema.name not in ALLOCATIONS:
            (op.backward if self.is_backward else op.forward).append(kernel)
        # reads and writes of the forward pass; new memory; what a device has beyond shapes
        sources = self.memory.within(tensors)
        is_sum = self.is_backward and func._schema.name == SUM_OF_GRADIENTS and len(sources) == 2
        cast = func is _CAST and out.dtype is self.autocast
        self._read(index, tensors, sources, is_cast=cast)
        if not self.is_backward:
            self._write(index, func, args, kwargs)
        outputs = list(tensors_in(out))
        # [Note: sums of gradients] Without a dispatch mode autograd adds in place when nobody else
        # holds the first gradient and it is no view. Counting the sum from the next tick on, when
        # the parts may be gone, is the same.
        born = tick + 1 if is_sum and not args[0]._is_view() else tick
        for tensor in outputs:
            self.memory.track(tensor, born=born, op=index, parts=tuple(sources) if is_sum else ())
        if cast and (name := self._parameters.get(tensors[0].untyped_storage()._cdata)):
            self._copies.update(dict.fromkeys(self.memory.within(out), name))
        # A real tensor has all of its bytes.
        place, hidden = hidden_bytes(func, args)
        if hidden and (storage := self.memory.of(outputs[place])):
            storage.bytes += int(hidden) if isinstance(outputs[place], FakeTensor) else 0
        if not self.is_backward and not op.outputs:
            op.outputs = [shape_of(tensor) for tensor in outputs]
        record.kernel_ops.append(index)
        record.kernels.append(kernel)

    def _read(
        self, index: int, tensors: list[Tensor], sources: list[StorageRecord], *, is_cast: bool
    ) -> None:
        op, record = self.recording.ops[index], self.recording
        for tensor in tensors:
            # views of a parameter count too: they share its memory
            name = self._parameters.get(tensor.untyped_storage()._cdata)
            if name is None:
                continue
            if not is_cast:
                record.read.add(name)
            elif not self.is_backward:  # there it is cast again where a user's code recomputes
                start = int(tensor.storage_offset())
                places = zip(tensor.shape, tensor.stride(), strict=True)
                end = start + 1 + sum(int((n - 1) * step) for n, step in places)
                # an expanded one has elements several times
                times = 2 if tensor.numel() > end - start else 1
                record.casts.setdefault(name, []).extend([(start, end)] * times)
            if not self.is_backward:
                op.parameters[name] = None
        if self.is_backward:
            return
        for source in sources:
            # an edge from who made it, or wrote to it last
            if source.op != index:
                self.recording.edges.setdefault((source.op, index), source.shape)

    def _write(
        self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for tensor in written_tensors(func, args, kwargs):
            storage = self.memory.of(tensor)
            self.recording.writes.append(
                (len(self.recording.kernel_ops), storage.born if storage else OUTSIDE)
            )
            if storage is not None:
                if name := self._copies.get(storage):  # which 16 bits would be themselves
                    self.recording.read.add(name)
                storage.op, storage.shape = index, shape_of(tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        # Note that autograd saves `tensor`
        for storage in self.memory.within(tensor):
            if not self.is_backward and not storage.saved:
                storage.saved = True
                self._unclaimed.append(storage)
        # A node is made before its operator runs, so a new number says that the operator is still
        # to come.
        if self.nodes.are_claimed:
            self._claim_saved(self.current)
        return tensor

    def _claim_saved(self, op: int) -> None:
        while self._unclaimed:
            storage = self._unclaimed.pop()
            storage.saved_by = op
            self.recording.ops[op].saved_bytes += storage.bytes


# ---- memory and autograd nodes -------------------------------------------------------------------


class LiveStorages:
    """The storages of a recording that are alive, by address.

    Their end is noted when the last tensor lets go of them. `outside` are tensors that are older;
    they are held, so that no address of theirs is used again.
    """

    def __init__(self, recording: Recording, outside: Iterable[Tensor]) -> None:
        self._recording = recording
        self._live: dict[int, StorageRecord] = {}
        self._references: dict[int, object] = {}
        self._outside = list(outside)
        self._outside_ids = {
            tensor.untyped_storage()._cdata for tensor in self._outside if is_strided(tensor)
        }

    def of(self, tensor: Tensor) -> StorageRecord | None:
        """Return the storage of `tensor`; None where it is older or not strided."""
        return self._live.get(tensor.untyped_storage()._cdata) if is_strided(tensor) else None

    def within(self, value: object) -> list[StorageRecord]:
        """Return the storages of the tensors in a structure, each once."""
        found = {t.untyped_storage()._cdata: None for t in tensors_in(value) if is_strided(t)}
        return [self._live[address] for address in found if address in self._live]

    def track(
        self, tensor: Tensor, *, born: int, op: int, parts: tuple[StorageRecord, ...] = ()
    ) -> None:
        """Note the memory of `tensor`, made by operator `op`, unless it is known."""
        if not is_strided(tensor):
            return
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self._live or address in self._outside_ids:
            return
        made = len(self._recording.kernel_ops)
        storage = StorageRecord(memory.nbytes(), born, op, shape_of(tensor), made=made, parts=parts)
        self._live[address] = storage
        self._recording.storages.append(storage)

        def freed(_: object) -> None:
            # the tick that comes next: at the last one it was still there
            storage.died = len(self._recording.kernel_ops)
            self._live.pop(address, None)
            self._references.pop(address, None)

        # called when the last tensor on this memory is gone
        self._references[address] = weakref.ref(memory, freed)


def shape_of(tensor: Tensor) -> Shape:
    """Return the sizes and dtype of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class AutogradNodes:
    """The operator that each autograd node belongs to.

    A node carries a sequence number, counted up by the thread that makes it. The numbers given out
    since the last low-level call belong to the operator of this call; so a node of the backward
    pass finds its operator.
    """

    def __init__(self) -> None:
        self._ops: dict[int, int] = {}
        self._next = torch._C._autograd._get_sequence_nr()

    def claim(self, op: int, *, keep_last: bool = False) -> None:
        """Note that nodes made since the last claim belong to operator `op`.

        `keep_last` leaves the newest unclaimed.
        """
        # the number that the next node will get
        until = torch._C._autograd._get_sequence_nr() - keep_last
        for node in range(self._next, until):
            self._ops[node] = op
        self._next = max(self._next, until)

    def op_of(self, node: Any, default: int) -> int:
        """Return the operator of `node`, `default` for None and nodes that nobody claimed."""
        return default if node is None else self._ops.get(node._sequence_nr(), default)

    @property
    def are_claimed(self) -> bool:
        """Whether no node was made since the last claim."""
        return bool(torch._C._autograd._get_sequence_nr() == self._next)


def frozen_call(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> Frozen:
    """Return a key that is equal for equal calls; the tensors of the call go to `tensors`."""
    return func, freeze(args, tensors), freeze(tuple(kwargs.items()), tensors)
