"""The file of a store: header, index and data, reserved in pieces, and the lock of its writers.

    page 0: header (tail, reserved) | index: 32 bytes per item | data

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

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
_HEADER = struct.Struct("<8sQQQQ")  # magic, number of items, tail, reserved, checksum


class LockTimeout(OSError):
    """Another process has held the lock of a store for too long."""


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

    def pause(self) -> None:
        """Skip the lock for a while, and then wait for it less long.

        That lasts until it was acquired once.
        """
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def end_pause(self) -> None:
        """Wait for the lock as usual again."""
        self._paused_until = -inf

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; a timeout starts a `pause`.

        The holder may be stopped for good, and the caller may be about to train with a sample that
        it has already.

        Raises:
            LockTimeout: the lock is held for too long.
        """
        try:
            with self.lock.held(seconds=None if self._paused_until == -inf else RETRY_SECONDS):
                self.end_pause()
                yield
        except LockTimeout:
            self.pause()
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
