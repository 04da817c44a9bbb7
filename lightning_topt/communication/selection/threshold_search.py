"""The exact selection on a CPU around its compiled kernels: buffers, the bound, and what follows
where the sample misled.

Passes over the data: one, almost always. Fewer survivors than k (large values lie in clusters,
which the sample met too often): one more with the bound corrected by what the first found. More
than there is room for: one more for what lies strictly above the bound; many values equal the bound
then (zeros), and the first ones are known from the pass before. Where even that fails, histograms
of all the data: four more, exact whatever the data are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_topt.communication.selection.lanes import GROUP, INFINITY_BITS, MAGNITUDE_MASK
from lightning_topt.communication.selection.numba_kernels import (
    BLOCK,
    collect,
    collect_sum,
    exact_threshold,
    sums_of,
    take,
    zero_at,
)
from lightning_topt.communication.selection.sampled import SIGMAS, expected_rank, sample_share

Array = npt.NDArray[Any]
Chosen = tuple[Tensor, Tensor]  # values (k,) float32 and indices (k,) int32, ascending
_VIEWED = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}  # see lanes.py
_NO_POSITIONS = np.empty(0, np.int32)


@dataclass
class _Pass:
    """A `_Pass` holds what one pass over the data kept: everything of at least `threshold`, or the
    first of it where `full`.
    """

    indices: Array  # int32
    survivors: Tensor  # of the data's dtype
    threshold: int
    count: int = 0
    full: bool = False

    @staticmethod
    def prepare(x: Tensor, k: int, threshold: int) -> _Pass:
        """Make room for twice what is expected, and for a last block that may all survive; memory
        that is not used is not touched.
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


def _elements(x: Tensor) -> Array:
    return (x.view(_VIEWED[x.dtype]) if x.dtype in _VIEWED else x).numpy()


def _bits(x: Tensor) -> Array:
    """Return float32's bits of all of `x` (n,)."""
    return x.numpy().view(np.int32) if x.dtype == torch.float32 else _sample(x, every=1)


def _sample(
    gradient: Tensor,
    *,
    every: int,
    residual: Array | None = None,
    velocity: Array | None = None,
    scale: float = 1.0,
    momentum: float = 0.0,
) -> Array:
    """Return float32's bits (m,) of ``residual + momentum * velocity + scale * gradient``, one run
    of 64 in `every`.

    Compiled too: torch would use its threads, and wait for them where cores are shared with a
    backward pass.
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


def _every(numel: int) -> int:
    return round(1 / sample_share(numel))


def _bound(sample: Array, numel: int, k: int) -> int:
    """Return a magnitude that almost surely lies a little below the k-th largest, as bits."""
    if k == 0:
        return INFINITY_BITS
    rank = k if sample.size == numel else expected_rank(numel, k)
    return int(exact_threshold(sample, rank)[0])


def _corrected_bound(sample: Array, k: int, found: _Pass) -> int:
    """The bound moved down to where k survive, judged by how many did survive the last one."""
    passed = int((sample & MAGNITUDE_MASK >= found.threshold).sum())
    mean = passed * k / max(found.count, 1)
    rank = min(sample.size, math.ceil(mean + SIGMAS * math.sqrt(mean)) + 1)
    return int(exact_threshold(sample, rank)[0])


def _chosen(bits: Array, positions: Array, k: int) -> Chosen:
    """The k largest of `bits` (m,) at `positions` (m,), or at their own places where that is
    empty.
    """
    indices, values = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
    if k:
        threshold, equal = exact_threshold(bits, k)
        take(bits, positions, threshold, equal, indices, values)
    return torch.from_numpy(values[:k].view(np.float32)), torch.from_numpy(indices[:k])


def _with_ties(found: _Pass, above: _Pass, k: int) -> Chosen:
    """All `above` the threshold and the first ones equal to it, which begin the list of those
    `found`.
    """
    bits = found.bits()
    equal = np.flatnonzero(bits & MAGNITUDE_MASK == found.threshold)[: k - above.count]
    indices = np.concatenate([above.indices[: above.count], found.indices[equal]])
    values = np.concatenate([above.bits(), bits[equal]])
    order = np.argsort(indices)
    return torch.from_numpy(values[order].view(np.float32)), torch.from_numpy(indices[order])


def _finish(x: Tensor, k: int, sample: Array, found: _Pass) -> Chosen:
    """The k largest of `x` (n,), all finite, of which one pass `found` some."""
    if found.count < k:
        found.threshold = _corrected_bound(sample, k, found)
        found.run(x)
    if not found.full and found.count >= k:
        return _chosen(found.bits(), found.indices[: found.count], k)
    if found.full:
        above = _Pass.prepare(x, k, found.threshold + 1)
        above.run(x)
        if not above.full and above.count >= k:
            return _chosen(above.bits(), above.indices[: above.count], k)
        if not above.full:
            return _with_ties(found, above, k)
    return _chosen(_bits(x), _NO_POSITIONS, k)


def select(x: Tensor, k: int) -> Chosen | None:
    """Return the k largest magnitudes of the contiguous `x` (n,), of equal ones the first; None:
    not finite.
    """
    sample = _sample(x, every=_every(x.numel()))
    found = _Pass.prepare(x, k, _bound(sample, x.numel(), k))
    return _finish(x, k, sample, found) if found.run(x) else None


def feedback_select(
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
    every = _every(residual.numel())
    sample = _sample(
        gradient, every=every, residual=kept, velocity=moving, scale=scale, momentum=momentum
    )
    found = _Pass.prepare(residual, k, _bound(sample, residual.numel(), k))
    factors = np.float32(scale), np.float32(momentum), found.threshold
    found.count, found.full, done = collect_sum(
        kept, moving, _elements(gradient), *factors, found.indices, found.survivors.numpy()
    )
    if found.count < 0:
        _undo(
            gradient[:done],
            residual[:done],
            scale,
            None if velocity is None else velocity[:done],
            momentum,
        )
        return None
    chosen = _finish(residual, k, sample, found)
    for state in (kept, moving):
        if state is not None:
            zero_at(state, chosen[1].numpy())
    return chosen


def _undo(
    gradient: Tensor, residual: Tensor, scale: float, velocity: Tensor | None, momentum: float
) -> None:
    if velocity is None:
        residual.sub_(gradient, alpha=scale)
    else:
        residual.sub_(velocity)
        velocity.sub_(gradient, alpha=scale).div_(momentum)


def warm_up() -> None:
    """Compile for float32 now (seconds the first time; later runs find it in the cache)."""
    x = torch.arange(100.0)
    select(x, 3)
    feedback_select(x, x.clone(), 3, scale=0.5)
    feedback_select(x, x.clone(), 3, scale=0.5, velocity=x.clone(), momentum=0.5)
