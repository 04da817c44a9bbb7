"""Two recordings of one step, at two batch sizes, become one operator graph."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import nn

from lightning_topt.graph.blocks import choose_blocks, output_bytes
from lightning_topt.graph.errors import WAY_OUT, CaptureError
from lightning_topt.graph.kernels import Measured
from lightning_topt.graph.op_graph import Amount, Kernel, Op, OpGraph, Parameter, Segment, TensorEdge, TensorSpec
from lightning_topt.graph.recording import Call, OpRecord, Recording, Shape

Sizes = tuple[int, int]  # the two batch sizes
Stretch = tuple[str, int, int, Call | None]  # block, first tick, end tick, its call


def assemble(
    module: nn.Module, recordings: tuple[Recording, Recording], *, name: str, sizes: Sizes, input_bytes: tuple[int, int]
) -> OpGraph:
    """The graph of the copy `module` from its recordings at two batch `sizes`; with one size it holds for that alone.

    Raises CaptureError when the recordings differ in more than shapes.
    """
    _check_equal(recordings, sizes)
    blocks = choose_blocks(module, recordings[0])
    paths = {block.name for block in blocks if block.name}
    kept = [bool(op.forward or op.backward) for op in recordings[0].ops]
    ops = [_op(a, b, sizes, _block_of(a.stack, paths)) for a, b in zip(*(r.ops for r in recordings), strict=True)]
    return OpGraph(
        model=name,
        batch_size=sizes[0],
        ops=tuple(op for op, keep in zip(ops, kept, strict=True) if keep),
        edges=tuple(
            TensorEdge(ops[i].name, ops[j].name, _tensor(shape, recordings[1].edges[i, j]))
            for (i, j), shape in recordings[0].edges.items()
            if kept[i] and kept[j]
        ),
        parameters=tuple(_parameters(module, paths)),
        blocks=tuple(blocks),
        timeline=tuple(_timeline(recordings, sizes, paths)),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        input_bytes=Amount.fit(sizes, input_bytes),
        batch_scaling=sizes[0] != sizes[1],
        unused=tuple(
            name for name, p in module.named_parameters() if p.requires_grad and name not in recordings[0].with_gradient
        ),
    )


def _check_equal(recordings: tuple[Recording, Recording], sizes: Sizes) -> None:
    first, second = (recording.sequence() for recording in recordings)
    for a, b in zip(first, second, strict=False):
        if a != b:
            raise CaptureError(
                f"training_step runs other operators on {sizes[0]} samples than on {sizes[1]}, first at {a[0]!r} "
                f"against {b[0]!r}: the graph must not depend on the batch size. {WAY_OUT}"
            )
    if len(first) != len(second) or recordings[0].edges.keys() != recordings[1].edges.keys():
        raise CaptureError(
            f"training_step runs {len(first)} operators on {sizes[0]} samples and {len(second)} on {sizes[1]}, or "
            f"connects them otherwise: the graph must not depend on the batch size. {WAY_OUT}"
        )


def _op(first: OpRecord, second: OpRecord, sizes: Sizes, block: str) -> Op:
    return Op(
        name=first.name,
        kind=first.kind,
        module=first.stack[-1] if first.stack else "",
        block=block,
        parameters=tuple(first.parameters),
        outputs=tuple(_tensor(a, b) for a, b in zip(first.outputs, second.outputs, strict=True)),
        forward=_kernels(first.forward, second.forward, sizes),
        backward=_kernels(first.backward, second.backward, sizes),
        saved_bytes=Amount.fit(sizes, (first.saved_bytes, second.saved_bytes)),
    )


def _kernels(first: Sequence[Measured], second: Sequence[Measured], sizes: Sizes) -> tuple[Kernel, ...]:
    """One Kernel for all identical calls, in the order of their first call."""
    groups: dict[str, list[Kernel]] = {}
    for a, b in zip(first, second, strict=True):
        flops, size = Amount.fit(sizes, (a.flops, b.flops)), Amount.fit(sizes, (a.bytes, b.bytes))
        key = json.dumps([a.name, a.arguments, flops.per_sample, size.per_sample])
        groups.setdefault(key, []).append(Kernel(a.name, a.arguments, flops, size))
    return tuple(
        Kernel(kernel.name, kernel.arguments, kernel.flops, kernel.bytes, count=len(calls))
        for calls in groups.values()
        for kernel in calls[:1]
    )


def _tensor(first: Shape, second: Shape) -> TensorSpec:
    differing = [dim for dim, (m, n) in enumerate(zip(first[0], second[0], strict=True)) if m != n]
    return TensorSpec(first[0], first[1], differing[0] if differing else None)


def _block_of(stack: Sequence[str], paths: set[str]) -> str:
    return next((path for path in stack if path in paths), "")


def _parameters(module: nn.Module, paths: set[str]) -> list[Parameter]:
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
            block=next((path for path in paths if first.startswith(path + ".")), ""),
            trainable=tensors[key].requires_grad,
            aliases=tuple(aliases),
        )
        for key, (first, *aliases) in names.items()
    ]


def _timeline(recordings: tuple[Recording, Recording], sizes: Sizes, paths: set[str]) -> list[Segment]:
    first, second = (_memory(recording, paths) for recording in recordings)
    return [
        Segment(block, *(Amount.fit(sizes, values) for values in zip(a, b, strict=True)))
        for (block, a), (_, b) in zip(first, second, strict=True)
    ]


def _memory(recording: Recording, paths: set[str]) -> list[tuple[str, tuple[int, int, int, int]]]:
    """(block, bytes (kept, output, forward peak, backward peak)) of each segment; see `op_graph.Segment`."""
    stretches = _stretches(recording, paths)
    segment_of_op: dict[int, int] = {}
    for index, (_, start, end, _call) in enumerate(stretches):
        for tick in range(start, end):
            segment_of_op[recording.kernel_ops[tick]] = index
    backward_peaks: dict[int, int] = {}
    current = len(stretches) - 1
    for tick in range(recording.backward_start, len(recording.kernel_ops)):
        # An operator that only made views in forward has no tick there; its backward is beside that of its neighbour.
        current = segment_of_op.get(recording.kernel_ops[tick], current)
        backward_peaks[current] = max(backward_peaks.get(current, 0), int(recording.live_bytes[tick]))
    rows = []
    for index, (block, start, end, call) in enumerate(stretches):
        before, kept = recording.kept_bytes(0, start), recording.kept_bytes(start, end)
        output = kept if call is None else output_bytes(recording, call)
        forward_peak = int(recording.live_bytes[start:end].max()) - before
        backward_peak = backward_peaks[index] - before - kept if index in backward_peaks else 0
        rows.append((block, (kept, output, forward_peak, backward_peak)))
    return rows


def _stretches(recording: Recording, paths: set[str]) -> list[Stretch]:
    """The forward pass cut at the calls of blocks; stretches without a kernel are left out."""
    stretches: list[Stretch] = []
    tick = 0
    for call in recording.calls:
        if call.path in paths and call.enter >= tick:  # not inside another call of a block
            stretches += [("", tick, call.enter, None), (call.path, call.enter, call.exit, call)]
            tick = call.exit
    stretches.append(("", tick, recording.backward_start, None))
    return [stretch for stretch in stretches if stretch[1] < stretch[2]]
