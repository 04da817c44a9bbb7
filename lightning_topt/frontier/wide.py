"""The search where there is much to do: compiled, pruned by prices, and bounded in points, seconds
and memory.

Two columns (seconds, bytes) are walked through at once. With more, nearly every partial plan is
minimal, so sweeps keep at most `cap` of them, those that could gain most, and make better plans
known for the next, wider one; the first that gives none up is exact. A search that ends before has
missed at most what the partial plans that it gave up could gain.

A sweep walks from both ends, since the number of partial plans grows with their length, and joins
what meets: the costs of a whole plan are two numbers, so no more partial plans of full length have
to be held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.frontier.layers import Layer
from lightning_topt.frontier.pareto import Array, Rows
from lightning_topt.frontier.prices import (
    Bounds,
    Known,
    Network,
    Prices,
    improve,
    make_prices,
    state_kernels,
)
from lightning_topt.frontier.walk import GiveUpError, Side, Walk, make_side, make_way_back

_FIRST_CAP, _WIDER = 512, 16
_ROUGH = 0.02  # what the first sweep may miss without better plans being sought at once
_PAIRS = 2**25  # pairs of partial plans that are worth joining
_ROOM = 2**16  # joined plans held at once


@dataclass(frozen=True)
class Budget:
    """A `Budget` says what a search may take: partial plans at one time, joint configurations of
    operators, seconds, bytes; and what it may miss: plans that are less than `epsilon` better.
    """

    max_points: int
    max_branches: int
    max_seconds: float
    max_bytes: float
    epsilon: float = 0.0


def search_wide(
    layers: Sequence[Layer],
    *,
    lifts: Sequence[Array],
    budget: Budget,
    deadline: float,
    priced: tuple[Prices, Known] | None = None,
) -> tuple[Rows, float]:
    """Return transitions (n, N) and the error bound of the best plans, see `Frontier`.

    `lifts` are those of `columns.raises`; `deadline` is a time of `time.thread_time`. Every layer
    has transitions. With `priced`, prices of these layers and good known plans, all that may be
    better is looked at at once, as far as three quarters of the time allow.
    """
    columns = max(2, *(layer.columns for layer in layers))
    per_state = 8 * len(layers) + 64 * columns  # back-pointers of all layers, columns of one
    most = int(max(1, min(budget.max_points, budget.max_bytes / per_state)))
    side = make_side(layers, lifts=lifts)
    if columns == 2 and all(len(layer.start) == 2 for layer in layers) and budget.epsilon == 0:
        try:
            return _walk_through(Walk(side, None, cap=most, deadline=deadline)).plans, 0.0
        except GiveUpError:
            pass
    prices, known = make_prices(layers) if priced is None else priced
    # Partial plans of two columns are cheap to hold, and whole plans may be so many that pairs are
    # not.
    sides = side, make_way_back(layers) if columns > 2 else None
    missed, cap, last = prices.gain(known), _FIRST_CAP, False
    if priced is not None and missed > budget.epsilon:
        known, dropped = _at_once(
            sides, prices, known, cap=most, epsilon=budget.epsilon, deadline=deadline
        )
        missed = min(missed, dropped)
    while missed > budget.epsilon and not last:
        cap, began = min(cap, most), time.thread_time()
        try:
            known, dropped = _sweep(
                sides, prices, known, cap=cap, epsilon=budget.epsilon, deadline=deadline
            )
            missed = min(missed, dropped)
        except GiveUpError:
            last = True
        now = time.thread_time()
        wider = min(_WIDER, (deadline - now) / (now - began))  # as far as there is time for
        last |= cap == most or wider < 2
        if missed > max(budget.epsilon, 0.0 if last or cap > _FIRST_CAP else _ROUGH):
            known = improve(layers, known)
            missed = min(missed, prices.gain(known))
        cap = int(cap * wider)
    return known.plans, max(missed, 0.0)


def _sweep(
    sides: tuple[Side, Side | None],
    prices: Prices,
    known: Known,
    *,
    cap: int,
    epsilon: float,
    deadline: float,
    looks_ahead: bool = False,
) -> tuple[Known, float]:
    """Known plans with those found with at most `cap` partial plans at a time, and what others
    could gain at most.

    Raises GiveUpError at the deadline, or, where it `looks_ahead`, once the layers that are left
    would end behind it even if they took a quarter of the time of the last one.
    """
    bounds = Bounds(prices, known, epsilon)
    ahead = Walk(sides[0], bounds, cap=cap, deadline=deadline)
    if sides[1] is not None:
        behind = Walk(sides[1], bounds.reversed, cap=cap, deadline=deadline)
        while (left := len(sides[0].layers) - ahead.done - behind.done) > 0:
            began = time.thread_time()
            (ahead if len(ahead.states.costs) <= len(behind.states.costs) else behind).step()
            now = time.thread_time()
            if looks_ahead and (left - 1) * (now - began) / 4 > deadline - now:
                raise GiveUpError
        if (
            np.dot(*(np.diff(walk.states.first).astype(float) for walk in (ahead, behind)))
            <= _PAIRS
        ):
            known = _join(ahead, behind, Network(sides[0].layers).kinds[ahead.done], known)
            return known, _missed(epsilon, ahead.dropped, behind.dropped)
    found = _walk_through(ahead)
    return known.joined(found.costs, found.plans), _missed(epsilon, ahead.dropped)


def _at_once(
    sides: tuple[Side, Side | None],
    prices: Prices,
    known: Known,
    *,
    cap: int,
    epsilon: float,
    deadline: float,
) -> tuple[Known, float]:
    """Return what `_sweep` does; what is known already, and no bound, where that would take over
    three quarters of the time.
    """
    most = 0.25 * time.thread_time() + 0.75 * deadline
    try:
        return _sweep(
            sides, prices, known, cap=cap, epsilon=epsilon, deadline=most, looks_ahead=True
        )
    except GiveUpError:
        return known, np.inf


def _missed(epsilon: float, *dropped: float) -> float:
    """Return how much may be missed: what was dropped counts beside plans that are better by
    `epsilon` already.
    """
    return epsilon + (1 + epsilon) * max(dropped)


def _walk_through(walk: Walk) -> Known:
    while walk.done < len(walk.side.layers):
        walk.step()
    order = np.argsort(walk.states.costs[:, 0])
    return Known(walk.states.costs[order], walk.plans(order))


def _join(ahead: Walk, behind: Walk, kinds: Rows, known: Known) -> Known:
    """Known plans with all pairs of a partial plan from the start and one from the end that meet in
    a group.

    Raises GiveUpError at the deadline.
    """
    left, right = ahead.states, behind.states
    room = max(_ROOM, 2 * int(np.diff(right.first).max()))
    found, costs = np.empty((room, 2), np.int64), np.empty((room, 2))
    for group in range(len(left.first) - 1):
        begin, ends = int(left.first[group]), (int(right.first[group]), int(right.first[group + 1]))
        while begin < left.first[group + 1] and ends[0] < ends[1]:
            ahead.check_time()
            some = np.array([begin, left.first[group + 1], *ends])
            best = np.ascontiguousarray(known.costs.T)
            count, begin = state_kernels().join(
                left.costs, right.costs, some, kinds, *best, found, costs
            )
            rows = Known(np.zeros((0, 2)), found[:0]).joined(costs[:count], found[:count])
            first, second = ahead.plans(rows.plans[:, 0]), behind.plans(rows.plans[:, 1])
            known = known.joined(
                rows.costs, np.concatenate([first, second[:, ::-1]], axis=1).astype(np.int32)
            )
    return known
