"""Compiled walk over the passes of a schedule, for many sets of costs at once.

Each stage receives from the one before alone. Loaded by `timing` where there is much to walk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics.jit import kernel

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@kernel
def run_passes(
    actions: Integers,
    begin: Integers,
    ranks: Integers,
    sizes: tuple[int, int],
    seconds: Array,
    crossing: Array,
    done: Array,
) -> bool:
    """Write into `done` (P, n) when each rank has run its last pass, as `timing` does pass by pass.

    Args:
        actions: (A, 3) kind, stage and microbatch of passes.
        begin: those of rank r are ``actions[begin[r] : begin[r + 1]]``.
        ranks: (S,) ranks of the stages.
        sizes: the numbers of stages and of microbatches.
        seconds: (kind, S, n).
        crossing: (2, S, n), of what comes into each stage from the one before, and of its gradient
            back.
        done: is written.

    Returns:
        False where the schedule hangs.
    """
    stages, micro, count = sizes[0], sizes[1], seconds.shape[2]
    ready = np.zeros((2, stages, micro), np.bool_)  # forward, backward
    # when each tensor is there, and when each link between two ranks is free
    arrived = np.empty((2, stages, micro, count))
    links = np.zeros((len(done), len(done), count))
    place, left, moves = begin[:-1].copy(), len(actions), True
    done[:] = 0.0
    # rank after rank as far as it can go, until none has moved
    while moves:
        moves = False
        for rank in range(len(done)):
            while place[rank] < begin[rank + 1]:
                a = place[rank]
                kind, s, m = actions[a, 0], actions[a, 1], actions[a, 2]
                side, step = (0, -1) if kind == 0 else (1, 1)
                source, target = s + step, s - step
                # gradients of parameters and updates need the stage's own backward
                if kind > 2:
                    if not ready[1, s, m]:
                        break
                # a pass needs what comes in, and a backward its own forward
                elif (side == 1 and not ready[0, s, m]) or (
                    0 <= source < stages and not ready[side, source, m]
                ):
                    break
                receives = kind <= 2 and 0 <= source < stages and ranks[source] != rank
                sends = kind <= 2 and 0 <= target < stages and ranks[target] != rank
                onto = max(s, target)  # seconds of an edge are at the later one of its stages
                other = ranks[target] if sends else rank
                # receive, run and send, as `timing._run` does; for each set of costs
                for i in range(count):
                    time = done[rank, i]
                    if receives:
                        time = max(time, arrived[side, source, m, i])
                    time = time + seconds[kind, s, i]
                    # send: beside the rank, over a link that may be busy
                    if sends:
                        links[rank, other, i] = (
                            max(time, links[rank, other, i]) + crossing[side, onto, i]
                        )
                        arrived[side, s, m, i] = links[rank, other, i]
                    done[rank, i] = time
                # others may go on with the result
                if kind <= 2:
                    ready[side, s, m] = True
                place[rank] += 1
                left -= 1
                moves = True
    return left == 0
