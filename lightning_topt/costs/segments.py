"""Where on the memory timeline of a captured step things happen, and what crosses between blocks.

`locate` gives the segment of every operator and the segments that use a parameter. `find_crossings`
gives the tensors that cross each boundary between blocks, as in a run (`graph.step_flow`): units
are the blocks, and outside of them the outermost modules that contain none. What units return
crosses to later units that need it, also through functional operators, which every stage runs by
itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_topt.basics import once_per_object
from lightning_topt.costs.sizes import ITEM_BYTES, ROOT
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.op_graph import Amount, Kernel, Op, OpGraph, Parameter, TensorSpec


@dataclass(frozen=True)
class Segments:
    """Positions on ``graph.timeline``, from 0.

    Attributes:
        count: of all segments.
        of_op: the segment of an operator by name.
        of_parameter: the first and last segment that use a parameter; its gradient begins in the
            backward of the last one and is complete after that of the first one.
        of_block: the first and last segment of a block that has any.
        every: all segments of a block, in order.
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
    # a tied parameter is used under each of its names
    of_parameter = {
        parameter.name: _span(
            parameter, uses, of_block.get(parameter.block, (0, max(len(graph.timeline) - 1, 0)))
        )
        for parameter in graph.parameters
    }
    return Segments(len(graph.timeline), of_op, of_parameter, of_block, every)


def _span(
    parameter: Parameter, uses: Mapping[str, list[int]], default: tuple[int, int]
) -> tuple[int, int]:
    indices = [
        index for name in (parameter.name, *parameter.aliases) for index in uses.get(name, ())
    ]
    return (min(indices), max(indices)) if indices else default


@dataclass(frozen=True, eq=False)
class BlockPasses:
    """Where kernels run; repeated blocks share their kernels.

    ``kernels[i]`` run in the direction (0 forward, 1 backward) and segment of each of
    ``places[i]``, (block, direction, segment).
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
    # repeated blocks have the same kernel objects
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
    # forward along the edges: what depends on a trained parameter has a gradient
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
def blocks_gathered_once(graph: OpGraph) -> frozenset[str]:
    """Return the blocks with parameters that FSDP2 does not gather in backward.

    No gradient comes to them, as in a frozen backbone. The last of these is not among them: it is
    gathered ahead, from the block after it, and in vain. A graph without kernels names none.
    """
    with_backward = {op.block for op in graph.ops if op.backward}
    named = {parameter.block for parameter in graph.parameters} - with_backward
    order = [*dict.fromkeys(op.block for op in graph.ops if op.block in named)]
    return frozenset(order[:-1]) if with_backward else frozenset()


@once_per_object
def structures_of(graph: OpGraph) -> dict[str, int]:
    """Return a number for each named block with one segment.

    Equal where their parameters, the uses of these, and their activations are.
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
            # parameters and where they are used from here, and the memory of the segment without
            # its name
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


# ---- What crosses the boundaries between blocks


_Source = tuple[str, TensorSpec]  # what an operator returned


@dataclass(frozen=True)
class BoundaryBytes:
    """Bytes at the boundary before each block but the first (block,).

    Attributes:
        forward: bytes that are sent.
        backward: of these, what gradients come back for.
        places: the block of each segment, that before it where it is outside of all.
    """

    forward: tuple[Amount, ...]
    backward: tuple[Amount, ...]
    places: tuple[int, ...]


def find_crossings(graph: OpGraph, segments: Segments) -> BoundaryBytes:
    """Return what crosses the boundaries between the blocks of `graph`."""
    blocks = chain_of(graph)
    # the block of each segment; what is outside of all belongs to the block before
    places, place = [], -1
    for segment in graph.timeline:
        place += segment.block != ROOT
        places.append(max(place, 0))
    spans = _spans(
        graph, {op.name: places[segments.of_op[op.name]] for op in graph.ops}, last=len(blocks) - 1
    )
    forward, backward = [[Amount()] * len(blocks) for _ in range(2)]
    for (_, spec), (made, needed) in spans.items():
        size = spec_bytes(spec, graph.batch_size)
        for boundary in range(made + 1, needed + 1):  # each one between maker and last reader
            forward[boundary] += size
            if spec.dtype.startswith(("float", "bfloat", "complex")):
                backward[boundary] += size
    return BoundaryBytes(tuple(forward), tuple(backward), tuple(places))


def chain_of(graph: OpGraph) -> tuple[str, ...]:
    """Return the blocks that run in the forward pass, in order.

    All that is outside of them belongs to those before.
    """
    return tuple(segment.block for segment in graph.timeline if segment.block != ROOT)


def _spans(
    graph: OpGraph, place_of: Mapping[str, int], *, last: int
) -> dict[_Source, tuple[int, int]]:
    # The first and the last block that need what units return. The first makes it. What the end of
    # the step needs, the last block does.
    ops = {op.name: op for op in graph.ops}
    inside = _inside_units(graph)
    # operators outside of units run on every stage that needs them: what they read goes through
    incoming: dict[str, list[tuple[str, TensorSpec]]] = {}
    read = set()
    for edge in graph.edges:
        incoming.setdefault(edge.target, []).append((edge.source, edge.tensor))
        read.add(edge.source)
    through: dict[str, frozenset[_Source]] = {}
    spans: dict[_Source, tuple[int, int]] = {}
    for op in ops:  # in execution order
        sources: set[_Source] = set()
        for source, spec in incoming.get(op, ()):
            sources |= {(source, spec)} if inside[source] else through.get(source, frozenset())
        if not inside[op]:
            through[op] = frozenset(sources)
        # outside of units only the end of the step needs something by itself
        needed = place_of[op] if inside[op] else last if op not in read else -1
        for each in sources:
            made = place_of[each[0]]
            spans[each] = made, max(needed, spans.get(each, (made, made))[1])
    return spans


def _inside_units(graph: OpGraph) -> dict[str, bool]:
    # Whether each operator runs inside of a unit. Then a module around it is a block, or contains
    # none.
    blocks = {block.name for block in graph.blocks} - {ROOT}
    around = {
        ".".join(parts[:n])
        for parts in (block.split(".") for block in blocks)
        for n in range(1, len(parts))
    }

    def is_inside(op: Op) -> bool:
        return any(path in blocks or path not in around for path in op.stack if path)

    return {op.name: is_inside(op) for op in graph.ops}


def spec_bytes(spec: TensorSpec, batch_size: int) -> Amount:
    """Return the bytes of a tensor that was captured at this batch size."""
    size = float(ITEM_BYTES.get(spec.dtype, 4))
    for dim in spec.shape:
        size *= dim
    return Amount(size) if spec.batch_dim is None else Amount(0.0, size / batch_size)


def uses_of_parameters(
    graph: OpGraph, segments: Segments, places: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the blocks (places in the chain) whose stage runs an operator with a parameter.

    In order; the first of a parameter's names counts. Those that none uses are at the place of
    their block, or at the first.
    """
    names = {
        alias: parameter.name
        for parameter in graph.parameters
        for alias in (parameter.name, *parameter.aliases)
    }
    found: dict[str, set[int]] = {}
    for op in graph.ops:
        for name in op.parameters:
            found.setdefault(names.get(name, name), set()).add(places[segments.of_op[op.name]])
    for parameter in graph.parameters:
        if parameter.name not in found:
            first = segments.of_block.get(parameter.block, (0, 0))[0]
            found[parameter.name] = {places[first] if places else 0}
    return {name: tuple(sorted(used)) for name, used in found.items()}
