"""Shared memory that cannot be left behind: an anonymous file (memfd) that the kernel frees with its last process.

It has no name in /dev/shm, whose size therefore does not limit it. Other processes find it through one that holds it:
``/proc/<pid>/fd/<number>``, listed in a registry file beside the disk cache.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import psutil

PREFIX = "lightning-topt-"
RESERVE = 0.05  # of the machine's memory is left to others
CGROUP = Path("/sys/fs/cgroup")


class MemoryUnavailable(OSError):
    """This system has no shared memory of the kind, or none is left."""


def open_shared(registry: Path) -> int:
    """A descriptor of the memory file that `registry` lists, made anew where no process holds it. Call it under a lock.

    Raises MemoryUnavailable where the system has no memfd (other than Linux).
    """
    if not hasattr(os, "memfd_create"):
        raise MemoryUnavailable(
            errno.ENOSYS, "a cache in shared memory needs Linux: set memory_bytes=0, disk_bytes > 0"
        )
    holders, descriptor = [], -1
    for line in registry.read_text().splitlines() if registry.exists() else []:
        found = _open_held(line)
        if found is None:
            continue
        holders.append(line)
        if descriptor < 0:
            descriptor = found
        else:
            os.close(found)
    if descriptor < 0:
        name = PREFIX + secrets.token_hex(8)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    own = f"{os.getpid()} {descriptor} {_name(f'/proc/self/fd/{descriptor}')}"
    temporary = registry.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("\n".join([*holders, own]) + "\n")
    temporary.replace(registry)
    return descriptor


def _name(link: str) -> str:
    """The memory file's name behind a descriptor: "/memfd:NAME (deleted)"."""
    return os.readlink(link).removeprefix("/memfd:").removesuffix(" (deleted)")


def _open_held(line: str) -> int | None:
    """Open what a line of the registry says that a process holds; None where it does not any more, or may not be seen."""
    words = line.split()
    if len(words) != 3:
        return None
    link = f"/proc/{words[0]}/fd/{words[1]}"
    try:
        if _name(link) != words[2] or not words[2].startswith(PREFIX):
            return None
        descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _name(f"/proc/self/fd/{descriptor}") == words[2]:
        return descriptor
    os.close(descriptor)  # the number was given to another file in between
    return None


def available_bytes() -> int:
    """Memory that may still be taken: of the machine, and of this process's control group."""
    memory = psutil.virtual_memory()
    available = int(memory.available - RESERVE * memory.total)
    try:
        group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = CGROUP / group.strip().lstrip("/")
        while folder != CGROUP.parent:
            available = min(available, _left_in_group(folder))
            folder = folder.parent
    except (OSError, StopIteration):
        pass
    return max(0, available)


def _left_in_group(folder: Path) -> int:
    """Bytes below the limit of one control group, pages of files that can be dropped not counted."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((folder / "memory.current").read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    return int(limit) - used + int(figures.get("inactive_file", 0))
