"""The exact selection on CUDA: one pass over memory by a Triton kernel.

The kernel adds the gradient to the residual, compares with a threshold that stays on the device,
and appends survivors through an atomic counter; sorting their indices restores their order. The
rest is done on the few survivors. A file of its own because it is imported everywhere, and usable
only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_topt.communication.selection.plain import (
    RUN,
    SAMPLE_SHARE,
    NonFiniteError,
    Selection,
    expected_rank,
    first_largest,
    sample_share,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

BLOCK = 2048

if triton is not None:

    @triton.jit
    def _collect(
        values,
        added,
        scale,
        threshold,
        indices,
        state,
        numel,
        room,
        ACCUMULATE: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        """Append the indices of what reaches the threshold.

        state[0] is their number, state[1] says whether a value is not finite (such a value is left
        as it was).
        """
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < numel
        x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        if ACCUMULATE:
            x += scale * tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        magnitude = tl.abs(x)
        finite = magnitude < float("inf")
        if ACCUMULATE:
            tl.store(values + at, x, mask=inside & finite)
        if tl.max((inside & (finite == 0)).to(tl.int32), axis=0) > 0:
            tl.atomic_max(state + 1, 1)
        keep = (inside & finite & (magnitude >= tl.load(threshold))).to(tl.int32)
        found = tl.sum(keep, axis=0)
        if found > 0:  # one counter for all: no traffic where nothing is kept
            position = tl.atomic_add(state, found) + tl.cumsum(keep, axis=0) - 1
            tl.store(indices + position, at.to(tl.int32), mask=(keep > 0) & (position < room))


def select(x: Tensor, k: int) -> Tensor:
    """Return the indices (k,) int64 of the k largest magnitudes of the flat CUDA tensor `x`.

    They ascend. Raises NonFiniteError.
    """
    indices = _select(x, x, k, scale=0.0, accumulate=False)
    if indices is None:
        raise NonFiniteError("top-k of values that are not finite")
    return indices


def feedback_select(added: Tensor, residual: Tensor, k: int, *, scale: float) -> Selection | None:
    """Do ``residual += scale * added``, then take out the k largest. None: not finite, undone."""
    indices = _select(residual, added, k, scale=scale, accumulate=True)
    if indices is None:
        change = scale * added.float()
        residual.sub_(
            torch.where(torch.isfinite(residual + change) & torch.isfinite(change), change, 0.0)
        )
        return None
    values = residual[indices]
    residual.index_fill_(0, indices, 0)
    return Selection(values, indices.int())


def _select(
    values: Tensor, added: Tensor, k: int, *, scale: float, accumulate: bool
) -> Tensor | None:
    """Return the indices of the k largest of `values` (after adding); None: not finite."""
    numel = values.numel()
    threshold = _threshold(values, added, k, scale)
    room = min(numel, 2 * k + int(4 * (expected_rank(numel, k) / sample_share(numel) - k))) + BLOCK
    indices = torch.empty(room, dtype=torch.int32, device=values.device)
    state = torch.zeros(2, dtype=torch.int32, device=values.device)
    grid: Any = (triton.cdiv(numel, BLOCK),)
    if numel:
        with torch.cuda.device(values.device):
            _collect[grid](
                values,
                added,
                scale,
                threshold,
                indices,
                state,
                numel,
                room,
                ACCUMULATE=accumulate,
                SIZE=BLOCK,
            )
    count, infinite = state.tolist()
    if infinite:
        return None
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if not k <= count <= room:  # the bound missed, or many values are equal: exact all the same
        return first_largest(values.abs(), k)
    survivors = indices[:count].sort().values.long()
    return survivors[first_largest(values[survivors].abs(), k)]


def _threshold(values: Tensor, added: Tensor, k: int, scale: float) -> Tensor:
    """Return a lower bound of the k-th largest magnitude, () float32, on the device."""
    numel = values.numel()
    if k == 0:
        return torch.full((), torch.inf, device=values.device)
    whole = sample_share(numel) == 1.0
    every = 1 if whole else round(1 / SAMPLE_SHARE)
    sampled = [
        x if whole else x[: numel // RUN * RUN].view(-1, RUN)[::every].reshape(-1)
        for x in (values, added)
    ]
    sample = (
        torch.add(sampled[0].float(), sampled[1].float(), alpha=scale).abs().nan_to_num(torch.inf)
    )
    rank = k if whole else expected_rank(numel, k)
    return sample.topk(rank).values[-1] if rank < sample.numel() else sample.new_zeros(())
