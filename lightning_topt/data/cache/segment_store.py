"""One tier of a cache: samples written once, never evicted, verified at each read.

Any number of processes share it. Writers reserve room under a lock, write outside of it, and
publish the item's index record last. So a writer killed at any moment leaves at most a reserved
place, which the next writer of that item uses. Two that write the same item write the same bytes to
the same place. Readers take no lock: a record and an entry each carry a checksum.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lightning_topt.data.cache.memory_file import available_bytes
from lightning_topt.data.cache.store_file import (
    BYTES_MASK,
    PAGE,
    PAUSE_SECONDS,
    RECORD,
    LockTimeout,
    StoreFile,
)

EMPTY, CLAIMED, STORED = 0, 1, 2
_MOST_BUFFERS = 512  # per system call; Linux takes 1024


class Location(NamedTuple):
    """Where an entry is: open file, first byte, bytes, and the checksum it must have."""

    descriptor: int
    offset: int
    nbytes: int
    checksum: int


def checksum(parts: Sequence[Any], *, item: int) -> int:
    """Return 64 bits (XXH3) over the buffers in order, seeded with the item's number."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed=item)
    digest = xxhash.xxh3_64(seed=item)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


class SegmentStore:
    """The items 0 .. `num_items` - 1 of `file`, up to `capacity_bytes` of entries.

    Nothing here raises for a file system or memory that is full or fails: reading returns None,
    writing False, with one warning. While a stopped process holds the lock, nothing is written, and
    nobody waits more than once.

    Args:
        name: for warnings.
        verify_once: an entry that this process has found whole is not checked again; for memory
            that nobody else can change.
    """

    def __init__(
        self,
        file: StoreFile,
        *,
        capacity_bytes: int,
        name: str = "cache",
        verify_once: bool = False,
    ) -> None:
        self.file, self.capacity_bytes, self.name = file, capacity_bytes, name
        self.num_items = file.num_items
        self.damaged = 0  # entries found damaged by this process
        self._verified = bytearray(file.num_items) if verify_once else None
        # Entries of this size or more have no room: nothing is ever evicted.
        self._refused_bytes: float = inf

    def read(self, item: int) -> npt.NDArray[np.uint8] | None:
        """Return a verified, writable copy of the entry.

        None where it is absent, or damaged: then it is dropped.
        """
        where = self.locate(item)
        if where is None:
            return None
        entry = np.empty(where.nbytes, np.uint8)
        return entry if self._fill(where, [entry], item) else None

    def read_into(self, item: int, buffers: Sequence[Any]) -> bool:
        """Fill writable `buffers` with the entry, one after the other.

        False where it is absent, damaged or of another size; the buffers may have been written to
        all the same.
        """
        where = self.locate(item)
        if where is None or sum(len(buffer) for buffer in buffers) != where.nbytes:
            return False
        return self._fill(where, buffers, item)

    def _fill(self, where: Location, buffers: Sequence[Any], item: int) -> bool:
        try:
            done = 0
            # as many buffers as one call takes
            for first in range(0, len(buffers), _MOST_BUFFERS):
                some = buffers[first : first + _MOST_BUFFERS]
                done += os.preadv(where.descriptor, some, where.offset + done)
        except OSError as error:
            self._warn(f"reading from the {self.name} failed: {error}")
            return False
        # whole: as long as its record says, with its checksum
        if done == where.nbytes and (
            self.is_verified(item) or checksum(buffers, item=item) == where.checksum
        ):
            self.set_verified(item)
            return True
        # damaged, or the file is shorter than its record says
        self.discard(item)
        return False

    def is_verified(self, item: int) -> bool:
        """Return whether this process need not check the entry again."""
        return self._verified is not None and bool(self._verified[item])

    def set_verified(self, item: int) -> None:
        """Note that this process has just found the entry whole."""
        if self._verified is not None:
            self._verified[item] = True

    def head(self, item: int, nbytes: int) -> bytes | None:
        """Return the first `nbytes` of an entry, not verified; None where it is absent."""
        where = self.locate(item)
        try:
            return (
                None
                if where is None
                else os.pread(where.descriptor, min(nbytes, where.nbytes), where.offset)
            )
        except OSError:
            return None

    def locate(self, item: int) -> Location | None:
        """Return where the entry is, not verified; None where it is absent."""
        state, offset, nbytes, digest = self._record(item)
        return Location(self.file.descriptor, offset, nbytes, digest) if state == STORED else None

    def __contains__(self, item: int) -> bool:
        return self.locate(item) is not None

    def __len__(self) -> int:
        return int((self.states() == STORED).sum())

    def states(self) -> npt.NDArray[np.uint64]:
        """Return the states of all items, not verified.

        Only the first ones where the file was cut off.
        """
        try:
            return self.file.records()[:, 1] >> np.uint64(56)
        except OSError as error:
            self._warn(f"reading from the {self.name} failed: {error}")
            return np.empty(0, np.uint64)

    @property
    def used_bytes(self) -> int:
        """Bytes of entries, including reserved places; 0 where that cannot be read."""
        try:
            return self.file.space().tail - self.file.data_start
        except OSError as error:
            self._warn(f"reading from the {self.name} failed: {error}")
            return 0

    def _record(self, item: int) -> tuple[int, int, int, int]:
        """Return state, offset, bytes and checksum of an item.

        An item whose record is damaged is empty.
        """
        if not 0 <= item < self.num_items:
            raise IndexError(f"item {item} of a cache of {self.num_items}")
        try:
            # no lock: a record that is being written fails its checksum, which is a miss
            raw = os.pread(self.file.descriptor, RECORD.size, PAGE + RECORD.size * item)
        except OSError as error:
            self._warn(f"reading from the {self.name} failed: {error}")
            return EMPTY, 0, 0, 0
        # the file ends before this record
        if len(raw) < RECORD.size:
            return EMPTY, 0, 0, 0
        offset, state_and_bytes, digest, check = RECORD.unpack(raw)
        if check != xxhash.xxh3_64_intdigest(raw[:-8], seed=item):
            # a record that was never written is zeros, and not damaged
            self.damaged += any(raw)
            return EMPTY, 0, 0, 0
        return state_and_bytes >> 56, offset, state_and_bytes & int(BYTES_MASK), digest

    def _write_record(self, item: int, state: int, offset: int, nbytes: int, digest: int) -> None:
        # the state is the upper byte of the size; the last 8 bytes are the record's own checksum
        raw = RECORD.pack(offset, state << 56 | nbytes, digest, 0)[:-8]
        check = xxhash.xxh3_64_intdigest(raw, seed=item).to_bytes(8, "little")
        # These 32 bytes are within a page: a killed writer has written all of them or none.
        os.pwrite(self.file.descriptor, raw + check, PAGE + RECORD.size * item)

    def write(self, item: int, parts: Sequence[Any]) -> bool:
        """Store an entry, given as buffers; returns whether it is there now.

        False where there is no room, or the file system failed.
        """
        if not self.may_take(item, sum(map(len, parts))):
            return item in self
        return self.write_many([item], [parts], [checksum(parts, item=item)])[0]

    def write_many(
        self, items: Sequence[int], entries: Sequence[Sequence[Any]], digests: Sequence[int]
    ) -> list[bool]:
        """Store several different items, whose places are claimed at once.

        `digests` are the entries' checksums.
        """
        # Places under the lock, bytes outside of it, and each record last.
        places = self.claim(items, [sum(map(len, parts)) for parts in entries])
        stored: list[bool] = []
        failed = False
        for place, item, parts, digest in zip(places, items, entries, digests, strict=True):
            # stored already, or without room
            if place is None:
                stored.append(item in self)
            else:
                # after the first failure the rest is not tried
                stored.append(not failed and self._write_at(place, item, parts, digest))
                failed = not stored[-1]
        return stored

    def _write_at(self, offset: int, item: int, parts: Sequence[Any], digest: int) -> bool:
        try:
            done = 0
            for first in range(0, len(parts), _MOST_BUFFERS):
                some = parts[first : first + _MOST_BUFFERS]
                wanted = sum(map(len, some))
                if os.pwritev(self.file.descriptor, some, offset + done) != wanted:
                    self._stop("the file system took only a part of an entry")
                    return False
                done += wanted
            # last: from now on readers find the entry
            self._write_record(item, STORED, offset, done, digest)
        except (OSError, MemoryError) as error:
            self._failed(error)
            return False
        return True

    def may_take(self, item: int, nbytes: int) -> bool:
        """Return whether `write` is worth trying.

        It is not where an entry of so many bytes has found no room, or in a pause.
        """
        return not self.file.is_paused and (
            nbytes < self._refused_bytes or self._record(item)[0] != EMPTY
        )

    def claim(self, items: Sequence[int], sizes: Sequence[int]) -> list[int | None]:
        """Claim places for entries of these sizes and return them.

        None where the entry is stored already or has no room.
        """
        places: list[int | None] = [None] * len(items)
        worth = [i for i, item in enumerate(items) if self.may_take(item, sizes[i])]
        if not worth:
            return places
        try:
            with self.file.locked():
                # Places claimed before, by a writer that was killed.
                new = []
                for i in worth:
                    state, offset, reserved, _ = self._record(items[i])
                    if state == CLAIMED and reserved == sizes[i]:
                        places[i] = offset
                    elif state != STORED:
                        new.append(i)
                # New places, as long as there is room.
                while new:
                    found = self.file.allocate(
                        [sizes[i] for i in new], capacity_bytes=self.capacity_bytes
                    )
                    for i, place in zip(new, found, strict=False):
                        if place is None:
                            # nothing of this size or more will find room
                            self._refused_bytes = min(self._refused_bytes, sizes[i])
                        else:
                            self._write_record(items[i], CLAIMED, place, sizes[i], 0)
                        places[i] = place
                    new = new[len(found) :]
        except (OSError, MemoryError) as error:
            self._failed(error)
        return places

    def discard(self, item: int) -> None:
        """Drop a damaged entry; its place is kept for the same item."""
        self.damaged += 1
        if self.file.is_paused:
            return
        try:
            with self.file.locked():
                # another process may have dropped it, or stored it again
                state, offset, nbytes, _ = self._record(item)
                if state == STORED:
                    # the place stays claimed, for the same item
                    self._write_record(item, CLAIMED, offset, nbytes, 0)
        except OSError as error:
            self._warn(f"a damaged sample could not be dropped from the {self.name}: {error}")

    def clear(self) -> None:
        """Forget all items.

        Entries that are being written meanwhile may come back. Where the file fails, nothing is
        forgotten.
        """
        try:
            with self.file.locked():
                # zeros are records that were never written
                os.pwrite(self.file.descriptor, bytes(RECORD.size * self.num_items), PAGE)
        except OSError as error:
            self._warn(f"the {self.name} could not be emptied: {error}")

    def _failed(self, error: Exception) -> None:
        if isinstance(error, LockTimeout):
            retried = f"this is tried again every {PAUSE_SECONDS:g} s"
            self._warn(
                f"samples are not stored in the {self.name} at the moment: {error}; {retried}"
            )
        else:
            self._stop(str(error))

    def _stop(self, reason: str) -> None:
        # Write nothing more; what is stored can still be read
        self._refused_bytes = 0
        self._warn(f"no more samples are stored in the {self.name}: {reason}")

    def _warn(self, message: str) -> None:
        warn_once(message, stacklevel=4)


_warned: dict[str, object] = {}


def warn_once(message: str, *, stacklevel: int) -> None:
    """Give a warning that this process has not given yet."""
    first = object()
    if _warned.setdefault(message, first) is first:
        warnings.warn(message, stacklevel=stacklevel)


def described(store: SegmentStore) -> dict[str, Any]:
    """Describe a store for `open_store` in another process, which inherits the open file.

    The description is plain data.
    """
    return {
        "descriptor": store.file.descriptor,
        "num_items": store.num_items,
        "lock": str(store.file.lock.path),
        "in_memory": store.file.available is not None,
        "capacity_bytes": store.capacity_bytes,
        "name": store.name,
    }


def open_store(known: dict[str, Any]) -> SegmentStore:
    """Open a store that another process has `described`.

    Its file is open here under the same descriptor.
    """
    file = StoreFile(
        known["descriptor"],
        num_items=known["num_items"],
        lock=Path(known["lock"]),
        available=available_bytes if known["in_memory"] else None,
    )
    return SegmentStore(file, capacity_bytes=known["capacity_bytes"], name=known["name"])
