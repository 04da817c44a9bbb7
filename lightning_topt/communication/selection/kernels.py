"""The exact selections on a CPU, compiled by Numba, without the GIL.

A file of its own because Numba caches compiled code by file. Magnitudes are compared as the bits of
float32 without the sign, which are in the same order.

Of a whole vector, for `vector_top_k`: one pass over memory.

    sums_of               a sample of what the pass will see
    exact_threshold       of the sample: a lower bound of the k-th largest magnitude
    collect, collect_sum  the one pass: (accumulate,) keep what reaches the bound
    exact_threshold       of the survivors: their k-th largest magnitude, by histograms of its bits
    take                  the k survivors, in the order of their index

Of every chunk, for `chunk_top_k`: `take_chunks`, one call for all chunks. Each chunk, while it is
in the first-level cache: accumulate, find the threshold that k magnitudes reach by counting, and
write what reaches it in the order of its index. Neighbouring chunks have similar thresholds: five
or six counts find the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.selection.lanes import (
    GROUP,
    INFINITY_BITS,
    MAGNITUDE_MASK,
    add_group,
    count_ones,
    lowest_one,
    mask_group,
)

BLOCK = 4096  # survivors are fetched while their block is in the first-level cache
AT_ONCE = 2  # survivors of a group that are listed without a branch
DIGITS = ((16, 15), (8, 8), (0, 8))  # of a magnitude: lowest bit and width
BINADE = 1 << 23  # from one power of two to the next, in the bits of a magnitude


def _kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False)


# ---- of a whole vector


@_kernel
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


@_kernel
def _rank_from_top(histogram: Any, rank: int) -> tuple[int, int]:
    # The bin of the element of `rank` (from 1) from the top, and how many lie above
    above = 0
    for bin_index in range(histogram.shape[0] - 1, -1, -1):
        if above + histogram[bin_index] >= rank:
            return bin_index, above
        above += histogram[bin_index]
    return 0, above


@_kernel
def exact_threshold(bits: Any, k: int) -> tuple[int, int]:
    """Return the k-th largest magnitude of `bits` (m,), and how many of the k equal it."""
    prefix = 0
    for shift, width in DIGITS:
        histogram = np.zeros(1 << width, np.int32)
        for i in range(bits.shape[0]):
            magnitude = bits[i] & MAGNITUDE_MASK
            if magnitude >> (shift + width) == prefix:
                histogram[(magnitude >> shift) & ((1 << width) - 1)] += 1
        digit, above = _rank_from_top(histogram, k)
        prefix, k = (prefix << width) | digit, k - above
    return prefix, k


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
def zero_at(values: Any, indices: Any) -> None:
    """Set ``values[indices]`` to zero."""
    for i in range(indices.shape[0]):
        values[indices[i]] = 0.0


# ---- of every chunk


@_kernel
def count_reaching(values: Any, bits: Any, start: int, stop: int, threshold: int) -> int:
    """Return how many magnitudes of ``values[start:stop]`` reach `threshold`.

    `bits` is the same memory as int32.
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
    """Return the largest threshold that `k` magnitudes of a chunk reach, and how many do.

    It is the k-th largest magnitude, or anything between that and the next where no magnitude
    equals it. `guess` says where to begin. All are finite, k > 0.
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
        # widen until both sides are known; then interpolate, and bisect every fourth time
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
    # Write the indices in a chunk of all that reach `threshold`; return `written`
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
    # Write the indices of all above `threshold` and of some ties; return `written`
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
    """Do ``residual = decay * residual + scale * added`` and take the largest of each chunk out.

    They go to `indices` and `values` (k,). `bits` is the memory of `residual` as int32. A last
    chunk that is shorter gives its share, rounded up. Returns how many were taken, -1 where a sum
    was not finite (earlier chunks have changed then).
    """
    written = threshold = 0
    for start in range(0, residual.shape[0], chunk):
        stop = min(start + chunk, residual.shape[0])
        # accumulate, then find the threshold of k
        for i in range(start, stop):
            residual[i] = decay * residual[i] + scale * added[i]
        if count_reaching(residual, bits, start, stop, INFINITY_BITS):
            return -1
        k = (per_chunk * (stop - start) + chunk - 1) // chunk
        threshold, many = find_threshold(residual, bits, start, stop, k, threshold)
        # list what is taken, then take it out
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
