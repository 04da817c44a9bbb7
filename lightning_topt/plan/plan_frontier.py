"""`PlanFrontier` holds the plans that no other beats, each with what it is predicted to cost;
`frontier.json` is its text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_topt.costs.plain_values import names, number, one_line, parse_json, whole
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.shared_blocks import BlockTables, SharedBlocks

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class PlanPoint:
    """A plan with what it is predicted to cost: seconds per step, bytes per device at the peak,
    number of devices.
    """

    step_seconds: float
    peak_bytes: float
    devices: int
    plan: ParallelPlan


@dataclass(frozen=True)
class PlanFrontier:
    """All plans that no other plan for the same number of devices beats in both time and memory, by
    devices and memory. Plans whose gradients are views of DDP's buckets are compared with one
    another only: a choice may prefer others to them.

    `exact` says whether the search proves that; where not, no plan is better than one of these by
    more than the share `error_bound` in both. `uniform` are plans that treat all blocks alike,
    whether others beat them or not: a choice may prefer them (see `choose`); with split parameters,
    where some plan of that split may be on the frontier. `frontier.json` holds exactly these fields
    (docs/schemas.md).
    """

    points: tuple[PlanPoint, ...]
    exact: bool
    capture_seconds: float
    search_seconds: float
    error_bound: float = 0.0
    uniform: tuple[PlanPoint, ...] = ()

    @property
    def candidates(self) -> tuple[PlanPoint, ...]:
        """All plans that may be chosen: those of the frontier, then the uniform ones that are not
        on it.
        """
        known = {point.step_seconds for point in self.points}  # far quicker to compare than plans
        others = (p for p in self.uniform if p.step_seconds not in known or p not in self.points)
        return (*self.points, *others)

    def shown_with(self, chosen: PlanPoint) -> tuple[PlanPoint, ...]:
        """Return the points to show: those of the frontier, and the chosen one where it is not
        among them.
        """
        return self.points if chosen in self.points else (*self.points, chosen)

    @classmethod
    def of(
        cls,
        points: Iterable[PlanPoint],
        *,
        uniform: Iterable[PlanPoint] = (),
        capture_seconds: float = 0.0,
        search_seconds: float = 0.0,
        error_bound: float = 0.0,
    ) -> PlanFrontier:
        """Return the frontier of any points: those that another one for as many devices beats are
        left out.
        """
        kept: list[PlanPoint] = []
        fastest: dict[tuple[int, bool], float] = {}
        for point in sorted(points, key=lambda p: (p.devices, p.peak_bytes, p.step_seconds)):
            kind = point.devices, point.plan.gradient_views
            if kind not in fastest or point.step_seconds < fastest[kind]:
                kept.append(point)
                fastest[kind] = point.step_seconds
        return cls(
            tuple(kept),
            error_bound == 0,
            capture_seconds,
            search_seconds,
            error_bound,
            tuple(uniform),
        )

    def to_json(self) -> str:
        """Return the frontier as `frontier.json` holds it."""
        lists, shared = {"points": self.points, "uniform": self.uniform}, SharedBlocks()
        plain = {
            key: [{**vars(p), "plan": shared.plain(p.plan)} for p in points]
            for key, points in lists.items()
        }
        return json.dumps(
            {"schema_version": SCHEMA_VERSION, **vars(self), **plain, **shared.tables}
        )

    @classmethod
    def from_json(cls, text: str) -> PlanFrontier:
        """Read what `to_json` wrote. Raises PlanError, also on another schema version."""
        try:
            return _read_frontier(parse_json(text))
        except (ValueError, TypeError, OverflowError) as error:
            raise PlanError(f"cannot read the frontier: {one_line(error)}") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")


def _read_frontier(data: Any) -> PlanFrontier:
    if not isinstance(data, dict):
        raise ValueError(f"it is a mapping, got {type(data).__name__}")
    if type(data.get("schema_version")) is not int or data.pop("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"it was not written by schema version {SCHEMA_VERSION}; run `topt plan` again"
        )
    known = {field.name for field in dataclasses.fields(PlanFrontier)} | {"blocks", "configs"}
    if wrong := set(data) ^ known:
        raise ValueError(f"the entries {names(wrong)} are unknown or missing")
    tables = BlockTables(data.pop("blocks"), data.pop("configs"))
    if not isinstance(data.pop("exact"), bool):
        raise ValueError("exact must be true or false")
    lists = {key: _read_points(data.pop(key), tables, name=key) for key in ("points", "uniform")}
    seconds = {key: number(value, name=key) for key, value in data.items()}
    return PlanFrontier(exact=seconds["error_bound"] == 0, **lists, **seconds)  # type: ignore[arg-type]


def _read_points(entries: Any, tables: BlockTables, *, name: str) -> tuple[PlanPoint, ...]:
    if not isinstance(entries, list | tuple) or not all(
        isinstance(entry, dict) for entry in entries
    ):
        raise ValueError(f"{name} must be a list of mappings")
    fields = {"step_seconds", "peak_bytes", "devices", "plan"}
    if any(set(entry) != fields for entry in entries):
        raise ValueError(f"each of {name} has the entries {sorted(fields)}")
    return tuple(
        PlanPoint(
            number(entry["step_seconds"], name="step_seconds"),
            number(entry["peak_bytes"], name="peak_bytes"),
            whole(entry["devices"], name="devices"),
            ParallelPlan.from_dict(tables.written_out(entry["plan"], name=f"{name}[{place}].plan")),
        )
        for place, entry in enumerate(entries)
    )
