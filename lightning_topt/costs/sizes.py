"""Bytes of parameters and gradients, of what one rank holds of them, and of memory taken anew.

    of a parameter          parameter_bytes, gradient_bytes
    of its shard (FSDP2)    shard_share, shard_bytes, padded_bytes

Where every freed block goes back to the operating system (a plan under a memory limit on CPUs), a
step pays for memory that it takes anew:

    bytes                                          function           source
    kernels: new tensors and work buffers          kernels_bytes      `Kernel.allocated`
    gather: flat buffer and full parameters        gathered_bytes     torch [1]
    reduce: flat buffer, its pieces, the shards    reduced_bytes      torch [1], and [2]

[1] torch 2.13 `_fsdp_collectives.py`. [2] `communication.collectives`. `TrainingStep.taken_seconds`
makes seconds of them, at `Device.page_fault_seconds_per_byte`. Two ranks of a ConvNeXt of 7.5 M
parameters took 253 MiB anew in a DDP step and 466 under ZeRO-3, a ResNet 426 MiB; on a busy virtual
machine that cost 3 microseconds for each page of 4 KiB. With glibc's own rule they took nearly
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_topt.communication.collectives import CHUNK_ELEMENTS
from lightning_topt.graph.op_graph import Kernel, Parameter

ROOT = ""  # the block of everything outside the named blocks
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SMALLEST_BYTES = 1 << 16  # what is smaller stays on the C heap (`execution.memory`)


def parameter_bytes(parameter: Parameter) -> int:
    """Return the bytes of the whole parameter."""
    return parameter.numel * ITEM_BYTES[parameter.dtype.removeprefix("torch.")]


def gradient_bytes(parameter: Parameter) -> int:
    """Return the bytes of the full gradient, in the parameter's dtype; 0 for a frozen one."""
    return parameter_bytes(parameter) if parameter.trainable else 0


def shard_share(parameter: Parameter, world_size: int) -> float:
    """Return the largest share of a parameter that a rank holds.

    FSDP2 cuts dim 0 into chunks of ceil(dim0 / N) rows.
    """
    rows = parameter.shape[0] if parameter.shape else 1
    return math.ceil(rows / world_size) / rows if rows else 0.0


def shard_bytes(parameter: Parameter, world_size: int) -> float:
    """Return the bytes of the largest shard.

    Every rank allocates that much (the last ones padded).
    """
    return parameter_bytes(parameter) * shard_share(parameter, world_size)


def padded_bytes(parameter: Parameter, world_size: int) -> float:
    """Return the bytes of all padded shards together.

    As in the flat buffers of all_gather and reduce_scatter.
    """
    return shard_bytes(parameter, world_size) * world_size


# ---- Memory that is taken anew


def kernels_bytes(kernels: Iterable[Kernel], *, batch_size: float) -> float:
    """Return the bytes that calls of `kernels` take anew."""
    sizes = ((kernel.count, kernel.allocated.at(batch_size)) for kernel in kernels)
    return sum(count * size for count, size in sizes if size >= SMALLEST_BYTES)


def gathered_bytes(*, flat: float, whole: float) -> float:
    """Return the bytes that one gather takes anew.

    The flat buffer and the `whole` parameters that are copied out of it.
    """
    return sum(size for size in (flat, whole) if size >= SMALLEST_BYTES)


def reduced_bytes(*, flat: float, shards: float, workspace: float) -> float:
    """Return the bytes that one reduce-scatter takes anew.

    `workspace` as `gloo_workspace`, 0 on other backends.
    """
    return sum(size for size in (flat, shards, workspace) if size >= SMALLEST_BYTES)


def gloo_workspace(flat: float, *, world_size: int) -> float:
    """Return the bytes that our reduce-scatter of `flat` bytes takes inside on gloo.

    It receives into one buffer; what goes out in several pieces is copied into another.
    """
    piece = world_size * CHUNK_ELEMENTS * 4
    return flat if flat <= piece else 2 * piece
