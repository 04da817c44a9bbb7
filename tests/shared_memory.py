"""What lies in the machine's shared memory, for tests that leave nothing there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def shared_files() -> set[str]:
    """Names of the files there, without those that only others hold: tests run beside each other.

    Not others are this process and those that it started, also the ones that live on without a
    parent. Python's semaphores are left out: its resource tracker removes them, some time after a
    process was killed.
    """
    names = {n for n in os.listdir(FOLDER) if not n.startswith("sem.")}
    own, others = set(), set()
    for process in psutil.process_iter() if names else ():
        (own if _is_own(process) else others).update(_held(process.pid))
    there = set(os.listdir(FOLDER))  # some are gone before their holders were looked at
    return (names & there) - (others - own)


def _is_own(process: psutil.Process) -> bool:
    try:
        parents = [parent.pid for parent in process.parents()]
    except psutil.Error:  # it has ended
        return False
    return parents[:1] == [1] or os.getpid() in (process.pid, *parents)


def _held(pid: int) -> set[str]:
    """The files that a process has open or mapped; none where it has ended."""
    process, paths = Path("/proc", str(pid)), []
    with contextlib.suppress(OSError):
        paths += opened(process)
        paths += [
            line.split(maxsplit=5)[-1].strip()
            for line in (process / "maps").read_text().splitlines()
        ]
    return {Path(path).name for path in paths if path.startswith(f"{FOLDER}/")}


def opened(process: Path) -> Iterator[str]:
    """What the descriptors of a process are. Raises OSError where it has ended."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(descriptor)
