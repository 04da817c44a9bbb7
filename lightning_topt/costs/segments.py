"""Segments say where on the memory timeline things happen: the segment of every operator, and the
segments that use a parameter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_topt.basics.once import once_per_object
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.op_graph import Kernel, OpGraph, Parameter


@dataclass(frozen=True)
class Segments:
    """Positions on ``graph.timeline``, from 0.

    `of_op` gives the segment of an operator by name, `of_parameter` the first and last segment that
    use a parameter (its gradient begins in the backward of the last one and is complete after that
    of the first one), `of_block` the first and last segment of a block that has any, `every` all of
    them in order.
    """

    count: int
    of_op: Mapping[str, int]
    of_parameter: Mapping[str, tuple[int, int]]
    of_block: Mapping[str, tuple[int, int]]
    every: Mapping[str, Sequence[int]]


@once_per_object
def locate(graph: OpGraph) -> Segments:
    """Align the operators, which are in execution order, with the timeline's stretches of blocks.

    A parameter that no operator uses counts as used in every segment of its block. Raises
    ValueError when an operator belongs to a block that the timeline lacks.
    """
    every: dict[str, list[int]] = {}
    for index, segment in enumerate(graph.timeline):
        every.setdefault(segment.block, []).append(index)
    of_block = {block: (indices[0], indices[-1]) for block, indices in every.items()}
    of_op: dict[str, int] = {}
    uses: dict[str, list[int]] = {}
    position = 0
    for op in graph.ops:
        if op.block not in of_block:
            raise ValueError(
                f"operator {op.name!r} is in block {op.block!r}, which has no segment on the "
                "timeline"
            )
        # the nearest at or after the operator before, else the nearest one before it
        own = every[op.block]
        position = own[min(bisect_left(own, position), len(own) - 1)]
        of_op[op.name] = position
        for name in op.parameters:
            uses.setdefault(name, []).append(position)
    of_parameter = {
        parameter.name: _span(
            parameter, uses, of_block.get(parameter.block, (0, max(len(graph.timeline) - 1, 0)))
        )
        for parameter in graph.parameters
    }
    return Segments(len(graph.timeline), of_op, of_parameter, of_block, every)


@dataclass(frozen=True, eq=False)
class BlockPasses:
    """`BlockPasses` say where kernels run: ``kernels[i]`` in the direction (0 forward, 1 backward)
    and segment of each of ``places[i]``, (block, direction, segment): repeated blocks share their
    kernels.
    """

    kernels: tuple[tuple[Kernel, ...], ...]
    places: tuple[tuple[tuple[str, int, int], ...], ...]


@once_per_object
def passes_of(graph: OpGraph) -> BlockPasses:
    """Return the passes of the blocks of `graph`."""
    of_op, passes = locate(graph).of_op, dict[tuple[str, int, int], list[Kernel]]()
    for op in graph.ops:
        for direction, kernels in enumerate((op.forward, op.backward)):
            passes.setdefault((op.block, direction, of_op[op.name]), []).extend(kernels)
    alike: dict[tuple[int, ...], tuple[list[Kernel], list[tuple[str, int, int]]]] = {}
    for place, found in passes.items():
        alike.setdefault(tuple(map(id, found)), (found, []))[1].append(place)
    return BlockPasses(
        tuple(tuple(each) for each, _ in alike.values()), tuple(tuple(p) for _, p in alike.values())
    )


@once_per_object
def blocks_reduced_last(graph: OpGraph) -> frozenset[str]:
    """Return the blocks whose inputs need no gradient, such as embeddings of the batch.

    FSDP2 learns from the gradient of an input that a block's backward is over; without one, the
    block keeps its whole parameters and gradients until the end of the backward pass. A graph
    without edges names none.
    """
    trainable = {name for p in graph.parameters if p.trainable for name in (p.name, *p.aliases)}
    block_of = {op.name: op.block for op in graph.ops}
    needs_gradient = {op.name for op in graph.ops if trainable.intersection(op.parameters)}
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        if edge.tensor.dtype.startswith(("float", "bfloat", "complex")):
            sources.setdefault(edge.target, []).append(edge.source)
    reached: set[str] = set()
    for op in graph.ops:  # in execution order
        for source in sources.get(op.name, ()):
            if source in needs_gradient:
                needs_gradient.add(op.name)
                if block_of[source] != op.block:
                    reached.add(op.block)
    return frozenset(set(block_of.values()) - reached) if graph.edges else frozenset()


@once_per_object
def structures_of(graph: OpGraph) -> dict[str, int]:
    """Return a number for each named block with one segment; equal where their parameters, the uses
    of these, and their activations are.
    """
    segments, parameters = locate(graph), dict[str, list[Parameter]]()
    for parameter in graph.parameters:
        parameters.setdefault(parameter.block, []).append(parameter)
    numbers: dict[Hashable, int] = {}
    found = {}
    for block, (first, last) in segments.of_block.items():
        if first == last and block:
            shapes = tuple(
                (
                    p.shape,
                    p.dtype,
                    p.trainable,
                    *(place - first for place in segments.of_parameter[p.name]),
                )
                for p in parameters.get(block, ())
            )
            at_end = first == 0, first == segments.count - 1  # where neighbours are none
            key = shapes, at_end, replace(graph.timeline[first], block="")
            found[block] = numbers.setdefault(key, len(numbers))
    return found


@once_per_object
def tied_blocks(graph: OpGraph) -> frozenset[str]:
    """Return the blocks that share a parameter with another block."""
    blocks = {block.name for block in graph.blocks}
    shared: set[str] = set()
    for parameter in graph.parameters:
        users = {parameter.block, *(block_of(alias, blocks) for alias in parameter.aliases)}
        shared |= users if len(users) > 1 else set()
    return frozenset(shared)


def _span(
    parameter: Parameter, uses: Mapping[str, list[int]], default: tuple[int, int]
) -> tuple[int, int]:
    indices = [
        index for name in (parameter.name, *parameter.aliases) for index in uses.get(name, ())
    ]
    return (min(indices), max(indices)) if indices else default
