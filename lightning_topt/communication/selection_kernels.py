"""The exact selection on a CPU, compiled by Numba, without the GIL: one pass over memory.

    sums_of               a sample of what the pass will see
    exact_threshold       of the sample: a lower bound of the k-th largest magnitude
    collect, collect_sum  the one pass: (accumulate,) keep what reaches the bound
    exact_threshold       of the survivors: their k-th largest magnitude, by histograms of its bits
    take                  the k survivors, in the order of their index

A file of its own because Numba caches compiled code by file. Magnitudes are compared as the bits of
float32 without the sign, which are in the same order.

The pass asks which of 64 magnitudes reach a threshold, answered as the bits of one integer
(`mask_group`, `add_group`). These are written in LLVM's own vector operations, since no Python loop
becomes them; LLVM splits the 64 lanes into what the processor has. An array's dtype says what its
elements are: float32, uint16 for float16 and int16 for bfloat16, which NumPy does not know.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_topt.basics.jit import kernel

BLOCK = 4096  # survivors are fetched while their block is in the first-level cache
AT_ONCE = 2  # survivors of a group that are listed without a branch
# of a magnitude: lowest bit and width; of a chunk, whose histogram has to stay in the cache
DIGITS = ((16, 15), (8, 8), (0, 8))
CHUNK_DIGITS = ((20, 11), (10, 10), (0, 10))
GROUP = 64  # lanes: magnitudes that are compared at once
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


@kernel
def sums_of(residual: Any, gradient: Any, scale: Any, every: int, sums: Any) -> None:
    """Write a sample of what will be summed into `sums` (m,) float32: one run of 64 in `every`.

    The sums are ``residual + scale * gradient``. `residual`: None reads as zeros. Where sums of a
    run are not all finite, zeros or the residual stand for them.
    """
    kept, added = np.zeros(GROUP, np.float32), np.zeros(GROUP, gradient.dtype)
    for run in range((sums.shape[0] + GROUP - 1) // GROUP):
        start, first = run * GROUP * every, run * GROUP
        size = min(GROUP, sums.shape[0] - first)
        added[:size] = gradient[start : start + size]
        if residual is None:
            kept[:] = 0.0
        else:
            kept[:size] = residual[start : start + size]
        add_group(kept, added, 0, scale, np.int32(0))
        sums[first : first + size] = kept[:size]


@kernel
def _rank_from_top(histogram: Any, rank: int) -> tuple[int, int]:
    # The bin of the element of `rank` (from 1) from the top, and how many lie above
    above = 0
    for bin_index in range(histogram.shape[0] - 1, -1, -1):
        if above + histogram[bin_index] >= rank:
            return bin_index, above
        above += histogram[bin_index]
    return 0, above


@kernel
def exact_threshold(bits: Any, k: int) -> tuple[int, int]:
    """Return the k-th largest magnitude of `bits` (m,), and how many of the k equal it."""
    prefix = 0
    for place in range(3):
        shift, width = DIGITS[place] if bits.shape[0] > BLOCK else CHUNK_DIGITS[place]
        histogram = np.zeros(1 << width, np.int32)
        for i in range(bits.shape[0]):
            magnitude = bits[i] & MAGNITUDE_MASK
            if magnitude >> (shift + width) == prefix:
                histogram[(magnitude >> shift) & ((1 << width) - 1)] += 1
        digit, above = _rank_from_top(histogram, k)
        prefix, k = (prefix << width) | digit, k - above
    return prefix, k


@kernel
def _append(mask: int, first: int, indices: Any, count: int) -> int:
    """Append ``first + j`` for every bit j of `mask`; return the new count.

    Room for `AT_ONCE` more is needed. How many survivors a group has cannot be predicted: the first
    few are written in any case.
    """
    total = count + count_ones(mask)
    for j in range(AT_ONCE):
        # unsigned: Numba checks nothing then
        indices[np.uint64(count + j)] = first + lowest_one(mask)
        mask &= mask - 1
    count += AT_ONCE
    while mask != 0:
        indices[np.uint64(count)] = first + lowest_one(mask)
        mask &= mask - 1
        count += 1
    return total


@kernel
def collect(data: Any, threshold: int, indices: Any, survivors: Any) -> tuple[int, bool]:
    """Pass once over `data` (n,) and keep what reaches `threshold`.

    Returns the number of survivors (-1: not finite), and whether there was no room for all.
    """
    numel, count, full = data.shape[0], 0, False
    mask: int
    infinite: int
    tail = np.zeros(GROUP, data.dtype)
    rest = numel % GROUP
    tail[:rest] = data[numel - rest :]
    for block in range(0, numel, BLOCK):
        if count + BLOCK + GROUP > indices.shape[0]:
            # keep the first ones; go on only to see what is not finite
            threshold, full = INFINITY_BITS, True
        before = count
        for start in range(block, min(block + BLOCK, numel), GROUP):
            if start + GROUP <= numel:
                mask, infinite = mask_group(data, start, np.int32(threshold))
            else:
                mask, infinite = mask_group(tail, 0, np.int32(threshold))
                mask &= (1 << rest) - 1
            if infinite != 0:
                return -1, full
            count = _append(mask, start, indices, count)
        for j in range(before, count):
            survivors[np.uint64(j)] = data[np.uint64(indices[np.uint64(j)])]
    return count, full


@kernel
def _add_tail(residual: Any, gradient: Any, scale: Any, threshold: int) -> tuple[int, int]:
    # Do `add_group` on the last, incomplete group
    rest = residual.shape[0] % GROUP
    start = residual.shape[0] - rest
    kept, added = np.zeros(GROUP, residual.dtype), np.zeros(GROUP, gradient.dtype)
    kept[:rest], added[:rest] = residual[start:], gradient[start:]
    mask: int
    infinite: int
    mask, infinite = add_group(kept, added, 0, scale, np.int32(threshold))
    residual[start:] = kept[:rest]
    return mask & ((1 << rest) - 1), infinite


@kernel
def collect_sum(
    residual: Any, gradient: Any, scale: Any, threshold: int, indices: Any, survivors: Any
) -> tuple[int, bool, int]:
    """Do ``residual += scale * gradient`` and what `collect` does, in one pass.

    The third number returned says how many elements were accumulated.
    """
    numel, count, full = residual.shape[0], 0, False
    mask: int
    infinite: int
    for block in range(0, numel, BLOCK):
        if count + BLOCK + GROUP > indices.shape[0]:
            threshold, full = INFINITY_BITS, True
        before = count
        for start in range(block, min(block + BLOCK, numel), GROUP):
            if start + GROUP <= numel:
                mask, infinite = add_group(residual, gradient, start, scale, np.int32(threshold))
            else:
                mask, infinite = _add_tail(residual, gradient, scale, threshold)
            if infinite != 0:
                return -1, full, start
            count = _append(mask, start, indices, count)
        for j in range(before, count):
            survivors[np.uint64(j)] = residual[np.uint64(indices[np.uint64(j)])]
    return count, full, numel


@kernel
def take(bits: Any, positions: Any, threshold: int, equal: int, indices: Any, values: Any) -> None:
    """Write what lies above `threshold`, and the first `equal` ties, into arrays (k + 1,).

    `positions` (m,) of the elements; empty where an element's position is its own.
    """
    count, listed = 0, positions.shape[0] > 0
    for i in range(bits.shape[0]):
        magnitude = bits[i] & MAGNITUDE_MASK
        tie = magnitude == threshold and equal > 0
        indices[count] = positions[i] if listed else i
        values[count] = bits[i]
        count += magnitude > threshold or tie
        equal -= tie


@kernel
def zero_at(values: Any, indices: Any) -> None:
    """Set ``values[indices]`` to zero."""
    for i in range(indices.shape[0]):
        values[indices[i]] = 0.0


@kernel
def take_chunks(
    residual: Any, bits: Any, added: Any, decay: Any, chunk: int, per_chunk: int,
    indices: Any, values: Any,
) -> None:  # fmt: skip
    """Do ``residual = decay * residual + added``, and take the largest of each chunk out.

    They go to `indices` and `values` (k,), ascending; of equal magnitudes the first. `bits` is the
    memory of `residual` (n,) as int32. A last chunk that is shorter gives its share, rounded up.
    """
    written = 0
    for start in range(0, residual.shape[0], chunk):
        stop = min(start + chunk, residual.shape[0])
        for i in range(start, stop):
            residual[i] = decay * residual[i] + added[i]
        # the threshold, then what reaches it, while the chunk is in the first-level cache
        k = (per_chunk * (stop - start) + chunk - 1) // chunk
        threshold, equal = exact_threshold(bits[start:stop], k)
        for i in range(start, stop):
            magnitude = bits[i] & MAGNITUDE_MASK
            tie = magnitude == threshold and equal > 0
            if magnitude > threshold or tie:
                indices[written], values[written] = i, residual[i]
                residual[i] = 0.0
                written += 1
            equal -= tie


# ---- 64 lanes at once, as LLVM operations


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
