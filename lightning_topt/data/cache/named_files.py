"""Files that the state of a data set names are part of its fingerprint: by size and time of last
change, not by content.
"""

from __future__ import annotations

import os
import stat
from pathlib import PurePath
from typing import Any

import numpy as np
import xxhash

_SEARCHED = 1 << 22  # bytes of an array of texts at a time, which stay in a core's cache


def hash_of_file(path: str | bytes | PurePath) -> int | None:
    """Return a hash of the name, size and time of last change of the file at `path`; None where
    there is no such file.
    """
    if isinstance(path, str | bytes) and not 0 < len(path) <= 4096:
        return None
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no such file; no name of a file
        return None
    is_live = os.fsdecode(path).startswith(("/proc/", "/sys/"))  # last changed whenever one asks
    # a folder changes with whatever is put beside the data
    if not stat.S_ISREG(found.st_mode) or is_live:
        return None
    fact = f"{os.fsdecode(path)} {found.st_size} {found.st_mtime_ns}".encode(
        "utf-8", "surrogateescape"
    )
    return xxhash.xxh3_64_intdigest(fact)


def paths_in(array: np.ndarray[Any, Any]) -> list[str | bytes]:
    """Return the distinct items of an array of texts that may be names of files: those with a dot
    or a separator.
    """
    if array.dtype.names:
        return [path for name in array.dtype.names for path in paths_in(array[name])]
    if array.dtype.kind not in "SU" or not array.size * array.dtype.itemsize:
        return []
    texts = np.ascontiguousarray(array).reshape(-1)
    letters = texts.view("u1" if array.dtype.kind == "S" else f"{array.dtype.str[0]}u4").reshape(
        len(texts), -1
    )
    found: dict[str | bytes, None] = {}
    step = max(1, _SEARCHED // array.dtype.itemsize)
    for start in range(0, len(texts), step):
        part = letters[start : start + step]
        is_path = ((part == ord(".")) | (part == ord("/")) | (part == ord(os.sep))).any(axis=1)
        found |= dict.fromkeys(texts[start : start + step][is_path].tolist())
    return list(found)
