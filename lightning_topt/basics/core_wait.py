"""Whether a machine was busy: how long other programs kept a thread from running.

    watch = CoreWait(threads=1)
    ...                                        # what is measured
    is_busy(watch.share(), ranks=2, threads=1)

Linux counts for each thread how long it was ready to run and had no core
(``/proc/thread-self/schedstat``, in nanoseconds: on a core, ready without one, turns). Waiting for
another rank, a disk or a lock is no part of it. So it tells a busy machine from a slow one, in
containers too. What other threads of the same process ran meanwhile, such as those of gloo, may
have been on that core, and is taken off.
"""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple

BUSY_SHARE = 0.2  # without a core, from which on times are those of a busy machine
_LEAST_SECONDS = 0.02  # in which the clocks of threads tell something
_COUNTS = "/proc/thread-self/schedstat"


class CoreWait:
    """Counts for the calling thread, from now on.

    The process computes with so many `threads`. Those run on cores of their own, so where there are
    several nothing is taken off.
    """

    def __init__(self, *, threads: int) -> None:
        self._computes_alone = threads == 1
        self._before = _now()

    def seconds(self) -> float:
        """Return how long other programs kept the thread from running; NaN where unknown.

        Below 0 where the process has other threads that ran on other cores.
        """
        spent = _since(self._before)
        return spent.waited - (spent.process - spent.thread if self._computes_alone else 0.0)

    def share(self) -> float:
        """Return that as a part of the time in which the thread has computed; NaN where unknown.

        Where Linux does not count, it is the part in which the thread did not run.
        """
        spent, seconds = _since(self._before), self.seconds()
        if math.isnan(seconds) and spent.wall >= _LEAST_SECONDS:
            seconds = spent.wall - spent.thread
        return max(seconds, 0.0) / max(spent.wall, 1e-9)


def is_busy(share: float, *, ranks: int, threads: int) -> bool:
    """Return whether other programs had cores that these ranks needed; False where unknown.

    Args:
        share: of `CoreWait`, of the rank that waited longest.
        ranks: on this machine.
        threads: that compute on each rank. Where there are more of them than cores, some wait for
            one another: that is no sign of other programs.
    """
    own = max(0.0, 1 - usable_cores() / (ranks * threads))
    return share > own + BUSY_SHARE


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Times(NamedTuple):
    """Seconds of the clock, of the calling thread and its process on cores, and without one."""

    wall: float
    thread: float
    process: float
    waited: float


def _now() -> _Times:
    try:
        with open(_COUNTS, encoding="ascii") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited = math.nan
    return _Times(time.perf_counter(), time.thread_time(), time.process_time(), waited)


def _since(before: _Times) -> _Times:
    return _Times(*(now - then for now, then in zip(_now(), before, strict=True)))
