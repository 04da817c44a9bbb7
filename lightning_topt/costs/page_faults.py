"""Seconds of memory that is taken anew: what a step pays where every freed block goes back to the
operating system.

    equation                                     function         source
    t = f * bytes                                StepTime.taken   f measured (`measure_page_faults`)
    kernels: new tensors and work buffers        kernels_bytes    graph, `Kernel.allocated`
    gather: flat buffer and whole parameters     gathered_bytes   torch 2.13 `_fsdp_collectives.py`
    reduce: flat buffer, its pieces, the shards  reduced_bytes    same, `communication.collectives`

Two ranks of a ConvNeXt of 7.5 M parameters took 253 MiB anew in a DDP step and 466 under ZeRO-3, a
ResNet 426 MiB; on a busy virtual machine that cost 3 microseconds for each page of 4 KiB. With
glibc's own rule they took nearly nothing.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Iterable

import torch

from lightning_topt.graph.op_graph import Kernel

SMALLEST_BYTES = 1 << 16  # what is smaller stays on the C heap (`execution.allocator`)
_BLOCK_BYTES, _BLOCKS, _ROUNDS = 1 << 20, 16, 9


def measure_page_faults(device: torch.device) -> float:
    """Return the seconds that a byte costs which is taken anew, written once and given back, above
    writing it again.

    In blocks of 1 MiB, a tenth of a second in all. They are taken one after another before they are
    given back, as in a step: a block that has just been given back is still in the processor's
    cache and takes a fifth less. 0 on devices other than CPUs, whose allocator keeps what it has,
    and where the platform cannot map private memory.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return 0.0
    costs = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        taken = [torch.frombuffer(_map(), dtype=torch.uint8).fill_(1) for _ in range(_BLOCKS)]
        middle = time.perf_counter()
        for block in taken:
            block.fill_(1)
        again = time.perf_counter()
        del taken, block
        costs.append((middle - start) + (time.perf_counter() - again) - (again - middle))
    return max(statistics.median(costs), 0.0) / (_BLOCKS * _BLOCK_BYTES)


def _map() -> mmap.mmap:
    return mmap.mmap(-1, _BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def kernels_bytes(kernels: Iterable[Kernel], *, batch_size: float) -> float:
    """Return the bytes that calls of `kernels` take anew."""
    sizes = ((kernel.count, kernel.allocated.at(batch_size)) for kernel in kernels)
    return sum(count * size for count, size in sizes if size >= SMALLEST_BYTES)


def gathered_bytes(*, flat: float, whole: float) -> float:
    """Return the bytes that one gather takes anew: the flat buffer and the parameters that are
    copied out of it.
    """
    return sum(size for size in (flat, whole) if size >= SMALLEST_BYTES)


def reduced_bytes(*, flat: float, shards: float, workspace: float) -> float:
    """Return the bytes that one reduce-scatter takes anew; `workspace` as `sizes.gloo_workspace`, 0
    on other backends.
    """
    return sum(size for size in (flat, shards, workspace) if size >= SMALLEST_BYTES)
