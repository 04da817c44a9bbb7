"""An explanation takes apart what one plan is expected to cost: what its seconds are spent on, and what is in memory in each
phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.lifetimes import ONCE, Phase
from lightning_topt.techniques.plan_costs import Configs, PlanCosts


@dataclass(frozen=True)
class Explanation:
    """An `Explanation` says what a plan is expected to cost on each rank, in seconds and bytes.

    `step_seconds` = `compute_seconds` + `exposed_communication_seconds`. `seconds` splits the work (exchanges in full,
    overlapped or not), `peak_phase` names the phase of `peak_bytes`, ``"backward 3"`` for instance, `peak_parts` what is alive
    then, and `phases` the bytes of every phase in the order of time.
    """

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    seconds: Mapping[str, float]
    peak_bytes: float
    peak_phase: str
    peak_parts: Mapping[str, float]
    phases: Mapping[str, float]


def explain(costs: PlanCosts, configs: Configs) -> Explanation:
    """Return what the plan that gives each block its entry of `configs` costs.

    Raises ValueError when a block has no configuration, or one that no technique places.
    """
    costs.check(configs)
    seconds = seconds_by_kind(costs, configs)
    compute = compute_seconds(seconds)
    step_seconds = costs.seconds(configs)
    order, parts = costs.step.phases.order, _memory_by_kind(costs, configs)
    total = np.sum([*parts.values()], axis=0)
    peak = int(np.argmax(total))
    return Explanation(
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_communication_seconds=max(step_seconds - compute, 0.0),
        seconds=seconds,
        peak_bytes=float(total[peak]),
        peak_phase=_name(order[peak]),
        peak_parts={kind: float(sizes[peak]) for kind, sizes in parts.items()},
        phases={_name(phase): float(size) for phase, size in zip(order, total, strict=True)},
    )


def compute_seconds(seconds: Mapping[str, float]) -> float:
    """Return those of `seconds_by_kind` that are computation."""
    return sum(seconds[kind] for kind in ("forward", "backward", "recompute", "update"))


def seconds_by_kind(costs: PlanCosts, configs: Configs) -> dict[str, float]:
    """Return the work of a step by kind, in seconds, whether it is in the way of anything or not."""
    times = [costs.block_seconds(name, config) for name, config in configs.items()]
    compute = [costs.step.compute[name] for name in configs]
    step, count = costs.step, costs.step.num_microbatches
    shared = costs.plan_seconds(configs) - step.sent_seconds - step.host_seconds
    return {
        "forward": count * float(sum(forward.sum() for forward, _ in compute)) + step.host_seconds,
        "backward": count * float(sum(backward.sum() for _, backward in compute)),
        "recompute": count * sum(time.recompute for time in times),
        "update": sum(time.update for time in times) + shared,
        "gather": sum(sum(time.gather_foreground) + sum(time.gather_background) for time in times),
        "reduce": sum(time.reduce_foreground + time.reduce_background for time in times),
        "broadcast": sum(time.broadcast for time in times),
        "buffers": step.sent_seconds,
    }


def _memory_by_kind(costs: PlanCosts, configs: Configs) -> dict[str, np.ndarray]:
    lifetimes, beside = [*costs.plan_lifetimes(configs)], costs.neighbours(configs)
    for name, config in configs.items():
        lifetimes += costs.block_lifetimes(name, config, beside[name])
    return costs.step.phases.by_kind(lifetimes)


def _name(phase: Phase) -> str:
    return phase[0] if phase in ONCE else f"{phase[0]} {phase[1]}"
