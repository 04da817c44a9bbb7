"""Defaults say where a cache lies and how large it is when nobody says so."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from lightning_topt.data.cache.memory_file import available_bytes

MEMORY_SHARE = 4  # a fourth of what is free


def default_directory() -> Path:
    """Return ``lightning_topt/samples/HOST`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; for users
    without a home in /tmp.

    With the host's name: homes of several machines may be one folder, which their locks and
    memories are not.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        caches = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return caches / "lightning_topt" / "samples" / (socket.gethostname() or "localhost")


def default_memory_bytes(*, promised_bytes: int) -> int:
    """Return a fourth of the free memory of this machine, and of its control group, less what is
    promised already.
    """
    return max(1, (available_bytes() - promised_bytes) // MEMORY_SHARE)
