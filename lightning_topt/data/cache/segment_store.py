"""One tier of a cache: samples written once, never evicted, verified at each read.

    page 0: header (tail, reserved) | index: 32 bytes per item | data

    SegmentStore   the items: read, write, claim a place, drop what is damaged
    StoreFile      the file: header and index, and room that is reserved in pieces
    StoreLock      the lock of its writers

Any number of processes share a tier. Writers reserve room under a lock, write outside of it, and
publish the item's index record last. So a writer killed at any moment leaves at most a reserved
place, which the next writer of that item uses. Two that write the same item write the same bytes to
the same place. Readers take no lock: a record and an entry each carry a checksum.

Everything is read and written by position (pread, pwrite), and nothing is mapped. A file that was
cut off is then a short read, where a map would end the process with SIGBUS. On a warm file the two
cost the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lightning_topt.basics.own_files import open_own

PAGE = 4096
MAGIC = b"toptseg1"
CHUNK_BYTES = 1 << 24  # reserved at a time
LOCK_SECONDS = 10.0  # to wait for the lock
PAUSE_SECONDS = 60.0  # without trying a lock that was not available
RETRY_SECONDS = 0.5  # to wait for it afterwards
# Of an item: offset, state << 56 | bytes, checksum of the entry, checksum of this record.
RECORD = struct.Struct("<QQQQ")
BYTES_MASK = np.uint64((1 << 56) - 1)
EMPTY, CLAIMED, STORED = 0, 1, 2
_HEADER = struct.Struct("<8sQQQQ")  # magic, number of items, tail, reserved, checksum
_MOST_BUFFERS = 512  # per system call; Linux takes 1024


class LockTimeout(OSError):
    """Another process has held the lock of a store for too long."""


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

    def locate(self, item: int) -> Location | None:
        """Return where the entry is, not verified; None where it is absent."""
        state, offset, nbytes, digest = self._record(item)
        return Location(self.file.descriptor, offset, nbytes, digest) if state == STORED else None

    def __contains__(self, item: int) -> bool:
        return self.locate(item) is not None

    def __len__(self) -> int:
        # not verified, and less where the file was cut off
        try:
            return int((self.file.records()[:, 1] >> np.uint64(56) == STORED).sum())
        except OSError as error:
            self._warn(f"reading from the {self.name} failed: {error}")
            return 0

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
            self._warn(
                f"samples are not stored in the {self.name} at the moment: {error}; this is tried "
                f"again every {PAUSE_SECONDS:g} s"
            )
        else:
            self._stop(str(error))

    def _stop(self, reason: str) -> None:
        # Write nothing more; what is stored can still be read
        self._refused_bytes = 0
        self._warn(f"no more samples are stored in the {self.name}: {reason}")

    def _warn(self, message: str) -> None:
        warn_once(message, stacklevel=4)


# ---- the file -----------------------------------------------------------------------------------


class Space(NamedTuple):
    """Where data ends (`tail`) and up to where there is room (`reserved`), in bytes of the file."""

    tail: int
    reserved: int


class StoreFile:
    """An open store file of `num_items` items, initialized where it is empty or not one of ours.

    Args:
        descriptor: of the open file.
        lock: path of the lock file.
        available: returns how many more bytes may be taken; None: the file system decides.

    Raises:
        OSError: it cannot be initialized.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        num_items: int,
        lock: Path,
        available: Callable[[], int] | None = None,
    ) -> None:
        self.descriptor, self.num_items, self.available = descriptor, num_items, available
        self.lock = StoreLock(lock)
        # rounded up to a page
        self.data_start = -(-(PAGE + 32 * num_items) // PAGE) * PAGE
        self._paused_until = -inf  # later from the lock's first timeout until it is acquired again
        if self._read_header() is None:
            with self.lock.held():
                if self._read_header() is None and self._is_unusable():
                    # to nothing first, so that all records are zeros
                    os.ftruncate(descriptor, 0)
                    os.ftruncate(descriptor, self.data_start)
                    self.write_space(Space(self.data_start, self.data_start))

    @property
    def is_paused(self) -> bool:
        """Whether to skip the lock now: it was not available a moment ago."""
        return self._paused_until > -inf and time.monotonic() < self._paused_until

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock.

        A timeout starts a pause, in which the lock is skipped: its holder may be stopped for good.
        Afterwards it is waited for less long, until it was acquired once.

        Raises:
            LockTimeout: the lock is held for too long.
        """
        try:
            with self.lock.held(seconds=None if self._paused_until == -inf else RETRY_SECONDS):
                self._paused_until = -inf
                yield
        except LockTimeout:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            raise

    def _read_header(self) -> Space | None:
        raw = os.pread(self.descriptor, _HEADER.size, 0)
        if len(raw) < _HEADER.size:
            return None
        magic, num_items, tail, reserved, digest = _HEADER.unpack(raw)
        if (
            digest != xxhash.xxh3_64_intdigest(raw[:-8])
            or magic != MAGIC
            or num_items != self.num_items
        ):
            return None
        return Space(tail, reserved)

    def _is_unusable(self) -> bool:
        # It is empty or of another kind. A damaged header of this kind leaves the records usable.
        raw = os.pread(self.descriptor, 16, 0)
        return raw != MAGIC + self.num_items.to_bytes(8, "little")

    def space(self) -> Space:
        """Return what the header says.

        Where that is damaged, data ends with the last place that a record names.
        """
        known = self._read_header()
        if known is None:
            records, size = self.records(), os.fstat(self.descriptor).st_size
            # a torn record may name any place: only those inside the file count
            ends = records[:, 0] + (records[:, 1] & BYTES_MASK)
            end = int(ends[ends <= size].max(initial=self.data_start))
            known = Space(end, end)
        return known

    def records(self) -> npt.NDArray[np.uint64]:
        """Return all records (items, 4), as `RECORD` has them; not verified."""
        raw = os.pread(self.descriptor, RECORD.size * self.num_items, PAGE)
        # a file that was cut off has fewer records
        return np.frombuffer(raw[: len(raw) // RECORD.size * RECORD.size], np.dtype("<u8")).reshape(
            -1, 4
        )

    def write_space(self, space: Space) -> None:
        """Write the header, under the lock."""
        # the checksum of the fields takes the place of the 0
        raw = _HEADER.pack(MAGIC, self.num_items, *space, 0)[:-8]
        os.pwrite(self.descriptor, raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little"), 0)

    def allocate(self, sizes: Sequence[int], *, capacity_bytes: int) -> list[int | None]:
        """Allocate places for entries of these sizes, under the lock.

        None stands for an entry without room within `capacity_bytes` of data. The answer is for the
        first sizes only where the file system or the memory has no room for the next one.

        Raises:
            OSError: the file system has no room for the first one.
            MemoryError: the memory has none.
        """
        # One after the other from the tail; more room is reserved in chunks.
        tail, reserved = self.space()
        limit = self.data_start + capacity_bytes
        places: list[int | None] = []
        for nbytes in sizes:
            end = tail + nbytes
            # a smaller entry after it may still have room
            if end > limit:
                places.append(None)
                continue
            if end > reserved:
                try:
                    reserved = self._reserve(
                        reserved, max(end, min(limit, reserved + CHUNK_BYTES)), at_least=end
                    )
                # what has a place already is kept
                except (OSError, MemoryError):
                    if not places:
                        raise
                    break
            places.append(tail)
            tail = end
        self.write_space(Space(tail, reserved))
        return places

    def _reserve(self, start: int, goal: int, *, at_least: int) -> int:
        """Reserve room up to `goal`, or to `at_least` where there is no more.

        What is written there later then has its room.
        """
        if self.available is not None:
            # Memory is taken when it is written; zeroing it before would cost as much again.
            if self.available() < goal - start:
                goal = at_least
                if self.available() < goal - start:
                    raise MemoryError("no memory is left")
            return goal
        # On disk: a full one is noticed here, not when an entry is written.
        try:
            os.posix_fallocate(self.descriptor, start, goal - start)
        except OSError:
            # nearly full: then just what is needed, without a chunk ahead, unless that was tried
            if goal == at_least:
                raise
            goal = at_least
            os.posix_fallocate(self.descriptor, start, goal - start)
        return goal


class StoreLock:
    """An open lock file at `path`, which excludes other threads and processes with the same file.

    What counts is the file, whatever its path is now.

    Raises:
        NotOwn: it is not this user's.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, open_own(path)
        self._threads, self._process = threading.Lock(), os.getpid()
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def _open_again(self) -> None:
        # Open the file anew in a forked process, which would share its parent's lock
        descriptor = os.open(f"/dev/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(descriptor, self.descriptor, inheritable=False)
        os.close(descriptor)
        self._threads, self._process = threading.Lock(), os.getpid()

    @property
    def is_in_place(self) -> bool:
        """Whether its path still names it; else others find another lock there, or none."""
        try:
            return _identity(os.stat(self.path)) == _identity(os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def held(self, *, seconds: float | None = None) -> Iterator[None]:
        """Hold the lock; a process that dies releases it.

        Raises:
            LockTimeout: after `seconds`, by default `LOCK_SECONDS`.
        """
        seconds = LOCK_SECONDS if seconds is None else seconds
        if self._process != os.getpid():
            self._open_again()
        deadline, threads = time.monotonic() + seconds, self._threads
        # First against threads of this process, then, by polling, against other processes.
        if not threads.acquire(timeout=seconds):
            raise LockTimeout(f"{self.path} is locked by another thread")
        try:
            # longer and longer: usually it is free at once
            pause = 1e-4
            while True:
                try:
                    fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LockTimeout(
                            f"{self.path} is locked by another process, which may be stopped"
                        ) from None
                    time.sleep(pause)
                    pause = min(2 * pause, 0.01)
            try:
                yield
            finally:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        finally:
            threads.release()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# ---- warnings -----------------------------------------------------------------------------------

_warned: dict[str, object] = {}


def warn_once(message: str, *, stacklevel: int) -> None:
    """Give a warning that this process has not given yet."""
    first = object()
    if _warned.setdefault(message, first) is first:
        warnings.warn(message, stacklevel=stacklevel)
