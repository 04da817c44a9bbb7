"""Opening the tiers of a cache. One that cannot be opened costs its samples and a warning, never
the training.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_topt.basics.own_files import NotOwn, made, open_own
from lightning_topt.data.cache import memory_file
from lightning_topt.data.cache.mapped_entries import MappedEntries
from lightning_topt.data.cache.memory_file import (
    Handed,
    MemoryUnavailable,
    available_bytes,
    handed,
    open_handed,
    open_memory,
)
from lightning_topt.data.cache.segment_store import SegmentStore, warn_once
from lightning_topt.data.cache.store_file import LockTimeout, StoreFile

MEMORY, DISK = "memory cache", "disk cache"


class Room(NamedTuple):
    """A `Room` is what a cache is opened with: entries of `num_items` items, and bytes of them per
    tier; 0: no such tier.
    """

    num_items: int
    memory_bytes: int
    disk_bytes: int


class Tiers(NamedTuple):
    """Those that are open; `left_out` names those that could not be opened, also by a process that
    started this one.
    """

    memory: SegmentStore | None
    mapped: MappedEntries | None
    disk: SegmentStore | None
    left_out: tuple[str, ...]

    @property
    def stores(self) -> list[SegmentStore]:
        """The fastest first."""
        return [tier for tier in (self.memory, self.disk) if tier is not None]


def open_tiers(
    folder: Path, room: Room, *, left_out: tuple[str, ...] = (), known: Handed | None = None
) -> Tiers:
    """Return the tiers in `folder`, which is made. `left_out` are not tried; `known` is the memory
    of the process this one is from.

    Raises ValueError where `folder` is a file, MemoryUnavailable where the system has no memory of
    the kind.
    """
    failed: dict[str, OSError] = {}

    def opened(name: str, nbytes: int, store: Callable[[], SegmentStore]) -> SegmentStore | None:
        if not nbytes or name in left_out:
            return None
        try:
            return store()
        except MemoryUnavailable:
            raise
        except OSError as error:
            failed[name] = error.with_traceback(None)  # which would keep the other tiers open
            return None

    memory = opened(MEMORY, room.memory_bytes, lambda: _open_memory(folder, room, known))
    try:
        disk = opened(DISK, room.disk_bytes, lambda: _open_disk(folder, room))
    except BaseException:
        if memory is not None:
            os.close(memory.file.descriptor)
        raise
    if failed:
        _warn_without(failed, folder)
    return Tiers(memory, None if memory is None else _mapped(memory), disk, (*left_out, *failed))


def hand_over(memory: SegmentStore) -> Handed:
    """Return what a process that this one starts needs to open the same memory."""
    return handed(memory.file.descriptor, memory.file.lock)


def _open_memory(folder: Path, room: Room, known: Handed | None) -> SegmentStore:
    descriptor, registry = (known and open_handed(known)) or open_memory(folder)
    with _closed_on_error(descriptor):
        file = StoreFile(
            descriptor, num_items=room.num_items, lock=registry, available=available_bytes
        )
        store = SegmentStore(file, capacity_bytes=room.memory_bytes, name=MEMORY, verify_once=True)
    if registry.parent == memory_file.SHARED:
        weakref.finalize(store, memory_file.leave, registry, memory_file.line_of(descriptor))
    return store


def _open_disk(folder: Path, room: Room) -> SegmentStore:
    path = made(folder) / "samples"
    descriptor = open_own(path)
    with _closed_on_error(descriptor):
        file = StoreFile(descriptor, num_items=room.num_items, lock=folder / "disk.lock")
        return SegmentStore(file, capacity_bytes=room.disk_bytes, name=f"{DISK} {path}")


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(memory: SegmentStore) -> MappedEntries | None:
    try:
        return MappedEntries(memory)
    except OSError as error:
        warnings.warn(
            f"the memory cache cannot be mapped, which makes reading it slower: {error}",
            stacklevel=5,
        )
        return None


def _warn_without(failed: dict[str, OSError], folder: Path) -> None:
    names = " and its ".join(f"{name} ({error})" for name, error in failed.items())
    if any(isinstance(error, LockTimeout) for error in failed.values()):
        advice = (
            "end the process that holds the lock, or name another directory, before the next run"
        )
    elif any(isinstance(error, NotOwn) for error in failed.values()):
        advice = (
            "name a directory of your own, which others may not write to, or remove what is "
            "there, before the next run"
        )
    else:
        advice = "free room there, or name a directory that can be written, before the next run"
    warn_once(
        f"training goes on without its {names} in {folder}, and reads what is kept nowhere else "
        f"from the source: {advice}",
        stacklevel=6,
    )
