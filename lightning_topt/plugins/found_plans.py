"""Frontiers of several searches for one fit: what is the best so far, what more would pay, and all
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_topt.plan.choose import TIME_ERROR, TIME_ERROR_SECONDS, fitting_points
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.plan_request import PlanRequest


def fastest(
    request: PlanRequest, search: SearchRequest, found: Iterable[PlanFrontier]
) -> float | None:
    """Return the least seconds of plans that fit; None where none does."""
    limit = (
        search.cluster.device.memory_bytes if request.memory_limit is None else request.memory_limit
    )
    points = (point for frontier in found for point in frontier.candidates)
    fitting = fitting_points(points, memory_limit=limit, memory_margin=request.memory_margin)
    return min((point.step_seconds for point in fitting), default=None)


def pays(seconds: float, best: float) -> bool:
    """Return whether a step of `seconds` would be chosen before the simpler ones of at least
    `best`; see `choose`.
    """
    return seconds * (1 + TIME_ERROR) + TIME_ERROR_SECONDS < best


def seconds_that_pay(
    request: PlanRequest, search: SearchRequest, found: Iterable[PlanFrontier]
) -> float | None:
    """Return the seconds below which a step would be chosen before those that were `found`; None
    where memory decides.
    """
    best = fastest(request, search, found)
    if best is None or request.objective != "time":
        return None
    return max((best - TIME_ERROR_SECONDS) / (1 + TIME_ERROR), 0.0)


def together(found: Sequence[PlanFrontier]) -> PlanFrontier:
    """Return one frontier of all that was searched."""
    first = found[0]
    if len(found) == 1:
        return first
    points: list[PlanPoint] = [point for frontier in found for point in frontier.points]
    return PlanFrontier.of(
        points,
        uniform=[point for frontier in found for point in frontier.uniform],
        capture_seconds=first.capture_seconds,
        search_seconds=sum(frontier.search_seconds for frontier in found),
        error_bound=max(frontier.error_bound for frontier in found),
    )
