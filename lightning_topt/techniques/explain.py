"""An explanation takes apart what one plan is expected to cost: what its seconds are spent on, and
what is in memory in each phase; for the whole plan (`explain`) or block by block
(`explain_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.lifetimes import ONCE, Phase
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import Configs, PlanCosts

_PASSES = ("forward", "backward", "recompute")


@dataclass(frozen=True)
class Explanation:
    """An `Explanation` says what a plan is expected to cost on each rank, in seconds and bytes.

    `step_seconds` = `compute_seconds` + `exposed_communication_seconds`. `seconds` splits the work
    (exchanges in full, overlapped or not), `peak_phase` names the phase of `peak_bytes`,
    ``"backward 3"`` for instance, `peak_parts` what is alive then, and `phases` the bytes of every
    phase in the order of time.
    """

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    seconds: Mapping[str, float]
    peak_bytes: float
    peak_phase: str
    peak_parts: Mapping[str, float]
    phases: Mapping[str, float]


@dataclass(frozen=True)
class TensorCollective:
    """Calls of `op` along a tensor axis in one pass (``"forward"``, ``"backward"``,
    ``"recompute"``) of a block, with the bytes of the whole tensors and the seconds of all of them.
    """

    during: str
    op: str
    axis: str
    calls: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class BlockExplanation:
    """The costs of one block of a plan on each rank: `seconds` by kind as in `Explanation`,
    `peak_parts` the bytes by kind that it has in the phase in which the plan's memory is at its
    peak, and what its operators exchange along tensor axes, whose seconds are part of those of the
    passes.
    """

    seconds: Mapping[str, float]
    peak_parts: Mapping[str, float]
    collectives: tuple[TensorCollective, ...]


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


def explain_blocks(costs: PlanCosts, configs: Configs) -> dict[str, BlockExplanation]:
    """Return what each block of the plan costs; what its blocks share is in none of them. Raises
    ValueError as `explain`.
    """
    costs.check(configs)
    beside, peak = costs.neighbours(configs), int(np.argmax(costs.memory(configs)))
    found = {}
    for name, config in configs.items():
        parts = costs.step.phases.by_kind(costs.block_lifetimes(name, config, beside[name]))
        found[name] = BlockExplanation(
            _block_seconds(costs, name, config),
            {kind: float(sizes[peak]) for kind, sizes in parts.items()},
            tuple(_tensor_collectives(costs, name, config)),
        )
    return found


def seconds_by_kind(costs: PlanCosts, configs: Configs) -> dict[str, float]:
    """Return the work of a step by kind, in seconds, whether it is in the way of anything or
    not.
    """
    blocks = [_block_seconds(costs, name, config) for name, config in configs.items()]
    found = {kind: sum(block[kind] for block in blocks) for kind in blocks[0]}
    found["forward"] += costs.step.host_seconds
    found["update"] += (
        costs.plan_seconds(configs) - costs.step.sent_seconds - costs.step.host_seconds
    )
    return {**found, "buffers": costs.step.sent_seconds}


def _block_seconds(costs: PlanCosts, name: str, config: OpConfig) -> dict[str, float]:
    time, (forward, backward) = costs.block_seconds(name, config), costs.step.compute[name]
    count = costs.step.num_microbatches
    return {
        "forward": count * float(forward.sum()),
        "backward": count * float(backward.sum()),
        "recompute": count * time.recompute,
        "update": time.update,
        "gather": sum(time.gather_foreground) + sum(time.gather_background),
        "reduce": time.reduce_foreground + time.reduce_background + time.reduce_last,
        "broadcast": time.broadcast,
    }


def _tensor_collectives(
    costs: PlanCosts, name: str, config: OpConfig
) -> Iterator[TensorCollective]:
    passes: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for op in costs.step.graph.ops:
        again = [("recompute", op.forward)] if config.recompute else []
        for during, kernels in (
            (("forward", op.forward), ("backward", op.backward), *again) if op.block == name else ()
        ):
            for kernel in kernels:
                if (shown := costs.step.shown(kernel)) is not None:
                    passes.setdefault((during, shown[0], shown[2]), []).append(
                        (kernel.count, shown[1])
                    )
    for (during, op_name, axis), calls in sorted(
        passes.items(), key=lambda each: _PASSES.index(each[0][0])
    ):
        seconds = sum(
            count * costs.step.collective_seconds(op_name, size, axes=[axis])
            for count, size in calls
        )
        count, size = sum(count for count, _ in calls), sum(count * size for count, size in calls)
        yield TensorCollective(during, op_name, costs.step.mesh.names[axis], count, size, seconds)


def _memory_by_kind(costs: PlanCosts, configs: Configs) -> dict[str, np.ndarray]:
    lifetimes, beside = [*costs.plan_lifetimes(configs)], costs.neighbours(configs)
    for name, config in configs.items():
        lifetimes += costs.block_lifetimes(name, config, beside[name])
    return costs.step.phases.by_kind(lifetimes)


def _name(phase: Phase) -> str:
    return phase[0] if phase in ONCE else f"{phase[0]} {phase[1]}"
