"""Exact top-k in one pass and a little, in plain torch, on every device.

A sample gives a threshold that is almost surely a little below the k-th largest magnitude; one pass
keeps what reaches it, and the k largest of the survivors are the answer. Fewer than k survivors:
the threshold falls until there are enough. On a CPU the pass works in chunks that stay in the
cache: temporaries of the size of the data would cost ten times the pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_topt.communication.selection.outcome import NonFiniteError

SAMPLE_SHARE = 0.005
RUN = 64  # sampled elements that lie together: a cache line or several
SIGMAS = 4  # by which the expected rank in the sample is passed
CHUNK = 1 << 16


def sampled_indices(x: Tensor, k: int) -> Tensor:
    """Return the indices (k,) of the k largest magnitudes of the flat `x`, ascending; of equal ones
    the first. Raises NonFiniteError.
    """
    if k == 0:
        _check_finite(x)
        return torch.empty(0, dtype=torch.int64, device=x.device)
    rank = expected_rank(x.numel(), k)
    sample = _sample(x).abs()
    while True:
        threshold = sample.topk(rank).values[-1] if rank < sample.numel() else sample.new_zeros(())
        indices, magnitudes = _reaching(x, threshold)
        if not bool(torch.isfinite(magnitudes).all()):
            raise NonFiniteError("top-k of values that are not finite")
        if indices.numel() >= k:
            return indices[first_largest(magnitudes, k)]
        rank *= 4


def expected_rank(numel: int, k: int) -> int:
    """Return the rank in the sample whose element lies almost surely below the k-th largest of
    `numel`.
    """
    mean = k * sample_share(numel)
    return math.ceil(mean + SIGMAS * math.sqrt(mean)) + 1


def sample_share(numel: int) -> float:
    """Return the share of the elements in the sample: all of them where they are few."""
    return 1.0 if numel <= CHUNK else SAMPLE_SHARE


def first_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the positions (k,), ascending, of the k largest; of equal ones the first."""
    least = magnitudes.topk(k, sorted=False).values.min()
    above = magnitudes > least
    equal = (magnitudes == least).nonzero().view(-1)[: k - int(above.sum())]
    above[equal] = True
    return above.nonzero().view(-1)


def _sample(x: Tensor) -> Tensor:
    """The sample (m,) of the flat `x`: runs at equal distances, so that the same data give the same
    selection.
    """
    if sample_share(x.numel()) == 1.0:
        return x
    runs = x[: x.numel() // RUN * RUN].view(-1, RUN)
    return runs[:: round(1 / SAMPLE_SHARE)].reshape(-1)


def _reaching(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and magnitudes of the elements of at least `threshold`, and of those that are not
    finite.
    """
    if x.device.type != "cpu":
        magnitudes = x.abs()
        indices = (~(magnitudes < threshold)).nonzero().view(-1)
        return indices, magnitudes[indices]
    found_indices, found = [], []
    for number, chunk in enumerate(torch.split(x, CHUNK)):
        magnitudes = chunk.abs()
        indices = (~(magnitudes < threshold)).nonzero().view(-1)
        found.append(magnitudes[indices])
        found_indices.append(indices.add_(number * CHUNK))
    return torch.cat(found_indices), torch.cat(found)


def _check_finite(x: Tensor) -> None:
    if not all(bool(torch.isfinite(chunk).all()) for chunk in torch.split(x, CHUNK)):
        raise NonFiniteError("top-k of values that are not finite")
