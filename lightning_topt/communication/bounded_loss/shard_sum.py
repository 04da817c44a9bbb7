"""Sums over the contributions to a shard, in rank order, and the elements that a bitmap says are
missing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.packed_halves import pack_halves, unpack_halves
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    fill_memory,
    float_array,
    inner,
    store8,
)
from lightning_topt.communication.bounded_loss.table_views import (
    bit_row,
    config_row,
    flow_row,
    inbox_of,
    large_of,
    scale_of,
    slot_row,
)
from lightning_topt.communication.bounded_loss.tables import (
    COUNT,
    ELEMENTS,
    FIRST,
    HALVES,
    IN_C,
    LARGE_BLOCK,
    NUMEL,
    OUT_C,
    RANK,
    RESCALE,
    SEGMENTS,
    SUM,
    VALUES,
    WORLD,
)

_reordered = partial(compiled, fastmath={"reassoc"})  # sums that need not be the same everywhere


@_reordered
def _mean_square(part: Array) -> float:
    total = np.float32(0.0)
    for value in part:
        total += value * value
    return float(total / max(len(part), 1))


@inner
def has_bit(words: Array, index: int) -> bool:
    """Return whether bit `index` is set."""
    return (words[index >> 6] >> np.uint64(index & 63)) & np.uint64(1) != np.uint64(0)


@inner
def set_bit(words: Array, index: int) -> None:
    """Set bit `index`."""
    words[index >> 6] |= np.uint64(1) << np.uint64(index & 63)


@inner
def set_first_bits(words: Array, count: int) -> None:
    """Set bits 0 to `count` - 1 and clear the others."""
    words[:] = np.uint64(0)
    for index in range(count):
        set_bit(words, index)


@inner
def segment_elements(t: int, slot: int, segment: int) -> int:
    """Return how many elements a segment of the part has: the last one may be shorter."""
    each = config_row(t)[ELEMENTS]
    return min(each, slot_row(t, slot)[NUMEL] - segment * each)


@inner
def clear_missing(t: int, slot: int, peer: int) -> None:
    """Let what did not arrive of `peer`'s contribution read as zeros."""
    flow, words, each = (
        flow_row(t, slot, peer, IN_C),
        bit_row(t, slot, peer, IN_C),
        config_row(t)[ELEMENTS],
    )
    for index in range(flow[COUNT]):
        if not has_bit(words, index):
            size = segment_elements(t, slot, flow[FIRST] + index)
            fill_memory(inbox_of(t, slot, peer) + 4 * index * each, np.int32(0), 4 * size)


@inner
def sum_segments(t: int, slot: int, first: int, begin: int, count: int) -> None:
    """Sum all contributions to `count` segments from `begin` of the shard that is from `first`, in
    rank order, scaled.
    """
    config, row, each = config_row(t), slot_row(t, slot), config_row(t)[ELEMENTS]
    world, rank = config[WORLD], config[RANK]
    wide, sums = np.empty(2 * each, np.float32), np.empty(2 * each, np.float32)  # of halves
    for index in range(begin, begin + count):
        size = segment_elements(t, slot, first + index)
        words = float_array(row[SUM] + 4 * index * each, size)
        total = sums[: 2 * size] if config[HALVES] else words
        arrived = 0
        for peer in range(world):
            if peer == rank:
                part = float_array(row[VALUES] + 4 * (first + index) * each, size)
            else:
                part = float_array(inbox_of(t, slot, peer) + 4 * index * each, size)
            arrived += peer == rank or has_bit(bit_row(t, slot, peer, IN_C), index)
            if config[HALVES]:
                unpack_halves(part.view(np.uint32), wide[: 2 * size])
                part = wide[: 2 * size]
            _add(part, total, peer == 0)
        scale = np.float32(scale_of(t, slot) * (world / arrived if row[RESCALE] else 1.0))
        if scale != np.float32(1.0):
            for i in range(len(total)):
                total[i] *= scale
        if config[HALVES]:
            pack_halves(total, words.view(np.uint32))


@inner
def _add(part: Array, total: Array, first: bool) -> None:
    if first:
        for i in range(len(part)):
            total[i] = part[i]
    else:
        for i in range(len(part)):
            total[i] += part[i]


@inner
def find_large(t: int, slot: int) -> None:
    """Mark the blocks of segments of this rank's contribution whose mean square is above the
    part's.

    Of halves every second value counts, as the upper part of its word.
    """
    row, block = slot_row(t, slot), config_row(t)[ELEMENTS] * LARGE_BLOCK
    blocks = (row[SEGMENTS] + LARGE_BLOCK - 1) // LARGE_BLOCK
    squares = np.zeros(blocks)
    for index in range(blocks):
        size = min(block, row[NUMEL] - index * block)
        squares[index] = _mean_square(float_array(row[VALUES] + 4 * index * block, size))
    mean = squares.mean()
    for index in range(blocks):
        store8(large_of(t, slot, index), squares[index] >= mean)


@compiled
def undelivered_segments(t: int, slot: int, found: Array) -> int:
    """Write the segments of this rank's contribution that no sum has to `found`, ascending; returns
    how many.
    """
    total = 0
    for peer in range(config_row(t)[WORLD]):
        if peer == config_row(t)[RANK]:
            continue
        flow = flow_row(t, slot, peer, OUT_C)
        for index in range(flow[COUNT]):
            if not has_bit(bit_row(t, slot, peer, OUT_C), index):
                found[total] = flow[FIRST] + index
                total += 1
    return total
