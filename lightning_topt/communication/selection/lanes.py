"""One step of a compaction loop for Numba: 16 magnitudes against a threshold, survivors appended.

Written in LLVM's own operations, since no Python loop becomes a compressing store. On processors with AVX-512 that is one
instruction; elsewhere LLVM makes branches of it, which only run where a lane survives.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
INFINITY_BITS = 0x7F800000  # float32: as integers, magnitudes are in the order of their bits, NaN above infinity
MAGNITUDE_MASK = 0x7FFFFFFF

_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


_FLOATS = ir.VectorType(ir.FloatType(), LANES)


def _broadcast(builder: ir.IRBuilder, value: Any, kind: Any = _INTS) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _load(builder: ir.IRBuilder, data: Any, start: Any, kind: Any) -> tuple[Any, Any]:
    pointer = builder.bitcast(builder.gep(data, [start]), kind.as_pointer())
    lanes = builder.load(pointer)
    lanes.align = 4
    return lanes, pointer


def _store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 4


def _append(builder: ir.IRBuilder, values: Any, *, to: Any, mask: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_INTS, to.type, mask.type])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.compressstore.v{LANES}i32")
    builder.call(store, [values, to, mask])


def _compact(
    builder: ir.IRBuilder, lanes: Any, *, position: Any, threshold: Any, targets: Any, count: Any, undo: Any = None
) -> Any:
    """The new count, -1 (after `undo`) where a survivor is not finite."""
    magnitude = builder.and_(lanes, ir.Constant(_INTS, [MAGNITUDE_MASK] * LANES))
    mask = builder.icmp_unsigned(">=", magnitude, _broadcast(builder, threshold))
    packed = builder.bitcast(mask, ir.IntType(LANES))
    zero = ir.Constant(packed.type, 0)
    result = cgutils.alloca_once_value(builder, count)
    with builder.if_then(builder.icmp_unsigned("!=", packed, zero), likely=False):
        positions = builder.add(_broadcast(builder, position), ir.Constant(_INTS, list(range(LANES))))
        _append(builder, positions, to=builder.gep(targets[0], [count]), mask=mask)
        _append(builder, magnitude, to=builder.gep(targets[1], [count]), mask=mask)
        builder.store(builder.add(count, builder.zext(builder.ctpop(packed), ir.IntType(64))), result)
        infinite = builder.icmp_unsigned(">=", magnitude, ir.Constant(_INTS, [INFINITY_BITS] * LANES))
        with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(infinite, packed.type), zero), likely=False):
            if undo is not None:
                undo()
            builder.store(ir.Constant(ir.IntType(64), -1), result)
    return builder.load(result)


def _data(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, *which: int) -> list[Any]:
    return [generator.make_array(signature.args[i])(generator, builder, arguments[i]).data for i in which]


@intrinsic
def append_lanes(
    context: Any, bits: Any, start: Any, offset: Any, threshold: Any, indices: Any, magnitudes: Any, count: Any
) -> Any:
    """Append the lanes of ``bits[start : start + 16]`` whose magnitude reaches `threshold`; returns the new count.

    `bits` (m,), `indices` and `magnitudes` (capacity,) are int32; `offset` (int32) is added to indices. There must be room
    for 16 more. Returns -1 when a surviving lane is not finite.
    """
    signature = types.int64(bits, types.int64, types.int32, types.int32, indices, magnitudes, types.int64)

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, start, offset, threshold, _, _, count = arguments
        source, *targets = _data(generator, builder, signature, arguments, 0, 4, 5)
        lanes, _ = _load(builder, source, start, _INTS)
        position = builder.add(builder.trunc(start, _INT), offset)
        return _compact(builder, lanes, position=position, threshold=threshold, targets=targets, count=count)

    return signature, generate


@intrinsic
def add_and_append_lanes(
    context: Any,
    residual: Any,
    gradient: Any,
    start: Any,
    scale: Any,
    threshold: Any,
    indices: Any,
    magnitudes: Any,
    count: Any,
) -> Any:
    """The same after ``residual += scale * gradient`` (float32); lanes of which one is not finite stay as they were."""
    signature = types.int64(
        residual, gradient, types.int64, types.float32, types.int32, indices, magnitudes, types.int64
    )

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, start, scale, threshold, _, _, count = arguments
        kept, added, *targets = _data(generator, builder, signature, arguments, 0, 1, 5, 6)
        before, pointer = _load(builder, kept, start, _FLOATS)
        change = builder.fmul(_load(builder, added, start, _FLOATS)[0], _broadcast(builder, scale, _FLOATS))
        total = builder.fadd(before, change)
        _store(builder, total, pointer)
        return _compact(
            builder,
            builder.bitcast(total, _INTS),
            position=builder.trunc(start, _INT),
            threshold=threshold,
            targets=targets,
            count=count,
            undo=lambda: _store(builder, before, pointer),
        )

    return signature, generate
