"""The wire format: 40 bytes of header, then elements of a segment or a control message's body.

    byte  0  kind; 1 flags; 2..3 rank of the sender; 4..7 step of the part
    byte  8  key of the session
    byte 16  part: bucket << 12 | part of the bucket; 20..23 segment, or serial number of a probe
    byte 24  bytes after the header; 26..27 zero; 28..31 sequence number of data, by receiver
    byte 32  clock of the sender, nanoseconds

Everything is little-endian. Segments have the same bounds on all ranks: number i begins at element
i times the elements of a segment. So datagrams are valid in any order. Nothing in a datagram is
used before `is_valid` and the receiver's own tables have checked it.

Bodies of control messages, in words of 8 bytes:

    OPEN              elements of the part
    PROBE, SYNC       sequence number of the next data
    BITMAP, STOP      segments of the shard that arrived, a bit each; none for STOP of a result
    REPORT            8 numbers: see `control_messages.send_report`
    FAILED            the rank that does not answer
    PING, PONG, LEAVE -

An element is a float32, or with 16 bits a word of two bfloat16. The low half is the first value.
Rounding is to nearest, ties to even, as torch's; NaN stays NaN.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    inner,
    load8,
    load16,
    load64,
    store64,
)

HEADER_BYTES = 40
DEFAULT_DATAGRAM_BYTES = 1472  # an Ethernet frame of 1500 bytes without headers of IPv4 and UDP
FEWEST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES = 128, 65000

CONTRIBUTION, RESULT = 1, 2  # data: of a rank to the owner of a shard; of the owner to all
OPEN, PROBE, BITMAP, STOP, REPORT, SYNC, PING, PONG, FAILED, LEAVE = 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
KINDS = 13
MORE = 1  # flag of data: the sender has more for this receiver

MOST_PARTS, MOST_BUCKETS = 1 << 12, 1 << 20
MASK32 = 0xFFFFFFFF


# ---- headers


@inner
def write_header(
    address: int,
    kind: int,
    flags: int,
    rank: int,
    step: int,
    key: int,
    part: int,
    segment: int,
    size: int,
    sequence: int,
    clock: int,
) -> None:
    """Write a header at `address`; `segment` is the serial number in probes and their answers."""
    store64(address, kind | flags << 8 | rank << 16 | (step & MASK32) << 32)
    store64(address + 8, key)
    store64(address + 16, (part & MASK32) | (segment & MASK32) << 32)
    store64(address + 24, size | (sequence & MASK32) << 32)
    store64(address + 32, clock)


@inner
def is_valid(address: int, size: int, key: int, rank: int, world_size: int) -> bool:
    """Return whether `size` bytes are a whole datagram with the right key from another rank."""
    if size < HEADER_BYTES:
        return False
    kind, sender = load8(address), load16(address + 2)
    if load64(address + 8) != key or kind < CONTRIBUTION or kind >= KINDS:
        return False
    return sender != rank and sender < world_size and load16(address + 24) == size - HEADER_BYTES


@inner
def unwrapped(low: int, near: int) -> int:
    """Return the number with the low 32 bits `low` that is nearest to `near`."""
    difference = (low - near) & MASK32
    if difference >= 1 << 31:
        difference -= 1 << 32
    return near + difference


# ---- values of 16 bits


@compiled
def pack_halves(values: Array, words: Array) -> None:
    """Round values to bfloat16, two in each word.

    Args:
        values: (n,) float32, contiguous.
        words: (ceil(n / 2),) uint32, written; the last upper half may be 0.
    """
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        words[i] = _rounded(np.int64(bits[2 * i])) >> 16 | _rounded(np.int64(bits[2 * i + 1]))
    if len(values) % 2:
        words[pairs] = _rounded(np.int64(bits[-1])) >> 16


@inner
def _rounded(bits: np.int64) -> np.int64:
    # Round the float32 with these `bits` to its upper 16 bits, which stay in their place
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN
        return (bits & 0xFFFF0000) | 0x00400000
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000


@compiled
def unpack_halves(words: Array, values: Array) -> None:
    """Write what `pack_halves` packed to `values` (n,) float32, contiguous."""
    bits, pairs = values.view(np.uint32), len(values) // 2
    for i in range(pairs):
        bits[2 * i] = np.uint32(words[i] << np.uint32(16))
        bits[2 * i + 1] = words[i] & np.uint32(0xFFFF0000)
    if len(values) % 2:
        bits[-1] = np.uint32(words[pairs] << np.uint32(16))
