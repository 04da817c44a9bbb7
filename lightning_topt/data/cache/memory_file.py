"""Shared memory that cannot be left behind: an anonymous file (memfd), freed with its last process.

It has no name in /dev/shm, whose size therefore does not limit it. Other processes find it through
one that holds it: ``/proc/<pid>/fd/<number>``, listed in a registry beside the disk cache. The
registry is also the lock of the memory's writers: who finds the one has the other.

    open_memory    the memory of all processes of this user that name a folder
    MemoryHandle   what a parent gives its workers, which then need no registry
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import psutil
import xxhash

from lightning_topt.basics.own_files import is_own, made
from lightning_topt.data.cache.segment_store import RETRY_SECONDS, LockTimeout, StoreLock

PREFIX = "lightning-topt-"  # of memory files and of registries in shared memory
REGISTRY = "memory.holders"
SHARED = Path("/dev/shm")  # for a registry that has no room in its own folder; never for samples
RESERVE = 0.05  # share of the machine's memory that is left to others
CGROUP = Path("/sys/fs/cgroup")


class MemoryUnavailable(OSError):
    """This system has no anonymous memory files."""


class MemoryFile(NamedTuple):
    """An open descriptor of the memory, for its owner to close, and its registry's path."""

    descriptor: int
    registry: Path


def open_memory(folder: Path) -> MemoryFile:
    """Open the memory of all processes of this user that name `folder`.

    Its registry is in `folder`, or in /dev/shm where that cannot be written.

    Raises:
        MemoryUnavailable: the system has no memfd (other than Linux).
        ValueError: `folder` is a file.
        OSError: neither place can be written.
    """
    if not hasattr(os, "memfd_create"):
        raise MemoryUnavailable(
            errno.ENOSYS, "a cache in shared memory needs Linux: set memory_bytes=0, disk_bytes > 0"
        )
    registry = folder / REGISTRY
    try:
        made(folder)
        return MemoryFile(open_shared(registry), registry)
    except LockTimeout:
        raise  # another registry would mean a second memory
    except OSError as error:
        prefix = f"{PREFIX}{os.geteuid()}-"
        try:
            for old in SHARED.glob(prefix + "*"):  # left by killed processes
                leave(old, "")
            registry = SHARED / (prefix + xxhash.xxh3_128_hexdigest(os.fsencode(folder)))
            return MemoryFile(open_shared(registry), registry)
        except OSError:
            raise error from None


def open_shared(registry: Path) -> int:
    """Open the memory file that `registry` lists, made anew where no process holds it.

    Raises:
        OSError: a new one cannot be listed.
    """
    lock = StoreLock(registry)
    with lock.held():
        if not lock.is_in_place:  # its last holder has just removed it
            return open_shared(registry)
        # Join the memory of those that are listed, or make a new one.
        holders, descriptor = _find(_lines(lock))
        if not holders:
            descriptor = os.memfd_create(
                PREFIX + secrets.token_hex(8), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        try:
            # under the lock, so that nobody finds a registry without this holder
            _list(lock, [*holders, line_of(descriptor)])
        except OSError:
            if not holders:
                os.close(descriptor)
                raise
            # The disk is full: others find the memory by the holders that are listed.
    return descriptor


def leave(registry: Path, line: str) -> None:
    """Remove a line of this process from a registry, and the registry with its last line.

    It is for registries in shared memory.
    """
    with contextlib.suppress(OSError):
        # the line of another process is not for this one to remove
        if not registry.exists() or (line and line.split()[0] != str(os.getpid())):
            return
        lock = StoreLock(registry)
        with lock.held(seconds=RETRY_SECONDS):
            holders, descriptor = _find([other for other in _lines(lock) if other != line])
            if holders:
                os.close(descriptor)
                _list(lock, holders)
            elif lock.is_in_place:
                registry.unlink()


def _lines(lock: StoreLock) -> list[str]:
    words = os.pread(lock.descriptor, os.fstat(lock.descriptor).st_size, 0)
    return words.decode(errors="replace").splitlines()


def _find(lines: list[str]) -> tuple[list[str], int]:
    """Return the lines whose processes hold a memory file, and an open descriptor of the first.

    The descriptor is -1 where there is none.
    """
    holders, descriptor = [], -1
    # all lines that still name the memory; one descriptor of it is enough
    for line in lines:
        found = _open_held(line)
        if found is None:
            continue
        holders.append(line)
        if descriptor < 0:
            descriptor = found
        else:
            os.close(found)
    return holders, descriptor


def _list(lock: StoreLock, lines: list[str]) -> None:
    """Write the registry in place, for which a full disk has room.

    A line that a killed process left incomplete names no holder.
    """
    words = "".join(line + "\n" for line in lines).encode()
    if os.pwrite(lock.descriptor, words, 0) != len(words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(lock.path))
    os.ftruncate(lock.descriptor, len(words))


def line_of(descriptor: int) -> str:
    """Return the registry's line for this process as a holder of the memory."""
    return f"{os.getpid()} {descriptor} {_name(f'/proc/self/fd/{descriptor}')}"


def _open_held(line: str) -> int | None:
    """Open the memory that a line of the registry names.

    None where that process does not hold it any more, or may not be seen.
    """
    # process, descriptor, name of the memory
    words = line.split()
    if len(words) != 3:
        return None
    link = f"/proc/{words[0]}/fd/{words[1]}"
    try:
        # the number may be another file's by now
        if _name(link) != words[2] or not words[2].startswith(PREFIX):
            return None
        descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _name(f"/proc/self/fd/{descriptor}") == words[2] and is_own(descriptor):
        return descriptor
    os.close(descriptor)  # the number has gone to another file in between
    return None


def _name(link: str) -> str:
    # The memory file's name behind a descriptor: "/memfd:NAME (deleted)"
    return os.readlink(link).removeprefix("/memfd:").removesuffix(" (deleted)")


class MemoryHandle(NamedTuple):
    """What another process opens the memory by while this process holds it.

    It does not depend on the registry.
    """

    line: str
    registry: str


def handle_of(descriptor: int, lock: StoreLock) -> MemoryHandle:
    """Return the handle of a memory that is open here."""
    return MemoryHandle(line_of(descriptor), f"/proc/{os.getpid()}/fd/{lock.descriptor}")


def open_handle(known: MemoryHandle) -> MemoryFile | None:
    """Open the memory of a process by its handle; None where that process is gone.

    Nothing is waited for.
    """
    descriptor = _open_held(known.line)
    return None if descriptor is None else MemoryFile(descriptor, Path(known.registry))


def available_bytes() -> int:
    """Return the memory that may still be taken.

    It is limited by the machine and by this process's control groups.
    """
    # Of the machine, then of this process's control group (v2) and all groups above it.
    memory = psutil.virtual_memory()
    available = int(memory.available - RESERVE * memory.total)
    try:
        group = next(
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        folder = CGROUP / group.strip().lstrip("/")
        while folder != CGROUP.parent:
            available = min(available, _left_in_group(folder))
            folder = folder.parent
    except (OSError, StopIteration):
        pass
    return max(0, available)


def _left_in_group(folder: Path) -> int:
    """Return the bytes below the limit of one control group.

    Pages of files that can be dropped count as free.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((folder / "memory.current").read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    return int(limit) - used + int(figures.get("inactive_file", 0))
