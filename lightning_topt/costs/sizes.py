"""Bytes of a parameter, of its gradient and of what one rank holds of it."""

from __future__ import annotations

import math

from lightning_topt.communication.collectives import CHUNK_ELEMENTS
from lightning_topt.graph.op_graph import Parameter

ROOT = ""  # the block of everything outside the named blocks

ITEM_BYTES = {
    **{
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    },
    **{
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
    },
}


def parameter_bytes(parameter: Parameter) -> int:
    """Return the bytes of the whole parameter."""
    return parameter.numel * ITEM_BYTES[parameter.dtype.removeprefix("torch.")]


def gradient_bytes(parameter: Parameter) -> int:
    """Return the bytes of its whole gradient, in the parameter's dtype; 0 for a frozen
    parameter.
    """
    return parameter_bytes(parameter) if parameter.trainable else 0


def shard_share(parameter: Parameter, world_size: int) -> float:
    """Return the largest share of a parameter that a rank holds: FSDP2 cuts dim 0 into chunks of
    ceil(dim0 / N) rows.
    """
    rows = parameter.shape[0] if parameter.shape else 1
    return math.ceil(rows / world_size) / rows if rows else 0.0


def shard_bytes(parameter: Parameter, world_size: int) -> float:
    """Return the bytes of the largest shard, which is what every rank allocates (the last ones
    padded).
    """
    return parameter_bytes(parameter) * shard_share(parameter, world_size)


def padded_bytes(parameter: Parameter, world_size: int) -> float:
    """Return the bytes of all padded shards together, as in the flat buffers of all_gather and
    reduce_scatter.
    """
    return shard_bytes(parameter, world_size) * world_size


def gloo_workspace(flat: float, *, world_size: int) -> float:
    """Return the bytes that our reduce-scatter of `flat` bytes takes inside on gloo.

    It receives into one buffer; what goes out in several pieces is copied into another.
    """
    piece = world_size * CHUNK_ELEMENTS * 4
    return flat if flat <= piece else 2 * piece
