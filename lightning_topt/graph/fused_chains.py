"""A step as `torch.compile` runs it: chains of elementwise operators are one kernel.

    graph = fused(capture(module, batch))       # graph.compiled

A chain are operators that run one after the other in one block, feed one another, and whose
kernels all work element by element. Means and sums of rows belong to it, as in RMSNorm. Products,
attention and norms that are kernels already stay as they are.

    what a chain moves, in bytes
    forward     what its operators read and write, less what they hand to one another
    backward    gradients of its outputs, and of its inputs; again the inputs or what eager code
                saves, whichever is less; what other kernels (sums over the batch) read of it

Neither is more than the eager step moves. Source: fusion in TorchInductor, and the choice of what
backward computes again in AOTAutograd (Ansel et al., PyTorch 2, ASPLOS 2024, sections 4 and 3.4).
Lifetimes of tensors stay those of the eager step. A compiled one seldom keeps more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_topt.graph.op_graph import Kernel, Op, OpGraph, TensorEdge
from lightning_topt.graph.step_memory import NOTHING, Amount, TensorSpec

FUSED = "topt.fused_elementwise.default"
# elementwise, without torch's tag for it
_ELEMENTWISE = {
    *("aten._to_copy.default", "aten.clone.default", "aten.copy_.default"),
    *("aten.native_dropout.default", "aten.native_dropout_backward.default"),
}
_OF_ROWS = {"aten.mean.dim", "aten.sum.dim_IntList"}  # of the last dim alone


def fused(graph: OpGraph) -> OpGraph:
    """Return `graph`, of an eager step, with one kernel for each chain of elementwise operators."""
    assert not graph.compiled
    edges = _Edges.of(graph)
    made: dict[Any, tuple[Kernel, ...]] = {}  # equal chains share their kernels, as blocks do
    ops = [*graph.ops]
    for chain in _chains(graph, edges):
        forward, backward = _kernels_of(graph, edges, chain)
        for index in chain:
            others = tuple(k for k in ops[index].backward if not _is_elementwise(k))
            ops[index] = replace(ops[index], forward=(), backward=others)
        *_, last = chain
        rest = ops[last].backward
        ops[last] = replace(
            ops[last],
            forward=made.setdefault(_key(forward), forward),
            backward=made.setdefault(_key((*backward, *rest)), (*backward, *rest)),
        )
    return replace(graph, ops=tuple(ops), compiled=True)


def _key(kernels: Sequence[Kernel]) -> object:
    return tuple(
        (kernel.name, str(kernel.arguments), kernel.flops, kernel.bytes, kernel.count)
        for kernel in kernels
    )


# ---- which operators are a chain


@dataclass(frozen=True)
class _Edges:
    """The edges of a graph, by the index of the operator that they lead to or come from.

    `held` are bytes of parameters by name.
    """

    into: Mapping[int, list[tuple[int, TensorEdge]]]
    out_of: Mapping[int, list[tuple[int, TensorEdge]]]
    held: Mapping[str, int]

    @classmethod
    def of(cls, graph: OpGraph) -> _Edges:
        places = {op.name: index for index, op in enumerate(graph.ops)}
        into: dict[int, list[tuple[int, TensorEdge]]] = {}
        out_of: dict[int, list[tuple[int, TensorEdge]]] = {}
        for edge in graph.edges:
            source, target = places[edge.source], places[edge.target]
            into.setdefault(target, []).append((source, edge))
            out_of.setdefault(source, []).append((target, edge))
        held = {name: p.nbytes for p in graph.parameters for name in (p.name, *p.aliases)}
        return cls(into, out_of, held)


def _chains(graph: OpGraph, edges: _Edges) -> Iterator[tuple[int, ...]]:
    """Yield the operators of each chain in the order of forward, by index.

    Between operators that run one after the other nothing else runs. So no operator of a chain
    depends on one outside that needs the chain's results.
    """
    run: list[int] = []
    for index, op in enumerate(graph.ops):
        if not op.forward:  # only allocates or views
            continue
        fits = all(map(_is_elementwise, op.forward))
        if run and not (fits and op.block == graph.ops[run[-1]].block):
            yield from _connected(graph, edges, run)
            run = []
        if fits:
            run.append(index)
    yield from _connected(graph, edges, run)


def _connected(graph: OpGraph, edges: _Edges, run: Sequence[int]) -> Iterator[tuple[int, ...]]:
    # Yield the parts of `run` that feed one another and have several kernels
    part = {index: index for index in run}
    for index in run:
        for source, _ in edges.into.get(index, ()):
            if source in part:
                old, new = part[index], part[source]
                part = {each: new if of == old else of for each, of in part.items()}
    for first in dict.fromkeys(part.values()):
        chain = tuple(index for index in run if part[index] == first)
        if sum(kernel.count for index in chain for kernel in graph.ops[index].forward) > 1:
            yield chain


def _is_elementwise(kernel: Kernel) -> bool:
    if kernel.name in _OF_ROWS:
        tensor, dims, *_ = kernel.arguments["args"]
        shape = tensor["tensor"][0]
        return dims in ([-1], [len(shape) - 1])
    return kernel.name in _ELEMENTWISE or _is_pointwise(kernel.name)


@functools.cache
def _is_pointwise(name: str) -> bool:
    # Whether torch says that an operator works element by element
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return False
    return torch.Tag.pointwise in getattr(found, "tags", ())


# ---- what a chain costs


def _kernels_of(
    graph: OpGraph, edges: _Edges, chain: Sequence[int]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    # The kernels that take the place of a chain's elementwise ones
    sizes = graph.step.batch_sizes
    small, large = (_Traffic.of(graph, edges, chain, size) for size in sizes)

    def line(name: str) -> Amount:
        return Amount.fit(sizes, (getattr(small, name), getattr(large, name)))

    spec = _result(graph.ops[chain[-1]], edges.out_of.get(chain[-1], ()))
    arguments = {"args": [{"tensor": _described(spec)}], "kwargs": {}}
    forward = Kernel(FUSED, arguments, NOTHING, line("forward"), allocated=line("outputs"))
    backward = Kernel(FUSED, arguments, NOTHING, line("backward"), allocated=line("inputs"))
    return (forward,), (backward,) if small.backward > 0 else ()


@dataclass(frozen=True)
class _Traffic:
    """Bytes at one batch size: of both directions, and of the tensors at the ends of a chain."""

    forward: float
    backward: float
    inputs: float
    outputs: float

    @classmethod
    def of(cls, graph: OpGraph, edges: _Edges, chain: Sequence[int], size: int) -> _Traffic:
        members = {*chain}

        def bytes_of(spec: TensorSpec) -> float:
            return _bytes_at(spec, size, captured=graph.batch_size)

        # tensors from outside, each once; tensors that others read, or that nobody here does
        inputs = {
            source: bytes_of(edge.tensor)
            for index in chain
            for source, edge in edges.into.get(index, ())
            if source not in members
        }
        own_bytes = outputs = handed = 0.0
        for index in chain:
            own = edges.out_of.get(index, [])
            written = bytes_of(_result(graph.ops[index], own))
            within = [edge for target, edge in own if target in members]
            if len(within) < len(own) or not own:
                outputs += written
            else:
                handed += written
            handed += sum(bytes_of(edge.tensor) for edge in within)
        eager = _moved((k for index in chain for k in graph.ops[index].forward), size)
        for index in chain:
            into = sum(bytes_of(edge.tensor) for _, edge in edges.into.get(index, ()))
            own_bytes += _own_bytes(graph, index, into, edges, size)
        forward = min(max(own_bytes - handed, outputs), eager)
        # backward
        kernels = [k for index in chain for k in graph.ops[index].backward]
        elementwise = _moved(filter(_is_elementwise, kernels), size)
        others = _moved((k for k in kernels if not _is_elementwise(k)), size)
        saved = sum(graph.ops[index].saved_bytes.at(size) for index in chain)
        read = sum(inputs.values())
        backward = min(outputs + min(read, saved) + read + others, elementwise)
        return cls(forward, backward, read, outputs)


def _own_bytes(graph: OpGraph, index: int, into: float, edges: _Edges, size: int) -> float:
    # What one operator moves as a kernel: a leaf module reads its inputs once
    op = graph.ops[index]
    eager = _moved(op.forward, size)
    if sum(kernel.count for kernel in op.forward) == 1:
        return eager
    held = sum(edges.held.get(name, 0) for name in op.parameters)
    result = _result(op, edges.out_of.get(index, ()))
    written = _bytes_at(result, size, captured=graph.batch_size)
    # what comes from the batch or a buffer is in no edge: the largest kernel has read it
    if not into:
        into = max(kernel.bytes.at(size) for kernel in op.forward) - written
    return min(max(into, 0.0) + held + written, eager)


def _result(op: Op, out_of: Sequence[tuple[int, TensorEdge]]) -> TensorSpec:
    # What an operator hands on
    if out_of:
        return out_of[0][1].tensor
    return op.outputs[0] if op.outputs else TensorSpec((), "float32")


def _moved(kernels: Iterable[Kernel], size: int) -> float:
    return sum(kernel.count * max(kernel.bytes.at(size), 0.0) for kernel in kernels)


def _bytes_at(spec: TensorSpec, size: int, *, captured: int) -> float:
    # The bytes of a tensor at a batch of `size`
    whole = math.prod(spec.shape) * int(getattr(torch, spec.dtype).itemsize)
    return whole * size / captured if spec.batch_dim is not None else float(whole)


def _described(spec: TensorSpec) -> list[object]:
    # Shape, contiguous strides and dtype, as arguments of kernels are written
    strides = [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
    return [[*spec.shape], strides, spec.dtype]
