"""Processes of this machine: which one a rank is, and whether it still runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESS_SPACE = Path("/proc/self/ns/pid")
INSTALLED = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "<frozen", "<string>")


def process_state(process: int) -> tuple[str, str]:
    """Return the state of `process` (a letter of /proc: R, S, T, Z, ...) and its start in ticks
    since boot; both empty without one.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def process_start(process: int) -> str:
    """Return when `process` started, in ticks since boot; empty where it has ended, even if its
    parent does not know yet.
    """
    state, started = process_state(process)
    return "" if state in "ZX" else started


def own_identity() -> str:
    """Return this process as text that another one of the machine finds it by: boot, space of
    process numbers, number, start.
    """
    boot = space = ""
    with contextlib.suppress(OSError):  # another system than Linux
        boot, space = BOOT.read_text().strip(), os.readlink(PROCESS_SPACE)
    return " ".join(
        (boot or "-", space or "-", str(os.getpid()), process_start(os.getpid()) or "-")
    )


def fate_of(identity: str) -> str:
    """Return what became of the process with that `own_identity`: that it has ended or is stopped;
    empty if neither is known.
    """
    here, there = own_identity().split(), identity.split()
    if len(there) != 4 or there[:2] != here[:2] or "-" in there:
        return ""
    state, started = process_state(int(there[2]))
    if started != there[3] or state in "ZX":
        return f"process {there[2]} has ended"
    return f"process {there[2]} is stopped" if state in "Tt" else ""


def position_of_main_thread() -> str:
    """Return the innermost line of the user's code that the main thread is at, as ``file.py:12 in
    function``; empty if none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    package = str(Path(__file__).parents[1])
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(package) and not any(part in name for part in INSTALLED):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
