"""Top-k in plain torch, on every device; what a selection returns and raises.

`sampled_indices` is exact, in one pass and a little. A sample gives a threshold that is almost
surely a little below the k-th largest magnitude; one pass keeps what reaches it, and the k largest
of the survivors are the answer. Fewer than k survivors: the threshold falls until there are enough.
On a CPU the pass works in chunks that stay in the cache: temporaries of the size of the data would
cost ten times the pass. The compiled selections (`vector_top_k`, `triton_kernels`) share its
sample.

`mstopk_indices` is MSTopK (arXiv 2010.10458, algorithm 1 as in the authors' code): bisection of a
threshold by counting, approximate. It is kept for comparison: it reads the data about N + 2 times.

    symbol      paper                                             here
    d, k        elements, elements wanted                         magnitudes.numel(), k
    N           number of bisections                              rounds
    thres1, k1  least threshold that at most k elements reach     enough
    thres2, k2  greatest threshold that more than k reach         too_low
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLE_SHARE = 0.005
RUN = 64  # sampled elements that lie together: a cache line or several
SIGMAS = 4  # standard deviations by which the expected rank in the sample is exceeded
CHUNK = 1 << 16
ROUNDS = 30


class Selection(NamedTuple):
    """Signed `values` (k,) and their `indices` (k,) in the flattened tensor, ascending."""

    values: Tensor
    indices: Tensor


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity among the values: there is no top k."""


def sampled_indices(x: Tensor, k: int) -> Tensor:
    """Return the indices (k,) of the k largest magnitudes of the flat `x`, ascending.

    Of equal magnitudes the first are taken. Raises NonFiniteError.
    """
    if k == 0:
        if not all(bool(torch.isfinite(chunk).all()) for chunk in torch.split(x, CHUNK)):
            raise NonFiniteError("top-k of values that are not finite")
        return torch.empty(0, dtype=torch.int64, device=x.device)
    rank = expected_rank(x.numel(), k)
    sample = _sample(x).abs()
    # lower the threshold until k survive
    while True:
        threshold = sample.topk(rank).values[-1] if rank < sample.numel() else sample.new_zeros(())
        indices, magnitudes = _reaching(x, threshold)
        if not bool(torch.isfinite(magnitudes).all()):
            raise NonFiniteError("top-k of values that are not finite")
        if indices.numel() >= k:
            return indices[first_largest(magnitudes, k)]
        rank *= 4


def _sample(x: Tensor) -> Tensor:
    """Return the sample (m,) of the flat `x`.

    Runs at equal distances: the same data give the same selection.
    """
    if sample_share(x.numel()) == 1.0:
        return x
    runs = x[: x.numel() // RUN * RUN].view(-1, RUN)
    return runs[:: round(1 / SAMPLE_SHARE)].reshape(-1)


def expected_rank(numel: int, k: int) -> int:
    """Return a rank in the sample that almost surely lies below the k-th largest of `numel`."""
    mean = k * sample_share(numel)
    return math.ceil(mean + SIGMAS * math.sqrt(mean)) + 1


def sample_share(numel: int) -> float:
    """Return the share of the elements in the sample: all of them where they are few."""
    return 1.0 if numel <= CHUNK else SAMPLE_SHARE


def _reaching(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and magnitudes of what reaches `threshold`, or is not finite."""
    if x.device.type != "cpu":
        magnitudes = x.abs()
        indices = (~(magnitudes < threshold)).nonzero().view(-1)
        return indices, magnitudes[indices]
    # chunk by chunk, in the cache
    found_indices, found = [], []
    for number, chunk in enumerate(torch.split(x, CHUNK)):
        magnitudes = chunk.abs()
        indices = (~(magnitudes < threshold)).nonzero().view(-1)
        found.append(magnitudes[indices])
        found_indices.append(indices.add_(number * CHUNK))
    return torch.cat(found_indices), torch.cat(found)


def first_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the positions (k,), ascending, of the k largest; of equal ones the first."""
    if magnitudes.device.type != "cpu":
        return first_largest_counted(magnitudes, k)
    least = magnitudes.topk(k, sorted=False).values.min()
    above = magnitudes > least
    equal = (magnitudes == least).nonzero().view(-1)[: k - int(above.sum())]
    above[equal] = True
    return above.nonzero().view(-1)


def first_largest_counted(magnitudes: Tensor, k: int) -> Tensor:
    """Do what `first_largest` does, with counts that stay on the device: the host does not wait."""
    least = magnitudes.topk(k, sorted=False).values.min()
    above, equal = magnitudes > least, magnitudes == least
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).view(-1)


def mstopk_indices(x: Tensor, k: int, *, rounds: int = ROUNDS, start: int | None = None) -> Tensor:
    """Return the indices (k,) of about the k largest magnitudes of the flat `x` (d,), ascending.

    All that reach the final threshold, and a contiguous run of those between it and the next lower
    one, from the `start`-th of them (None: at random). Raises NonFiniteError.
    """
    magnitudes = x.abs().float()
    base, top = magnitudes.mean().item(), magnitudes.max().item()
    if not (math.isfinite(base) and math.isfinite(top)):
        raise NonFiniteError("top-k of values that are not finite")
    # bisect between the mean and the largest magnitude
    low, high = 0.0, 1.0
    enough, too_low = (0, math.inf), (x.numel(), 0.0)
    reached = torch.empty_like(magnitudes, dtype=torch.bool)
    for _ in range(rounds):
        ratio = (low + high) / 2
        threshold = base + ratio * (top - base)
        count = int(torch.count_nonzero(torch.ge(magnitudes, threshold, out=reached)))
        if count <= k:
            high = ratio
            if count > enough[0]:
                enough = (count, threshold)
        else:
            low = ratio
            if count < too_low[0]:
                too_low = (count, threshold)
    # all above, then enough of those between the two thresholds
    chosen = (magnitudes >= enough[1]).nonzero().view(-1)
    between = ((magnitudes >= too_low[1]) & (magnitudes < enough[1])).nonzero().view(-1)
    missing = k - chosen.numel()
    first = int(torch.randint(0, between.numel() - missing + 1, ())) if start is None else start
    return torch.cat([chosen, between[first : first + missing]]).sort().values
