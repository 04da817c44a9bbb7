"""What lies in the machine's shared memory, for tests that leave nothing there."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def shared_files() -> set[str]:
    """Names of the files there, without those that only processes hold which this one has not started: other tests' ones."""
    names = set(os.listdir(FOLDER))
    if not names:
        return names
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    held: dict[str, set[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for name in _held(process):
                held.setdefault(name, set()).add(int(process.name))
    there = set(os.listdir(FOLDER))  # some are gone before their holders were looked at
    return {name for name in names & there if name not in held or held[name] & own}


def _held(process: Path) -> set[str]:
    """Those that a process has open or mapped; none where it has ended."""
    paths: list[str] = []
    try:
        for descriptor in (process / "fd").iterdir():
            paths.append(os.readlink(descriptor))
        paths += [line.split(maxsplit=5)[-1].strip() for line in (process / "maps").read_text().splitlines()]
    except OSError:
        pass
    return {Path(path).name for path in paths if path.startswith(f"{FOLDER}/")}
