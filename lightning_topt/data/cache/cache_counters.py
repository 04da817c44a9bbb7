"""Counts of where samples came from, by all processes of a job in shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_topt.data.cache.segment_store import warn_once

COUNTED = ("memory_hits", "disk_hits", "peer_hits", "misses", "damaged", "stored")
# Adding is not atomic, so no two processes that live at the same time share a row. torch uses its
# threads for 32 kB and more, which hangs in a forked process.
_ROWS = 512


@dataclass(frozen=True)
class CacheStatistics:
    """Statistics say of this job, all its worker processes together, where samples came from, and
    what the tiers hold, in entries and bytes.

    `damaged` entries were found out by their checksum, dropped and read again; `stored` ones were
    written by this job.
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


class CacheCounters:
    """Counters of all `COUNTED`, shared with the processes that this object is given to."""

    def __init__(self) -> None:
        self._shared = torch.zeros((_ROWS, len(COUNTED)), dtype=torch.int64)
        try:
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # /dev/shm is full, and worker processes need it for more than this
            warn_once(
                f"the statistics of the cache are those of each process alone: {error}",
                stacklevel=5,
            )
        self._rows: npt.NDArray[np.int64] = self._shared.numpy()  # the same memory

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
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
        """Return the counts of all processes, and begin anew where `reset` is given."""
        counts: dict[str, int] = dict(zip(COUNTED, self._shared.sum(dim=0).tolist(), strict=True))
        if reset:
            self._shared.zero_()
        return counts
