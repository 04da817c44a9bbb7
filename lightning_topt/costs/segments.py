"""Segments say where on the memory timeline things happen: the segment of every operator, and the segments that use a
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_topt.graph.op_graph import OpGraph, Parameter


@dataclass(frozen=True)
class Segments:
    """Positions on ``graph.timeline``, from 0.

    `of_op` gives the segment of an operator by name, `of_parameter` the first and last segment that use a parameter
    (its gradient begins in the backward of the last one and is complete after that of the first one), `of_block` the
    first and last segment of a block that has any.
    """

    count: int
    of_op: Mapping[str, int]
    of_parameter: Mapping[str, tuple[int, int]]
    of_block: Mapping[str, tuple[int, int]]


def locate(graph: OpGraph) -> Segments:
    """Align the operators, which are in execution order, with the timeline's stretches of blocks.

    A parameter that no operator uses counts as used in every segment of its block. Raises ValueError when an operator
    belongs to a block that the timeline lacks.
    """
    of_block: dict[str, tuple[int, int]] = {}
    for index, segment in enumerate(graph.timeline):
        of_block[segment.block] = (of_block.get(segment.block, (index, index))[0], index)
    of_op: dict[str, int] = {}
    uses: dict[str, list[int]] = {}
    position = 0
    for op in graph.ops:
        if op.block not in of_block:
            raise ValueError(f"operator {op.name!r} is in block {op.block!r}, which has no segment on the timeline")
        position = _advance(graph, position, op.block)
        of_op[op.name] = position
        for name in op.parameters:
            uses.setdefault(name, []).append(position)
    of_parameter = {
        parameter.name: _span(parameter, uses, of_block.get(parameter.block, (0, max(len(graph.timeline) - 1, 0))))
        for parameter in graph.parameters
    }
    return Segments(len(graph.timeline), of_op, of_parameter, of_block)


def blocks_reduced_last(graph: OpGraph) -> frozenset[str]:
    """Return the blocks whose inputs need no gradient, such as embeddings of the batch.

    FSDP2 learns from the gradient of an input that a block's backward is over; without one, the block keeps its whole
    parameters and gradients until the end of the backward pass. A graph without edges names none.
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


def _advance(graph: OpGraph, position: int, block: str) -> int:
    """The nearest segment of `block` at or after `position`, else the nearest one before it."""
    nearest = [*range(position, len(graph.timeline)), *reversed(range(position))]
    found: int = next(index for index in nearest if graph.timeline[index].block == block)
    return found


def _span(parameter: Parameter, uses: Mapping[str, list[int]], default: tuple[int, int]) -> tuple[int, int]:
    indices = [index for name in (parameter.name, *parameter.aliases) for index in uses.get(name, ())]
    return (min(indices), max(indices)) if indices else default
