"""A process that copies entries from the memory tier to their places on disk, in idle time.

Whoever stores a sample only claims its place on disk, so the first epoch does not wait for the file
system. The process is light (no torch) and runs at the lowest priority. It ends once its parent has
ended and everything is copied, also after the parent was killed. Of several (one per rank) one
copies at a time.

It is a module of its own because the process imports it: `main` runs there, `DiskWriter` here.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import subprocess
import sys
import time
import warnings
import weakref
from typing import Any

import numpy as np

from lightning_topt.basics.own_files import open_own
from lightning_topt.data.cache.segment_store import (
    CLAIMED,
    STORED,
    SegmentStore,
    described,
    open_store,
)
from lightning_topt.data.light_process import close_pipes, start_light

log = logging.getLogger(__name__)
SWEEP_SECONDS = 0.5  # between two searches for new entries
TURN_SECONDS = 5.0  # to wait for another writer to end, after one's own parent has ended
SILENT_SECONDS = 3.0  # of waiting in `close`, before it says so
CLOSE_SECONDS = 300.0  # `close` waits no longer; the process then goes on alone
AT_LOWEST_PRIORITY = True  # not in tests: it gets hardly any time while others work


class DiskWriter:
    """Copies entries that `memory` has and `disk` has a claimed place for, until `close`.

    Raises:
        OSError: the process cannot start.
    """

    def __init__(self, memory: SegmentStore, disk: SegmentStore) -> None:
        self.process = start_light(
            __name__,
            {
                "memory": described(memory),
                "disk": described(disk),
                "at_lowest_priority": AT_LOWEST_PRIORITY,
            },
            pass_fds=[memory.file.descriptor, disk.file.descriptor],
        )
        self._finalizer = weakref.finalize(self, _end, self.process, os.getpid())

    def close(self) -> None:
        """Wait until everything is on disk. Calling it again does nothing."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    close_pipes(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=SILENT_SECONDS)
    if process.returncode is None:
        log.warning(
            "the rest of the disk cache is being written; this waits for at most %g s",
            CLOSE_SECONDS,
        )
    try:
        if process.wait(timeout=CLOSE_SECONDS):
            warnings.warn(
                "the process that writes the disk cache failed, see its standard error; samples "
                "that it had not written are read from the source in the next run",
                stacklevel=2,
            )
    except subprocess.TimeoutExpired:
        warnings.warn(
            f"the disk cache is still being written after {CLOSE_SECONDS:g} s, and goes on",
            stacklevel=2,
        )


def main(settings: dict[str, Any]) -> None:
    """Copy until standard input ends, and then what is left."""
    if settings["at_lowest_priority"]:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except (AttributeError, OSError):
            os.nice(19)
    memory, disk = open_store(settings["memory"]), open_store(settings["disk"])
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    try:
        lock: int | None = open_own(disk.file.lock.path.with_name("writer.lock"))
    except OSError:
        # The disk is full, or the folder is gone: several writers copy the same to the same places.
        lock = None
    # While the parent runs.
    while not poll.poll(SWEEP_SECONDS * 1000):
        if _is_held(lock):
            copy_claimed(memory, disk)
    # The parent has ended, or waits in `close`: finish at the usual priority.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    end = time.monotonic() + TURN_SECONDS
    while not (own := _is_held(lock)) and time.monotonic() < end:
        time.sleep(0.1)
    if own:  # else another rank's process goes on copying
        disk.file.end_pause()  # there is no later time
        copy_claimed(memory, disk)


def copy_claimed(memory: SegmentStore, disk: SegmentStore) -> int:
    """Write every entry that has a claimed place on disk and is in memory.

    Returns how many were written.
    """
    stored, claimed = memory.states() == STORED, disk.states() == CLAIMED
    number = min(len(stored), len(claimed))
    written = 0
    for item in np.flatnonzero(stored[:number] & claimed[:number]).tolist():
        entry = memory.read(item)
        if entry is not None and not disk.write(item, [entry]):
            break  # full or failing, and it has warned
        written += entry is not None
    return written


def _is_held(lock: int | None) -> bool:
    # Whether this process is the one that copies; it remains so until it ends
    if lock is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
