"""Collectives inside a training step: a capture on fake tensors runs on one rank, so none of them may wait for others."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


def is_collective(func: OpOverload) -> bool:
    """Return whether `func` communicates with other ranks."""
    return func.namespace in NAMESPACES


def run_collective(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, real: bool) -> Any:
    """Return what `func` returns. Unless `real` nothing is sent: outputs stay as they are, and the work is finished."""
    if real or func.namespace != "c10d":  # functional collectives have shape-only kernels
        return func(*args, **kwargs)
    results = [_finished() if "Work" in str(result.type) else args[0] for result in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


def _finished() -> Any:
    return torch._C._distributed_c10d.FakeWork().boxed()
