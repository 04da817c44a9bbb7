"""Values as bfloat16, two in each 32-bit word of a datagram.

Of a word the low half is the first value. Rounding is to nearest, ties to even, as torch's; NaN
stays NaN.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.raw_memory import Array, inner


@inner
def rounded(bits: np.int64) -> np.int64:
    """Return the upper 16 bits of the float32 that has these `bits`, rounded, in their place."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits & 0xFFFF0000) | 0x00400000
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000


@compiled
def pack_halves(values: Array, words: Array) -> None:
    """Write `values` (n,) float32, contiguous, to `words` (ceil(n / 2),) uint32; the last half may
    be 0.
    """
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        words[i] = rounded(np.int64(bits[2 * i])) >> 16 | rounded(np.int64(bits[2 * i + 1]))
    if len(values) % 2:
        words[pairs] = rounded(np.int64(bits[-1])) >> 16


@compiled
def unpack_halves(words: Array, values: Array) -> None:
    """Write `words` to `values` (n,) float32, contiguous."""
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        bits[2 * i] = np.uint32(words[i] << np.uint32(16))
        bits[2 * i + 1] = words[i] & np.uint32(0xFFFF0000)
    if len(values) % 2:
        bits[-1] = np.uint32(words[pairs] << np.uint32(16))
