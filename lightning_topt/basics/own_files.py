"""Files and folders of this user alone; what others put in their places is not read nor written.

Caches are in folders such as /tmp, where another user may make a file first, or a link. `made`
makes a folder, and `open_own` opens a file, only where nobody else can have made or changed it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HELD = Path("/proc")


class NotOwn(PermissionError):
    """A file or folder that another user made, or can change, or a link in its place."""


def open_own(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Return a descriptor of this user's file at `path`.

    By default a file is made where there is none, for this user alone.

    Raises:
        NotOwn: a link, a file with a second name, or one that is no plain file; a file that belongs
            to somebody else (but root), or that others may write.
        OSError: it cannot be opened.
    """
    # /proc/<pid>/fd/<n> is a link by nature, and the file behind it is checked below
    if _HELD not in path.parents:
        flags |= os.O_NOFOLLOW
    try:
        # a pipe there is not waited for
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_own("it is a symbolic link", path) from None
        raise
    try:
        # checked by the descriptor: what is at the path may change meanwhile
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_own("it is no plain file", path)
        if status.st_nlink > 1:
            raise _not_own("it has another name as well (a hard link)", path)
        _check(status, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def made(folder: Path) -> Path:
    """Make a folder of this user's where there is none, and return it.

    Others may not write in it, nor put another one in its place.

    Raises:
        ValueError: a file has its place.
        NotOwn: it is not this user's alone.
        OSError: it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        folder.mkdir(exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError) as error:
        # say which part of the path is a file
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
        if file is None:
            raise
        raise ValueError(
            f"a cache needs a folder, and {file} is a file: give another directory"
        ) from error
    # lstat: of the folder's name itself, not of what a link points to
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode):
        raise _not_own("it is a symbolic link", folder)
    _check(status, folder)
    # The folder around it may be a group's, as all are where the umask is 002; in one like /tmp
    # only owners move things.
    around = os.stat(folder.parent)
    _check(around, folder.parent, forbidden=0 if around.st_mode & stat.S_ISVTX else stat.S_IWOTH)
    return folder


def is_own(descriptor: int) -> bool:
    """Return whether an open file belongs to this user, or root."""
    return os.fstat(descriptor).st_uid in (0, os.geteuid())


def _check(status: os.stat_result, path: Path, *, forbidden: int = OTHERS_WRITE) -> None:
    # `forbidden` are bits of the mode that let others write; root can change everything anyway, so
    # its files are no worse
    if status.st_uid not in (0, os.geteuid()):
        owner = f"it belongs to user {status.st_uid}, this process to user {os.geteuid()}"
        raise _not_own(owner, path)
    if status.st_mode & forbidden:
        mode = f"others may write to it, its mode is {stat.S_IMODE(status.st_mode):o} (chmod go-w)"
        raise _not_own(mode, path)


def _not_own(reason: str, path: Path) -> NotOwn:
    return NotOwn(errno.EPERM, f"not used, for {reason}", str(path))
