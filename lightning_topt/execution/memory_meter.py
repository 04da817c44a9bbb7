"""A meter says how many bytes a rank used at its peak, above what it used when idle: one interface
for every kind of device.

meter = MemoryMeter(device)
meter.mark_base(module)  # idle: process group up, module not on the device yet
...                      # first steps: lazy initialisation of libraries, optimizer state
meter.reset_peak()
...                      # steady steps
meter.peak_bytes()
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size to the current one


class _Probe(Protocol):
    def current_bytes(self) -> int | None: ...
    def reset_peak(self) -> bool: ...
    def peak_bytes(self) -> int | None: ...


class _CudaProbe:
    """Bytes that live tensors occupy on one CUDA device, as torch's caching allocator counts
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self.device)
        return True

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)


class _ProcessProbe:
    """Anonymous resident bytes of this process, as Linux counts them.

    The kernel keeps the peak of all resident pages only. Pages of mapped files (the libraries'
    code, which comes in as it is first run) and shared pages hold no tensor of ours and hardly
    change in steady steps: their present size is taken off.
    """

    def current_bytes(self) -> int | None:
        status = _status()
        return status.get("RssAnon")

    def reset_peak(self) -> bool:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # not Linux, or a sandbox that forbids it
            return False
        return True

    def peak_bytes(self) -> int | None:
        status = _status()
        if not {"VmHWM", "RssFile", "RssShmem"} <= set(status):
            return None
        return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


class MemoryMeter:
    """Peak bytes of this rank on `device`, above the base of the idle rank.

    On CUDA these are bytes of tensors, on CPU resident anonymous bytes of the process, which also
    count what the C allocator keeps after a free. Where the platform cannot say (no `/proc`, or a
    sandbox hides it) `peak_bytes` is None, never a guess.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._probe: _Probe = _CudaProbe(device) if device.type == "cuda" else _ProcessProbe()
        self._base_bytes: int | None = None
        self._was_reset = False

    @property
    def base_bytes(self) -> int | None:
        """Bytes at the last `mark_base`; None before it, or where the platform cannot say."""
        return self._base_bytes

    def mark_base(
        self,
        module: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        other_bytes: int = 0,
    ) -> None:
        """Take the present use as the base, without tensors of `module` and `optimizers` that are
        on the device already, and without `other_bytes` of the training.
        """
        release_free_memory()
        current = self._probe.current_bytes()
        if current is not None and module is not None:
            current -= _training_bytes(module, optimizers, self.device) + other_bytes
        self._base_bytes = current

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._was_reset = self._probe.reset_peak()

    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`, less the base; None where it is unknown or
        nothing was marked.
        """
        peak = self._probe.peak_bytes()
        if peak is None or self._base_bytes is None or not self._was_reset:
            return None
        return max(peak - self._base_bytes, 0)


def release_free_memory() -> None:
    """Give back what torch's and the C library's allocators keep of freed memory, so that it counts
    for nobody.
    """
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def _training_bytes(
    module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device
) -> int:
    """Bytes of the storages of parameters, gradients, buffers and optimizer state that are on this
    kind of device.
    """
    tensors = [
        *module.parameters(),
        *module.buffers(),
        *(p.grad for p in module.parameters() if p.grad is not None),
    ]
    tensors += [
        value
        for optimizer in optimizers
        for value in tree_leaves(dict(optimizer.state))
        if torch.is_tensor(value)
    ]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _status() -> dict[str, int]:
    """Sizes in `/proc/self/status`, in bytes; empty where there is no such file."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return {}
    return {
        name: int(size) * 1024
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
