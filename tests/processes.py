"""Waiting for what other processes and threads do, in tests."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], *, seconds: float = 30) -> None:
    """Raises TimeoutError where `condition` did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.005)


def wait_for_end(pid: int, *, seconds: float = 20) -> bool:
    """Whether a process that is not our child ended in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def halt(pid: int, number: int) -> None:
    """Send SIGSTOP or SIGKILL and wait until it has taken effect, after the call."""
    os.kill(pid, number)
    wait_until(lambda: not runs(pid))


def runs(pid: int) -> bool:
    """Whether a thread of the process may still act: is not stopped (T) or dead (Z, X)."""
    try:
        threads = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # one has ended: the next look tells
        return Path(f"/proc/{pid}").exists()
    return any(thread.rpartition(")")[2].split()[0] not in "TZX" for thread in threads)
