"""The arithmetic of a part, compiled: bits of segments, the sum of a shard, what is missing of it.

A shard's owner adds up all contributions in rank order, so the sums do not depend on the order of
arrival. What a contribution lacks counts as 0, or is made up for with ``rescale``. Sums are made in
float32, also of halves.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.datagram import pack_halves, unpack_halves
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    fill_memory,
    floats,
    inner,
)
from lightning_topt.communication.bounded_loss.tables import (
    IN_CONTRIBUTION,
    OUT_CONTRIBUTION,
    Root,
    bits_of,
    config_of,
    flow_of,
    inbox_address,
    scale_of,
    slot_of,
)

# ---- the sum


@inner
def sum_segments(t: Root, slot: int, first: int, begin: int, count: int) -> None:
    """Sum some segments of this rank's shard over all contributions, in rank order, and scale them.

    Args:
        t: the tables.
        slot: the part.
        first: the shard's first segment.
        begin: the first segment to sum, counted from `first`.
        count: how many.
    """
    config, row = config_of(t), slot_of(t, slot)
    world, rank, each = config.world_size, config.rank, config.segment_elements
    # room for the values of a segment of halves, and for their sum
    wide, sums = np.empty(2 * each, np.float32), np.empty(2 * each, np.float32)
    for index in range(begin, begin + count):
        size = segment_elements(t, slot, first + index)
        words = floats(row.shard_sum + 4 * index * each, size)
        total = sums[: 2 * size] if config.halves else words
        arrived = 0
        for peer in range(world):
            if peer == rank:
                part = floats(row.values + 4 * (first + index) * each, size)
            else:
                part = floats(inbox_address(t, slot, peer) + 4 * index * each, size)
            arrived += peer == rank or has_bit(bits_of(t, slot, peer, IN_CONTRIBUTION), index)
            if config.halves:
                unpack_halves(part.view(np.uint32), wide[: 2 * size])
                part = wide[: 2 * size]
            _add(part, total, peer == 0)
        scale = np.float32(scale_of(t, slot) * (world / arrived if row.rescale else 1.0))
        if scale != np.float32(1.0):
            for i in range(len(total)):
                total[i] *= scale
        if config.halves:
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
def segment_elements(t: Root, slot: int, segment: int) -> int:
    """Return how many elements a segment of the part has: the last one may be shorter."""
    each = config_of(t).segment_elements
    return min(each, slot_of(t, slot).numel - segment * each)


# ---- what is missing


@inner
def clear_missing(t: Root, slot: int, peer: int) -> None:
    """Let what did not arrive of `peer`'s contribution read as zeros."""
    flow, each = flow_of(t, slot, peer, IN_CONTRIBUTION), config_of(t).segment_elements
    words = bits_of(t, slot, peer, IN_CONTRIBUTION)
    for index in range(flow.count):
        if not has_bit(words, index):
            size = segment_elements(t, slot, flow.first + index)
            fill_memory(inbox_address(t, slot, peer) + 4 * index * each, np.int32(0), 4 * size)


@compiled
def undelivered_segments(t: Root, slot: int, found: Array) -> int:
    """Write the segments of this rank's contribution that no sum has to `found`, ascending.

    Returns:
        How many they are.
    """
    total = 0
    for peer in range(config_of(t).world_size):
        if peer == config_of(t).rank:
            continue
        flow = flow_of(t, slot, peer, OUT_CONTRIBUTION)
        for index in range(flow.count):
            if not has_bit(bits_of(t, slot, peer, OUT_CONTRIBUTION), index):
                found[total] = flow.first + index
                total += 1
    return total


# ---- bits


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
