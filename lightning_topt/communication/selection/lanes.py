"""64 magnitudes against a threshold, answered as the bits of one integer: for Numba.

Written in LLVM's own vector operations, since no Python loop becomes them; LLVM splits the 64 lanes
into what the processor has. Kernels that use this are cached by Numba under their own file's date:
touch `kernels.py` and `wire_kernels.py` after a change here.

An array's dtype says what its elements are: float32, uint16 for float16 and int16 for bfloat16,
which NumPy does not know.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

GROUP = 64
# float32: as integers, magnitudes are in the order of their bits, NaN above infinity
INFINITY_BITS = 0x7F800000
MAGNITUDE_MASK = 0x7FFFFFFF

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_INTS, _FLOATS, _SHORTS = (
    ir.VectorType(kind, GROUP) for kind in (_INT, ir.FloatType(), ir.IntType(16))
)
_MASKS = types.UniTuple(types.int64, 2)

CACHE_LINE = 64
# the processor's own prefetching ends with a page: 38 ms become 30 for 400 MB
PREFETCH_BYTES = 2048
_PREFETCH = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _INT, _INT, _INT])
_READ, _KEEP, _DATA = (ir.Constant(_INT, value) for value in (0, 3, 1))


def _broadcast(builder: ir.IRBuilder, value: Any, kind: Any) -> Any:
    # A vector of 64 times `value`
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, _all(0))


def _pointer(builder: ir.IRBuilder, data: Any, start: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [start]), kind.as_pointer())


def _load(builder: ir.IRBuilder, data: Any, start: Any, kind: Any) -> Any:
    # The 64 elements from `start`, and prefetch what comes later
    size = 4 if kind is _FLOATS else 2
    byte = _pointer(builder, data, start, ir.IntType(8))
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], _PREFETCH)
    for offset in range(0, GROUP * size, CACHE_LINE):
        ahead = builder.gep(byte, [ir.Constant(_LONG, PREFETCH_BYTES + offset)])
        builder.call(prefetch, [ahead, _READ, _KEEP, _DATA])
    lanes = builder.load(_pointer(builder, data, start, kind))
    lanes.align = size
    return lanes


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * GROUP)


def _load_floats(builder: ir.IRBuilder, data: Any, start: Any, dtype: Any) -> Any:
    # 64 elements as float32
    if dtype == types.float32:
        return _load(builder, data, start, _FLOATS)
    words = builder.zext(_load(builder, data, start, _SHORTS), _INTS)
    if dtype == types.uint16:
        return _widened(builder, words)
    assert dtype == types.int16
    return builder.bitcast(builder.shl(words, _all(16)), _FLOATS)


def _widened(builder: ir.IRBuilder, words: Any) -> Any:
    """Convert float16 to float32 by its bits.

    LLVM's own conversion calls a function that is not there before AVX2.
    """
    magnitude = builder.shl(builder.and_(words, _all(0x7FFF)), _all(13))
    exponent = builder.and_(magnitude, _all(0x1F << 23))
    normal = builder.add(magnitude, _all((127 - 15) << 23))
    infinite = builder.add(magnitude, _all((255 - 31) << 23))
    # a denormal number as 1.f times the least exponent, less that exponent
    one = _all((127 - 14) << 23)
    denormal = builder.fsub(
        builder.bitcast(builder.add(magnitude, one), _FLOATS), builder.bitcast(one, _FLOATS)
    )
    bits = builder.select(builder.icmp_signed("==", exponent, _all(0x1F << 23)), infinite, normal)
    bits = builder.select(
        builder.icmp_signed("==", exponent, _all(0)), builder.bitcast(denormal, _INTS), bits
    )
    sign = builder.shl(builder.and_(words, _all(0x8000)), _all(16))
    return builder.bitcast(builder.or_(bits, sign), _FLOATS)


def _reaching(builder: ir.IRBuilder, magnitudes: Any, threshold: Any) -> Any:
    # The lanes that reach `threshold` as bits of one integer
    # Signed, as no magnitude has the sign bit: AVX2 has no unsigned comparison.
    return builder.bitcast(builder.icmp_signed(">=", magnitudes, threshold), _LONG)


def _masks(builder: ir.IRBuilder, floats: Any, threshold: Any) -> tuple[Any, Any]:
    # Bits of the lanes that reach `threshold`, and of those that are not finite
    magnitudes = builder.and_(builder.bitcast(floats, _INTS), _all(MAGNITUDE_MASK))
    infinite = _reaching(builder, magnitudes, _all(INFINITY_BITS))
    return _reaching(builder, magnitudes, _broadcast(builder, threshold, _INTS)), infinite


def _array(generator: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> Any:
    return generator.make_array(kind)(generator, builder, value).data


@intrinsic
def mask_group(context: Any, data: Any, start: Any, threshold: Any) -> Any:
    """Return which of ``data[start : start + 64]`` reach `threshold`, and which are not finite.

    `data` (n,) float32, uint16 or int16; `threshold` is the bits of a float32. Returns two int64;
    bit j stands for element ``start + j``.
    """

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, start, threshold = arguments
        floats = _load_floats(builder, _array(generator, builder, data, values), start, data.dtype)
        return generator.make_tuple(builder, _MASKS, _masks(builder, floats, threshold))

    return _MASKS(data, types.int64, types.int32), generate


@intrinsic
def add_group(
    context: Any, residual: Any, gradient: Any, start: Any, scale: Any, threshold: Any
) -> Any:
    """Do ``residual += scale * gradient`` on 64 elements, and return what `mask_group` returns.

    Without effect if a sum is not finite. `residual` (n,) float32, `gradient` (n,) float32, uint16
    or int16.
    """

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kept, added, start, scale, threshold = arguments
        kept_data = _array(generator, builder, residual, kept)
        floats = _load_floats(
            builder, _array(generator, builder, gradient, added), start, gradient.dtype
        )
        change = builder.fmul(floats, _broadcast(builder, scale, _FLOATS))
        # the sum, stored only where all 64 are finite
        total = builder.fadd(_load(builder, kept_data, start, _FLOATS), change)
        mask, infinite = _masks(builder, total, threshold)
        with builder.if_then(
            builder.icmp_signed("==", infinite, ir.Constant(_LONG, 0)), likely=True
        ):
            builder.store(total, _pointer(builder, kept_data, start, _FLOATS)).align = 4
        return generator.make_tuple(builder, _MASKS, (mask, infinite))

    return _MASKS(residual, gradient, types.int64, types.float32, types.int32), generate


@intrinsic
def count_ones(context: Any, mask: Any) -> Any:
    """Return the number of ones of an int64."""

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


@intrinsic
def lowest_one(context: Any, mask: Any) -> Any:
    """Return the position of the lowest one of an int64; 64 where there is none."""

    def generate(generator: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate
