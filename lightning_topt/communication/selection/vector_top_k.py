"""Top-k by magnitude of a whole vector: one interface, and the fastest exact way for each device.

`top_k` selects; `feedback_top_k` is one step of error feedback, which accumulates, selects and
takes out. On CUDA `triton_kernels` does it, elsewhere `plain`. The rest of this file is the exact
selection on a CPU around its compiled `kernels`: buffers, the bound, and what follows where the
sample misled.

Passes over the data: one, almost always.

- Fewer survivors than k (large values lie in clusters, which the sample met too often): one more
  with the bound corrected by what the first found.
- More than there is room for: one more for what lies strictly above the bound. Many values equal
  the bound then (zeros), and the first ones are known from the pass before.
- Where even that fails: histograms of all the data, four more passes, exact whatever the data are.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_topt.communication.selection import triton_kernels
from lightning_topt.communication.selection.kernels import (
    BLOCK,
    collect,
    collect_sum,
    exact_threshold,
    sums_of,
    take,
    zero_at,
)
from lightning_topt.communication.selection.lanes import GROUP, INFINITY_BITS, MAGNITUDE_MASK
from lightning_topt.communication.selection.plain import (
    SIGMAS,
    NonFiniteError,
    Selection,
    expected_rank,
    first_largest,
    mstopk_indices,
    sample_share,
    sampled_indices,
)

METHODS = ("auto", "mstopk", "sampled", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NUMEL = 2**31 - 1  # indices are int32 inside

Array = npt.NDArray[Any]
Chosen = tuple[Tensor, Tensor]  # values (k,) float32 and indices (k,) int32, ascending
_VIEWED = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}  # see lanes.py
_NO_POSITIONS = np.empty(0, np.int32)


def top_k(x: Tensor, k: int, *, method: str = "auto") -> Selection:
    """Return the k entries of largest magnitude.

    Args:
        x: any shape and strides; indices count its elements in row-major order. float32, bfloat16
            or float16.
        k: between 0 and the number of elements. Of equal magnitudes the first are taken.
        method: "auto" is exact and the fastest for the device: a sampled lower bound, one pass, and
            exact selection among the survivors (compiled on a CPU and on CUDA). "sampled" is the
            same in plain torch, "torch" is `torch.topk`, "mstopk" the approximate bisection of
            arXiv 2010.10458.

    Returns:
        signed `values` (k,) of the dtype of `x`, and `indices` (k,), int64, ascending.

    Raises:
        ValueError: for a k, dtype or method that cannot be.
        NonFiniteError: when `x` has a NaN or an infinity.
    """
    _check(x, k)
    if method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; got {method!r}")
    # one way for each method and device: indices, then the values at them
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
        found = _select(flat.contiguous(), k)
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
    """Do one step of error feedback in place: accumulate, select the exact top k, take them out.

    ``residual += scale * gradient``. With `velocity`, momentum correction and factor masking (Deep
    Gradient Compression, arXiv 1712.01887, sections 3.1 and 3.2): ``velocity = momentum * velocity
    + scale * gradient; residual += velocity``, and what is taken is zeroed in both. Releases the
    GIL on a CPU.

    Args:
        gradient: (n,) float32, bfloat16 or float16, contiguous; only read.
        residual: (n,) float32, contiguous, on the gradient's device.
        k: number of entries to take.
        scale: factor of the gradient.
        velocity: as `residual`.
        momentum: above 0 with a velocity.

    Returns:
        values (k,) float32 and indices (k,) int32, ascending.

    Raises:
        ValueError: for tensors of other shapes, dtypes or devices.
        NonFiniteError: when the sum has a NaN or an infinity; `residual` and `velocity` are then as
            before, up to rounding.
    """
    _check(gradient, k)
    _check_state(gradient, residual, velocity)
    if velocity is not None and not 0 < momentum < 1:
        raise ValueError(f"momentum correction needs a momentum between 0 and 1; got {momentum}")
    added = gradient.detach()
    if added.device.type == "cpu":
        found = _feedback_select(
            added, residual, k, scale=scale, velocity=velocity, momentum=momentum
        )
        chosen = None if found is None else Selection(*found)
    else:
        chosen = _feedback_device(added, residual, k, scale, velocity, momentum)
    if chosen is None:
        raise NonFiniteError("gradient that is not finite")
    return chosen


def _feedback_device(
    added: Tensor, residual: Tensor, k: int, scale: float, velocity: Tensor | None, momentum: float
) -> Selection | None:
    """Do `feedback_top_k` off the CPU; None: not finite, undone."""
    before = None  # the velocity, to restore it
    if velocity is not None:
        before = velocity.clone()
        added, scale = velocity.mul_(momentum).add_(added, alpha=scale), 1.0
    select = triton_kernels.feedback_select if _has_triton(added) else _feedback_torch
    chosen = select(added, residual, k, scale=scale)
    if velocity is not None and before is not None:
        if chosen is None:
            velocity.copy_(before)
        else:
            velocity.index_fill_(0, chosen.indices.long(), 0)
    return chosen


def _feedback_torch(added: Tensor, residual: Tensor, k: int, *, scale: float) -> Selection | None:
    """Do `feedback_top_k` without velocity in plain torch; None: not finite, unchanged."""
    total = torch.add(residual, added, alpha=scale)
    try:
        indices = sampled_indices(total, k)
    except NonFiniteError:
        return None
    values = total[indices]
    total.index_fill_(0, indices, 0)
    residual.copy_(total)
    return Selection(values, indices.int())


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
                f"{tuple(gradient.shape)}; got {state.dtype} {tuple(state.shape)}"
            )
        if state.device != gradient.device:
            raise ValueError(f"{name} is on {state.device}, the gradient on {gradient.device}")


# ---- the selection on a CPU


def _select(x: Tensor, k: int) -> Chosen | None:
    """Return the k largest magnitudes of the contiguous `x` (n,); None: not finite."""
    sample = _sample(x, every=round(1 / sample_share(x.numel())))
    found = _Pass.prepare(x, k, _bound(sample, x.numel(), k))
    return _finish(x, k, sample, found) if found.run(x) else None


def _feedback_select(
    gradient: Tensor,
    residual: Tensor,
    k: int,
    *,
    scale: float,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> Chosen | None:
    """Accumulate into `residual` (n,) (through `velocity`), then take out the k largest.

    None: some sum is not finite; everything is as before, up to rounding.
    """
    kept, moving = residual.numpy(), None if velocity is None else velocity.numpy()
    every = round(1 / sample_share(residual.numel()))
    sample = _sample(
        gradient, every=every, residual=kept, velocity=moving, scale=scale, momentum=momentum
    )
    # one pass accumulates and keeps what reaches the bound
    found = _Pass.prepare(residual, k, _bound(sample, residual.numel(), k))
    factors = np.float32(scale), np.float32(momentum), found.threshold
    found.count, found.full, done = collect_sum(
        kept, moving, _elements(gradient), *factors, found.indices, found.survivors.numpy()
    )
    if found.count < 0:
        # take back what the unfinished pass accumulated
        if velocity is None:
            residual[:done].sub_(gradient[:done], alpha=scale)
        else:
            residual[:done].sub_(velocity[:done])
            velocity[:done].sub_(gradient[:done], alpha=scale).div_(momentum)
        return None
    # select among the survivors, and take them out
    chosen = _finish(residual, k, sample, found)
    for state in (kept, moving):
        if state is not None:
            zero_at(state, chosen[1].numpy())
    return chosen


def _finish(x: Tensor, k: int, sample: Array, found: _Pass) -> Chosen:
    """Return the k largest of `x` (n,), all finite, of which one pass `found` some."""
    # too few: the bound was too high
    if found.count < k:
        found.threshold = _corrected_bound(sample, k, found)
        found.run(x)
    if not found.full and found.count >= k:
        return _chosen(found.bits(), found.indices[: found.count], k)
    # too many: what lies above the bound, and the first ones equal to it
    if found.full:
        above = _Pass.prepare(x, k, found.threshold + 1)
        above.run(x)
        if not above.full and above.count >= k:
            return _chosen(above.bits(), above.indices[: above.count], k)
        if not above.full:
            return _with_ties(found, above, k)
    # by histograms of everything
    return _chosen(_bits(x), _NO_POSITIONS, k)


def _chosen(bits: Array, positions: Array, k: int) -> Chosen:
    """Return the k largest of `bits` (m,) at `positions` (m,); empty: their own."""
    indices, values = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
    if k:
        threshold, equal = exact_threshold(bits, k)
        take(bits, positions, threshold, equal, indices, values)
    return torch.from_numpy(values[:k].view(np.float32)), torch.from_numpy(indices[:k])


def _with_ties(found: _Pass, above: _Pass, k: int) -> Chosen:
    """Return all `above` the threshold and the first ones equal to it, which were `found` first."""
    bits = found.bits()
    equal = np.flatnonzero(bits & MAGNITUDE_MASK == found.threshold)[: k - above.count]
    indices = np.concatenate([above.indices[: above.count], found.indices[equal]])
    values = np.concatenate([above.bits(), bits[equal]])
    order = np.argsort(indices)
    return torch.from_numpy(values[order].view(np.float32)), torch.from_numpy(indices[order])


def _bound(sample: Array, numel: int, k: int) -> int:
    """Return a magnitude that almost surely lies a little below the k-th largest, as bits."""
    if k == 0:
        return INFINITY_BITS
    rank = k if sample.size == numel else expected_rank(numel, k)
    return int(exact_threshold(sample, rank)[0])


def _corrected_bound(sample: Array, k: int, found: _Pass) -> int:
    """Return a lower bound at which k survive, judged by how many survived the last one."""
    passed = int((sample & MAGNITUDE_MASK >= found.threshold).sum())
    mean = passed * k / max(found.count, 1)
    rank = min(sample.size, math.ceil(mean + SIGMAS * math.sqrt(mean)) + 1)
    return int(exact_threshold(sample, rank)[0])


@dataclass
class _Pass:
    """What one pass kept: everything of at least `threshold`, or the first of it where `full`."""

    indices: Array  # int32
    survivors: Tensor  # of the data's dtype
    threshold: int
    count: int = 0
    full: bool = False

    @staticmethod
    def prepare(x: Tensor, k: int, threshold: int) -> _Pass:
        """Make room for twice what is expected, and for a last block that may all survive.

        Memory that is not used is not touched.
        """
        numel, share = x.numel(), sample_share(x.numel())
        excess = (expected_rank(numel, k) - k * share) / share
        room = min(numel, int(2 * k + 4 * excess)) + 2 * BLOCK
        return _Pass(np.empty(room, np.int32), torch.empty(room, dtype=x.dtype), threshold)

    def run(self, x: Tensor) -> bool:
        """Make one pass over `x`; return whether everything was finite."""
        self.count, self.full = collect(
            _elements(x), self.threshold, self.indices, _elements(self.survivors)
        )
        return self.count >= 0

    def bits(self) -> Array:
        """Return the survivors' float32 bits."""
        return _bits(self.survivors[: self.count])


def _sample(
    gradient: Tensor,
    *,
    every: int,
    residual: Array | None = None,
    velocity: Array | None = None,
    scale: float = 1.0,
    momentum: float = 0.0,
) -> Array:
    """Return float32's bits (m,) of a sample: one run of 64 in `every`.

    Of ``residual + momentum * velocity + scale * gradient``. Compiled too: torch would use its
    threads, and wait for them where cores are shared with a backward pass.
    """
    numel = gradient.numel()
    sums = np.empty(numel if every == 1 else -(-(numel // GROUP) // every) * GROUP, np.float32)
    sums_of(
        residual,
        velocity,
        _elements(gradient),
        np.float32(scale),
        np.float32(momentum),
        every,
        sums,
    )
    return sums.view(np.int32)


def _bits(x: Tensor) -> Array:
    """Return float32's bits of all of `x` (n,)."""
    return x.numpy().view(np.int32) if x.dtype == torch.float32 else _sample(x, every=1)


def _elements(x: Tensor) -> Array:
    """Return `x` as an array, 16-bit floats as integers."""
    return (x.view(_VIEWED[x.dtype]) if x.dtype in _VIEWED else x).numpy()


def warm_up() -> None:
    """Compile for float32 now (seconds the first time; later runs find it in the cache)."""
    x = torch.arange(100.0)
    _select(x, 3)
    _feedback_select(x, x.clone(), 3, scale=0.5)
    _feedback_select(x, x.clone(), 3, scale=0.5, velocity=x.clone(), momentum=0.5)
