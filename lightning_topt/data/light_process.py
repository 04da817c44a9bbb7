"""Processes that load a few modules of this package, and not torch.

They start quickly and take a tenth of the memory: the server of a partitioned
cache, the coordinator of prepared batches.
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

# The package's own __init__ imports torch, so the process gets empty packages that only know where
# their modules are. Its settings come by a pipe that nobody else can read.
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
    """Start ``main(settings)`` of a module of this package in a new process.

    Its standard input stays open until `close_pipes`, or until this process ends, however that
    happens: processes forked from this one do not keep it open.

    Args:
        module: full name of the module.
        settings: plain data.
        pass_fds: as of `subprocess.Popen`.
        stdout: as of `subprocess.Popen`.
        stderr: as of `subprocess.Popen`.

    Raises:
        OSError: the process cannot start.
    """
    start = {
        "settings": settings,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "package": str(Path(__file__).resolve().parents[1]),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOT, module],
        stdin=subprocess.PIPE,
        bufsize=0,  # a buffer has a lock, which a fork in the meantime would copy as held
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C in the terminal is for the job
        cwd="/",
        stdout=stdout,
        stderr=stderr,
    )
    # forked copies of this process close its pipes: see _close_inherited
    _started.add(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended; standard error has the reason
        # unbuffered: one write may take a part only
        words = memoryview(json.dumps(start).encode() + b"\n")
        while words:
            words = words[process.stdin.write(words) :]
    return process


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close a process's pipes: its standard input ends. Calling it again does nothing."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _close_inherited() -> None:
    # In a forked process: the others must see the end of their parent, not of this process.
    for process in list(_started):
        close_pipes(process)
    _started.clear()


os.register_at_fork(after_in_child=_close_inherited)
