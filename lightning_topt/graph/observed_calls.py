"""Calls of equal modules while a step is recorded: two are run and compared, the others are left
out.

[Note: calls left out] A call is left out when it must do what two calls before it did: its module
equals theirs (`equal_modules`), its arguments have their shapes, strides and plain values, the
modes of torch, the globals of the user's files and the modules around it are theirs, and both of
them ran the same operators on their arguments, their parameters and tensors of their own; wrote to
nothing else but buffers of their own; drew nothing from Python's or NumPy's generators; left
attributes and globals as they were; and left no tensor but their results and what autograd saves.
What they did in the backward pass is compared when it is over. Wherever something turns out
otherwise, the step is recorded again without leaving calls of such modules out (`Surprise`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.kernels import Measured
from lightning_topt.graph.recording import OpRecord, Recording, Shape, Storage

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Surprise(Exception):
    """Calls of the modules `key` are not alike after all."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(f"calls of equal modules {key!r} differ")
        self.key = key


@dataclass(frozen=True)
class Result:
    """A tensor that a call returned: its storage, which operator of the call made it, and how to
    make one like it.
    """

    storage: Any  # the Storage
    op: int  # counted from the first one of the call, as are all numbers of operators here
    shape: Shape
    saved_by: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Any = None  # where techniques say how it is split


@dataclass(eq=False)
class ObservedCall:
    """A call that was run. Pairs are first and end, into the recording's operators, ticks, storages
    and calls.

    `reads`: (source, operator, shape) in the order of time, where a negative source -1 - k is input
    k. `packed` are the inputs that autograd saved, `claims` the operators that were the first to
    ask for them, `casts` the identities of storages that autocast keeps until its context ends.
    """

    path: str
    key: Hashable
    depth: int  # how many modules are around it
    inputs: list[Storage | None]
    given: dict[int, int]  # input by the address of its memory
    own: set[int]  # addresses of its parameters and buffers
    buffers: set[int]
    ops: tuple[int, int]
    ticks: tuple[int, int]
    storages: tuple[int, int]
    calls: tuple[int, int]
    reads: list[tuple[int, int, Shape]] = field(default_factory=list)
    packed: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    claims: dict[int, int | None] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    structure: Any = None  # of what it returned
    current: int = 0
    gradient: Storage | None = None  # of its result
    is_like_others: bool = True

    def read(self, tensor: Tensor, storage: Storage | None, op: int) -> None:
        """Note that operator `op` of the recording reads `tensor`."""
        address = tensor.untyped_storage()._cdata
        if storage is not None and storage.born >= self.ticks[0]:
            if storage.op != op:
                self.reads.append((storage.op - self.ops[0], op - self.ops[0], storage.shape))
        elif address in self.given:
            if storage is not None:
                self.reads.append((-1 - self.given[address], op - self.ops[0], storage.shape))
        elif address not in self.own:
            self.is_like_others = False

    def cast(self, tensor: Tensor, storage: Storage | None) -> None:
        """Note that `tensor` was cast; autocast keeps a parameter's cast."""
        if (
            storage is not None
            and tensor.untyped_storage()._cdata in self.own
            and torch.is_autocast_cache_enabled()
        ):
            self.casts.add(id(storage))

    def write(self, tensor: Tensor, storage: Storage | None) -> None:
        """Note a write to `tensor`."""
        is_new = storage is not None and storage.born >= self.ticks[0]
        self.is_like_others &= is_new or tensor.untyped_storage()._cdata in self.buffers

    def save(self, storage: Storage) -> None:
        """Note that autograd saved a tensor for the backward pass."""
        if storage.born < self.ticks[0]:
            found = [number for number, given in enumerate(self.inputs) if given is storage]
            self.packed.update(found)
            self.is_like_others &= bool(found)


@dataclass(eq=False)
class CopiedCall:
    """A call that was left out and did what `model` did: an operator per result and a tick per
    direction stand for it.
    """

    path: str
    outer: tuple[str, ...]  # the modules around it
    model: ObservedCall
    inputs: list[Storage | None]
    input_ops: list[int]
    claims: dict[int, int]
    first_op: int
    tick: int
    storage: int  # places among the recording's storages and calls
    call: int
    results: list[Storage] = field(default_factory=list)
    backward_tick: int | None = None
    backward_storage: int = 0
    gradient: Storage | None = None  # of its result
    input_gradient: Storage | None = None


def forward_facts(recording: Recording, call: ObservedCall) -> Any:
    """Return what two calls must have in common in the forward pass, free of names and places."""
    op, tick = call.ops[0], call.ticks[0]
    own = {id(s): n for n, s in enumerate(recording.storages[slice(*call.storages)])}
    results = {id(result.storage) for result in call.results}

    def place(storage: Storage) -> Any:
        return own.get(
            id(storage), ("input", [number for number, s in enumerate(call.inputs) if s is storage])
        )

    return (
        [operator_facts(o, call, o.forward) for o in recording.ops[slice(*call.ops)]],
        [index - op for index in recording.kernel_ops[slice(*call.ticks)]],
        recording.kernels[slice(*call.ticks)],
        [
            (s.bytes, s.born - tick) if id(s) in results else _storage_facts(s, call)
            for s in recording.storages[slice(*call.storages)]
        ],
        [
            (
                strip(c.path, call.path),
                c.enter - tick,
                c.exit - tick,
                [*map(place, c.inputs)],
                [*map(place, c.outputs)],
            )
            for c in recording.calls[slice(*call.calls)]
        ],
        [c.needs_grad for c in recording.calls[slice(*call.calls)]],
        [
            (at - tick, born - tick if born >= tick else None)
            for at, born in recording.writes
            if tick <= at < call.ticks[1]
        ],
        [replace(result, storage=own.get(id(result.storage))) for result in call.results],
        (call.reads, call.packed, call.claims, call.structure, call.current),
    )


def operator_facts(op: OpRecord, call: ObservedCall, kernels: list[Measured]) -> Any:
    """Return what operators of two calls must have in common; kernels are one object where they are
    equal.
    """
    names = [strip(name, call.path) for name in (op.name, *op.stack[call.depth :], *op.parameters)]
    return names, op.kind, op.outputs, [id(kernel) for kernel in kernels], op.saved_bytes


def _storage_facts(storage: Storage, call: ObservedCall) -> Any:
    op, tick = call.ops[0], call.ticks[0]
    died = storage.died - tick if storage.died <= call.ticks[1] else None
    saved_by = None if storage.saved_by is None else storage.saved_by - op
    return (
        storage.bytes,
        storage.born - tick,
        storage.op - op,
        storage.shape,
        storage.saved,
        saved_by,
        died,
    )


def strip(name: str, path: str) -> str:
    """Return `name` from the module at `path` on; the names of modules around it stay as they
    are.
    """
    if name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".", ":"):
        return "*" + name[len(path) :]
    return name


def rename(name: str, model: str, copied: str) -> str:
    """Return `name` as it is where the module at `copied` stands for the one at `model`."""
    short = strip(name, model)
    return copied + short[1:] if short.startswith("*") else name


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """Return the structure of arguments or of a result, and its tensors; None for a structure that
    is not plain.
    """
    tensors: list[Tensor] = []
    try:
        return _structure(value, tensors), tensors
    except ValueError:
        return None, []


def _structure(value: Any, tensors: list[Tensor]) -> Any:
    # No closure that knows itself: the tensors would live on in a cycle.
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(_structure(part, tensors) for part in value)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return dict, tuple((key, _structure(part, tensors)) for key, part in value.items())
    raise ValueError


def rebuild(structure: Any, tensors: list[Tensor]) -> Any:
    """Return what `flatten` took apart, with `tensors`."""
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind is dict:
        return {key: rebuild(part, tensors) for key, part in content}
    return kind(rebuild(part, tensors) for part in content) if kind in (tuple, list) else content
