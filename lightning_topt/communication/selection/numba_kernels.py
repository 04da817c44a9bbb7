"""The exact selection on a CPU: one pass over memory, compiled by Numba, without the GIL.

    sample_threshold    a lower bound of the k-th largest magnitude, from 0.5 % of the data
    collect*            the one pass: (accumulate,) keep what reaches the bound
    exact_threshold     the k-th largest magnitude of the survivors: two histograms of their bits, 16 and 16
    take                the k survivors, in the order of their index; zeroed where asked

When the bound was too high (fewer than k survive) or far too low (more than there is room for: many equal values), the
histograms run over the whole data: three more passes, exact whatever the data are. Magnitudes are compared as the bits of
float32 without the sign, which are in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lightning_topt.communication.selection.lanes import (
    INFINITY_BITS,
    LANES,
    MAGNITUDE_MASK,
    add_and_append_lanes,
    append_lanes,
)
from lightning_topt.communication.selection.sampled import expected_rank

RUN = 64
SAMPLE_EVERY = 200  # one run of RUN in so many
SAMPLE_ALL_BELOW = 1 << 16
BLOCK = 1024  # elements that are accumulated, then scanned, while they are in the first-level cache
TOP_BINS, LOW_BINS = 1 << 15, 1 << 16

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def _kernel(function: Any) -> Any:
    return njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)


@_kernel
def _rank_from_top(histogram: Any, rank: int) -> tuple[int, int]:
    """The bin that holds the element of `rank` (from 1) counted from the top, and how many lie above that bin."""
    above = 0
    for bin_index in range(histogram.shape[0] - 1, -1, -1):
        if above + histogram[bin_index] >= rank:
            return bin_index, above
        above += histogram[bin_index]
    return 0, above


@_kernel
def _sample_threshold(
    residual: Any, velocity: Any, gradient: Any, scale: Any, momentum: Any, rank: int, every: int
) -> int:
    """Lower edge of the bin of the sample's element of `rank`, in ``residual + momentum * velocity + scale * gradient``."""
    histogram = np.zeros(TOP_BINS, np.int32)
    values = np.empty(RUN, np.float32)
    bits = values.view(np.int32)
    for start in range(0, residual.shape[0], RUN * every):
        stop = min(start + RUN, residual.shape[0])
        for j in range(stop - start):
            values[j] = residual[start + j] + (momentum * velocity[start + j] + scale * gradient[start + j])
        for j in range(stop - start):
            histogram[(bits[j] & MAGNITUDE_MASK) >> 16] += 1
    return _rank_from_top(histogram, rank)[0] << 16


@_kernel
def _scan(bits: Any, offset: int, threshold: int, indices: Any, magnitudes: Any, count: int) -> int:
    """Append what reaches `threshold`; -1 when some of it is not finite."""
    whole = bits.shape[0] // LANES * LANES
    for start in range(0, whole, LANES):
        count = append_lanes(bits, start, np.int32(offset), np.int32(threshold), indices, magnitudes, count)
        if count < 0:
            return -1
    for j in range(whole, bits.shape[0]):
        magnitude = bits[j] & MAGNITUDE_MASK
        if magnitude >= threshold:
            if magnitude >= INFINITY_BITS:
                return -1
            indices[count] = offset + j
            magnitudes[count] = magnitude
            count += 1
    return count


@_kernel
def _collect(bits: Any, threshold: int, indices: Any, magnitudes: Any) -> tuple[int, bool]:
    """One pass over `bits` (n,): number of survivors (-1: not finite), and whether there was no room for all."""
    count, full = 0, False
    for start in range(0, bits.shape[0], BLOCK):
        if not full and count + BLOCK > indices.shape[0]:
            count, threshold, full = 0, INFINITY_BITS, True  # go on only to see what is not finite
        count = _scan(bits[start : start + BLOCK], start, threshold, indices, magnitudes, count)
        if count < 0:
            return -1, full
    return count, full


@_kernel
def _collect_sum(
    residual: Any, gradient: Any, scale: Any, threshold: int, indices: Any, magnitudes: Any
) -> tuple[int, bool, int]:
    """The same over ``residual += scale * gradient``; the third number says how many elements were accumulated."""
    count, full = 0, False
    whole = residual.shape[0] // LANES * LANES
    for block in range(0, residual.shape[0], BLOCK):
        if not full and count + BLOCK > indices.shape[0]:
            count, threshold, full = 0, INFINITY_BITS, True
        for start in range(block, min(block + BLOCK, whole), LANES):
            count = add_and_append_lanes(
                residual, gradient, start, scale, np.int32(threshold), indices, magnitudes, count
            )
            if count < 0:
                return -1, full, start
    for i in range(whole, residual.shape[0]):
        before = residual[i]
        residual[i] = before + scale * gradient[i]
        count = _scan(residual[i : i + 1].view(np.int32), i, threshold, indices, magnitudes, count)
        if count < 0:
            residual[i] = before
            return -1, full, i
    return count, full, residual.shape[0]


@_kernel
def _collect_velocity(
    residual: Any,
    velocity: Any,
    gradient: Any,
    scale: Any,
    momentum: Any,
    threshold: int,
    indices: Any,
    magnitudes: Any,
) -> tuple[int, bool, int]:
    """The same over ``velocity = momentum * velocity + scale * gradient; residual += velocity``."""
    count, full = 0, False
    values, speeds = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for start in range(0, residual.shape[0], BLOCK):
        if not full and count + BLOCK > indices.shape[0]:
            count, threshold, full = 0, INFINITY_BITS, True
        kept, moving = residual[start : start + BLOCK], velocity[start : start + BLOCK]
        added = gradient[start : start + BLOCK]
        block, speed = values[: kept.shape[0]], speeds[: kept.shape[0]]
        for j in range(kept.shape[0]):
            speed[j] = momentum * moving[j] + scale * added[j]
            block[j] = kept[j] + speed[j]
        count = _scan(block.view(np.int32), start, threshold, indices, magnitudes, count)
        if count < 0:
            return -1, full, start
        for j in range(kept.shape[0]):
            kept[j] = block[j]
            moving[j] = speed[j]
    return count, full, residual.shape[0]


@_kernel
def _undo_velocity(residual: Any, velocity: Any, gradient: Any, scale: Any, momentum: Any, stop: int) -> None:
    for i in range(stop):
        residual[i] -= velocity[i]
        velocity[i] = (velocity[i] - scale * gradient[i]) / momentum


@_kernel
def _undo_sum(residual: Any, gradient: Any, scale: Any, stop: int) -> None:
    for i in range(stop):
        residual[i] -= scale * gradient[i]


@_kernel
def _exact_threshold(bits: Any, k: int) -> tuple[int, int]:
    """The k-th largest magnitude of `bits`, and how many equal to it belong to the k largest."""
    histogram = np.zeros(TOP_BINS, np.int64)
    for i in range(bits.shape[0]):
        histogram[(bits[i] & MAGNITUDE_MASK) >> 16] += 1
    top, above = _rank_from_top(histogram, k)
    histogram = np.zeros(LOW_BINS, np.int64)
    for i in range(bits.shape[0]):
        if (bits[i] & MAGNITUDE_MASK) >> 16 == top:
            histogram[bits[i] & 0xFFFF] += 1
    low, between = _rank_from_top(histogram, k - above)
    return (top << 16) | low, k - above - between


@_kernel
def _take(magnitudes: Any, positions: Any, threshold: int, equal: int, out: Any) -> None:
    """Into `out` (k + 1,) the positions of magnitudes above `threshold`, and of the first `equal` equal to it.

    `positions` (m,) or empty, where an element's position is its own.
    """
    count, listed = 0, positions.shape[0] > 0
    for i in range(magnitudes.shape[0]):
        magnitude = magnitudes[i] & MAGNITUDE_MASK
        tie = magnitude == threshold and equal > 0
        out[count] = positions[i] if listed else i
        count += magnitude > threshold or tie
        equal -= tie


@_kernel
def _cut_out(values: Any, indices: Any, out: Any) -> None:
    for i in range(indices.shape[0]):
        out[i] = values[indices[i]]
        values[indices[i]] = 0.0


@_kernel
def _zero(values: Any, indices: Any) -> None:
    for i in range(indices.shape[0]):
        values[indices[i]] = 0.0


_NO_POSITIONS = np.empty(0, np.int32)


def _room(numel: int, k: int) -> int:
    """Survivors to make room for: the sample's excess is some `SIGMAS` deviations, and the last block may all survive."""
    share = 1.0 if numel <= SAMPLE_ALL_BELOW else 1 / SAMPLE_EVERY
    excess = (expected_rank(numel, k) - k * share) / share
    return min(numel, int(1.1 * k + 1.5 * excess)) + 2 * BLOCK


def _choose(bits: Ints, k: int, count: int, full: bool, indices: Ints, magnitudes: Ints) -> Ints:
    """Indices (k,) from the survivors, or from all the data where those do not hold the k largest."""
    complete = not full and count >= k
    found, positions = (magnitudes[:count], indices[:count]) if complete else (bits, _NO_POSITIONS)
    chosen = np.empty(k + 1, np.int32)
    if k:
        threshold, equal = _exact_threshold(found, k)
        _take(found, positions, threshold, equal, chosen)
    return chosen[:k]


def _bound(
    residual: Floats, gradient: Floats, scale: float, k: int, *, velocity: Floats | None = None, momentum: float = 0.0
) -> int:
    if k == 0:
        return INFINITY_BITS
    numel = residual.shape[0]
    rank, every = (k, 1) if numel <= SAMPLE_ALL_BELOW else (expected_rank(numel, k), SAMPLE_EVERY)
    moving = residual if velocity is None else velocity  # read all the same, and multiplied by zero
    factors = np.float32(scale), np.float32(momentum)
    return int(_sample_threshold(residual, moving, gradient, *factors, rank, every))


def select(x: Floats, k: int) -> Ints | None:
    """Indices (k,) of the k largest magnitudes of `x` (n,), ascending, of equal ones the first; None: not finite."""
    bits, room = x.view(np.int32), _room(x.shape[0], k)
    indices, magnitudes = np.empty(room, np.int32), np.empty(room, np.int32)
    count, full = _collect(bits, _bound(x, x, 0.0, k), indices, magnitudes)
    return None if count < 0 else _choose(bits, k, count, full, indices, magnitudes)


def feedback_select(
    residual: Floats,
    gradient: Floats,
    k: int,
    *,
    scale: float,
    velocity: Floats | None = None,
    momentum: float = 0.0,
) -> tuple[Floats, Ints] | None:
    """Accumulate into `residual` (through `velocity`), then take out the k largest: values and indices (k,).

    None: some sum is not finite; everything is as before, up to rounding.
    """
    bits, room = residual.view(np.int32), _room(residual.shape[0], k)
    indices, magnitudes = np.empty(room, np.int32), np.empty(room, np.int32)
    factor, decay = np.float32(scale), np.float32(momentum)
    threshold = _bound(residual, gradient, scale, k, velocity=velocity, momentum=momentum)
    if velocity is None:
        count, full, done = _collect_sum(residual, gradient, factor, threshold, indices, magnitudes)
    else:
        count, full, done = _collect_velocity(
            residual, velocity, gradient, factor, decay, threshold, indices, magnitudes
        )
    if count < 0:
        if velocity is None:
            _undo_sum(residual, gradient, factor, done)
        else:
            _undo_velocity(residual, velocity, gradient, factor, decay, done)
        return None
    chosen = _choose(bits, k, count, full, indices, magnitudes)
    values = np.empty(k, np.float32)
    _cut_out(residual, chosen, values)
    if velocity is not None:
        _zero(velocity, chosen)
    return values, chosen


def zero_at(values: Floats, indices: Ints) -> None:
    """Set ``values[indices]`` to zero."""
    _zero(values, indices)


def warm_up() -> None:
    """Compile everything now (seconds the first time; later runs find it in the cache)."""
    x = np.arange(100, dtype=np.float32)
    select(x, 3)
    for gradient in (x.copy(), np.full(100, math.nan, np.float32)):
        feedback_select(x, gradient, 3, scale=0.5)
        feedback_select(x, gradient, 3, scale=0.5, velocity=x.copy(), momentum=0.5)
    zero_at(x, np.arange(3, dtype=np.int32))
