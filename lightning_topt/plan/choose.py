"""Choosing one plan from a frontier, and saying why: least time, least memory, or fewest devices, within the limits.

The three are the user modes of TensorOpt (arXiv 2004.10856, section 5): mini-time, and mini-parallelism for ``"devices"``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_topt.costs.units import format_bytes, format_seconds
from lightning_topt.plan.gradient_exchange import describe_exchange, is_lossy
from lightning_topt.plan.parallel_plan import ParallelPlan

SCHEMA_VERSION = 1
OBJECTIVES = ("time", "memory", "devices")


class NoPlanFitsError(ValueError):
    """No plan meets the limits; says the smallest memory that one would need, and which plan that is."""


@dataclass(frozen=True)
class PlanPoint:
    """A plan with what it is predicted to cost: seconds per step, bytes per device at the peak, number of devices."""

    step_seconds: float
    peak_bytes: float
    devices: int
    plan: ParallelPlan


@dataclass(frozen=True)
class PlanFrontier:
    """All plans that no other plan for the same number of devices beats in both time and memory, by devices and memory.

    `exact` says whether the search proves that; where not, no plan is better than one of these by more than the share
    `error_bound` in both. `frontier.json` holds exactly these fields (docs/schemas.md).
    """

    points: tuple[PlanPoint, ...]
    exact: bool
    capture_seconds: float
    search_seconds: float
    error_bound: float = 0.0

    @classmethod
    def of(
        cls,
        points: Iterable[PlanPoint],
        *,
        capture_seconds: float = 0.0,
        search_seconds: float = 0.0,
        error_bound: float = 0.0,
    ) -> PlanFrontier:
        """The frontier of any points: those that another one for as many devices beats are left out."""
        kept: list[PlanPoint] = []
        for point in sorted(points, key=lambda p: (p.devices, p.peak_bytes, p.step_seconds)):
            last = kept[-1] if kept and kept[-1].devices == point.devices else None
            if last is None or point.step_seconds < last.step_seconds:
                kept.append(point)
        return cls(tuple(kept), error_bound == 0, capture_seconds, search_seconds, error_bound)

    def to_json(self) -> str:
        """As `frontier.json` holds it."""
        points = [{**vars(point), "plan": point.plan.to_dict()} for point in self.points]
        return json.dumps({"schema_version": SCHEMA_VERSION, **vars(self), "points": points}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> PlanFrontier:
        """Read what `to_json` wrote. Raises ValueError on another schema version."""
        data: dict[str, Any] = json.loads(text)
        if data.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"this frontier was not written by schema version {SCHEMA_VERSION}; run `topt plan` again")
        points = [{**point, "plan": ParallelPlan.from_dict(point["plan"])} for point in data.pop("points")]
        return cls(points=tuple(PlanPoint(**point) for point in points), **data)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")


def check_objective(objective: str, *, allowed: Sequence[str] = OBJECTIVES) -> None:
    """Raise ValueError unless `objective` is one of `allowed`."""
    if objective not in allowed:
        raise ValueError(f"objective must be one of {', '.join(allowed)}; got {objective!r}")


def choose(
    points: Sequence[PlanPoint],
    *,
    objective: str = "time",
    memory_limit: float | None = None,
    devices: int | None = None,
    memory_margin: float = 0.05,
) -> PlanPoint:
    """The point that is best by `objective` within the limits; its plan's `reason` says why, and what its neighbours cost.

    Args:
        objective: ``"time"``: least time; ``"memory"``: least memory; ``"devices"``: fewest devices, then least time.
        memory_limit: bytes per device, or None.
        devices: consider plans for this number of devices only.
        memory_margin: a plan fits when ``peak_bytes * (1 + memory_margin) <= memory_limit``.

    Raises ValueError for an unknown objective and for a number of devices without plans, NoPlanFitsError when nothing fits.
    """
    check_objective(objective)
    candidates = [point for point in points if devices is None or point.devices == devices]
    if not candidates:
        planned = sorted({point.devices for point in points})
        raise ValueError(f"there are no plans for {devices} devices; plans were made for {planned}")
    fitting = [p for p in candidates if memory_limit is None or p.peak_bytes * (1 + memory_margin) <= memory_limit]
    if not fitting:
        assert memory_limit is not None
        raise NoPlanFitsError(_why_none_fits(candidates, memory_limit, memory_margin))
    keys = {
        "time": lambda p: (p.step_seconds, p.peak_bytes, p.devices),
        "memory": lambda p: (p.peak_bytes, p.step_seconds, p.devices),
        "devices": lambda p: (p.devices, p.step_seconds, p.peak_bytes),
    }
    chosen = min(fitting, key=keys[objective])
    reason = _why(chosen, candidates, objective=objective, memory_limit=memory_limit, memory_margin=memory_margin)
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, reason=reason))


def _why_none_fits(points: Sequence[PlanPoint], memory_limit: float, memory_margin: float) -> str:
    smallest = min(points, key=lambda point: point.peak_bytes)
    needed = smallest.peak_bytes * (1 + memory_margin)
    most_devices = max(points, key=lambda point: point.devices).devices
    return (
        f"no plan fits into {format_bytes(memory_limit)} per device. The smallest needs {format_bytes(needed)} "
        f"({format_bytes(smallest.peak_bytes)} predicted and a margin of {100 * memory_margin:.0f} %): "
        f"{smallest.plan.summary()} on {smallest.devices} device(s). Set memory_limit to at least that, use a smaller batch "
        f"per device, or more than {most_devices} device(s)"
    )


def _why(
    chosen: PlanPoint,
    points: Sequence[PlanPoint],
    *,
    objective: str,
    memory_limit: float | None,
    memory_margin: float,
) -> str:
    best = {
        "time": "The fastest step",
        "memory": "The least memory",
        "devices": "The fewest devices, and their fastest step",
    }
    within = "" if memory_limit is None else f" within {format_bytes(memory_limit)} per device"
    sentences = [
        f"{best[objective]}{within}: {format_seconds(chosen.step_seconds)} and {format_bytes(chosen.peak_bytes)} "
        f"predicted on {chosen.devices} device(s)"
    ]
    peers = sorted((p for p in points if p.devices == chosen.devices), key=lambda p: p.peak_bytes)
    faster = next((p for p in peers if p.step_seconds < chosen.step_seconds), None)
    smaller = next((p for p in reversed(peers) if p.peak_bytes < chosen.peak_bytes), None)
    if faster is not None:
        needed = faster.peak_bytes * (1 + memory_margin)
        over = memory_limit is not None and needed > memory_limit
        sentences.append(
            f"the next faster plan ({faster.plan.summary()}) saves {_percent(faster.step_seconds, chosen.step_seconds)} of "
            f"the time and needs {format_bytes(needed)} with its margin" + (", above the limit" if over else "")
        )
    if smaller is not None:
        saved = format_bytes(chosen.peak_bytes - smaller.peak_bytes)
        sentences.append(
            f"the next smaller plan ({smaller.plan.summary()}) saves {saved} and is "
            f"{_percent(chosen.step_seconds, smaller.step_seconds, of=chosen.step_seconds)} slower"
        )
    if exchange := _why_compressed(chosen, peers):
        sentences.append(exchange)
    return "; ".join(sentences) + "."


def _why_compressed(chosen: PlanPoint, peers: Sequence[PlanPoint]) -> str:
    exchange = chosen.plan.gradient_exchange
    if exchange is None or not is_lossy(exchange):
        return ""
    words = f"gradients are sent compressed ({describe_exchange(exchange)}), which was allowed and is predicted to be faster"
    exact = [p for p in peers if p.plan.gradient_exchange is None or not is_lossy(p.plan.gradient_exchange)]
    if exact:
        fastest = min(exact, key=lambda p: p.step_seconds)
        words += f": the fastest plan of the frontier without that takes {format_seconds(fastest.step_seconds)}"
    return words


def _percent(low: float, high: float, *, of: float | None = None) -> str:
    return f"{100 * (high - low) / (high if of is None else of):.1f} %"
