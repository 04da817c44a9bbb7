"""The exact selection on a CPU: one pass over memory, compiled by Numba, without the GIL.

    sums_of               a sample of what the pass will see
    exact_threshold       of the sample: a lower bound of the k-th largest magnitude
    collect, collect_sum  the one pass: (accumulate,) keep what reaches the bound
    exact_threshold       of the survivors: their k-th largest magnitude, by histograms of its bits
    take                  the k survivors, in the order of their index

Where the sample misled, `search.py` goes on. Magnitudes are compared as the bits of float32 without
the sign, which are in the same order.
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


def _kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False)


@_kernel
def _rank_from_top(histogram: Any, rank: int) -> tuple[int, int]:
    """The bin that holds the element of `rank` (from 1) counted from the top, and how many lie
    above that bin.
    """
    above = 0
    for bin_index in range(histogram.shape[0] - 1, -1, -1):
        if above + histogram[bin_index] >= rank:
            return bin_index, above
        above += histogram[bin_index]
    return 0, above


@_kernel
def exact_threshold(bits: Any, k: int) -> tuple[int, int]:
    """Return the k-th largest magnitude of `bits` (m,), and how many equal to it belong to the k
    largest.
    """
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
def sums_of(
    residual: Any, velocity: Any, gradient: Any, scale: Any, momentum: Any, every: int, sums: Any
) -> None:
    """Write into `sums` (m,) float32 ``residual + momentum * velocity + scale * gradient``, one run
    of 64 in `every`.

    `residual`, `velocity`: None reads as zeros. Sums of a run that are not all finite are left out:
    zeros or the residual.
    """
    kept, moving, added = (
        np.zeros(GROUP, np.float32),
        np.zeros(GROUP, np.float32),
        np.zeros(GROUP, gradient.dtype),
    )
    for run in range((sums.shape[0] + GROUP - 1) // GROUP):
        start, first = run * GROUP * every, run * GROUP
        size = min(GROUP, sums.shape[0] - first)
        added[:size] = gradient[start : start + size]
        if residual is None:
            kept[:] = 0.0
        else:
            kept[:size] = residual[start : start + size]
        if velocity is None:
            add_group(kept, None, added, 0, scale, momentum, np.int32(0))
        else:
            moving[:size] = velocity[start : start + size]
            add_group(kept, moving, added, 0, scale, momentum, np.int32(0))
        sums[first : first + size] = kept[:size]


@_kernel
def _append(mask: int, first: int, indices: Any, count: int) -> int:
    """Append ``first + j`` for every bit j of `mask`; room for `AT_ONCE` more is needed. Returns
    the new count.

    Whether a group has survivors, and how many, cannot be predicted: the first few are written in
    any case.
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
    """Make one pass over `data` (n,); return the number of survivors (-1: not finite), and whether
    there was no room for all.
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
def _add_tail(
    residual: Any, velocity: Any, gradient: Any, scale: Any, momentum: Any, threshold: int
) -> tuple[int, int]:
    """Do `add_group` on the last, incomplete group."""
    rest = residual.shape[0] % GROUP
    start = residual.shape[0] - rest
    kept, added = np.zeros(GROUP, residual.dtype), np.zeros(GROUP, gradient.dtype)
    kept[:rest], added[:rest] = residual[start:], gradient[start:]
    mask: int
    infinite: int
    if velocity is None:
        mask, infinite = add_group(kept, None, added, 0, scale, momentum, np.int32(threshold))
    else:
        moving = np.zeros(GROUP, residual.dtype)
        moving[:rest] = velocity[start:]
        mask, infinite = add_group(kept, moving, added, 0, scale, momentum, np.int32(threshold))
        velocity[start:] = moving[:rest]
    residual[start:] = kept[:rest]
    return mask & ((1 << rest) - 1), infinite


@_kernel
def collect_sum(
    residual: Any,
    velocity: Any,
    gradient: Any,
    scale: Any,
    momentum: Any,
    threshold: int,
    indices: Any,
    survivors: Any,
) -> tuple[int, bool, int]:
    """Do the same over ``residual += scale * gradient``; the third number says how many elements
    were accumulated.

    With `velocity` (not None) over ``velocity = momentum * velocity + scale * gradient; residual +=
    velocity``.
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
                mask, infinite = add_group(
                    residual, velocity, gradient, start, scale, momentum, np.int32(threshold)
                )
            else:
                mask, infinite = _add_tail(residual, velocity, gradient, scale, momentum, threshold)
            if infinite != 0:
                return -1, full, start
            count = _append(mask, start, indices, count)
        for j in range(before, count):
            survivors[np.uint64(j)] = residual[np.uint64(indices[np.uint64(j)])]
    return count, full, numel


@_kernel
def take(bits: Any, positions: Any, threshold: int, equal: int, indices: Any, values: Any) -> None:
    """Write into `indices` and `values` (k + 1,) what lies above `threshold`, and the first `equal`
    equal to it.

    `positions` (m,) or empty, where an element's position is its own.
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
