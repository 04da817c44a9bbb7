"""The tensors that cross each boundary between blocks, from the operators of a captured step.

As in a run (`graph.step_flow`): units are the blocks, and outside of them the outermost modules
that contain none. What units return crosses to later units that need it, also through functional
operators, which every stage runs by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_topt.costs.segments import Segments
from lightning_topt.costs.sizes import ITEM_BYTES, ROOT
from lightning_topt.graph.op_graph import Amount, Op, OpGraph, TensorSpec

_Source = tuple[str, TensorSpec]  # what an operator returned


@dataclass(frozen=True)
class Crossings:
    """Bytes at the boundary before each block but the first (block,): those sent `forward`, and of
    these what gradients come back for. `places` is the block of each segment, that before it where
    it is outside of all.
    """

    forward: tuple[Amount, ...]
    backward: tuple[Amount, ...]
    places: tuple[int, ...]


def chain_of(graph: OpGraph) -> tuple[str, ...]:
    """Return the blocks that run in the forward pass, in order; all that is outside of them belongs
    to those before.
    """
    return tuple(segment.block for segment in graph.timeline if segment.block != ROOT)


def find_crossings(graph: OpGraph, segments: Segments) -> Crossings:
    """Return what crosses the boundaries between the blocks of `graph`."""
    blocks = chain_of(graph)
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
        for boundary in range(made + 1, needed + 1):
            forward[boundary] += size
            if spec.dtype.startswith(("float", "bfloat", "complex")):
                backward[boundary] += size
    return Crossings(tuple(forward), tuple(backward), tuple(places))


def _spans(
    graph: OpGraph, place_of: Mapping[str, int], *, last: int
) -> dict[_Source, tuple[int, int]]:
    """The blocks that make and that need last what units return; what the end of the step needs,
    the last one does.
    """
    ops = {op.name: op for op in graph.ops}
    inside = _inside_units(graph)
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
        needed = place_of[op] if inside[op] else last if op not in read else -1
        for each in sources:
            made = place_of[each[0]]
            spans[each] = made, max(needed, spans.get(each, (made, made))[1])
    return spans


def _inside_units(graph: OpGraph) -> dict[str, bool]:
    """Whether an operator runs inside of a unit: a module around it is a block, or contains
    none.
    """
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
    """Return the blocks (their places in the chain) whose stage runs an operator with a parameter,
    in order; the first of a parameter's names counts. Those that none uses are at the place of
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
