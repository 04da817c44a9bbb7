"""Choosing one plan from a frontier, and saying why: least time, least memory, or fewest devices,
within the limits.

The three are the user modes of TensorOpt (arXiv 2004.10856, section 5): mini-time, and
mini-parallelism for ``"devices"``. Predictions have errors, so among the plans that are as good as
the best up to that error the simplest one is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.plain_values import shown
from lightning_topt.plan.choice_reasons import (
    why_compressed,
    why_split,
    why_staged,
    why_stale,
    why_views,
)
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES

OBJECTIVES = ("time", "memory", "devices")
# Shares by which predicted times may be wrong: plans closer to one another than this count as
# equally fast. Errors of plans that run by the same mechanism are alike: only the storage and
# recomputation of blocks differ.
TIME_ERROR, ALIKE_TIME_ERROR = 0.15, 0.03
# Of steps of about 10 ms, ZeRO-1 was predicted to save 1 to 2 ms and saved none: what is done per
# step and per parameter in Python, by whatever runs it, is in no formula.
TIME_ERROR_SECONDS = 2e-3
# the same for memory, where it is the objective; errors of similar plans are alike, so it is small
MEMORY_ERROR = 0.01


class NoPlanFitsError(ValueError):
    """No plan meets the limits; says the smallest memory that one would need, and which plan that
    is.
    """


def check_objective(objective: str, *, allowed: Sequence[str] = OBJECTIVES) -> None:
    """Raise ValueError unless `objective` is one of `allowed`."""
    if objective not in allowed:
        raise ValueError(f"objective must be one of {', '.join(allowed)}; got {shown(objective)}")


def choose(
    points: Sequence[PlanPoint],
    *,
    objective: str = "time",
    memory_limit: float | None = None,
    devices: int | None = None,
    memory_margin: float = 0.05,
    time_error: float = TIME_ERROR,
    time_error_seconds: float = TIME_ERROR_SECONDS,
    alike_time_error: float = ALIKE_TIME_ERROR,
) -> PlanPoint:
    """Return the simplest point that is as good as the best by `objective`; its plan's `reason`
    says why, and what others cost.

    First the simplest mechanism: weights miss no update, or few, gradients travel whole, parameters
    are whole, there are no stages, gradients are no views. Then the simplest plan that runs by it:
    a plain schedule, blocks are alike, nothing is recomputed, a low ZeRO level, few blocks that
    deviate. Plans with equally many devices are compared.

    Args:
        points: `PlanFrontier.candidates`, or any others.
        objective: ``"time"``: least time; ``"memory"``: least memory (up to 1 %); ``"devices"``:
            fewest devices, then least time.
        memory_limit: bytes per device, or None.
        devices: consider plans for this number of devices only.
        memory_margin: a plan fits when ``peak_bytes * (1 + memory_margin) <= memory_limit``.
        time_error, time_error_seconds: plans that are slower than the fastest by at most this share
            and so many seconds count as equally fast.
        alike_time_error: the share for plans that run by the same mechanism, of which the fastest
            is looked for.

    Raises ValueError for an unknown objective and for a number of devices without plans,
    NoPlanFitsError when nothing fits.
    """
    check_objective(objective)
    candidates = [point for point in points if devices is None or point.devices == devices]
    if not candidates:
        planned = sorted({point.devices for point in points})
        raise ValueError(f"there are no plans for {devices} devices; plans were made for {planned}")
    fitting = fitting_points(candidates, memory_limit=memory_limit, memory_margin=memory_margin)
    if not fitting:
        assert memory_limit is not None
        raise NoPlanFitsError(_why_none_fits(candidates, memory_limit, memory_margin))
    by_memory = _by_memory, MEMORY_ERROR, MEMORY_ERROR, 0.0
    by_time = _by_time, time_error, min(alike_time_error, time_error), time_error_seconds
    cost, error, alike_error, least = by_memory if objective == "memory" else by_time
    best = min(
        fitting, key=lambda p: (p.devices if objective == "devices" else 0, cost(p), p.devices)
    )
    equal = [
        p
        for p in fitting
        if p.devices == best.devices and cost(p)[0] <= cost(best)[0] * (1 + error) + least
    ]
    simplest = min(_mechanism(point.plan) for point in equal)
    alike = [point for point in equal if _mechanism(point.plan) == simplest]
    most = min(cost(point)[0] for point in alike) * (1 + alike_error) + least
    chosen = min(
        (p for p in alike if cost(p)[0] <= most), key=lambda p: (_complexity(p.plan), cost(p))
    )
    reason = "; ".join(
        [
            _why(
                chosen,
                best,
                objective=objective,
                memory_limit=memory_limit,
                error=alike_error if best in alike else error,
            ),
            *_neighbours(
                chosen, candidates, memory_limit=memory_limit, memory_margin=memory_margin
            ),
        ]
    )
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, reason=f"{reason}."))


def fitting_points(
    points: Iterable[PlanPoint], *, memory_limit: float | None, memory_margin: float = 0.05
) -> list[PlanPoint]:
    """Return the points that fit into `memory_limit` with their margin; all without a limit."""
    return [
        p
        for p in points
        if memory_limit is None or p.peak_bytes * (1 + memory_margin) <= memory_limit
    ]


def _by_time(point: PlanPoint) -> tuple[float, float]:
    return point.step_seconds, point.peak_bytes


def _by_memory(point: PlanPoint) -> tuple[float, float]:
    return point.peak_bytes, point.step_seconds


def _mechanism(plan: ParallelPlan) -> tuple[int, ...]:
    """Smaller is simpler; what a plan runs by beside the storage and recomputation of its
    blocks.
    """
    exchange = plan.gradient_exchange
    exchanged = 0 if exchange is None else 2 - exchange.is_exact
    return (
        CONTINUOUS_SCHEDULES.get(plan.schedule or "", 0),
        exchanged,
        int(not plan.keeps_gradients_whole),
        int(plan.schedule is not None),
        int(plan.gradient_views),
    )


def _complexity(plan: ParallelPlan) -> tuple[int, ...]:
    """Smaller is simpler; whole numbers that do not depend on any prediction, so that noise moves
    no choice between equals.
    """
    named = [block.config for block in plan.blocks if block.block]
    levels = [block.config.storage.level for block in plan.blocks]
    kinds = {(config.storage, config.recompute) for config in named}
    if plan.keeps_gradients_whole:
        # the block "" cannot recompute, and is of level 2 in plans that shard: only here it can
        # deviate
        stored = {config.storage for config in named}
        kinds |= {
            (block.config.storage, False)
            for block in plan.blocks
            if block.config.storage not in stored
        }
    recomputed = sum(config.recompute for config in named)
    return (
        *_schedule_complexity(plan),
        len(plan.mesh.axes),
        len(kinds),
        int(recomputed > 0),
        max(levels),
        recomputed,
        sum(levels),
    )


def _schedule_complexity(plan: ParallelPlan) -> tuple[int, ...]:
    """Plans without stages, then one stage per rank, more of them; last those whose gradients of
    parameters have own passes.
    """
    if plan.schedule is None:
        return 0, 0, 0
    rule = SCHEDULES.get(plan.schedule)
    return (
        1 + (rule is not None and rule.splits_backward),
        plan.stages_per_rank,
        int(plan.schedule != "1f1b"),
    )


def _why_none_fits(points: Sequence[PlanPoint], memory_limit: float, memory_margin: float) -> str:
    smallest = min(points, key=lambda point: point.peak_bytes)
    needed = smallest.peak_bytes * (1 + memory_margin)
    most_devices = max(points, key=lambda point: point.devices).devices
    return (
        f"no plan fits into {format_bytes(memory_limit)} per device. The smallest needs "
        f"{format_bytes(needed)} "
        f"({format_bytes(smallest.peak_bytes)} predicted and a margin of {100 * memory_margin:.0f} "
        "%): "
        f"{smallest.plan.summary()} on {smallest.devices} device(s). Set memory_limit to at least "
        "that, use a smaller batch "
        f"per device, or more than {most_devices} device(s)"
    )


def _why(
    chosen: PlanPoint, best: PlanPoint, *, objective: str, memory_limit: float | None, error: float
) -> str:
    """The first sentence: what the plan is the best of, and what it costs."""
    limit = (
        ""
        if memory_limit is None
        else f" that fits into a limit of {format_bytes(memory_limit)} per device"
    )
    costs = (
        f": {format_seconds(chosen.step_seconds)} and {format_bytes(chosen.peak_bytes)} predicted "
        "on "
        f"{chosen.devices} device(s)"
    )
    if chosen is best:
        words = {
            "time": f"The fastest step{limit}",
            "memory": f"The least memory of any plan{limit}",
            "devices": f"The fewest devices with a plan{limit}, and their fastest step",
        }
        return words[objective] + costs
    words = {
        "time": f"As fast as any plan{limit}",
        "memory": f"As small as any plan{limit}",
        "devices": f"The fewest devices with a plan{limit}, as fast as any of theirs",
    }
    simplest = f", within the prediction's error of {100 * error:g} %, and the simplest of these"
    if objective == "memory":
        saved = (
            f"the smallest ({best.plan.summary()}) saves "
            f"{_percent(best.peak_bytes, chosen.peak_bytes)} of the memory"
        )
    else:
        saved = (
            f"the fastest ({best.plan.summary()}) saves "
            f"{_percent(best.step_seconds, chosen.step_seconds)} of the time"
        )
    return f"{words[objective]}{simplest}{costs}; {saved}"


def _neighbours(
    chosen: PlanPoint,
    points: Sequence[PlanPoint],
    *,
    memory_limit: float | None,
    memory_margin: float,
) -> list[str]:
    """Sentences on the plans beside it on the frontier, and on what compression buys."""
    sentences = []
    peers = sorted((p for p in points if p.devices == chosen.devices), key=lambda p: p.peak_bytes)
    larger = [p for p in peers if p.peak_bytes >= chosen.peak_bytes]
    faster = next((p for p in larger if p.step_seconds < chosen.step_seconds), None)
    smaller = next((p for p in reversed(peers) if p.peak_bytes < chosen.peak_bytes), None)
    if faster is not None:
        needed = faster.peak_bytes * (1 + memory_margin)
        over = memory_limit is not None and needed > memory_limit
        sentences.append(
            f"the next faster plan ({faster.plan.summary()}) saves "
            f"{_percent(faster.step_seconds, chosen.step_seconds)} of "
            f"the time and needs {format_bytes(needed)} with its margin"
            + (", above the limit" if over else "")
        )
    if smaller is not None:
        saved = format_bytes(chosen.peak_bytes - smaller.peak_bytes)
        change = (smaller.step_seconds - chosen.step_seconds) / chosen.step_seconds
        pace = (
            f"is {100 * change:.1f} % slower"
            if change >= 0
            else f"{100 * -change:.1f} % of the time"
        )
        sentences.append(
            f"the next smaller plan ({smaller.plan.summary()}) saves {saved} and {pace}"
        )
    fitting = fitting_points(peers, memory_limit=memory_limit, memory_margin=memory_margin)
    whys = [why(chosen, fitting, peers) for why in (why_split, why_staged, why_stale, why_views)]
    return [*sentences, *filter(None, [why_compressed(chosen, peers), *whys])]


def _percent(low: float, high: float) -> str:
    return f"{100 * (high - low) / high:.1f} %"
