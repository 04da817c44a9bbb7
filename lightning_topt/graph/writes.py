"""The tensors that a low-level operator call writes to, also where its schema does not say so."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.structures import tensors_in

# Update running statistics (arguments 3 and 4) when training (argument 5).
BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


def is_strided(tensor: Tensor) -> bool:
    """Return whether `tensor` is plain memory, not sparse, nested with offsets, or made for one
    library.
    """
    return tensor.layout is torch.strided


def written_tensors(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the strided tensors among the arguments that ``func(*args, **kwargs)`` may write
    to.
    """
    written = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    if func._schema.name in BATCH_NORMS and args[5]:
        written += args[3:5]
    if is_collective(func):
        written.append(args)
    return [tensor for tensor in tensors_in(written) if is_strided(tensor)] if written else []


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that the schema of `func` marks as written."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
