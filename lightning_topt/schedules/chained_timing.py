"""Seconds of steps whose stages receive from the one before alone, compiled: as `schedule_timing`
has them, to the last bit.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_topt.schedules.schedule import Kind, Schedule
from lightning_topt.schedules.stage_costs import Edge

_PLACES: Mapping[Kind, int] = {kind: place for place, kind in enumerate(get_args(Kind))}
_SMALL = 2**14  # passes up to which compiled code is not worth loading
_COLUMNS = 64  # sets of costs that are walked at once
_Seconds = Mapping[Edge, ArrayLike] | None


def is_chain(edges: Sequence[Edge], num_stages: int) -> bool:
    """Return whether each stage receives from the one before, and from no other."""
    return tuple(edges) == tuple(pairwise(range(num_stages)))


def is_worth_compiling(schedule: Schedule) -> bool:
    """Return whether compiled code is loaded, or walks over so many passes that it may be."""
    return "numba" in sys.modules or sum(map(len, schedule.actions)) > _SMALL


def chained_rank_seconds(
    schedule: Schedule,
    rows: Sequence[Any],
    transfers: tuple[_Seconds, _Seconds],
    *,
    overlapped: bool,
) -> NDArray[np.float64] | None:
    """Return when each rank has run its last pass (ranks, n); `rows` are the seconds of each kind
    of pass (stages, n).

    None for a schedule that hangs and for costs that do not fit, of which a walk tells more.
    """
    actions, begin = _arrays_of(schedule)
    stages, count = rows[0].shape
    if stages != schedule.num_stages or any(
        rows[kind] is None
        for kind in np.unique(actions[:, 0]).tolist()
        if kind != _PLACES["update"]
    ):
        return None
    seconds = np.stack([np.zeros((stages, count)) if each is None else each for each in rows])
    there, back = transfers[0], transfers[0] if transfers[1] is None else transfers[1]
    crossing = np.zeros((2, stages, count))
    for side, each in enumerate((there, back)):
        for edge in pairwise(range(stages)):
            crossing[side, edge[1]] = 0.0 if each is None else each[edge]
    run = importlib.import_module("lightning_topt.schedules.timing_kernels").run_passes
    sizes = stages, int(actions[:, 2].max(initial=0)) + 1
    found = np.zeros((schedule.num_ranks, count))
    for first in range(0, count, _COLUMNS):
        some = slice(first, first + _COLUMNS)
        done = np.zeros(found[:, some].shape)
        costs = np.ascontiguousarray(seconds[..., some]), np.ascontiguousarray(crossing[..., some])
        if not run(
            actions, begin, np.array(schedule.rank_of_stage), sizes, *costs, overlapped, done
        ):
            return None
        found[:, some] = done
    return found


@lru_cache(maxsize=256)
def _arrays_of(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The kind, stage and microbatch of all actions (A, 3), and where those of each rank begin (P +
    1,).
    """
    rows = [
        (_PLACES[a.kind], a.stage_index, a.microbatch_index)
        for actions in schedule.actions
        for a in actions
    ]
    return np.array(rows, np.int64).reshape(-1, 3), np.cumsum([0, *map(len, schedule.actions)])
