"""Memory of a rank: a meter of its peak, and a C allocator that gives freed memory back.

    meter = MemoryMeter(device)
    meter.mark_base(module)   # idle: process group up, module not on the device yet
    ...                       # first steps: lazy initialisation of libraries, optimizer state
    meter.reset_peak()
    ...                       # steady steps
    meter.peak_bytes()

[Note: freed memory] glibc keeps freed blocks of up to 32 MiB for reuse and cannot join what lies
apart. Sharded plans gather and free buffers of many sizes all the time. Without
`return_freed_memory` a GPT of 50 M parameters under ZeRO-3 on two ranks kept 1.39 GB resident where
its live tensors need 0.87 GB, and ZeRO-3 held more than plain DDP. Returning memory costs page
faults when it is taken again. It is on only under a memory limit, the objective "memory", and plans
with sharded gradients, tensor axes, stages or recomputation. Which blocks go back decides how much
stays. Of a ResNet of 11 M parameters under ZeRO-3, whose live tensors need about 150 MiB, 305 MiB
stayed with glibc's own rule, 170 with blocks of 1 MiB and more, 155 with 256 KiB, 152 with 64 KiB.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_topt.optim.mapped_memory import is_in_file

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size to the current one
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_THRESHOLD_BYTES = 1 << 16


class MemoryMeter:
    """Peak bytes of this rank on `device`, above the base of the idle rank.

    On CUDA these are bytes of tensors. On CPU they are resident anonymous bytes of the process,
    which also count what the C allocator keeps after a free. Where the platform cannot say (no
    `/proc`, or a sandbox hides it) `peak_bytes` is None, never a guess.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # at the last `mark_base`; None before it, or where the platform cannot say
        self.base_bytes: int | None = None
        self._was_reset = False

    def mark_base(
        self,
        module: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        other_bytes: int = 0,
    ) -> None:
        """Take the present use as the base.

        Tensors of `module` and `optimizers` that are on the device already do not count, nor do
        `other_bytes` of the training.
        """
        release_free_memory()
        # What the training has on the device already is no part of the base.
        current = _current_bytes(self.device)
        if current is not None and module is not None:
            current -= _training_bytes(module, optimizers, self.device) + other_bytes
        self.base_bytes = current

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._was_reset = _reset_peak(self.device)

    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`, less the base; None: it is not known."""
        peak = _peak_bytes(self.device)
        if peak is None or self.base_bytes is None or not self._was_reset:
            return None
        return max(peak - self.base_bytes, 0)


def release_free_memory() -> None:
    """Give back the freed memory that torch's and the C library's allocators keep."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def _training_bytes(
    module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device
) -> int:
    # Return the bytes of parameters, gradients, buffers and states on this kind of device.
    # Of what is sharded, the shard of this rank.
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
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    # Each storage once: tied parameters and views share theirs.
    # What is in files is no memory of the process.
    own = (tensor for tensor in local if tensor.device.type == device.type)
    storages = [tensor.untyped_storage() for tensor in own if not is_in_file(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ---- what devices say ----------------------------------------------------------------------------


# On CUDA bytes of live tensors, as torch's caching allocator counts them. Else anonymous resident
# bytes of this process, as Linux counts them: the kernel keeps the peak of all resident pages only.
# Pages of mapped files (the libraries' code, which comes in as it is first run) and shared pages
# hold no tensor of ours and hardly change in steady steps: their present size is taken off.


def _current_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status().get("RssAnon")


def _reset_peak(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # not Linux, or a sandbox that forbids it
        return False
    return True


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = _status()
    if not {"VmHWM", "RssFile", "RssShmem"} <= set(status):
        return None
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


def _status() -> dict[str, int]:
    # The sizes in `/proc/self/status`, in bytes; empty where there is no such file
    try:
        text = _STATUS.read_text()
    except OSError:
        return {}
    return {
        name: int(size) * 1024
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }


# ---- the C allocator -----------------------------------------------------------------------------


def return_freed_memory(device: torch.device) -> bool:
    """Let a CPU rank give freed blocks of 64 KiB and more back to the system at once.

    For the rest of the process; see [Note: freed memory]. Returns whether that is so: False on
    CUDA, where torch's own allocator rules, and on a C library other than glibc.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES) == 1)


def warm_up(device: torch.device) -> None:
    """Let libraries allocate their work buffers now, so that these count as idle memory.

    Those are buffers of matrix products and of autograd.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        layer = nn.Linear(1024, 1024, device=device)
        torch.autograd.backward(
            nn.functional.gelu(layer(torch.ones(1024, 1024, device=device))).sum()
        )
