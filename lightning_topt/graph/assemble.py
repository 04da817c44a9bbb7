"""Two recordings of one step, at two batch sizes, become one operator graph."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

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
from lightning_topt.graph.recording import OpRecord, Recording, Shape, Storage

Sizes = tuple[int, int]  # the two batch sizes


def assemble(
    module: nn.Module,
    recordings: tuple[Recording, Recording],
    *,
    name: str,
    sizes: Sizes,
    input_bytes: tuple[int, int],
) -> OpGraph:
    """Return the graph of the copy `module` from its recordings at two batch `sizes`; with one size
    it holds for that alone.

    All of it is one block. Raises CaptureError when the recordings differ in more than shapes.
    """
    _check_equal(recordings, sizes)
    first, second = recordings
    runs = {*first.kernel_ops}
    kept = {
        index: None
        for index, op in enumerate(first.ops)
        if op.forward or op.backward or index in runs
    }
    fit = _Fit(sizes)
    ops = [fit.op(first.ops[index], second.ops[index]) for index in kept]
    return OpGraph(
        model=name,
        batch_size=sizes[0],
        ops=tuple(ops),
        edges=tuple(
            TensorEdge(first.ops[i].name, first.ops[j].name, fit.spec(shape, second.edges[i, j]))
            for (i, j), shape in first.edges.items()
            if i in kept and j in kept
        ),
        parameters=tuple(_parameters(module)),
        blocks=(Block("", group=0, recomputable=False),),
        step=_step(
            module, recordings, fit, numbers={index: number for number, index in enumerate(kept)}
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
    if recordings[0] is recordings[1]:
        return
    first, second = (recording.sequence() for recording in recordings)
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


class _Fit:
    """Values of the graph from two measurements; what was the same object in both recordings is
    made once.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._amounts: dict[tuple[float, float], Amount] = {}
        self._specs: dict[tuple[Shape, Shape], TensorSpec] = {}
        self._kernels: dict[tuple[int, int], tuple[str, Kernel]] = {}
        self._groups: dict[tuple[int, ...], tuple[Kernel, ...]] = {}

    def amount(self, first: float, second: float) -> Amount:
        key = first, second
        if key not in self._amounts:
            self._amounts[key] = Amount.fit(self.sizes, key)
        return self._amounts[key]

    def spec(self, first: Shape, second: Shape) -> TensorSpec:
        key = first, second
        if key not in self._specs:
            differing = [
                dim for dim, (m, n) in enumerate(zip(first[0], second[0], strict=True)) if m != n
            ]
            self._specs[key] = TensorSpec(first[0], first[1], differing[0] if differing else None)
        return self._specs[key]

    def op(self, first: OpRecord, second: OpRecord) -> Op:
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
            saved_bytes=self.amount(first.saved_bytes, second.saved_bytes),
            stack=first.stack,
        )

    def kernels(self, first: Sequence[Measured], second: Sequence[Measured]) -> tuple[Kernel, ...]:
        """Return one Kernel for all identical calls, in the order of their first call."""
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
        # Recorders make one object for all equal calls.
        found = self._kernels.get((id(first), id(second)))
        if found is None:
            flops, size = (
                self.amount(first.flops, second.flops),
                self.amount(first.bytes, second.bytes),
            )
            allocated = self.amount(
                first.allocated + first.workspace, second.allocated + second.workspace
            )
            text = json.dumps([first.name, first.arguments, flops.per_sample, size.per_sample])
            found = text, Kernel(first.name, first.arguments, flops, size, allocated=allocated)
            self._kernels[id(first), id(second)] = found
        return found


def _parameters(module: nn.Module) -> list[Parameter]:
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
        )
        for key, (first, *aliases) in names.items()
    ]


# ---- the step ------------------------------------------------------------------------------------


def _step(
    module: nn.Module,
    recordings: tuple[Recording, Recording],
    fit: _Fit,
    *,
    numbers: Mapping[int, int],
) -> Step:
    first, second = recordings
    ticks = len(first.kernel_ops)
    indices = {id(storage): index for index, storage in enumerate(first.storages)}
    return Step(
        batch_sizes=fit.sizes,
        order=tuple(numbers[index] for index in first.kernel_ops),
        backward_start=first.backward_start,
        tensors=tuple(
            _tensor(a, b, fit, names=first.ops, ticks=ticks)
            for a, b in zip(first.storages, second.storages, strict=True)
        ),
        calls=tuple(_calls(first, indices)),
        modules=tuple(_modules(module)),
        workspaces=tuple(
            (tick, fit.amount(a.workspace, b.workspace))
            for tick, (a, b) in enumerate(zip(first.kernels, second.kernels, strict=True))
            if a is not None and b is not None and (a.workspace or b.workspace)
        ),
    )


def _tensor(
    first: Storage, second: Storage, fit: _Fit, *, names: Sequence[OpRecord], ticks: int
) -> StepTensor:
    return StepTensor(
        producer=names[first.op].name,
        spec=fit.spec(first.shape, second.shape),
        bytes=fit.amount(first.bytes, second.bytes),
        first=first.born,
        end=ticks + 1 if first.is_left else max(first.born, int(min(first.died, ticks + 1))),
        saved_by=None if first.saved_by is None else names[first.saved_by].name,
        gradient_of=first.gradient_of,
    )


def _calls(recording: Recording, indices: Mapping[int, int]) -> Iterable[ModuleCall]:
    # A write to a tensor that is older than the call: the writes are in the order of time.
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


def _modules(root: nn.Module) -> Iterable[Module]:
    """The submodules, parents first; see `Module` for what makes them equal."""
    numbers: dict[Hashable, int] = {}
    found: list[Module] = []

    def visit(module: nn.Module, path: str, around: frozenset[int]) -> int:
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
        structure = numbers.setdefault((type(module), parameters, children), len(numbers))
        if path:
            found.insert(position, Module(path, structure))
        return structure

    visit(root, "", frozenset({id(root)}))
    return found
