"""The tiers of a cache: shared memory, then local disk, then the memory of other nodes; what is in
none is a miss.

The policy is MinIO's (CoorDL, arXiv 2007.06775, section 4.1): what is stored is never evicted, so
an epoch misses exactly the items that found no room, whatever its order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.basics.own_files import open_own
from lightning_topt.data.cache.cache_counters import CacheCounters, CacheStatistics
from lightning_topt.data.cache.disk_writer import DiskWriter
from lightning_topt.data.cache.mapped_entries import HEAD_BYTES
from lightning_topt.data.cache.memory_file import Handed
from lightning_topt.data.cache.sample_codec import Parts, header_of, size_of
from lightning_topt.data.cache.segment_store import SegmentStore, checksum
from lightning_topt.data.cache.tiers import Room, hand_over, open_tiers

_MOST_NEW = 1 << 16


class RefusedCacheError(ValueError):
    """A cache was given up, since what was stored in it cannot be reproduced."""


class Peers(Protocol):
    """The other nodes' part of a partitioned cache."""

    def is_own(self, item: int) -> bool:
        """Return whether this node stores the item."""

    def fetch(self, items: Sequence[int]) -> list[Any]:
        """Return the entries of other nodes' items; None where the owner has none or does not
        answer in time.
        """

    def push(self, item: int, parts: Parts) -> None:
        """Give an entry to its owner, in the background."""

    def flush(self) -> None:
        """Wait for what was pushed, for a limited time."""

    def close(self) -> None:
        """Finish what was pushed."""


class SampleCache:
    """Entries (see `sample_codec`) of the items 0 .. `num_items` - 1, shared by all processes that
    open the same directory.

    Args:
        directory: on a local disk; each `fingerprint` has a folder in it, which outlives the run.
        fingerprint: of the data and everything done to them. Caches of one fingerprint have the
            same items.
        memory_bytes, disk_bytes: room for entries per node, a number or text (``"8GiB"``); 0: no
            such tier. The index adds 32 bytes per item.
        peers: the other nodes' parts; this node then stores its own items only.
        write_behind: what is in memory is copied to disk by a process of its own when nobody else
            wants the time, at the latest in `close`; a killed job's last samples may be missing on
            disk.

    A tier that cannot be opened is left out with one warning, here and in worker processes; what
    breaks later gives misses.

    Raises ValueError where both are 0 or one is no size or `directory` is a file, RefusedCacheError
    where `refuse` was called for this fingerprint, MemoryUnavailable for memory on other systems
    than Linux.
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
        write_behind: bool = False,
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
        self._handed: Handed | None = None
        self._open_tiers()
        self.write_behind = write_behind and self.memory is not None and self.disk is not None
        if self.write_behind:
            self._start_writer()

    def _start_writer(self) -> None:
        assert self.memory is not None and self.disk is not None
        try:
            self._writer: DiskWriter | None = DiskWriter(self.memory, self.disk)
        except OSError as error:
            self.write_behind = False
            warnings.warn(
                f"the disk cache is written at once, no process could be started for it: {error}",
                stacklevel=4,
            )

    def _open_tiers(self) -> None:
        self._writer = None
        # Items that this process has stored in memory since `verify_new`, which not every way of
        # reading calls.
        self._new: deque[int] = deque(maxlen=_MOST_NEW)
        self._check_refusal()
        room = Room(self.num_items, self.memory_bytes, self.disk_bytes)
        opened = open_tiers(self.folder, room, left_out=self._left_out, known=self._handed)
        self.memory, self.mapped, self.disk, self._left_out = opened
        self.tiers = opened.stores
        descriptors = [tier.file.descriptor for tier in self.tiers]
        self._finalizer = weakref.finalize(self, _close_all, descriptors)
        self._finalizer.atexit = False

    def _check_refusal(self) -> None:
        try:
            with open(open_own(self._refusal, os.O_RDONLY), errors="replace") as file:
                reason = file.read()
        except OSError:  # there is none
            return
        raise RefusedCacheError(
            f"this data set cannot be cached: {reason or 'its samples differ'} (if that has "
            "changed without a change of the "
            f"data set's code or state, remove {self.folder})"
        )

    @property
    def _refusal(self) -> Path:
        return self.folder / "refused"

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("memory", "mapped", "disk", "tiers", "_finalizer", "_writer")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return state | {"_handed": None if self.memory is None else hand_over(self.memory)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_tiers()

    def get(self, item: int) -> Any:
        """Return a verified, writable buffer with the entry of `item`; None: a miss, to be read
        from the source and `put`.
        """
        return self.get_many([item])[0]

    def get_many(self, items: Sequence[int]) -> list[Any]:
        """Return the same for several items; those of other nodes come in one exchange with
        each.
        """
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

    def get_local(self, item: int) -> Any:
        """Return the same from this node's memory or disk only, and a miss is not counted."""
        for tier in self.tiers:
            entry = self._checked(tier, tier.read(item))
            if entry is None:
                continue
            if tier is self.memory:
                self._counters.add("memory_hits")
            else:
                self._counters.add("disk_hits")
                if self.memory is not None and self.memory.write(item, [entry]):
                    self._new.append(item)
            return entry
        return None

    def peek(self, item: int) -> bytes | None:
        """Return the header of an entry in this node's memory, neither verified nor counted as a
        hit; None where there is none.
        """
        start = None if self.memory is None else self.memory.head(item, HEAD_BYTES)
        try:
            return None if start is None else header_of(start)
        except ValueError:  # longer, or damaged
            return None

    def read_into(self, item: int, buffers: Sequence[Any]) -> bool:
        """Fill `buffers` with the entry of `item` from this node's memory; False where it is not
        there or of another size.
        """
        if self.memory is None:
            return False
        if not self._checked(self.memory, self.memory.read_into(item, buffers)):
            return False
        self._counters.add("memory_hits")
        return True

    def _checked(self, tier: SegmentStore, outcome: Any) -> Any:
        if tier.damaged:
            self._counters.add("damaged", tier.damaged)
            tier.damaged = 0
        return outcome

    def put(self, item: int, parts: Parts) -> None:
        """Store an entry wherever there is room; nothing is raised where there is none."""
        self.put_many({item: parts})

    def put_many(self, entries: Mapping[int, Parts]) -> None:
        """Do the same for several items, which costs less than one by one."""
        entries = self._without_pushed(entries)
        sizes = {item: size_of(parts) for item, parts in entries.items()}
        wanted = [
            [item for item in entries if tier.may_take(item, sizes[item])] for tier in self.tiers
        ]
        digests = {item: checksum(entries[item], item=item) for item in set().union(*wanted)}
        stored: set[int] = set()
        for tier, items in zip(self.tiers, wanted, strict=True):
            if self.write_behind and tier is self.disk:
                behind = [item for item in items if item in stored]  # the writer brings them there
                tier.claim(behind, [sizes[item] for item in behind])
                items = [item for item in items if item not in stored]
            there = tier.write_many(
                items, [entries[item] for item in items], [digests[item] for item in items]
            )
            stored.update(itertools.compress(items, there))
            if tier is self.memory:
                self._new.extend(stored)
        self._counters.add("stored", len(stored))

    def _without_pushed(self, entries: Mapping[int, Parts]) -> Mapping[int, Parts]:
        """This node's own entries; the others are given to their owners."""
        peers = self.peers
        if peers is None:
            return entries
        for item, parts in entries.items():
            if not peers.is_own(item):
                peers.push(item, parts)
        return {item: parts for item, parts in entries.items() if peers.is_own(item)}

    def verify_new(self) -> None:
        """Get entries ready that were stored lately, by this process or others, for readings in
        place (`mapped`).
        """
        if self._new and self.mapped is not None:
            self.mapped.verify_new(list(self._new))
        self._new.clear()

    def flush(self) -> None:
        """Wait until other nodes have what was put here, as far as they take it in time."""
        if self.peers is not None:
            self.peers.flush()

    def refuse(self, reason: str) -> None:
        """Drop everything of this fingerprint, for good: `reason` says why. Later caches of it
        raise RefusedCacheError.
        """
        # A full disk keeps an empty file; without a folder the next job finds out itself.
        with contextlib.suppress(OSError), open(open_own(self._refusal), "w") as file:
            file.truncate(0)  # not when it is opened: it was not known then whose it is
            file.write(reason)
        for tier in self.tiers:
            tier.clear()

    def num_misses(self) -> int:
        """Return the misses of this job, all its worker processes together, since the last
        reset.
        """
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
        """Let go of the tiers: shared memory is freed with its last process, the disk's part stays.
        Twice is once.
        """
        if self.peers is not None:
            self.peers.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.mapped is not None:
            self.mapped.close()
        self.tiers, self.memory, self.mapped, self.disk = [], None, None, None
        self._finalizer()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
