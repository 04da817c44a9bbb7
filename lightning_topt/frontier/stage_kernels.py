"""Compiled loops of the search of stages: states of runs of blocks, and ways to cut a chain.

Loaded by `stage_search`, which has the same in arrays, where there is much to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics.jit import kernel
from lightning_topt.frontier.pareto import Array, Rows

Mask = NDArray[np.bool_]

_LEAST = 1e-6  # width of a cell of states that are put together because they are too many
_MOST = 1024  # states and decisions of a run that are compared pair by pair


def states_of_runs(
    shorter: Rows, last: Rows, blocks: Sequence[Array], step: float, most: int
) -> tuple[Array, Rows, Rows, Rows, float] | None:
    """Return the fields of `RunStates`; None where a run has so many states that arrays are faster.

    Args:
        shorter: (run,) the run that is one block shorter, -1 for none.
        last: (run,) the last block.
        blocks: costs (config, 5) of each block; infinite seconds forbid a configuration.
        step: width of the cells of which one state is kept.
        most: states that are kept of a run.
    """
    allowed = [np.flatnonzero(np.isfinite(block[:, 0])) for block in blocks]
    costs = np.concatenate([block[some] for block, some in zip(blocks, allowed, strict=True)])
    decisions = np.cumsum([0, *map(len, allowed)])
    # room for the states of all runs: four times as much where that is not enough
    room = 64 * len(last)
    while True:
        made = np.empty((room, 5)), np.empty(room, np.int64), np.empty(room, np.int64)
        first, errors = np.zeros(len(last) + 1, np.int64), np.empty(len(last))
        arrays = (
            np.ascontiguousarray(shorter, np.int64),
            np.ascontiguousarray(last, np.int64),
            costs,
            decisions,
        )
        size = _make(*arrays, step, most, *made, first, errors)
        if size == -1:
            return None
        if size >= 0:
            break
        room *= 4
    config = np.concatenate(allowed)[made[2][:size]]
    return made[0][:size].copy(), first, made[1][:size].copy(), config, float(errors.max()) - 1


@kernel
def _make(
    shorter: Rows,
    last: Rows,
    decided: Array,
    decisions: Rows,
    step: float,
    most: int,
    costs: Array,
    parent: Rows,
    choice: Rows,
    first: Rows,
    errors: Array,
) -> int:
    """Write the states of all runs.

    Returns how many, -1 for a run of too many and -2 where there is no room.
    """
    size = 0
    made, cells = np.empty((_MOST, 5)), np.empty((_MOST, 5))
    stays, minimal = np.empty(_MOST, np.bool_), np.empty(_MOST, np.bool_)
    for r in range(len(last)):
        # states of the run of one block less; one of nothing where there is none
        begin, end = (first[shorter[r]], first[shorter[r] + 1]) if shorter[r] >= 0 else (0, 1)
        low, several = decisions[last[r]], decisions[last[r] + 1] - decisions[last[r]]
        count = (end - begin) * several
        if count > _MOST:  # arrays are faster
            return -1
        if size + count > len(costs):
            return -2
        # each state of the shorter run with each configuration of the last block
        for i in range(count):
            k, d = begin + i // several, low + i % several
            for c in range(5):
                before = costs[k, c] if shorter[r] >= 0 else 0.0
                made[i, c] = max(before, decided[d, c]) if c == 4 else before + decided[d, c]
        width = _thin(made, count, stays, minimal, cells, step, most)
        errors[r] = (1.0 + width) * (errors[shorter[r]] if shorter[r] >= 0 else 1.0)
        for i in range(count):
            if stays[i]:
                for c in range(5):
                    costs[size, c] = made[i, c]
                parent[size] = begin + i // several if shorter[r] >= 0 else -1
                choice[size] = low + i % several
                size += 1
        first[r + 1] = size
    return size


@kernel
def _thin(
    made: Array, count: int, stays: Mask, minimal: Mask, cells: Array, step: float, most: int
) -> float:
    """Write which of the first `count` of `made` stay; return the width of cells.

    Those that none beats (`minimal`), the first of equal ones, and of these the first in each cell.
    """
    # those that none beats
    left = 0
    for i in range(count):
        minimal[i] = True
        for j in range(count):
            is_below, is_less = True, j < i
            for c in (3, 0, 4, 2, 1):  # what differs most comes first
                if made[j, c] > made[i, c]:
                    is_below = False
                    break
                is_less = is_less or made[j, c] < made[i, c]
            if is_below and is_less:
                minimal[i] = False
                break
        stays[i] = minimal[i]
        left += stays[i]
    # one of each cell, of cells so wide that few enough are left
    width = 0.0
    while (width < step and left > 2) or left > most:
        width = max(step, 2.0 * width, _LEAST)
        scale, left = np.log1p(width), 0
        for i in range(count):
            stays[i] = minimal[i]
            for c in range(5):
                cells[i, c] = np.floor(np.log(max(made[i, c], 1e-300)) / scale)
            for j in range(i):
                if stays[j]:
                    same = True
                    for c in range(5):
                        same = same and cells[j, c] == cells[i, c]
                    if same:
                        stays[i] = False
                        break
            left += stays[i]
    return width


@kernel
def cheapest_cuts(
    of: Rows,
    first: Rows,
    costs: Array,
    stages: Rows,
    held: Array,
    limits: Array,
    best: Array,
    came: Rows,
    chosen: Rows,
) -> None:
    """Write into `best` (S + 1, N + 1) the least lead of s stages that end before block j.

    Into `came` and `chosen` goes where the last of them begins and which state it has. All three
    are -1 or infinite where there is none.

    Args:
        of: (G, N, N + 1), of `StageStates`, for each group of stages.
        first: (C + 1,), of all groups one after the other.
        costs: (7, n), of all groups one after the other.
        stages: (S,) the group of each stage.
        held: ([held, waiting, in update], time, S) microbatches of each stage.
        limits: sizes and loads are below these.
        best: is written.
        came: is written.
        chosen: is written.
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
                picked[c] = -2  # not known yet
        left = len(stages) - 1 - s  # stages behind this one, of a block each at least
        for j in range(s + 1, count + 1 - left):
            came[s, j], chosen[s, j] = -1, -1
            for i in range(s, j):
                c = of[g, i, j]
                if c < 0 or not best[s, i] < best[s + 1, j]:
                    continue
                # the state of least lead below both limits: states are by lead ascending
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
