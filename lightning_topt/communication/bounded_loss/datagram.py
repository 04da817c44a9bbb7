"""The datagrams of the exchange: 40 bytes of header, then elements (kinds 1 and 2) or the body of a
control message.

    byte  0  kind, 1 flags, 2..3 rank of the sender, 4..7 step of the tensor
    byte  8  key of the session
    byte 16  tensor: bucket << 12 | part; 20..23 segment (its offset / the elements of a segment),
             or serial number of a probe
    byte 24  bytes after the header; 26..27 zero; 28..31 sequence number of data from this sender to
             this receiver
    byte 32  clock of the sender, nanoseconds

Everything is little-endian. A segment is the same elements for all ranks, so that datagrams are
valid in any order. Nothing in a datagram is used before `is_valid` and the receiver's own tables
have checked it. Control messages that also go over the side channel (TCP) are the same bytes after
a length of 8 bytes.
"""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.raw_memory import (
    inner,
    load8,
    load16,
    load64,
    store64,
)

HEADER_BYTES = 40
# what an Ethernet frame of 1500 bytes leaves beside the headers of IPv4 and UDP
DEFAULT_DATAGRAM_BYTES = 1472
FEWEST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES = 128, 65000

CONTRIBUTION, RESULT = 1, 2  # data: of a rank to the owner of a shard; of the owner to all
OPEN, PROBE, BITMAP, STOP, REPORT, SYNC, PING, PONG, FAILED, LEAVE = 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
KINDS = 13
MORE = 1  # flag of data: the sender has more for this receiver

MOST_PARTS, MOST_BUCKETS = 1 << 12, 1 << 20
MASK32 = 0xFFFFFFFF


@inner
def write_header(
    address: int, kind: int, flags: int, rank: int, step: int, key: int, tensor: int, segment: int,
    size: int, sequence: int, clock: int,
) -> None:  # fmt: skip
    """Write a header at `address`."""
    store64(address, kind | flags << 8 | rank << 16 | (step & MASK32) << 32)
    store64(address + 8, key)
    store64(address + 16, (tensor & MASK32) | (segment & MASK32) << 32)
    store64(address + 24, size | (sequence & MASK32) << 32)
    store64(address + 32, clock)


@inner
def is_valid(address: int, size: int, key: int, rank: int, world_size: int) -> bool:
    """Return whether the `size` bytes at `address` are a whole datagram with the right key from
    another rank.
    """
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
