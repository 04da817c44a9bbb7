"""Compiled loop over all ways to cut a chain into stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import kernel


@kernel
def cheapest_cuts(
    of: Any,
    first: Any,
    costs: Any,
    stages: Any,
    held: Any,
    limits: Any,
    best: Any,
    came: Any,
    chosen: Any,
) -> None:
    """Write into `best` (S + 1, N + 1) the least lead of s stages that end before block j, and into
    `came` and `chosen` where the last of them begins and which state it has; all three are -1 or
    infinite where there is none.

    `of` (G, N, N + 1), `first` (C + 1,) and `costs` (7, n) are those of `StageStates`, of all
    groups of stages one after the other; `stages` (S,) are the groups of the stages, `held` ([held,
    waiting, in update], time, S) their microbatches. `limits`: loads and sizes are below these.
    """
    count = of.shape[1]
    picked = np.empty(len(first) - 1, np.int64)
    lead, load, static, kept, hump, update = (
        costs[0],
        costs[1],
        costs[2],
        costs[3],
        costs[4],
        costs[5],
    )
    waiting, times = costs[6], held.shape[1]
    for s in range(len(stages) + 1):
        for j in range(count + 1):
            best[s, j] = np.inf
    best[0, 0] = 0.0
    for s in range(len(stages)):
        g = stages[s]
        if s == 0 or g != stages[s - 1] or (held[:, :, s] != held[:, :, s - 1]).any():
            for c in range(len(picked)):
                picked[c] = -2  # not looked at
        left = len(stages) - 1 - s
        for j in range(s + 1, count + 1 - left):
            came[s, j], chosen[s, j] = -1, -1
            for i in range(s, j):
                c = of[g, i, j]
                if c < 0 or not best[s, i] < best[s + 1, j]:
                    continue
                if picked[c] == -2:
                    picked[c] = -1
                    for k in range(first[c], first[c + 1]):
                        size = held[2, 0, s] * kept[k] + update[k]
                        for t in range(times):
                            size = max(
                                size, held[0, t, s] * kept[k] + held[1, t, s] * waiting[k] + hump[k]
                            )
                        size += static[k]
                        if load[k] < limits[1] and size < limits[0]:
                            picked[c] = k
                            break
                k = picked[c]
                if k >= 0 and best[s, i] + lead[k] < best[s + 1, j]:
                    best[s + 1, j] = best[s, i] + lead[k]
                    came[s, j], chosen[s, j] = i, k
