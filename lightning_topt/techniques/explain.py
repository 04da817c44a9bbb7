"""What a plan is expected to cost, taken apart: seconds by kind of work, bytes by phase.

`explain` does it for a whole plan, `explain_blocks` block by block.
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
    """What a plan is expected to cost on each rank, in seconds and bytes.

    Args:
        step_seconds: `compute_seconds` + `exposed_communication_seconds`
        seconds: the work by kind; exchanges in full, overlapped or not
        peak_phase: the phase of `peak_bytes`, ``"backward 3"`` for instance
        peak_parts: what is alive in that phase, in bytes by kind
        phases: the bytes of every phase, in the order of time
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
    """Calls of one collective along a tensor axis, in one pass of a block.

    Args:
        during: the pass: ``"forward"``, ``"backward"`` or ``"recompute"``
        op: the collective
        axis: name of the tensor axis
        calls: how often it is called
        bytes: of the unsharded tensors, all calls together
        seconds: of all calls
    """

    during: str
    op: str
    axis: str
    calls: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class BlockExplanation:
    """The costs of one block of a plan on each rank.

    Args:
        seconds: by kind, as in `Explanation`
        peak_parts: bytes by kind in the phase in which the plan's memory is at its peak
        collectives: what its operators exchange along tensor axes; their seconds are part of those
            of the passes
    """

    seconds: Mapping[str, float]
    peak_parts: Mapping[str, float]
    collectives: tuple[TensorCollective, ...]


def explain(costs: PlanCosts, configs: Configs) -> Explanation:
    """Return what the plan that gives each block its entry of `configs` costs.

    Raises:
        ValueError: a block has no configuration, or one that no technique places
    """
    costs.check(configs)
    # time
    seconds = seconds_by_kind(costs, configs)
    compute = compute_seconds(seconds)
    step_seconds = costs.seconds(configs)
    # memory: bytes (phase,) of every kind, and the phase in which their sum is largest
    lifetimes, beside = [*costs.plan_lifetimes(configs)], costs.neighbours(configs)
    for name, config in configs.items():
        lifetimes += costs.block_lifetimes(name, config, beside[name])
    order, parts = costs.step.phases.order, costs.step.phases.by_kind(lifetimes)
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
    """Return what each block of the plan costs; shared costs of the plan are in none of them.

    Raises:
        ValueError: as in `explain`
    """
    costs.check(configs)
    # one phase for all blocks: that of the peak of the plan
    beside, peak = costs.neighbours(configs), int(np.argmax(costs.memory(configs)))
    # bytes of the block in the phase of the peak
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
    """Return the work of a step in seconds by kind, overlapped or not."""
    # the sum over blocks
    blocks = [_block_seconds(costs, name, config) for name, config in configs.items()]
    found = {kind: sum(block[kind] for block in blocks) for kind in blocks[0]}
    # what the blocks of a plan take together counts as update, but for the host's part
    found["forward"] += costs.step.host_seconds
    outer = costs.step.outer_seconds
    found["update"] += (
        costs.plan_seconds(configs) - costs.step.sent_seconds - costs.step.host_seconds - outer
    )
    found["reduce"] += outer
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
    # calls by pass, collective and axis: how many, of how many bytes
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
    # one entry for all calls, in the order of passes
    for (during, op_name, axis), calls in sorted(
        passes.items(), key=lambda each: _PASSES.index(each[0][0])
    ):
        seconds = sum(
            count * costs.step.collective_seconds(op_name, size, axes=[axis])
            for count, size in calls
        )
        count, size = sum(count for count, _ in calls), sum(count * size for count, size in calls)
        yield TensorCollective(during, op_name, costs.step.mesh.names[axis], count, size, seconds)


def _name(phase: Phase) -> str:
    return phase[0] if phase in ONCE else f"{phase[0]} {phase[1]}"
