"""The C allocator on CPU ranks: what a rank holds is what it uses.

glibc keeps freed blocks of up to 32 MiB for reuse and cannot join what lies apart. Sharded plans
gather and free buffers of many sizes all the time: without `return_freed_memory` a GPT of 50 M
parameters under ZeRO-3 on two ranks kept 1.39 GB resident where its live tensors need 0.87 GB, and
ZeRO-3 held more than plain DDP. Returning memory costs page faults when it is taken again, so it is
switched on only where a memory limit is to be kept.

Which blocks go back decides how much stays: of a ResNet of 11 M parameters under ZeRO-3, whose live
tensors need about 150 MiB, 305 MiB stayed with glibc's own rule, 170 with blocks of 1 MiB and more,
155 with 256 KiB, 152 with 64 KiB.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform

import torch
from torch import nn

_M_MMAP_THRESHOLD = -3  # mallopt(3)
_THRESHOLD_BYTES = 1 << 16


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def return_freed_memory(device: torch.device) -> bool:
    """On a CPU rank, make every freed block of 64 KiB and more go back to the system at once, for
    the rest of the process.

    Returns whether that is so: False on CUDA, where torch's own allocator rules, and on a C library
    other than glibc.
    """
    libc = _libc() if device.type == "cpu" else None
    return libc is not None and libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES) == 1


def warm_up(device: torch.device) -> None:
    """Make the libraries take their work buffers now (matrix products, autograd), so that they
    count as idle memory.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        layer = nn.Linear(1024, 1024, device=device)
        torch.autograd.backward(
            nn.functional.gelu(layer(torch.ones(1024, 1024, device=device))).sum()
        )
