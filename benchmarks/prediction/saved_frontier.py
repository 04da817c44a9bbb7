"""Read the `frontier.json` that `topt plan` writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from lightning_topt.costs.accuracy import Interval
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import SCHEMA_VERSION, PlanFrontier, PlanPoint, TimeToLoss


def frontier_of_json(text: str) -> PlanFrontier:
    """Return what `PlanFrontier.to_json` wrote; raises ValueError on another schema version."""
    data = json.loads(text)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"it was not written by schema version {SCHEMA_VERSION}; run `topt plan` again"
        )

    def plan_of(plain: Mapping[str, Any]) -> ParallelPlan:
        stages = [
            [
                {"block": data["blocks"][block], **data["configs"][config]}
                for block, config in zip(stage["blocks"], stage["configs"], strict=True)
            ]
            for stage in plain["stages"]
        ]
        return ParallelPlan.from_dict({**plain, "stages": [{"blocks": each} for each in stages]})

    def interval_of(plain: Mapping[str, Any]) -> Interval:
        return Interval(**{**plain, "outside": tuple(plain["outside"])})

    def point_of(plain: Mapping[str, Any]) -> PlanPoint:
        found = {**plain, "plan": plan_of(plain["plan"])}
        for name in {"seconds_interval", "bytes_interval"} & found.keys():
            found[name] = interval_of(found[name])
        if (to_loss := found.get("to_loss")) is not None:
            # null is infinite, but for steps that are not known
            endless = {name: math.inf for name in ("high", "factor_high") if to_loss[name] is None}
            found["to_loss"] = TimeToLoss(**{**to_loss, **endless})
        return PlanPoint(**found)

    fields = {each.name: data[each.name] for each in dataclasses.fields(PlanFrontier)}
    for name in ("points", "uniform"):
        fields[name] = tuple(point_of(plain) for plain in data[name])
    return PlanFrontier(**{**fields, "left_out": tuple(data["left_out"])})
