"""Tensors in files that are mapped to memory: where CPU ranks keep what a plan offloads.

Where memory runs short, the operating system writes pages of such tensors to their files and drops
them; it reads them back when they are used. They count as cached files, not as memory of a process.
A file loses its name once it is mapped, so that nothing stays behind, however a rank ends. It is in
`TMPDIR`, or in ``/var/tmp`` where that is in memory itself.

    in_file(tensor)      a copy of `tensor` in a file
    is_in_file(tensor)
    NewStatesInFiles     while an optimizer makes its state: of what is in files, it is in files
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IN_MEMORY = ("tmpfs", "ramfs")
_aten = torch.ops.aten
# what optimizers make states with
_NEW = {
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.empty_like.default, _aten.clone.default),
}


def empty_in_file(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file. Raises OSError where the disk has no room for it."""
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.empty(shape, dtype=dtype)
    nbytes = numel * dtype.itemsize
    descriptor, path = tempfile.mkstemp(prefix="topt-", dir=_folder())
    try:
        # On a full disk this is an error; to write to a mapped page would end the process.
        os.posix_fallocate(descriptor, 0, nbytes)
        flat = torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except OSError as error:
        raise OSError(
            error.errno,
            f"offloading needs {nbytes / 2**20:.0f} MiB more in {os.path.dirname(path)} "
            f"({os.strerror(error.errno or 0)}): free some, or let TMPDIR name a larger disk",
        ) from error
    finally:
        os.close(descriptor)
        os.unlink(path)
    return flat.view(shape)


def in_file(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor`, which is contiguous, in a file."""
    return empty_in_file(tensor.shape, tensor.dtype).copy_(tensor.detach())


def is_in_file(tensor: Tensor) -> bool:
    """Return whether the memory of a plain tensor is that of a file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


class NewStatesInFiles(TorchDispatchMode):
    """While it is entered, tensors made in the likeness of one in a file are in files."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; what it has made goes to a file, one tensor at a time."""
        made = func(*args, **(kwargs or {}))
        return in_file(made) if func in _NEW and is_in_file(args[0]) and made.numel() else made


@cache
def _folder() -> str:
    for folder in (tempfile.gettempdir(), "/var/tmp"):
        if os.access(folder, os.W_OK) and _file_system(folder) not in _IN_MEMORY:
            return folder
    raise OSError(
        f"{tempfile.gettempdir()} is in memory, where nothing can be offloaded to: let TMPDIR name "
        "a folder on a disk"
    )


def _file_system(folder: str) -> str:
    # The kind of the file system that `folder` is on; "" where nobody says it
    mounts = dict[str, str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            mounts[place.rstrip("/") + "/"] = kind
    path = os.path.realpath(folder) + "/"
    return mounts[max((p for p in mounts if path.startswith(p)), key=len)] if mounts else ""
