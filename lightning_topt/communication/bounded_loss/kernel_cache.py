"""Care for kernels that Numba keeps on disk: it compiles a function anew when its own file changes,
not one that it calls.

Here functions of one file are compiled into those of others, with their constants, so a change of
any file makes all kept ones wrong. They are removed where the folder's files are not those that
they were made of.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_KEPT = ("*.nbi", "*.nbc")
_STAMP = "kernels_of"


def forget_outdated_kernels(folder: Path) -> None:
    """Remove what Numba keeps beside the files of `folder` if it is of other versions of them;
    where that can be written.
    """
    files = sorted(folder.glob("*.py"))
    now = " ".join(f"{path.name}:{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in files)
    stamp = folder / "__pycache__" / _STAMP
    with contextlib.suppress(OSError):
        if stamp.exists() and stamp.read_text() == now:
            return
        for pattern in _KEPT:
            for kept in stamp.parent.glob(pattern):
                kept.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        written = stamp.with_name(f"{_STAMP}.{os.getpid()}")  # ranks start together
        written.write_text(now)
        written.replace(stamp)
