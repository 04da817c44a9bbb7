"""The cache of samples: shared memory, then local disk, then the memory of other nodes.

    cache = SampleCache("/tmp/cache", fingerprint=fingerprint(dataset), num_items=len(dataset),
                        memory_bytes="8GiB", disk_bytes="100GiB")
    entry = cache.get(item)                 # None: a miss
    cache.put(item, encode(sample))

The policy is MinIO's (CoorDL, arXiv 2007.06775, section 4.1): what is stored is never evicted, so
an epoch misses exactly the items that found no room, whatever its order.

Below the cache: the map of its memory (`MappedEntries`, which `cached_batches` copies whole batches
from), and its counters in shared memory. A tier that cannot
be opened costs its samples and a warning, never the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.basics.own_files import NotOwn, made, open_own
from lightning_topt.data.cache import memory_file
from lightning_topt.data.cache.memory_file import (
    MemoryHandle,
    MemoryUnavailable,
    available_bytes,
    handle_of,
    open_handle,
    open_memory,
)
from lightning_topt.data.cache.sample_codec import Parts, header_of, size_of
from lightning_topt.data.cache.segment_store import (
    BYTES_MASK,
    PAGE,
    RECORD,
    STORED,
    LockTimeout,
    SegmentStore,
    StoreFile,
    checksum,
    warn_once,
)

if TYPE_CHECKING:
    from lightning_topt.data.peers.client import Peers

T = TypeVar("T")
Entry = npt.NDArray[np.uint8]  # bytes, verified and writable
MEMORY, DISK = "memory cache", "disk cache"
_MOST_NEW = 1 << 16
# Headers are numbered from 1. Of an entry: not verified yet, or its header has no number. Of a
# header: there are no more numbers.
UNKNOWN, UNNUMBERED, NO_NUMBER = 0, -1, -2
_MOST_HEADERS = (1 << 15) - 1
_WINDOW = 4096  # items
_AHEAD = 15  # entries of others verified per own one: as many other processes may be storing
_MADV_POPULATE_READ = 22  # Linux 5.14
HEAD_BYTES = 4096  # of an entry, read for its header
COUNTED = ("memory_hits", "disk_hits", "peer_hits", "misses", "damaged", "stored")
# Adding is not atomic, so no two live processes share a row. From 32 kB on torch uses its threads,
# which hangs in a forked process.
_ROWS = 512


class RefusedCacheError(ValueError):
    """A cache was given up, since what was stored in it cannot be reproduced."""


@dataclass(frozen=True)
class CacheStatistics:
    """Where this job's samples came from, all worker processes together, and what the tiers hold.

    Args:
        damaged: entries whose checksum was wrong; they were dropped and read again.
        stored: entries that this job wrote.
        memory_items: entries in the memory tier, also of other jobs.
        disk_items: entries in the disk tier.
    """

    memory_hits: int
    disk_hits: int
    peer_hits: int
    misses: int
    damaged: int
    stored: int
    memory_items: int
    memory_bytes: int
    disk_items: int
    disk_bytes: int


class SampleCache:
    """Entries (see `sample_codec`) of the items 0 .. `num_items` - 1.

    All processes that open the same directory share it. A tier that cannot be opened is left out
    with one warning, here and in worker processes. Failures later on only cause misses.

    Args:
        directory: on a local disk; each `fingerprint` has a folder in it, which outlives the run.
        fingerprint: of the data and everything done to them; caches of one fingerprint have the
            same items.
        memory_bytes: room for entries in shared memory, per node: a number or text (``"8GiB"``); 0:
            no such tier. The index takes 32 bytes per item besides.
        disk_bytes: the same on disk.
        peers: the other nodes' parts; this node then stores only its own items.

    Raises:
        ValueError: both sizes are 0, one is no size, or `directory` is a file.
        RefusedCacheError: `refuse` was called for this fingerprint.
        MemoryUnavailable: it should use memory on another system than Linux.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        fingerprint: str,
        num_items: int,
        memory_bytes: int | str,
        disk_bytes: int | str,
        peers: Peers | None = None,
    ) -> None:
        self.memory_bytes = check_size(memory_bytes, name="memory_bytes", least=0)
        self.disk_bytes = check_size(disk_bytes, name="disk_bytes", least=0)
        if self.memory_bytes + self.disk_bytes == 0:
            raise ValueError(
                "a cache needs room: memory_bytes > 0 (shared memory) or disk_bytes > 0 (local "
                "disk)"
            )
        self.folder = Path(directory).expanduser().absolute() / fingerprint
        self.num_items, self.peers = num_items, peers
        self._counters = CacheCounters()
        self._left_out: tuple[str, ...] = ()
        self._memory_handle: MemoryHandle | None = None
        self._open_tiers()

    def _open_tiers(self) -> None:
        # Items that this process has stored in memory since `verify_new`. Not all reads call that.
        self._new: deque[int] = deque(maxlen=_MOST_NEW)
        self._check_refusal()
        failed: dict[str, OSError] = {}  # by name of the tier, why it could not be opened
        self.memory = self._opened(MEMORY, self.memory_bytes, self._open_memory, failed)
        try:
            self.disk = self._opened(DISK, self.disk_bytes, self._open_disk, failed)
        except BaseException:  # no disk cache, and no cache at all
            if self.memory is not None:
                os.close(self.memory.file.descriptor)
            raise
        if failed:
            _warn_without(failed, self.folder)
        self._left_out = (*self._left_out, *failed)
        self.mapped = None if self.memory is None else _mapped(self.memory)
        # the open stores, the fastest first
        self.tiers = [tier for tier in (self.memory, self.disk) if tier is not None]
        descriptors = [tier.file.descriptor for tier in self.tiers]
        self._finalizer = weakref.finalize(self, _close_all, descriptors)
        self._finalizer.atexit = False

    def _opened(
        self, name: str, nbytes: int, store: Callable[[], SegmentStore], failed: dict[str, OSError]
    ) -> SegmentStore | None:
        # A tier, unless there is none of that name or it could not be opened, here or in a parent
        if not nbytes or name in self._left_out:
            return None
        try:
            return store()
        except MemoryUnavailable:
            raise
        except OSError as error:
            failed[name] = error.with_traceback(None)  # a traceback would keep other tiers open
            return None

    def _open_memory(self) -> SegmentStore:
        # a worker gets its parent's memory by the handle; others find it in the registry
        known = self._memory_handle
        descriptor, registry = (known and open_handle(known)) or open_memory(self.folder)
        with _closed_on_error(descriptor):
            file = StoreFile(
                descriptor, num_items=self.num_items, lock=registry, available=available_bytes
            )
            store = SegmentStore(
                file, capacity_bytes=self.memory_bytes, name=MEMORY, verify_once=True
            )
        # A registry in shared memory would stay there: take this process off it at the end.
        if registry.parent == memory_file.SHARED:
            weakref.finalize(store, memory_file.leave, registry, memory_file.line_of(descriptor))
        return store

    def _open_disk(self) -> SegmentStore:
        path = made(self.folder) / "samples"
        descriptor = open_own(path)
        with _closed_on_error(descriptor):
            file = StoreFile(descriptor, num_items=self.num_items, lock=self.folder / "disk.lock")
            return SegmentStore(file, capacity_bytes=self.disk_bytes, name=f"{DISK} {path}")

    def _check_refusal(self) -> None:
        try:
            with open(open_own(self._refusal, os.O_RDONLY), errors="replace") as file:
                reason = file.read()
        except OSError:  # there is none
            return
        raise RefusedCacheError(
            f"this data set cannot be cached: {reason or 'its samples differ'} (if that has "
            f"changed without a change of the data set's code or state, remove {self.folder})"
        )

    @property
    def _refusal(self) -> Path:
        return self.folder / "refused"

    def __getstate__(self) -> dict[str, object]:
        # what holds descriptors is opened again by the process that gets the state
        left_out = ("memory", "mapped", "disk", "tiers", "_finalizer")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        # The memory by its handle: a worker needs no registry and waits for no lock.
        memory = None if self.memory is None else self.memory.file
        handle = None if memory is None else handle_of(memory.descriptor, memory.lock)
        return state | {"_memory_handle": handle}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open_tiers()

    def get(self, item: int) -> Entry | None:
        """Return a verified, writable buffer with the entry of `item`.

        None is a miss: read the sample from the source, and `put` it.
        """
        return self.get_many([item])[0]

    def get_many(self, items: Sequence[int]) -> list[Entry | None]:
        """Return several entries; there is one exchange with each other node."""
        # This node's tiers, then one exchange with each owner of what is missing.
        entries = [self.get_local(item) for item in items]
        peers = self.peers
        if peers is not None:
            missing = [
                i for i, entry in enumerate(entries) if entry is None and not peers.is_own(items[i])
            ]
            if missing:
                for i, entry in zip(missing, peers.fetch([items[i] for i in missing]), strict=True):
                    entries[i] = entry
                    self._counters.add("peer_hits", entry is not None)
        self._counters.add("misses", sum(entry is None for entry in entries))
        return entries

    def get_local(self, item: int) -> Entry | None:
        """Return an entry from this node's memory or disk; a miss is not counted."""
        for tier in self.tiers:
            entry = self._checked(tier, tier.read(item))
            if entry is None:
                continue
            if tier is self.memory:
                self._counters.add("memory_hits")
            else:
                # Found on disk: also keep it in memory, if there is room.
                self._counters.add("disk_hits")
                if self.memory is not None and self.memory.write(item, [entry]):
                    self._new.append(item)
            return entry
        return None

    def read_into(self, item: int, buffers: Sequence[object]) -> bool:
        """Fill `buffers` with the entry of `item` from this node's memory.

        False where it is not there or of another size.
        """
        if self.memory is None:
            return False
        if not self._checked(self.memory, self.memory.read_into(item, buffers)):
            return False
        if self.mapped is not None:
            self.mapped.note(item)  # the next time its batch may be read at once
        self._counters.add("memory_hits")
        return True

    def _checked(self, tier: SegmentStore, outcome: T) -> T:
        # Collect the count of damaged entries from the tier.
        if tier.damaged:
            self._counters.add("damaged", tier.damaged)
            tier.damaged = 0
        return outcome

    def put(self, item: int, parts: Parts) -> None:
        """Store an entry wherever there is room; nothing is raised where there is none."""
        self.put_many({item: parts})

    def put_many(self, entries: Mapping[int, Parts]) -> None:
        """Store several entries, which costs less than one by one."""
        entries = self._without_pushed(entries)
        sizes = {item: size_of(parts) for item, parts in entries.items()}
        # What each tier may take, and one checksum for all of them.
        wanted = [
            [item for item in entries if tier.may_take(item, sizes[item])] for tier in self.tiers
        ]
        digests = {item: checksum(entries[item], item=item) for item in set().union(*wanted)}
        stored: set[int] = set()
        for tier, items in zip(self.tiers, wanted, strict=True):  # the fastest tier first
            there = tier.write_many(
                items, [entries[item] for item in items], [digests[item] for item in items]
            )
            stored.update(itertools.compress(items, there))
            if tier is self.memory:
                self._new.extend(stored)
        self._counters.add("stored", len(stored))

    def _without_pushed(self, entries: Mapping[int, Parts]) -> Mapping[int, Parts]:
        # Push other nodes' entries to their owners; returns this node's own
        peers = self.peers
        if peers is None:
            return entries
        peers.push({item: parts for item, parts in entries.items() if not peers.is_own(item)})
        return {item: parts for item, parts in entries.items() if peers.is_own(item)}

    def verify_new(self) -> None:
        """Prepare entries that were stored lately, for reading in place (`mapped`)."""
        if self._new and self.mapped is not None:
            self.mapped.verify_new(list(self._new))
        self._new.clear()

    def refuse(self, reason: str) -> None:
        """Drop everything of this fingerprint, for good, for the given reason.

        Later caches of this fingerprint raise RefusedCacheError.
        """
        # A full disk leaves an empty file. Without a folder the next job finds out itself.
        with contextlib.suppress(OSError), open(open_own(self._refusal), "w") as file:
            file.truncate(0)  # not on opening, when it is not known yet whose file it is
            file.write(reason)
        for tier in self.tiers:
            tier.clear()

    def num_misses(self) -> int:
        """Return this job's misses since the last reset, of all its processes."""
        return self._counters.total("misses")

    def count_memory_hits(self, number: int) -> None:
        """Count the hits of entries that were read through `mapped`."""
        self._counters.add("memory_hits", number)

    def statistics(self, *, reset: bool = False) -> CacheStatistics:
        """Return the counts since the last reset."""
        return CacheStatistics(
            **self._counters.totals(reset=reset),
            memory_items=0 if self.memory is None else len(self.memory),
            memory_bytes=0 if self.memory is None else self.memory.used_bytes,
            disk_items=0 if self.disk is None else len(self.disk),
            disk_bytes=0 if self.disk is None else self.disk.used_bytes,
        )

    def close(self) -> None:
        """Close the tiers: the last process frees the memory, the disk's part stays.

        Calling it again does nothing.
        """
        if self.peers is not None:
            self.peers.close()
        if self.mapped is not None:
            self.mapped.close()
        self.tiers, self.memory, self.mapped, self.disk = [], None, None, None
        self._finalizer()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(memory: SegmentStore) -> MappedEntries | None:
    try:
        return MappedEntries(memory)
    except OSError as error:
        warnings.warn(
            f"the memory cache cannot be mapped, which makes reading it slower: {error}",
            stacklevel=5,
        )
        return None


def _warn_without(failed: dict[str, OSError], folder: Path) -> None:
    names = " and its ".join(f"{name} ({error})" for name, error in failed.items())
    # what to do about it: a lock that is held, files of others, or no room
    if any(isinstance(error, LockTimeout) for error in failed.values()):
        advice = (
            "end the process that holds the lock, or name another directory, before the next run"
        )
    elif any(isinstance(error, NotOwn) for error in failed.values()):
        advice = (
            "name a directory of your own, which others may not write to, or remove what is there, "
            "before the next run"
        )
    else:
        advice = "free room there, or name a directory that can be written, before the next run"
    warn_once(
        f"training goes on without its {names} in {folder}, and reads what is kept nowhere else "
        f"from the source: {advice}",
        stacklevel=6,
    )


# ---- entries in memory, copied from where they are ----------------------------------------------


class MappedEntries:
    """The entries of a memory store, mapped into this process. `close` it before the file.

    That takes no system call per entry. The memory file is sealed and never becomes shorter, so a
    map cannot end the process with SIGBUS, as that of a file on disk could.

    An entry is verified, record and bytes, before it is first read here. From then on it is only
    checked that the entry is still there.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store, file = store, store.file
        size = file.data_start + store.capacity_bytes
        if os.fstat(file.descriptor).st_size < size:
            # This takes no memory yet: room is reserved piece by piece, as before.
            os.ftruncate(file.descriptor, size)
        fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._map: mmap.mmap | None = mmap.mmap(file.descriptor, size)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        index = self._bytes[PAGE : PAGE + RECORD.size * file.num_items]
        self._records: npt.NDArray[np.uint64] = index.view("<u8").reshape(-1, 4)
        # By item: the number of its header, once verified.
        self._headers = np.zeros(file.num_items, np.int16)
        self._numbers: dict[bytes, int] = {}
        self._by_number: list[bytes] = []  # without their sizes
        self._next = 0  # item, for `verify_new`
        # By first byte and length: the file's bytes as overlapping rows, one from every offset.
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._can_populate = hasattr(self._map, "madvise")

    def header(self, item: int) -> bytes | None:
        """Return the header of an entry that is there and intact, else None."""
        if self._headers[item] == UNKNOWN:
            self._verify_ahead(item, trusted=self._store.is_verified(item))
        number = self._headers[item]
        is_there = number > 0 and self._records[item, 1] >> np.uint64(56) == STORED
        return self._by_number[number - 1] if is_there else None

    def find_all(
        self, items: npt.NDArray[np.int64], *, header: bytes, nbytes: int
    ) -> npt.NDArray[np.int64] | None:
        """Return where entries are in the map, where all are there and verified; else None.

        Args:
            items: numbers of items.
            header: as it stands at the beginning of an entry.
            nbytes: of the entry.
        """
        # (items, 4): offset, state and size, checksums
        records = self._records[items]
        if (records[:, 1] != STORED << 56 | nbytes).any() or (
            self._headers[items] != self._number(header)
        ).any():
            return None
        offsets = records[:, 0]
        return offsets.astype(np.int64) if offsets.max() <= len(self._bytes) - nbytes else None

    def _entry(self, item: int, *, trusted: bool) -> npt.NDArray[np.uint8] | None:
        """Return the entry in place, verified unless `trusted`.

        None where it or its record is damaged.
        """
        # no lock: the record's own checksum says whether it is whole
        raw = self._records[item].tobytes()
        offset, state_and_bytes, digest, check = RECORD.unpack(raw)
        end = offset + (state_and_bytes & int(BYTES_MASK))
        if check != xxhash.xxh3_64_intdigest(raw[:-8], seed=item) or end > len(self._bytes):
            return None
        # To map these bytes at once costs less than a page fault for every sixteen pages.
        if self._map is not None and self._can_populate:
            first = offset // PAGE * PAGE
            try:
                self._map.madvise(_MADV_POPULATE_READ, first, end - first)
            except OSError:
                self._can_populate = False
        entry = self._bytes[offset:end]
        if not trusted and checksum([entry], item=item) != digest:
            return None
        self._store.set_verified(item)
        return entry

    def verify_new(self, own: Sequence[int]) -> None:
        """Prepare entries that were stored lately, so that reading them needs no verification.

        This process's `own` are not read again: it has just written them. For each of them some
        entries of other processes are verified, among the next `_WINDOW` items in turn.
        """
        for item in own:
            self.note(item)
        # Others': a window of the index that moves on once it has no more of them.
        limit = _AHEAD * len(own)
        window = slice(self._next, self._next + _WINDOW)
        stored = self._records[window, 1] >> np.uint64(56) == np.uint64(STORED)
        found = np.flatnonzero(stored & (self._headers[window] == UNKNOWN))[:limit] + self._next
        if len(found) < limit:
            self._next = 0 if window.stop >= len(self._records) else window.stop
        for item in found.tolist():
            self._verify_ahead(item, trusted=self._store.is_verified(item))

    def note(self, item: int) -> None:
        """Note the header of an entry that this process has just found or written whole."""
        if self._headers[item] == UNKNOWN:
            self._verify_ahead(item, trusted=True)

    def _verify_ahead(self, item: int, *, trusted: bool) -> None:
        entry = self._entry(item, trusted=trusted)
        if entry is None:
            return  # damaged, which is found when it is read
        try:
            header = header_of(entry[:HEAD_BYTES])
            number = self._number(len(header).to_bytes(4, "little") + header)
        except ValueError:
            number = NO_NUMBER  # the header is longer
        self._headers[item] = max(number, UNNUMBERED)

    def _number(self, header: bytes) -> int:
        # The number of a header, given when it is first seen
        number = self._numbers.get(header, 0)
        if not number:
            if len(self._numbers) >= _MOST_HEADERS:
                return NO_NUMBER
            number = self._numbers[header] = len(self._numbers) + 1
            self._by_number.append(header[4:])
        return number

    def take(self, offsets: npt.NDArray[np.int64], start: int, out: Tensor) -> None:
        """Copy bytes from each offset + `start` to the rows of `out`, in one call.

        `out` is (offsets, nbytes) of uint8.
        """
        nbytes = out.shape[1]
        rows = self._rows.get((start, nbytes))
        if rows is None:
            everything = torch.from_numpy(self._bytes)
            # row i begins at byte i + start: rows overlap, and picking some of them is one call
            rows = everything.as_strided(
                (len(everything) - start - nbytes + 1, nbytes), (1, 1), start
            )
            self._rows[start, nbytes] = rows
        torch.index_select(rows, 0, torch.from_numpy(offsets), out=out)

    def close(self) -> None:
        """Unmap the file. Calling it again does nothing."""
        if self._map is not None:
            # views of the map must go before it can be closed
            self._rows.clear()
            del self._records, self._bytes
            self._map.close()
            self._map = None


# ---- counters -----------------------------------------------------------------------------------


class CacheCounters:
    """Counters of all `COUNTED`, shared with the processes that get this object."""

    def __init__(self) -> None:
        self._shared = torch.zeros((_ROWS, len(COUNTED)), dtype=torch.int64)
        try:
            self._shared.share_memory_()
        except RuntimeError as error:
            # /dev/shm is full, which workers will run into anyway: they need it for batches.
            warn_once(
                f"the statistics of the cache are those of each process alone: {error}",
                stacklevel=5,
            )
        self._rows: npt.NDArray[np.int64] = self._shared.numpy()  # the same memory

    def __getstate__(self) -> dict[str, object]:
        return {"_shared": self._shared}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._rows = self._shared.numpy()

    def add(self, what: str, number: int | bool = 1) -> None:
        """Count `number` more of `what`, one of `COUNTED`."""
        if number:
            self._rows[os.getpid() % _ROWS, COUNTED.index(what)] += int(number)

    def total(self, what: str) -> int:
        """Return the count of `what` by all processes."""
        return int(self._rows[:, COUNTED.index(what)].sum())

    def totals(self, *, reset: bool = False) -> dict[str, int]:
        """Return the counts of all processes; `reset` sets them to 0."""
        counts: dict[str, int] = dict(zip(COUNTED, self._shared.sum(dim=0).tolist(), strict=True))
        if reset:
            self._shared.zero_()
        return counts
