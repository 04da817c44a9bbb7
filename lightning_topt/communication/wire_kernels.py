"""Messages of gradients on a CPU, compiled by Numba: indices and levels as bits.

The compiled half of `wire`; it stays a file of its own because Numba caches compiled code by file.
Each kernel passes once over its values while they are in the first-level cache, where torch takes
up to fifteen passes over all of them.

- indices: `pack_indices`, `unpack_indices`; sections are zeros before, and padded to 32-bit words;
- levels: `encode_groups`, `decode_groups`; `levels` (groups * levels each,) float32 and
  `level_bits`, the same memory as int32, hold numbers of bfloat16; `codes` are bytes.

In both the first value is in the lowest bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.selection.lanes import lowest_one

WORD_BITS = 32  # sections of a message are padded to these


def _exact_kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False)


def _level_kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False, fastmath={"reassoc"})


@_exact_kernel
def pack_indices(indices: Any, low_bits: int, lows: Any, words: Any) -> None:
    """Write ascending `indices` (k,) into the bytes `lows` and the uint32 `words`."""
    for j in range(indices.shape[0]):
        index = indices[j]
        if low_bits == 4:
            lows[j >> 1] |= (index & 15) << (4 * (j & 1))
        elif low_bits == 8:
            lows[j] = index & 255
        elif low_bits == 16:
            lows[2 * j] = index & 255
            lows[2 * j + 1] = (index >> 8) & 255
        place = (index >> low_bits) + j if low_bits else index
        words[place // WORD_BITS] |= 1 << (place % WORD_BITS)


@_exact_kernel
def unpack_indices(lows: Any, words: Any, low_bits: int, indices: Any) -> int:
    """Write the first k indices of a message into `indices` (k,); return how many there are."""
    word: int
    count, k = 0, indices.shape[0]
    for number in range(words.shape[0]):
        word = words[number]
        while word != 0 and count < k:
            place = number * WORD_BITS + lowest_one(word)
            word &= word - 1
            upper = (place - count if low_bits else place) << low_bits
            if low_bits == 4:
                indices[count] = upper | ((lows[count >> 1] >> (4 * (count & 1))) & 15)
            elif low_bits == 8:
                indices[count] = upper | lows[count]
            elif low_bits == 16:
                indices[count] = upper | lows[2 * count] | lows[2 * count + 1] << 8
            else:
                indices[count] = upper
            count += 1
    return count


@_level_kernel
def _round_level(level_bits: Any, place: int) -> None:
    # Round a level to bfloat16: to nearest, ties to even
    bits = level_bits[place]
    level_bits[place] = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


@_level_kernel
def _pack_group(unpacked: Any, count: int, bits: int, codes: Any, first: int) -> None:
    # Pack the codes of one group into bytes from `first`; those beyond `count` are zeros
    each = 8 // bits
    for place in range((count + each - 1) // each):
        byte = np.uint8(0)
        for j in range(each):
            if place * each + j < count:
                byte |= np.uint8(unpacked[place * each + j] << (bits * j))
        codes[first + place] = byte


@_level_kernel
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
    # Write the values of one group as signed steps of the largest magnitude / half
    largest = np.float32(0)
    for i in range(start, stop):
        largest = max(largest, abs(values[i]))
    levels[group] = largest / half
    _round_level(level_bits, group)
    inverse = np.float32(1) / levels[group] if levels[group] > 0 else np.float32(0)
    for i in range(start, stop):
        scaled = np.rint(values[i] * inverse)
        out[i - start] = np.uint8(min(max(scaled, -half), half) + half)


@_level_kernel
def _encode_signs(
    values: Any, start: int, stop: int, levels: Any, level_bits: Any, group: int, out: Any
) -> None:
    # Write the signs of one group; its level is the mean magnitude
    total = np.float32(0)
    for i in range(start, stop):
        total += abs(values[i])
    levels[group] = total / np.float32(stop - start)
    _round_level(level_bits, group)
    for i in range(start, stop):
        out[i - start] = values[i] < 0


@_level_kernel
def _encode_halves(
    values: Any, start: int, stop: int, levels: Any, level_bits: Any, group: int, out: Any
) -> None:
    """Write signs and whether magnitudes are above the group's mean.

    The two levels are the means of those below and of those above.
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


@_level_kernel
def encode_groups(
    values: Any, bits: int, size: int, levels: Any, level_bits: Any, codes: Any
) -> None:
    """Write the levels and codes of `values` (n,) in groups of `size`, a multiple of 8."""
    numel, unpacked = values.shape[0], np.zeros(size, np.uint8)
    half = np.float32((1 << (bits - 1)) - 1)
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


@_level_kernel
def decode_groups(levels: Any, codes: Any, bits: int, size: int, out: Any) -> None:
    """Write the values (n,) that `levels` and `codes` stand for into `out`."""
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
