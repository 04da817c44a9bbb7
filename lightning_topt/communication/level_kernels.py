"""`levels` on a CPU, compiled by Numba: a pass over each group in the first-level cache, where
torch takes fifteen over all.

`levels` (groups * levels each,) float32 and `level_bits`, the same memory as int32, hold numbers of
bfloat16. `codes` are bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import compiled


def _kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False, fastmath={"reassoc"})


@_kernel
def _round_level(level_bits: Any, place: int) -> None:
    """To bfloat16, nearest, ties to even."""
    bits = level_bits[place]
    level_bits[place] = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


@_kernel
def _pack_group(unpacked: Any, count: int, bits: int, codes: Any, first: int) -> None:
    """Codes of one group to bytes from `first`, the first in the lowest bits; those beyond `count`
    are zeros.
    """
    each = 8 // bits
    for place in range((count + each - 1) // each):
        byte = np.uint8(0)
        for j in range(each):
            if place * each + j < count:
                byte |= np.uint8(unpacked[place * each + j] << (bits * j))
        codes[first + place] = byte


@_kernel
def _encode_steps(
    values: Any,
    start: int,
    stop: int,
    half: Any,
    levels: Any,
    level_bits: Any,
    group: int,
    out: Any,
) -> None:
    """Signed steps of the largest magnitude / half."""
    largest = np.float32(0)
    for i in range(start, stop):
        largest = max(largest, abs(values[i]))
    levels[group] = largest / half
    _round_level(level_bits, group)
    inverse = np.float32(1) / levels[group] if levels[group] > 0 else np.float32(0)
    for i in range(start, stop):
        scaled = np.rint(values[i] * inverse)
        out[i - start] = np.uint8(min(max(scaled, -half), half) + half)


@_kernel
def _encode_signs(
    values: Any, start: int, stop: int, levels: Any, level_bits: Any, group: int, out: Any
) -> None:
    """The sign; the level is the mean magnitude."""
    total = np.float32(0)
    for i in range(start, stop):
        total += abs(values[i])
    levels[group] = total / np.float32(stop - start)
    _round_level(level_bits, group)
    for i in range(start, stop):
        out[i - start] = values[i] < 0


@_kernel
def _encode_halves(
    values: Any, start: int, stop: int, levels: Any, level_bits: Any, group: int, out: Any
) -> None:
    """The sign and whether the magnitude is above the mean; levels are the means of those below and
    above.
    """
    total, count = np.float32(0), np.float32(stop - start)
    for i in range(start, stop):
        total += abs(values[i])
    mean = total / count
    high, above = np.float32(0), 0
    for i in range(start, stop):
        is_above = abs(values[i]) > mean
        high += abs(values[i]) if is_above else np.float32(0)
        above += is_above
        out[i - start] = np.uint8(values[i] < 0) + 2 * np.uint8(is_above)
    low = max(total - high, np.float32(0)) / max(count - np.float32(above), np.float32(1))
    levels[2 * group] = low
    levels[2 * group + 1] = high / np.float32(above) if above else low
    _round_level(level_bits, 2 * group)
    _round_level(level_bits, 2 * group + 1)


@_kernel
def encode_groups(
    values: Any, bits: int, size: int, levels: Any, level_bits: Any, codes: Any
) -> None:
    """Write the levels and codes of `values` (n,) in groups of `size`, a multiple of 8."""
    numel, unpacked, half = (
        values.shape[0],
        np.zeros(size, np.uint8),
        np.float32((1 << (bits - 1)) - 1),
    )
    for group in range((numel + size - 1) // size):
        start = group * size
        stop = min(start + size, numel)
        if bits == 1:
            _encode_signs(values, start, stop, levels, level_bits, group, unpacked)
        elif bits == 2:
            _encode_halves(values, start, stop, levels, level_bits, group, unpacked)
        else:
            _encode_steps(values, start, stop, half, levels, level_bits, group, unpacked)
        _pack_group(unpacked, stop - start, bits, codes, start * bits // 8)


@_kernel
def decode_groups(levels: Any, codes: Any, bits: int, size: int, out: Any) -> None:
    """Write the values (n,) of `levels` and `codes` into `out`."""
    half, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    table = np.zeros(256, np.float32)
    for group in range((out.shape[0] + size - 1) // size):
        start = group * size
        if bits == 1:
            table[0], table[1] = levels[group], -levels[group]
        elif bits == 2:
            table[0], table[1] = levels[2 * group], -levels[2 * group]
            table[2], table[3] = levels[2 * group + 1], -levels[2 * group + 1]
        for i in range(start, min(start + size, out.shape[0])):
            place = i * bits
            code = (np.int32(codes[place >> 3]) >> (place & 7)) & mask
            out[i] = table[code] if bits < 3 else np.float32(code - half) * levels[group]
