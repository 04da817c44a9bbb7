"""Indices of a message (`wire`) on a CPU, compiled by Numba: one pass over them, nothing unpacked
into bytes on the way.
"""

from __future__ import annotations

from typing import Any

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.selection.lanes import lowest_one

WORD_BITS = 32  # sections of a message are padded to these


def _kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False)


@_kernel
def pack_indices(indices: Any, low_bits: int, lows: Any, words: Any) -> None:
    """Write ascending `indices` (k,) into the bytes `lows` and the upper bits `words` (uint32),
    both zeros before.
    """
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


@_kernel
def unpack_indices(lows: Any, words: Any, low_bits: int, indices: Any) -> int:
    """Write the first k indices of a message into `indices` (k,); return how many there are, at
    most k.
    """
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
