"""Whether a machine was busy: how long other programs kept a thread from running.

    watch = CoreWait(threads=1)
    ...                                        # what is measured
    is_busy(watch.share(), ranks=2, threads=1)

Linux counts for each thread how long it was ready to run and had no core
(``/proc/thread-self/schedstat``, in nanoseconds: on a core, ready without one, turns). Waiting for
another rank, a disk or a lock is no part of that, so it tells a busy machine from a slow one, in
containers too. On other systems no machine counts as busy.
"""

from __future__ import annotations

import os
import time

BUSY_SHARE = 0.2  # without a core, from which on times are those of a busy machine
_COUNTS = "/proc/thread-self/schedstat"


class CoreWait:
    """Counts for the calling thread, from now on, in a process that computes with `threads`."""

    def __init__(self, *, threads: int) -> None:
        self._is_single = threads == 1
        self._before = self._now()

    def share(self) -> float:
        """Return the part of the time since then in which the thread had no core; 0 if unknown."""
        wall, waited = (now - then for now, then in zip(self._now(), self._before, strict=True))
        return max(waited, 0.0) / max(wall, 1e-9)

    # seconds of the clock, and without a core
    def _now(self) -> tuple[float, float]:
        try:
            with open(_COUNTS, encoding="ascii") as file:
                waited = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return time.perf_counter(), 0.0
        # Other threads of this process, such as those of gloo, may have had the core meanwhile.
        # Where several threads compute, they have cores of their own.
        others = time.process_time() - time.thread_time() if self._is_single else 0.0
        return time.perf_counter(), waited - others


def is_busy(share: float, *, ranks: int, threads: int) -> bool:
    """Return whether other programs had cores that these ranks needed.

    Args:
        share: of `CoreWait`, of the rank that waited longest.
        ranks: on this machine.
        threads: that compute on each rank. Where there are more of them than cores, some wait for
            one another: that is no sign of other programs.
    """
    of_ranks = max(0.0, 1 - usable_cores() / (ranks * threads))
    return share > of_ranks + BUSY_SHARE


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
