"""Collectives inside a training step: a capture on fake tensors runs on one rank, so none of them
may wait for others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from lightning_topt.graph.operators import Kernel

# Stands for a collective call along a tensor axis of a mesh, by its index among them, in the step
# of a rank that is looked at.
LIBRARY = Library("topt", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("collective_(Tensor(a!) tensor, str op, int axis) -> ()")  # type: ignore[no-untyped-call]
LIBRARY.impl(  # type: ignore[no-untyped-call]
    "collective_", lambda tensor, op, axis: None, "CompositeExplicitAutograd"
)
SEEN = "topt.collective_.default"

NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


def is_collective(func: OpOverload) -> bool:
    """Return whether `func` communicates with other ranks."""
    return func.namespace in NAMESPACES


def skip_collective(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` returns, but send nothing: outputs stay as they are, and the work is
    finished.
    """
    if func.namespace != "c10d":  # functional collectives have shape-only kernels
        return func(*args, **kwargs)
    results = [
        _finished() if "Work" in str(result.type) else args[0] for result in func._schema.returns
    ]
    return results[0] if len(results) == 1 else tuple(results) or None


def show_collective(tensor: Tensor, *, op: str, axis: int) -> None:
    """Let a capture see that ranks along tensor axis `axis` run `op`, on `tensor`: the larger one
    of what is given and got.
    """
    torch.ops.topt.collective_(tensor, op, axis)


def shown_collective(kernel: Kernel) -> tuple[str, int] | None:
    """Return the op and the tensor axis of a collective that `show_collective` let a capture see;
    None for other kernels.
    """
    if kernel.name != SEEN:
        return None
    _, op, axis = kernel.arguments["args"]
    return op, axis


def _finished() -> Any:
    return torch._C._distributed_c10d.FakeWork().boxed()
