"""One pass over memory on CUDA, as a Triton kernel: accumulate, and keep what reaches a threshold.

A file of its own because it is imported everywhere, and usable only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def collect(
    values: Tensor, added: Tensor | None, threshold: Tensor, indices: Tensor, *, scale: float = 0.0
) -> Tensor:
    """Do ``values += scale * added``, and write the indices of what reaches `threshold`.

    In any order; `added` None: nothing is accumulated.

    Returns:
        two numbers (2,) int32 on the device: how many reach it, those without room included, and
        whether a value is not finite (such a value is left as it was).
    """
    numel = values.numel()
    state = torch.zeros(2, dtype=torch.int32, device=values.device)
    grid: Any = (triton.cdiv(numel, BLOCK),)
    if numel:
        with torch.cuda.device(values.device):
            _collect[grid](
                values,
                values if added is None else added,
                scale,
                threshold,
                indices,
                state,
                numel,
                indices.numel(),
                ACCUMULATE=added is not None,
                SIZE=BLOCK,
            )
    return state
