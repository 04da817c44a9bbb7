"""Seconds from one minibatch to the next in a pipeline that never flushes, once it has filled.

[Note: rounds] Stage a sends a minibatch on as far as stage b and waits for its gradient; (b - a) *
lag_per_hop minibatches later it updates, and begins the next one. So many and one more minibatches
take, in seconds, at least what is on this way:

    passes of the stages a to b + transfers between them, there and back + the update of stage a

No other loop of the schedule is longer (stages turn a minibatch round once), so the largest of
these, by minibatch, is the pace: a = b is a stage alone, its passes and its update. A link carries
one tensor at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def seconds_per_minibatch(
    passes: ArrayLike, updates: ArrayLike, transfers: ArrayLike, *, lag_per_hop: int
) -> NDArray[np.float64]:
    """Return the seconds (n,) of n sets of costs.

    `passes` (stages, n) are those of forward and backward, `updates` (stages, n); ``transfers[:,
    s]`` (2, stages, n) what a tensor takes into stage s and its gradient back; those of stage 0 do
    not count.
    """
    work, last = np.asarray(passes, float), np.asarray(updates, float)
    between = np.asarray(transfers, float).copy()
    between[:, 0] = 0.0
    longest = np.maximum((work + last).max(axis=0), between.max(axis=(0, 1)))
    sums = np.cumsum(work + between.sum(axis=0), axis=0)
    for a in range(len(work)):
        for b in range(a + 1, len(work)):
            seconds = work[a] + sums[b] - sums[a] + last[a]
            longest = np.maximum(longest, seconds / ((b - a) * lag_per_hop + 1))
    return np.asarray(longest)
