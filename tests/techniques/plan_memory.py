"""The bytes of a plan in each phase, added up block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import PlanCosts


def plan_memory(costs: PlanCosts, configs: Mapping[str, OpConfig]) -> Any:
    """Return them as an array (phase,)."""
    total, beside = (
        costs.step.phases.add_up(costs.plan_lifetimes(configs)),
        costs.neighbours(configs),
    )
    for name, config in configs.items():
        total += costs.block_memory(name, config, beside[name])
    return total
