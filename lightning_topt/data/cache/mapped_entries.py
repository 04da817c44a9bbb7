"""Entries of the memory tier, copied from where they are straight into a batch.

That takes no system call per entry: the memory file is mapped into the process. It is sealed and
never becomes shorter, so a map cannot end the process with SIGBUS, as that of a file on disk could.

It is a module of its own beside `sample_cache`, for raw addresses. `cached_batches` asks it too,
and adds the addresses of the rows that it fills.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_topt.data.cache.sample_codec import header_of
from lightning_topt.data.cache.segment_store import (
    BYTES_MASK,
    PAGE,
    RECORD,
    STORED,
    SegmentStore,
    checksum,
)

# Headers are numbered from 1. Of an entry: not verified yet, or its header has no number. Of a
# header: there are no more numbers.
UNKNOWN, UNNUMBERED, NO_NUMBER = 0, -1, -2
_MOST_HEADERS = (1 << 15) - 1
_WINDOW = 4096  # items
_AHEAD = 15  # entries of others verified per own one: as many other processes may be storing
_MADV_POPULATE_READ = 22  # Linux 5.14
HEAD_BYTES = 4096  # of an entry, read for its header


class MappedEntries:
    """The entries of a memory store, mapped into this process. `close` it before the file.

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
        """Return the header of an entry that is there and was verified here, else None."""
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

    def gather(self, offsets: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes at each offset, (offsets, nbytes); for few bytes."""
        gathered: npt.NDArray[np.uint8] = self._bytes[offsets[:, None] + np.arange(nbytes)]
        return gathered

    def close(self) -> None:
        """Unmap the file. Calling it again does nothing."""
        if self._map is not None:
            # views of the map must go before it can be closed
            self._rows.clear()
            del self._records, self._bytes
            self._map.close()
            self._map = None
