"""Sentences on why a chosen plan is not a plainer one: it splits parameters, has stages, or
compresses gradients.

Each is "" where that is not so. `fitting` are the plans of as many devices that meet the limits,
`peers` all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_topt.basics.units import format_seconds
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES


class Point(Protocol):
    """A plan with its seconds per step."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""


def why_split(chosen: Point, fitting: Sequence[Point], peers: Sequence[Point]) -> str:
    """Return what splitting parameters over ranks is good for; "" where nothing else was
    searched.
    """
    if not chosen.plan.mesh.tensor_axes or all(point.plan.mesh.tensor_axes for point in peers):
        return ""
    whole = [point for point in fitting if not point.plan.mesh.tensor_axes]
    words = "parameters are split over ranks inside a node"
    if not whole:
        return f"{words}, without which no plan fits"
    return (
        f"{words}: without that the fastest plan takes "
        f"{format_seconds(min(point.step_seconds for point in whole))}"
    )


def why_staged(chosen: Point, fitting: Sequence[Point], peers: Sequence[Point]) -> str:
    """Return what stages are good for; "" where nothing else was searched."""
    if chosen.plan.schedule is None or all(point.plan.schedule is not None for point in peers):
        return ""
    whole = [point for point in fitting if point.plan.schedule is None]
    words = "the model is cut into stages"
    if not whole:
        return f"{words}, without which no plan fits"
    return (
        f"{words}: without them the fastest plan takes "
        f"{format_seconds(min(point.step_seconds for point in whole))}"
    )


def why_stale(chosen: Point, fitting: Sequence[Point], peers: Sequence[Point]) -> str:
    """Return what stages that do not wait for one another are good for."""
    if chosen.plan.schedule not in CONTINUOUS_SCHEDULES:
        return ""
    words = (
        "stages compute with weights that miss some updates, which was allowed, and never "
        "wait "
        "for these"
    )
    waiting = [point for point in fitting if point.plan.schedule not in CONTINUOUS_SCHEDULES]
    if waiting:
        words += (
            ": the fastest plan without that takes "
            f"{format_seconds(min(p.step_seconds for p in waiting))}"
        )
    return words


def why_views(chosen: Point, fitting: Sequence[Point], peers: Sequence[Point]) -> str:
    """Return what gradients in DDP's buckets are good for."""
    if not chosen.plan.gradient_views:
        return ""
    words = (
        "gradients are views of DDP's buckets, so that what an optimizer keeps of them is "
        "overwritten by the next step"
    )
    own = [point for point in fitting if not point.plan.gradient_views]
    if not own:
        return f"{words}: otherwise no plan fits"
    return (
        f"{words}: otherwise the fastest plan that fits takes "
        f"{format_seconds(min(p.step_seconds for p in own))}"
    )


def why_compressed(chosen: Point, peers: Sequence[Point]) -> str:
    """Return what compression is good for."""
    exchange = chosen.plan.gradient_exchange
    if exchange is None or exchange.is_exact:
        return ""
    words = (
        f"gradients are sent compressed ({exchange.words}), which was allowed and is "
        "predicted "
        "to be faster"
    )
    exact = [
        p for p in peers if p.plan.gradient_exchange is None or p.plan.gradient_exchange.is_exact
    ]
    if exact:
        fastest = min(exact, key=lambda p: p.step_seconds)
        words += (
            ": the fastest plan of the frontier without that takes "
            f"{format_seconds(fastest.step_seconds)}"
        )
    return words
