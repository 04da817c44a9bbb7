"""Top-k by magnitude: one interface, and the fastest exact way for each device and dtype behind
it.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from lightning_topt.communication.selection import threshold_search, triton_kernels
from lightning_topt.communication.selection.bisection import mstopk_indices
from lightning_topt.communication.selection.outcome import NonFiniteError, Selection
from lightning_topt.communication.selection.sampled import first_largest, sampled_indices

METHODS = ("auto", "mstopk", "sampled", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NUMEL = 2**31 - 1  # indices are int32 inside


def top_k(x: Tensor, k: int, *, method: str = "auto") -> Selection:
    """Return the k entries of largest magnitude: signed `values` (k,) of the dtype of `x` and
    `indices` (k,), int64, ascending.

    Args:
        x: any shape and strides; indices count its elements in row-major order. float32, bfloat16
            or float16.
        k: between 0 and the number of elements. Of equal magnitudes the first are taken.
        method: "auto" is exact and the fastest for the device: a sampled lower bound, one pass, and
            exact selection among the survivors (compiled on a CPU and on CUDA). "sampled" is the
            same in plain torch, "torch" is `torch.topk`, "mstopk" the approximate bisection of
            arXiv 2010.10458.

    Raises ValueError for a k, dtype or method that cannot be, NonFiniteError when `x` has a NaN or
    an infinity.
    """
    _check(x, k)
    if method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; got {method!r}")
    flat = x.detach().reshape(-1)
    if method == "mstopk" and flat.numel():
        indices = mstopk_indices(flat, k)
    elif method == "torch":
        if not bool(torch.isfinite(flat).all()):
            raise NonFiniteError("top-k of values that are not finite")
        indices = first_largest(flat.abs(), k) if k else flat.new_empty(0, dtype=torch.int64)
    elif method == "sampled" or (flat.device.type != "cpu" and not _has_triton(flat)):
        indices = sampled_indices(flat, k)
    elif flat.device.type == "cpu":
        found = threshold_search.select(flat.contiguous(), k)
        if found is None:
            raise NonFiniteError("top-k of values that are not finite")
        return Selection(
            found[0].to(flat.dtype), torch.from_numpy(found[1].numpy().astype(np.int64))
        )
    else:
        indices = triton_kernels.select(flat, k)
    return Selection(flat[indices], indices)


def feedback_top_k(
    gradient: Tensor,
    residual: Tensor,
    k: int,
    *,
    scale: float = 1.0,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> Selection:
    """Do one step of error feedback in place: accumulate, select the exact top k, and take them out
    of the residual.

    ``residual += scale * gradient``; with `velocity`, momentum correction and factor masking (Deep
    Gradient Compression, arXiv 1712.01887, sections 3.1 and 3.2): ``velocity = momentum * velocity
    + scale * gradient; residual += velocity``, and what is taken is zeroed in both.

    Args:
        gradient: (n,) float32, bfloat16 or float16, contiguous; only read.
        residual, velocity: (n,) float32, contiguous, on the gradient's device; `momentum` is above
            0 with a velocity.
        k: number of entries to take.

    Returns values (k,) float32 and indices (k,) int32, ascending. Raises NonFiniteError when the
    sum has a NaN or an infinity; `residual` and `velocity` are then as before, up to rounding.
    Releases the GIL on a CPU.
    """
    _check(gradient, k)
    _check_state(gradient, residual, velocity)
    if velocity is not None and not 0 < momentum < 1:
        raise ValueError(f"momentum correction needs a momentum between 0 and 1; got {momentum}")
    added = gradient.detach()
    if added.device.type == "cpu":
        chosen = _feedback_cpu(added, residual, k, scale, velocity, momentum)
    else:
        chosen = _feedback_device(added, residual, k, scale, velocity, momentum)
    if chosen is None:
        raise NonFiniteError("gradient that is not finite")
    return chosen


def _feedback_cpu(
    added: Tensor, residual: Tensor, k: int, scale: float, velocity: Tensor | None, momentum: float
) -> Selection | None:
    found = threshold_search.feedback_select(
        added, residual, k, scale=scale, velocity=velocity, momentum=momentum
    )
    return None if found is None else Selection(*found)


def _feedback_device(
    added: Tensor, residual: Tensor, k: int, scale: float, velocity: Tensor | None, momentum: float
) -> Selection | None:
    before = None
    if velocity is not None:
        before = velocity.clone()
        added, scale = velocity.mul_(momentum).add_(added, alpha=scale), 1.0
    select = triton_kernels.feedback_select if _has_triton(added) else _feedback_torch
    chosen = select(added, residual, k, scale=scale)
    if velocity is not None and before is not None:
        if chosen is None:
            velocity.copy_(before)
        else:
            velocity[chosen.indices] = 0
    return chosen


def _feedback_torch(added: Tensor, residual: Tensor, k: int, *, scale: float) -> Selection | None:
    total = torch.add(residual, added, alpha=scale)
    try:
        indices = sampled_indices(total, k)
    except NonFiniteError:
        return None
    values = total[indices]
    total[indices] = 0
    residual.copy_(total)
    return Selection(values, indices.int())


def warm_up() -> None:
    """Compile the CPU kernels now rather than in the first step."""
    threshold_search.warm_up()


def _has_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _check(x: Tensor, k: int) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"top-k selects from float32, bfloat16 or float16; got {x.dtype}")
    if not 0 <= k <= x.numel():
        raise ValueError(f"k lies between 0 and the number of elements, {x.numel()}; got {k}")
    if x.numel() > MAX_NUMEL:
        raise ValueError(
            f"at most {MAX_NUMEL} elements at a time; got {x.numel()}: select from parts"
        )


def _check_state(gradient: Tensor, residual: Tensor, velocity: Tensor | None) -> None:
    if not gradient.is_contiguous():
        raise ValueError("gradient is a contiguous tensor; got strides " + str(gradient.stride()))
    for name, state in (("residual", residual), ("velocity", velocity)):
        if state is None:
            continue
        if (
            state.dtype != torch.float32
            or not state.is_contiguous()
            or state.shape != gradient.shape
            or state.dim() != 1
        ):
            raise ValueError(
                f"{name} is a contiguous float32 tensor of the gradient's shape "
                f"{tuple(gradient.shape)}; "
                f"got {state.dtype} {tuple(state.shape)}"
            )
        if state.device != gradient.device:
            raise ValueError(f"{name} is on {state.device}, the gradient on {gradient.device}")
