"""The file below a store: header, index and data, its room reserved piece by piece, and the lock of its writers.

    page 0: header (tail, reserved) | index: 32 bytes per item | data

Everything is read and written by position (pread, pwrite) and nothing is mapped: a file that was cut off is then a short read,
where a map would end the process with SIGBUS; on a warm file the two cost the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

PAGE = 4096
MAGIC = b"toptseg1"
CHUNK_BYTES = 1 << 24  # of room reserved at a time
LOCK_SECONDS = 10.0
RECORD = struct.Struct("<QQQQ")  # offset, state << 56 | bytes, checksum of the entry, checksum of this record
BYTES_MASK = np.uint64((1 << 56) - 1)
_HEADER = struct.Struct("<8sQQQQ")  # magic, number of items, tail, reserved, checksum
_locks: dict[
    str, tuple[int, threading.Lock]
] = {}  # never closed: closing any descriptor of a file ends a process's locks


class Space(NamedTuple):
    """Where data ends (`tail`) and up to where there is room (`reserved`), in bytes of the file."""

    tail: int
    reserved: int


class LockTimeout(OSError):
    """Another process has held the lock of a store for too long."""


def forget_locks() -> None:
    """In a new process: its parent's threads are not here to release theirs."""
    for path, (descriptor, _) in list(_locks.items()):
        _locks[path] = (descriptor, threading.Lock())


os.register_at_fork(after_in_child=forget_locks)


@contextlib.contextmanager
def locked(path: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock file `path` against all threads and processes; a process that dies lets go of it.

    Raises LockTimeout after `seconds`.
    """
    name = str(path)
    if name not in _locks:
        _locks[name] = (os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), threading.Lock())
    descriptor, threads = _locks[name]
    deadline = time.monotonic() + seconds
    if not threads.acquire(timeout=seconds):
        raise LockTimeout(f"{path} is locked by another thread")
    try:
        pause = 1e-4
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockTimeout(f"{path} has been locked by another process for {seconds:g} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        try:
            yield
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)
    finally:
        threads.release()


class StoreFile:
    """An open store file of `num_items` items, made where it is empty or not one of ours.

    `available` says how many more bytes may be taken, None: the file system decides.
    """

    def __init__(
        self, descriptor: int, *, num_items: int, lock: Path, available: Callable[[], int] | None = None
    ) -> None:
        self.descriptor, self.num_items, self.lock, self.available = descriptor, num_items, lock, available
        self.data_start = -(-(PAGE + 32 * num_items) // PAGE) * PAGE
        with locked(lock):
            if self._read_header() is None and self._is_foreign():
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, self.data_start)
                self.write_space(Space(self.data_start, self.data_start))

    def _read_header(self) -> Space | None:
        raw = os.pread(self.descriptor, _HEADER.size, 0)
        if len(raw) < _HEADER.size:
            return None
        magic, num_items, tail, reserved, digest = _HEADER.unpack(raw)
        if digest != xxhash.xxh3_64_intdigest(raw[:-8]) or magic != MAGIC or num_items != self.num_items:
            return None
        return Space(tail, reserved)

    def _is_foreign(self) -> bool:
        """Whether nothing of the file can be used: it is empty, or its header is whole but another one's."""
        raw = os.pread(self.descriptor, 16, 0)
        return raw != MAGIC + self.num_items.to_bytes(8, "little")

    def space(self) -> Space:
        """What is in the header; where that is damaged, data ends with the last place that a record names."""
        known = self._read_header()
        if known is None:
            records, size = self.records(), os.fstat(self.descriptor).st_size
            ends = records[:, 0] + (records[:, 1] & BYTES_MASK)
            end = int(ends[ends <= size].max(initial=self.data_start))
            known = Space(end, end)
        return known

    def records(self) -> npt.NDArray[np.uint64]:
        """All records (items, 4), as `RECORD` has them; not verified."""
        raw = os.pread(self.descriptor, RECORD.size * self.num_items, PAGE)
        return np.frombuffer(raw[: len(raw) // RECORD.size * RECORD.size], np.dtype("<u8")).reshape(-1, 4)

    def write_space(self, space: Space) -> None:
        """Under the lock: write the header."""
        raw = _HEADER.pack(MAGIC, self.num_items, *space, 0)[:-8]
        os.pwrite(self.descriptor, raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little"), 0)

    def allocate(self, sizes: Sequence[int], *, capacity_bytes: int) -> list[int | None]:
        """Under the lock: where so many more bytes may be written; None: no room within `capacity_bytes` of data.

        Answers for the first sizes only where the file system or the memory has no room for the next one. Raises OSError or
        MemoryError where it has none for the first.
        """
        tail, reserved = self.space()
        limit = self.data_start + capacity_bytes
        places: list[int | None] = []
        for nbytes in sizes:
            end = tail + nbytes
            if end > limit:
                places.append(None)
                continue
            if end > reserved:
                try:
                    reserved = self._reserve(reserved, max(end, min(limit, reserved + CHUNK_BYTES)), at_least=end)
                except (OSError, MemoryError):
                    if not places:
                        raise
                    break
            places.append(tail)
            tail = end
        self.write_space(Space(tail, reserved))
        return places

    def _reserve(self, start: int, goal: int, *, at_least: int) -> int:
        """Reserve up to `goal`, or to `at_least` where there is no more: what is written later then has its room."""
        if self.available is not None:
            # Memory is taken when it is written; to have it filled with zeros before would cost as much again.
            if self.available() < goal - start:
                goal = at_least
                if self.available() < goal - start:
                    raise MemoryError("no memory is left")
            return goal
        try:
            os.posix_fallocate(self.descriptor, start, goal - start)
        except OSError:
            if goal == at_least:
                raise
            goal = at_least
            os.posix_fallocate(self.descriptor, start, goal - start)
        return goal
