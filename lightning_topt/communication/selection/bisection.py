"""MSTopK (arXiv 2010.10458, algorithm 1 as in the authors' code): bisection of a threshold by
counting, approximate.

    symbol      paper                         here
    d, k        elements, elements wanted     magnitudes.numel(), k
    N           number of bisections          rounds
    thres1, k1  least threshold that at most k elements reach     enough
    thres2, k2  greatest threshold that more than k reach         too_low

Kept for comparison: it reads the data about N + 2 times, and the exact one-pass selection once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_topt.communication.selection.outcome import NonFiniteError

ROUNDS = 30


def mstopk_indices(x: Tensor, k: int, *, rounds: int = ROUNDS, start: int | None = None) -> Tensor:
    """Return the indices (k,) of approximately the k largest magnitudes of the flat `x` (d,),
    ascending.

    All that reach the final threshold, and a contiguous run of those between it and the next lower
    one, from the `start`-th of them (None: at random). Raises NonFiniteError.
    """
    magnitudes = x.abs().float()
    base, top = magnitudes.mean().item(), magnitudes.max().item()
    if not (math.isfinite(base) and math.isfinite(top)):
        raise NonFiniteError("top-k of values that are not finite")
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
    chosen = (magnitudes >= enough[1]).nonzero().view(-1)
    between = ((magnitudes >= too_low[1]) & (magnitudes < enough[1])).nonzero().view(-1)
    missing = k - chosen.numel()
    first = int(torch.randint(0, between.numel() - missing + 1, ())) if start is None else start
    return torch.cat([chosen, between[first : first + missing]]).sort().values
