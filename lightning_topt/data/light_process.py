"""Processes that load a few modules of this package and not torch: quickly there, and of a tenth of
the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The package's own __init__ imports torch: the process gets empty packages that only know where
# their modules lie. What it is to do comes by a pipe that nobody else can read.
BOOT = """
import importlib, json, os, sys, types
line = bytearray()
while not line.endswith(b"\\n"):
    piece = os.read(0, 1 << 16)
    if not piece:
        sys.exit()
    line += piece
start = json.loads(line)
sys.path[:] = start["path"]
for name, path in (
    ("lightning_topt", start["package"]),
    ("lightning_topt.data", start["package"] + "/data"),
):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
importlib.import_module(sys.argv[1]).main(start["settings"])
"""


def start_light(
    module: str,
    settings: dict[str, Any],
    *,
    pass_fds: Sequence[int],
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``main(settings)`` of a module of this package, in a new process. Raises OSError where
    it cannot start.

    Its standard input stays open until `close_pipes`, or until the end of this process, however it
    ends: processes forked from this one do not keep it open. `settings` are plain data; `stdout`
    and `stderr` as `subprocess.Popen` has them.
    """
    start = {
        "settings": settings,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "package": str(Path(__file__).resolve().parents[1]),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOT, module],
        stdin=subprocess.PIPE,
        bufsize=0,  # no lock of a buffer that a process forked meanwhile would find held
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C in the job's terminal is for the job
        cwd="/",
        stdout=stdout,
        stderr=stderr,
    )
    _started.add(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended; the reason is on standard error
        words = memoryview(json.dumps(start).encode() + b"\n")
        while words:
            words = words[process.stdin.write(words) :]
    return process


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Let a process see the end of its standard input. Twice is once."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked process: the others must see the end of the process that started them, not of
    this one.
    """
    for process in list(_started):
        close_pipes(process)
    _started.clear()


os.register_at_fork(after_in_child=_let_go)
