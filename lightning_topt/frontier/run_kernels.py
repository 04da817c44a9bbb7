"""Compiled states of runs of blocks (`stage_states.run_states`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_topt.basics.jit import kernel
from lightning_topt.frontier.pareto import Array, Rows

_LEAST = 1e-6  # width of a cell of states that are put together because they are too many
_MOST = 1024  # states and decisions of a run that are compared pair by pair


def states_of_runs(
    shorter: Rows, last: Rows, blocks: Sequence[Array], step: float, most: int
) -> tuple[Array, Rows, Rows, Rows, float] | None:
    """Return the fields of `RunStates` of runs that are run `shorter` (-1: none) and a block `last`
    (run,); `blocks` are costs (config, 5), infinite seconds forbid. None where a run has so many
    states that arrays are faster.
    """
    allowed = [np.flatnonzero(np.isfinite(block[:, 0])) for block in blocks]
    costs = np.concatenate([block[some] for block, some in zip(blocks, allowed, strict=True)])
    decisions = np.cumsum([0, *map(len, allowed)])
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
def _thin(
    made: Any, count: int, stays: Any, minimal: Any, cells: Any, step: float, most: int
) -> float:
    """Write which of the first `count` of `made` stay: those that none beats (`minimal`), the first
    of equal ones, and of these the first in each cell; return the width of cells.
    """
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
def _make(
    shorter: Any,
    last: Any,
    decided: Any,
    decisions: Any,
    step: float,
    most: int,
    costs: Any,
    parent: Any,
    choice: Any,
    first: Any,
    errors: Any,
) -> int:
    """Write the states of all runs; return how many, -1 for a run of too many and -2 where there is
    no room.
    """
    size = 0
    made, cells = np.empty((_MOST, 5)), np.empty((_MOST, 5))
    stays, minimal = np.empty(_MOST, np.bool_), np.empty(_MOST, np.bool_)
    for r in range(len(last)):
        begin, end = (first[shorter[r]], first[shorter[r] + 1]) if shorter[r] >= 0 else (0, 1)
        low, several = decisions[last[r]], decisions[last[r] + 1] - decisions[last[r]]
        count = (end - begin) * several
        if count > _MOST:
            return -1
        if size + count > len(costs):
            return -2
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
