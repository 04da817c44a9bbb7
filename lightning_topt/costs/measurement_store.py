"""The file that keeps measurements of one set-up: read only as this user's own, written whole,
merged with other jobs'.

    {"version": 1, "setup": {...}, "refreshed": t, "entries": {name: {"time": t, "value": ...}}}

`t` are seconds since 1970. Measuring again is always possible: what goes wrong here costs a
warning, never more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_topt.basics.own_files import not_own_reason

VERSION = 7
MAX_AGE_SECONDS = 30 * 24 * 3600.0
_MAX_BYTES, _MAX_ENTRIES = 1 << 25, 50_000
_LOCK_SECONDS = 2.0
_SUFFIX = ".json"


class Entry(NamedTuple):
    """A measured value, as JSON has it, and when it was measured."""

    time: float
    value: Any


Entries = dict[str, Entry]


def default_directory() -> Path:
    """Return where measurements of this user are kept: ``lightning_topt/measurements`` in the
    user's cache directory.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return caches / "lightning_topt" / "measurements"


def file_name(setup: Mapping[str, Any]) -> str:
    """Return the name of the file for a set-up (of JSON values)."""
    return hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:32] + _SUFFIX


def load(directory: Path, setup: Mapping[str, Any]) -> Entries:
    """Return the entries for `setup` that are not older than 30 days; none, with a warning, where
    they cannot be read or trusted.
    """
    try:
        with _opened(directory) as folder:
            return _read(folder, setup)[0]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(
            f"measurements in {directory} are not used, so this machine is measured again: {error}"
        )
        return {}


def save(
    directory: Path, setup: Mapping[str, Any], entries: Entries, *, refreshed: float | None = None
) -> None:
    """Merge `entries` with those in the file for `setup`, of each the newer one; all from before
    `refreshed` are dropped.

    Other jobs may do the same at the same time. A directory that cannot be written costs a warning.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(directory) as folder, _locked(folder):
            try:
                stored, limit = _read(folder, setup)
            except (OSError, ValueError, RecursionError):
                stored, limit = {}, 0.0
            limit = max(limit, refreshed or 0.0)
            merged = {name: entry for name, entry in stored.items() if entry.time >= limit}
            for name, entry in entries.items():
                if entry.time >= limit and (name not in merged or merged[name].time < entry.time):
                    merged[name] = entry
            newest = sorted(merged, key=lambda name: -merged[name].time)[:_MAX_ENTRIES]
            _replace(folder, setup, {name: merged[name] for name in newest}, limit)
            _remove_old(folder)
    except (OSError, ValueError) as error:
        _warn(
            f"measurements cannot be kept in {directory}, so the next start measures again: {error}"
        )


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of the folder, which is this user's and nobody else's to write."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_own(folder, str(directory))
        yield folder
    finally:
        os.close(folder)


def _check_own(descriptor: int, name: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if reason := not_own_reason(status, also_root=False):
        raise PermissionError(f"{name}: {reason}")
    return status


def _read(folder: int, setup: Mapping[str, Any]) -> tuple[Entries, float]:
    """The entries of the file, and before when everything was dropped. Raises ValueError, OSError
    for a file not of ours.
    """
    name = file_name(setup)
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
    )
    with open(descriptor, "rb") as file:
        status = _check_own(descriptor, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"{name} is no file of measurements")
        text = file.read(_MAX_BYTES + 1)
    try:
        data = json.loads(text)
        if data["version"] != VERSION or data["setup"] != dict(setup):
            raise ValueError("it is of another version or set-up")
        oldest = max(_time(data["refreshed"]), time.time() - MAX_AGE_SECONDS)
        entries = {
            str(key): Entry(_time(entry["time"]), entry["value"])
            for key, entry in data["entries"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read ({type(error).__name__}: {error})") from None
    latest = time.time() + 60  # a clock that was wrong must not keep entries for ever
    return {key: entry for key, entry in entries.items() if oldest <= entry.time <= latest}, _time(
        data["refreshed"]
    )


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _replace(folder: int, setup: Mapping[str, Any], entries: Entries, refreshed: float) -> None:
    """Write a new file beside the old one and give it its name: readers see one or the other, never
    a part.
    """
    data = {"version": VERSION, "setup": dict(setup), "refreshed": refreshed}
    data["entries"] = {name: entry._asdict() for name, entry in entries.items()}
    name = file_name(setup)
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(data).encode())
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Wait for other writers, but not for ever: without the lock the last writer wins, with a whole
    file all the same.
    """
    descriptor = os.open(
        ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _remove_old(folder: int) -> None:
    """Files that nobody has written for twice the age of their entries, such as those of containers
    that are gone.
    """
    for name in os.listdir(folder):
        if name.endswith((_SUFFIX, ".tmp")):
            with contextlib.suppress(OSError):
                if (
                    time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    > 2 * MAX_AGE_SECONDS
                ):
                    os.unlink(name, dir_fd=folder)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
