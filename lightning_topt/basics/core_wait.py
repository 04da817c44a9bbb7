"""Whether a machine was busy: how long threads were ready to run and had no core.

    watch = CoreWait()
    ...                                        # what is measured
    is_busy(watch.share(), ranks=2)            # did others have our cores?

Linux counts that for each thread, in nanoseconds (``/proc/<process>/task/<thread>/schedstat``: on a
core, ready without one, turns). Waiting for another rank, a disk or a lock is no part of it. So it
tells a busy machine from a slow one, in containers too.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

BUSY_SHARE = 0.2  # without a core, from which on times are those of a busy machine
_OWN, _THREADS = "/proc/thread-self/schedstat", "/proc/self/task"


class CoreWait:
    """Counts from now on.

    `computes`: the process computes all the time, and all of its threads count; else the calling
    one alone does, which may also wait for others.
    """

    def __init__(self, *, computes: bool = False) -> None:
        self._computes = computes
        self._waited, self._ran = core_wait_seconds(of_all=computes), time.thread_time()
        self._started = time.perf_counter()

    def share(self) -> float:
        """Return how many threads had no core, on average; NaN where the platform cannot say.

        Of one thread: the part of the time. Where Linux does not count, it is the part in which a
        thread that computes did not run.
        """
        seconds = time.perf_counter() - self._started
        waited = core_wait_seconds(of_all=self._computes) - self._waited
        if math.isnan(waited) and self._computes:
            waited = seconds - (time.thread_time() - self._ran)
        return max(waited, 0.0) / max(seconds, 1e-9)


def core_wait_seconds(*, of_all: bool = False) -> float:
    """Return how long the calling thread was ready to run and had no core, NaN where unknown.

    With `of_all` the sum of all threads of this process.
    """
    try:
        if not of_all:
            return _waited(_OWN)
        total = 0.0
        for thread in os.listdir(_THREADS):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                total += _waited(f"{_THREADS}/{thread}/schedstat")
        # a sandbox may list threads and count nothing
        return total if os.path.exists(_OWN) else math.nan
    except (OSError, ValueError, IndexError):
        return math.nan


def is_busy(share: float, *, ranks: int, threads: int = 1) -> bool:
    """Return whether other programs had cores that these ranks needed; False where unknown.

    Args:
        share: of `CoreWait`, of the rank that waited longest.
        ranks: on this machine.
        threads: that compute on each rank. Where there are more of them than cores, some wait for
            one another: that is no sign of other programs.
    """
    own = max(0.0, threads - usable_cores() / ranks)
    return share > own + BUSY_SHARE


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _waited(path: str) -> float:
    with open(path, encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9
