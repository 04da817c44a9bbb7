"""What one run of a step left behind, and the operator graph that two such runs give.

    first, second = (recorder.recording, ...)            # at two batch sizes (`recorder`)
    graph = assemble(module, (first, second), ...)       # amounts are lines through both

Time is counted in kernels: tick t is the moment after the t-th low-level call that computes
something.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_topt.graph.errors import WAY_OUT, CaptureError
from lightning_topt.graph.kernels import Measured
from lightning_topt.graph.op_graph import (
    Amount,
    Block,
    Kernel,
    Module,
    ModuleCall,
    Op,
    OpGraph,
    Parameter,
    Step,
    StepTensor,
    TensorEdge,
    TensorSpec,
)

T = TypeVar("T")
Shape = tuple[tuple[int, ...], str]  # sizes, dtype
OUTSIDE = -1  # older than the recording: parameters, buffers, the batch


@dataclass(eq=False)
class Recording:
    """All that one run of a step did.

    Args:
        ops: operators in execution order.
        edges: shape of what operator i gave to operator j, by (i, j).
        storages: all memory that was allocated, in order.
        calls: forward calls of modules, in the order of their beginnings.
        kernel_ops: the operator at each tick.
        kernels: its kernel.
        writes: (tick, birth) of every tensor changed in place, `OUTSIDE` for older ones.
        backward_start: tick of the first kernel of the backward pass.
        with_gradient: parameters that the backward pass gave a gradient.
        has_collectives: the step talked to other ranks.
        casts: of a parameter by name, the elements that autocast makes 16-bit copies of.
        read: parameters that anything else read.
        manual_passes: backward passes of manual optimization.
    """

    ops: list[OpRecord] = field(default_factory=list)
    edges: dict[tuple[int, int], Shape] = field(default_factory=dict)
    storages: list[StorageRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    kernel_ops: list[int] = field(default_factory=list)
    kernels: list[Measured] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    backward_start: int = 0
    with_gradient: set[str] = field(default_factory=set)
    has_collectives: bool = False
    manual_passes: int = 0
    casts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def sequence(self) -> Sequence[tuple[object, ...]]:
        """Return what two comparable runs share: every operator, the names of its kernels."""
        return [
            (
                op.name,
                tuple(kernel.name for kernel in op.forward),
                tuple(kernel.name for kernel in op.backward),
            )
            for op in self.ops
        ]


@dataclass(eq=False)
class OpRecord:
    """An operator as it ran; `stack` are the modules around it, outermost first."""

    name: str
    kind: str
    stack: tuple[str, ...]
    parameters: dict[str, None] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    forward: list[Measured] = field(default_factory=list)
    backward: list[Measured] = field(default_factory=list)
    saved_bytes: int = 0


@dataclass(eq=False)
class CallRecord:
    """One forward call of the module at `path`, ticks ``enter <= t < exit``."""

    path: str
    enter: int
    exit: int
    inputs: list[StorageRecord]
    outputs: list[StorageRecord] = field(default_factory=list)
    needs_grad: bool = False


@dataclass(eq=False)
class StorageRecord:
    """Memory of one tensor and its views, live at ticks ``born <= t < died``.

    It was made, or last written to, by operator `op`.
    """

    bytes: int
    born: int
    op: int
    shape: Shape
    made: int = 0  # the tick at which it came; `born` may be later
    died: float = math.inf
    saved: bool = False  # for backward, by an operator that may still be to come
    saved_by: int | None = None
    gradient_of: str | None = None  # parameter whose gradient it is, or is added to
    is_left: bool = False  # as a parameter's gradient when the step is over
    parts: tuple[StorageRecord, ...] = ()  # the gradients that autograd added to get this one


def changed(value: T, **changes: Any) -> T:
    """Return what `dataclasses.replace` does, in a fifth of its time.

    Nothing is checked or computed anew.
    """
    return made(type(value), value.__dict__ | changes)


def made(kind: type[T], values: dict[str, Any]) -> T:
    """Return an object of a dataclass with all of its `values`, in a fifth of the usual time."""
    found = object.__new__(kind)
    object.__setattr__(found, "__dict__", values)  # of frozen ones, too
    return found


Sizes = tuple[int, int]  # the two batch sizes


# ---- two recordings -> graph ---------------------------------------------------------------------


def assemble(
    module: nn.Module,
    recordings: tuple[Recording, Recording],
    *,
    name: str,
    sizes: Sizes,
    input_bytes: tuple[int, int],
) -> OpGraph:
    """Return the graph of `module` from its recordings at two batch sizes.

    Raises CaptureError when the recordings differ in more than shapes.

    Args:
        module: the copy that ran.
        recordings: one per size; the same one twice gives a graph for that size alone.
        name: of the model in the graph.
        sizes: samples of the two batches.
        input_bytes: bytes of the two batches.
    """
    _check_equal(recordings, sizes)
    first, second = recordings
    # Operators that only made views run no kernel: they are dropped, the others renumbered. A
    # Function that returns a view has saved by it what it saves.
    runs = {*first.kernel_ops}
    kept = {
        index: None
        for index, op in enumerate(first.ops)
        if op.forward or op.backward or index in runs or op.saved_bytes
    }
    values = GraphValues(sizes)
    ops = [values.op(first.ops[index], second.ops[index]) for index in kept]
    return OpGraph(
        model=name,
        batch_size=sizes[0],
        ops=tuple(ops),
        edges=tuple(
            TensorEdge(first.ops[i].name, first.ops[j].name, values.spec(shape, second.edges[i, j]))
            for (i, j), shape in first.edges.items()
            if i in kept and j in kept
        ),
        parameters=tuple(_parameters(module, first)),
        blocks=(Block("", group=0, recomputable=False),),
        step=_step(
            module, recordings, values, numbers={index: number for number, index in enumerate(kept)}
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        input_bytes=Amount.fit(sizes, input_bytes),
        batch_scaling=sizes[0] != sizes[1],
        unused=tuple(
            name
            for name, p in module.named_parameters()
            if p.requires_grad and name not in first.with_gradient
        ),
    )


def _check_equal(recordings: tuple[Recording, Recording], sizes: Sizes) -> None:
    # Raise CaptureError unless both recordings ran the same operators in the same order
    # one recording: a graph for one size alone
    if recordings[0] is recordings[1]:
        return
    first, second = (recording.sequence() for recording in recordings)
    # the first operator that differs says most; lengths come after
    for a, b in zip(first, second, strict=False):
        if a != b:
            raise CaptureError(
                f"training_step runs other operators on {sizes[0]} samples than on {sizes[1]}, "
                f"first at {a[0]!r} against {b[0]!r}: the graph must not depend on the batch size. "
                f"{WAY_OUT}"
            )
    if (
        len(first) != len(second)
        or recordings[0].edges.keys() != recordings[1].edges.keys()
        or recordings[0].kernel_ops != recordings[1].kernel_ops
        or len(recordings[0].storages) != len(recordings[1].storages)
    ):
        raise CaptureError(
            f"training_step runs {len(first)} operators on {sizes[0]} samples and {len(second)} on "
            f"{sizes[1]}, or connects them otherwise: the graph must not depend on the batch size. "
            f"{WAY_OUT}"
        )


class GraphValues:
    """Values of the graph from two recordings; what is the same object in both is made once."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._amounts: dict[tuple[float, float], Amount] = {}
        self._specs: dict[tuple[Shape, Shape], TensorSpec] = {}
        self._kernels: dict[tuple[int, int], tuple[str, Kernel]] = {}
        self._groups: dict[tuple[int, ...], tuple[Kernel, ...]] = {}

    def line(self, first: float, second: float) -> Amount:
        """Return the line through a number at both sizes."""
        key = first, second
        if key not in self._amounts:
            self._amounts[key] = Amount.fit(self.sizes, key)
        return self._amounts[key]

    def spec(self, first: Shape, second: Shape) -> TensorSpec:
        """Return what a shape of both recordings is in the graph."""
        key = first, second
        if key not in self._specs:
            # the dim that follows the batch is the first that differs
            differing = [
                dim for dim, (m, n) in enumerate(zip(first[0], second[0], strict=True)) if m != n
            ]
            self._specs[key] = TensorSpec(first[0], first[1], differing[0] if differing else None)
        return self._specs[key]

    def op(self, first: OpRecord, second: OpRecord) -> Op:
        """Return an operator of both recordings, outside of all blocks."""
        return Op(
            name=first.name,
            kind=first.kind,
            module=first.stack[-1] if first.stack else "",
            block="",
            parameters=tuple(first.parameters),
            outputs=tuple(
                self.spec(a, b) for a, b in zip(first.outputs, second.outputs, strict=True)
            ),
            forward=self.kernels(first.forward, second.forward),
            backward=self.kernels(first.backward, second.backward),
            saved_bytes=self.line(first.saved_bytes, second.saved_bytes),
            stack=first.stack,
        )

    def kernels(self, first: Sequence[Measured], second: Sequence[Measured]) -> tuple[Kernel, ...]:
        """Return one Kernel for all identical calls, in the order of their first call."""
        # repeated layers have the same calls: groups are known by these
        calls = [self._kernel(a, b) for a, b in zip(first, second, strict=True)]
        key = tuple(id(call) for call in calls)
        if key not in self._groups:
            groups: dict[str, list[Kernel]] = {}
            for text, kernel in calls:
                groups.setdefault(text, []).append(kernel)
            self._groups[key] = tuple(
                replace(group[0], count=len(group)) for group in groups.values()
            )
        return self._groups[key]

    def _kernel(self, first: Measured, second: Measured) -> tuple[str, Kernel]:
        # recorders make one object for all equal calls
        found = self._kernels.get((id(first), id(second)))
        if found is None:
            found = self._kernels[id(first), id(second)] = self._made(first, second)
        return found

    def _made(self, first: Measured, second: Measured) -> tuple[str, Kernel]:
        # work, bytes read and written, bytes allocated: lines in the number of samples
        flops, size = self.line(first.flops, second.flops), self.line(first.bytes, second.bytes)
        allocated = self.line(
            first.allocated + first.workspace, second.allocated + second.workspace
        )
        # equal texts are identical calls, which the graph counts together
        text = json.dumps([first.name, first.arguments, flops.per_sample, size.per_sample])
        return text, Kernel(first.name, first.arguments, flops, size, allocated=allocated)


def _parameters(module: nn.Module, recording: Recording) -> list[Parameter]:
    # tied parameters are one, under the first of their names
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return [
        Parameter(
            name=first,
            shape=tuple(tensors[key].shape),
            dtype=str(tensors[key].dtype).removeprefix("torch."),
            block="",
            trainable=tensors[key].requires_grad,
            aliases=tuple(aliases),
            narrow=_is_narrow(tensors[key], first, recording),
        )
        for key, (first, *aliases) in names.items()
    ]


def _is_narrow(parameter: nn.Parameter, name: str, recording: Recording) -> bool:
    # Whether it does not matter that `parameter` has 16 bits; see `Parameter`
    casts = sorted(recording.casts.get(name, ()))
    if not casts or name in recording.read or parameter.dim() < 2:
        return False
    # gradients of an element that is cast twice add up in float32
    is_once = all(end <= start for (_, end), (start, _) in pairwise(casts))
    return parameter.dtype == torch.float32 and is_once


def _step(
    module: nn.Module,
    recordings: tuple[Recording, Recording],
    values: GraphValues,
    *,
    numbers: Mapping[int, int],
) -> Step:
    first, second = recordings
    ticks = len(first.kernel_ops)
    # calls refer to storages by their place in `tensors`
    indices = {id(storage): index for index, storage in enumerate(first.storages)}
    return Step(
        batch_sizes=values.sizes,
        order=tuple(numbers[index] for index in first.kernel_ops),
        backward_start=first.backward_start,
        tensors=tuple(
            _tensor(a, b, values, names=first.ops, ticks=ticks)
            for a, b in zip(first.storages, second.storages, strict=True)
        ),
        calls=tuple(_calls(first, indices)),
        modules=tuple(list_modules(module)),
        workspaces=tuple(
            (tick, values.line(a.workspace, b.workspace))
            for tick, (a, b) in enumerate(zip(first.kernels, second.kernels, strict=True))
            if a.workspace or b.workspace
        ),
    )


def _tensor(
    first: StorageRecord,
    second: StorageRecord,
    values: GraphValues,
    *,
    names: Sequence[OpRecord],
    ticks: int,
) -> StepTensor:
    # A tensor of the graph; one that the step leaves behind ends after its last tick
    return made(
        StepTensor,
        {
            "producer": names[first.op].name,
            "spec": values.spec(first.shape, second.shape),
            "bytes": values.line(first.bytes, second.bytes),
            "first": first.born,
            "end": ticks + 1 if first.is_left else max(first.born, int(min(first.died, ticks + 1))),
            "saved_by": None if first.saved_by is None else names[first.saved_by].name,
            "gradient_of": first.gradient_of,
        },
    )


def _calls(recording: Recording, indices: Mapping[int, int]) -> Iterable[ModuleCall]:
    # Yield the calls of modules, with the storages that they read and made by index
    # writes are in the order of time: those during a call are found by bisection
    ticks = [tick for tick, _ in recording.writes]
    for call in recording.calls:
        writes = recording.writes[bisect_left(ticks, call.enter) : bisect_left(ticks, call.exit)]
        yield ModuleCall(
            call.path,
            first=call.enter,
            end=call.exit,
            inputs=tuple(indices[id(storage)] for storage in call.inputs),
            outputs=tuple(indices[id(storage)] for storage in call.outputs),
            needs_grad=call.needs_grad,
            writes_outside=any(born < call.enter for _, born in writes),
        )


def list_modules(root: nn.Module) -> Iterable[Module]:
    """Return the submodules, parents first; see `Module` for what makes them equal."""
    numbers: dict[Hashable, int] = {}
    found: list[Module] = []

    def visit(module: nn.Module, path: str, around: frozenset[int]) -> int:
        # parents first, although a structure is known after its children's
        position = len(found)
        children = tuple(
            (name, visit(child, f"{path}.{name}" if path else name, around | {id(child)}))
            for name, child in module.named_children()
            if id(child) not in around
        )
        parameters = tuple(
            (name, p.shape, p.dtype, p.requires_grad)
            for name, p in module._parameters.items()
            if p is not None
        )
        # equal numbers for modules of equal class, parameters and children
        structure = numbers.setdefault((type(module), parameters, children), len(numbers))
        if path:
            found.insert(position, Module(path, structure))
        return structure

    visit(root, "", frozenset({id(root)}))
    return found
