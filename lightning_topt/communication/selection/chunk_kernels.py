"""The largest entries of each chunk on a CPU, with a decaying residual: one call for all chunks,
compiled by Numba.

Per chunk, while it is in the first-level cache: accumulate, find the threshold that k magnitudes
reach by counting, and write what reaches it in the order of its index. Neighbouring chunks have
similar thresholds: five or six counts find the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.selection.lanes import (
    GROUP,
    INFINITY_BITS,
    MAGNITUDE_MASK,
    count_ones,
    lowest_one,
    mask_group,
)

BINADE = 1 << 23  # from one power of two to the next, in the bits of a magnitude


def _kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False)


@_kernel
def count_reaching(values: Any, bits: Any, start: int, stop: int, threshold: int) -> int:
    """Return how many magnitudes of ``values[start:stop]`` reach `threshold`; `bits` is the same
    memory as int32.
    """
    count, whole = 0, stop - (stop - start) % GROUP
    for i in range(start, whole, GROUP):
        count += count_ones(mask_group(values, i, np.int32(threshold))[0])
    for i in range(whole, stop):
        count += (bits[i] & MAGNITUDE_MASK) >= threshold
    return count


@_kernel
def find_threshold(
    values: Any, bits: Any, start: int, stop: int, k: int, guess: int
) -> tuple[int, int]:
    """Return the largest threshold that at least `k` magnitudes of ``values[start:stop]`` reach,
    and how many reach it.

    It is that of the k-th largest, or anything between that and the next where no magnitude equals
    it. `guess` says where to begin. All are finite, k > 0.
    """
    # `many` reach low, `few` reach high; few < k <= many
    low, high, many, few = 0, INFINITY_BITS, stop - start, 0
    width, tries = BINADE >> 3, 0
    threshold = min(max(guess, 1), INFINITY_BITS - 1)
    while many > k and high - low > 1:
        count = count_reaching(values, bits, start, stop, threshold)
        if count >= k:
            low, many = threshold, count
        else:
            high, few = threshold, count
        tries += 1
        if high == INFINITY_BITS:
            threshold = low + width
            width *= 4
        elif low == 0:
            threshold = high - width
            width *= 4
        elif tries % 4 == 0:
            threshold = (low + high) // 2
        else:
            threshold = low + (high - low) * (2 * (many - k) - 1) // (2 * (many - few))
        threshold = min(max(threshold, low + 1), high - 1)
    return low, many


@_kernel
def _list_reaching(
    values: Any, bits: Any, start: int, stop: int, threshold: int, indices: Any, written: int
) -> int:
    """Write the indices in ``values[start:stop]`` of all that reach `threshold`; the new
    `written`.
    """
    mask: int
    whole = stop - (stop - start) % GROUP
    for i in range(start, whole, GROUP):
        mask = mask_group(values, i, np.int32(threshold))[0]
        while mask != 0:
            # unsigned: Numba checks nothing then
            indices[np.uint64(written)] = i + lowest_one(mask)
            mask &= mask - 1
            written += 1
    for i in range(whole, stop):
        if (bits[i] & MAGNITUDE_MASK) >= threshold:
            indices[written] = i
            written += 1
    return written


@_kernel
def _list_above(
    bits: Any, start: int, stop: int, threshold: int, equal: int, indices: Any, written: int
) -> int:
    """Write the indices of all above `threshold` and of the first `equal` that are equal to it; the
    new `written`.
    """
    for i in range(start, stop):
        magnitude = bits[i] & MAGNITUDE_MASK
        tie = magnitude == threshold and equal > 0
        if magnitude > threshold or tie:
            indices[written] = i
            written += 1
        equal -= tie
    return written


@_kernel
def take_chunks(
    residual: Any,
    bits: Any,
    added: Any,
    decay: Any,
    scale: Any,
    chunk: int,
    per_chunk: int,
    indices: Any,
    values: Any,
) -> int:
    """``residual = decay * residual + scale * added``; take the largest of each chunk out, to
    `indices` and `values` (k,).

    `bits` is the memory of `residual` as int32. A last chunk that is shorter gives its share,
    rounded up. Returns how many were taken, -1 where a sum was not finite (earlier chunks have
    changed then).
    """
    written = threshold = 0
    for start in range(0, residual.shape[0], chunk):
        stop = min(start + chunk, residual.shape[0])
        for i in range(start, stop):
            residual[i] = decay * residual[i] + scale * added[i]
        if count_reaching(residual, bits, start, stop, INFINITY_BITS):
            return -1
        k = (per_chunk * (stop - start) + chunk - 1) // chunk
        threshold, many = find_threshold(residual, bits, start, stop, k, threshold)
        first = written
        if many == k:
            written = _list_reaching(residual, bits, start, stop, threshold, indices, written)
        else:
            equal = k - count_reaching(residual, bits, start, stop, threshold + 1)
            written = _list_above(bits, start, stop, threshold, equal, indices, written)
        for j in range(np.uint64(first), np.uint64(written)):
            index = np.uint64(indices[j])
            values[j] = residual[index]
            residual[index] = 0.0
    return written
