"""Top-k by magnitude of a vector: one interface, and the fastest exact way for each device.

`top_k` selects; `feedback_top_k` is one step of error feedback, which accumulates, selects and
takes out. Both are one pass over memory and a little: a sample gives a bound that is almost surely
a little below the k-th largest magnitude (MSTopK, arXiv 2010.10458, bisects for it), one pass keeps
what reaches it, and the k largest of the survivors are the answer.

- On a CPU around its compiled `selection_kernels`. Where the sample misled: fewer survivors than k
  (large values lie in clusters, which the sample met too often) are one more pass with the bound
  corrected by what the first found; more than there is room for, one more for what lies strictly
  above the bound (many values equal it then, such as zeros, and the first ones are known from the
  pass before); where even that fails, histograms of all the data, four more passes.
- On CUDA around its kernel (`selection_triton`). The threshold stays on the device; where the
  sample misled, `torch.topk`, as on a device without Triton. The host needs to know how many
  survived: `start_top_k` and `start_feedback` leave it to the caller when to wait for that.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_topt.communication import selection_triton
from lightning_topt.communication.collectives import HostCopy
from lightning_topt.communication.selection_kernels import (
    BLOCK,
    GROUP,
    INFINITY_BITS,
    MAGNITUDE_MASK,
    collect,
    collect_sum,
    exact_threshold,
    sums_of,
    take,
    zero_at,
)

MAX_NUMEL = 2**31 - 1  # indices are int32 inside
SAMPLE_SHARE = 0.005
RUN = 64  # sampled elements that lie together: a cache line or several
SIGMAS = 4  # standard deviations by which the expected rank in the sample is exceeded
FEW = 1 << 16  # elements, of which all are the sample

Array = npt.NDArray[Any]
Chosen = tuple[Tensor, Tensor]  # values (k,) float32 and indices (k,) int32, ascending
_VIEWED = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}  # see selection_kernels
_NO_POSITIONS = np.empty(0, np.int32)


class Selection(NamedTuple):
    """Signed `values` (k,) and their `indices` (k,) in the flattened tensor, ascending."""

    values: Tensor
    indices: Tensor


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity among the values: there is no top k."""


class Started(NamedTuple):
    """A selection under way.

    `counts` is what `result` waits for (None: nothing); `result` raises NonFiniteError.
    """

    counts: HostCopy | None
    result: Callable[[], Selection]


def top_k(x: Tensor, k: int) -> Selection:
    """Return the k entries of largest magnitude.

    Args:
        x: any shape and strides; indices count its elements in row-major order. float32, bfloat16
            or float16.
        k: between 0 and the number of elements. Of equal magnitudes the first are taken.

    Returns:
        signed `values` (k,) of the dtype of `x`, and `indices` (k,), int64, ascending.

    Raises:
        ValueError: for a k or dtype that cannot be.
        NonFiniteError: when `x` has a NaN or an infinity.
    """
    return start_top_k(x, k).result()


def start_top_k(x: Tensor, k: int) -> Started:
    """Begin `top_k`."""
    _check(x, k)
    flat = x.detach().reshape(-1)
    if _has_triton(flat):
        counts, select = _triton_select(flat, None, k)
        return Started(counts, lambda: _finite(_at(select(), flat)))
    if flat.device.type == "cpu":
        chosen = _select(flat.contiguous(), k)
        found = None if chosen is None else Selection(chosen[0].to(flat.dtype), chosen[1].long())
    else:
        is_finite = bool(torch.isfinite(flat).all())
        found = _at(first_largest(flat.abs(), k) if is_finite else None, flat)
    return Started(None, lambda: _finite(found))


def _at(indices: Tensor | None, flat: Tensor) -> Selection | None:
    return None if indices is None else Selection(flat[indices], indices)


def _finite(chosen: Selection | None) -> Selection:
    if chosen is None:
        raise NonFiniteError("top-k of values that are not finite")
    return chosen


def feedback_top_k(gradient: Tensor, residual: Tensor, k: int, *, scale: float = 1.0) -> Selection:
    """Do one step of error feedback in place: accumulate, select the exact top k, take them out.

    ``residual += scale * gradient``, and what is taken is zeroed. Releases the GIL on a CPU.

    Args:
        gradient: (n,) float32, bfloat16 or float16, contiguous; only read.
        residual: (n,) float32, contiguous, on the gradient's device.
        k: number of entries to take.
        scale: factor of the gradient.

    Returns:
        values (k,) float32 and indices (k,) int32, ascending.

    Raises:
        ValueError: for tensors of other shapes, dtypes or devices.
        NonFiniteError: when the sum has a NaN or an infinity; `residual` is then as before, up to
            rounding.
    """
    return start_feedback(gradient, residual, k, scale=scale).result()


def start_feedback(gradient: Tensor, residual: Tensor, k: int, *, scale: float = 1.0) -> Started:
    """Begin `feedback_top_k`; `residual` is whole again after the result."""
    _check(gradient, k)
    _check_residual(gradient, residual)
    added = gradient.detach()
    if _has_triton(added):
        counts, select = _triton_select(residual, added, k, scale=scale)
        return Started(counts, lambda: _finite(_taken(select(), added, residual, scale=scale)))
    if added.device.type == "cpu":
        found = _feedback_select(added, residual, k, scale=scale)
        chosen = None if found is None else Selection(*found)
    else:
        chosen = _feedback_torch(added, residual, k, scale=scale)
    return Started(None, lambda: _finite(chosen))


def _has_triton(x: Tensor) -> bool:
    # torch for CPUs comes without it
    return x.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _check(x: Tensor, k: int) -> None:
    if x.dtype != torch.float32 and x.dtype not in _VIEWED:
        raise ValueError(f"top-k selects from float32, bfloat16 or float16; got {x.dtype}")
    if not 0 <= k <= x.numel():
        raise ValueError(f"k lies between 0 and the number of elements, {x.numel()}; got {k}")
    if x.numel() > MAX_NUMEL:
        raise ValueError(
            f"at most {MAX_NUMEL} elements at a time; got {x.numel()}: select from parts"
        )


def _check_residual(gradient: Tensor, residual: Tensor) -> None:
    if not gradient.is_contiguous():
        raise ValueError("gradient is a contiguous tensor; got strides " + str(gradient.stride()))
    is_alike = residual.shape == gradient.shape and residual.dim() == 1
    if residual.dtype != torch.float32 or not residual.is_contiguous() or not is_alike:
        raise ValueError(
            "residual is a contiguous float32 tensor of the gradient's shape "
            f"{tuple(gradient.shape)}; got {residual.dtype} {tuple(residual.shape)}"
        )
    if residual.device != gradient.device:
        raise ValueError(f"residual is on {residual.device}, the gradient on {gradient.device}")


# ---- in plain torch, on every device


def _feedback_torch(added: Tensor, residual: Tensor, k: int, *, scale: float) -> Selection | None:
    # Do `feedback_top_k` in plain torch; None: not finite, unchanged
    total = torch.add(residual, added, alpha=scale)
    if not bool(torch.isfinite(total).all()):
        return None
    indices = first_largest(total.abs(), k)
    values = total[indices]
    residual.copy_(total.index_fill_(0, indices, 0))
    return Selection(values, indices.int())


def first_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the positions (k,), ascending, of the k largest; of equal ones the first.

    Counts stay on the device: the host does not wait.
    """
    if not k:
        return magnitudes.new_empty(0, dtype=torch.int64)
    least = magnitudes.topk(k, sorted=False).values.min()
    above, equal = magnitudes > least, magnitudes == least
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).view(-1)


# ---- the sample, and the bound that follows from it


def sample_of(x: Tensor) -> Tensor:
    """Return the sample (m,) of the flat `x`.

    Runs at equal distances: the same data give the same selection.
    """
    if sample_share(x.numel()) == 1.0:
        return x
    runs = x[: x.numel() // RUN * RUN].view(-1, RUN)
    return runs[:: round(1 / SAMPLE_SHARE)].reshape(-1)


def bound_of(magnitudes: Tensor, rank: int) -> Tensor:
    """Return the magnitude () of `rank` in a sample, counted from the largest; 0 after the last."""
    if rank < magnitudes.numel():
        return magnitudes.topk(rank).values[-1]
    return magnitudes.new_zeros(())


def expected_rank(numel: int, k: int) -> int:
    """Return a rank in the sample that almost surely lies below the k-th largest of `numel`."""
    mean = k * sample_share(numel)
    return math.ceil(mean + SIGMAS * math.sqrt(mean)) + 1


def sample_share(numel: int) -> float:
    """Return the share of the elements in the sample: all of them where they are few."""
    return 1.0 if numel <= FEW else SAMPLE_SHARE


# ---- the selection on a CPU


def _select(x: Tensor, k: int) -> Chosen | None:
    # The k largest magnitudes of the contiguous `x` (n,); None: not finite
    sample = _sample(x, every=round(1 / sample_share(x.numel())))
    found = _Pass.prepare(x, k, _bound(sample, x.numel(), k))
    return _finish(x, k, sample, found) if found.run(x) else None


def _feedback_select(gradient: Tensor, residual: Tensor, k: int, *, scale: float) -> Chosen | None:
    """Accumulate into `residual` (n,), then take out the k largest.

    None: some sum is not finite; everything is as before, up to rounding.
    """
    kept = residual.numpy()
    every = round(1 / sample_share(residual.numel()))
    sample = _sample(gradient, every=every, residual=kept, scale=scale)
    # one pass accumulates and keeps what reaches the bound
    found = _Pass.prepare(residual, k, _bound(sample, residual.numel(), k))
    found.count, found.full, done = collect_sum(
        kept, _elements(gradient), np.float32(scale), found.threshold, found.indices,
        found.survivors.numpy(),
    )  # fmt: skip
    if found.count < 0:
        # take back what the unfinished pass accumulated
        residual[:done].sub_(gradient[:done], alpha=scale)
        return None
    # select among the survivors, and take them out
    chosen = _finish(residual, k, sample, found)
    zero_at(kept, chosen[1].numpy())
    return chosen


def _finish(x: Tensor, k: int, sample: Array, found: _Pass) -> Chosen:
    # The k largest of `x` (n,), all finite, of which one pass `found` some
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
    # The k largest of `bits` (m,) at `positions` (m,); empty: their own
    indices, values = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
    if k:
        threshold, equal = exact_threshold(bits, k)
        take(bits, positions, threshold, equal, indices, values)
    return torch.from_numpy(values[:k].view(np.float32)), torch.from_numpy(indices[:k])


def _with_ties(found: _Pass, above: _Pass, k: int) -> Chosen:
    # All `above` the threshold and the first ones equal to it, which were `found` first
    bits = found.bits()
    equal = np.flatnonzero(bits & MAGNITUDE_MASK == found.threshold)[: k - above.count]
    indices = np.concatenate([above.indices[: above.count], found.indices[equal]])
    values = np.concatenate([above.bits(), bits[equal]])
    order = np.argsort(indices)
    return torch.from_numpy(values[order].view(np.float32)), torch.from_numpy(indices[order])


def _bound(sample: Array, numel: int, k: int) -> int:
    # A magnitude that almost surely lies a little below the k-th largest, as bits
    if k == 0:
        return INFINITY_BITS
    rank = k if sample.size == numel else expected_rank(numel, k)
    return int(exact_threshold(sample, rank)[0])


def _corrected_bound(sample: Array, k: int, found: _Pass) -> int:
    # A lower bound at which k survive, judged by how many survived the last one
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
    gradient: Tensor, *, every: int, residual: Array | None = None, scale: float = 1.0
) -> Array:
    """Return float32's bits (m,) of a sample: one run of 64 in `every`.

    Of ``residual + scale * gradient``. Compiled too: torch would use its threads, and wait for them
    where cores are shared with a backward pass.
    """
    numel = gradient.numel()
    sums = np.empty(numel if every == 1 else -(-(numel // GROUP) // every) * GROUP, np.float32)
    sums_of(residual, _elements(gradient), np.float32(scale), every, sums)
    return sums.view(np.int32)


def _bits(x: Tensor) -> Array:
    # Float32's bits of all of `x` (n,)
    return x.numpy().view(np.int32) if x.dtype == torch.float32 else _sample(x, every=1)


def _elements(x: Tensor) -> Array:
    # `x` as an array, 16-bit floats as integers
    return (x.view(_VIEWED[x.dtype]) if x.dtype in _VIEWED else x).numpy()


# ---- the selection on CUDA


def _taken(
    indices: Tensor | None, added: Tensor, residual: Tensor, *, scale: float
) -> Selection | None:
    # Take these out of the residual. None: not finite, what was added is taken back
    if indices is None:
        change = scale * added.float()
        residual.sub_(
            torch.where(torch.isfinite(residual + change) & torch.isfinite(change), change, 0.0)
        )
        return None
    values = residual[indices]
    residual.index_fill_(0, indices, 0)
    return Selection(values, indices.int())


def _triton_select(
    values: Tensor, added: Tensor | None, k: int, *, scale: float = 0.0
) -> tuple[HostCopy, Callable[[], Tensor | None]]:
    # Add, and begin to select from `values`: the counts on their way to the host, and what then
    # returns the indices of the k largest. None: not finite
    numel = values.numel()
    threshold = _triton_bound(values, values if added is None else added, k, scale)
    excess = expected_rank(numel, k) / sample_share(numel) - k
    room = min(numel, 2 * k + int(4 * excess)) + selection_triton.BLOCK
    indices = torch.empty(room, dtype=torch.int32, device=values.device)
    counts = HostCopy(selection_triton.collect(values, added, threshold, indices, scale=scale))

    def select() -> Tensor | None:
        count, infinite = counts.result()
        if infinite:
            return None
        if k == 0:
            return torch.empty(0, dtype=torch.int64, device=values.device)
        if not k <= count <= room:  # the bound missed, or many values are equal: exact all the same
            return first_largest(values.abs(), k)
        survivors = indices[:count].sort().values.long()
        return survivors[first_largest(values[survivors].abs(), k)]

    return counts, select


def _triton_bound(values: Tensor, added: Tensor, k: int, scale: float) -> Tensor:
    # A lower bound of the k-th largest magnitude, () float32, on the device
    numel = values.numel()
    if k == 0:
        return torch.full((), torch.inf, device=values.device)
    kept, new = sample_of(values).float(), sample_of(added).float()
    sample = torch.add(kept, new, alpha=scale).abs().nan_to_num(torch.inf)
    return bound_of(sample, k if sample.numel() == numel else expected_rank(numel, k))


def warm_up() -> None:
    """Compile for float32 now (seconds the first time; later runs find it in the cache)."""
    x = torch.arange(100.0)
    _select(x, 3)
    _feedback_select(x, x.clone(), 3, scale=0.5)
