"""Choose one plan from a frontier, and say why.

    chosen = choose(frontier.candidates, objective="time", memory_limit=2**30)
    chosen.plan.reason      # "The fastest step that fits into 1 GiB per device: ..."

Objectives are least time, least memory or fewest devices, within the limits: the user modes of
TensorOpt (arXiv 2004.10856, section 5), mini-time, and mini-parallelism for ``"devices"``.
Predictions have errors, so among the plans that are as good as the best up to that error the
simplest one is chosen.

What two plans have in common, such as the rate of matrix products, does not change which of them is
faster. Where it is known by how much the ratio of two predicted times is off (`difference`), plans
within that count as equally fast, whatever the error of either time is. Of these run the simplest
mechanism, then the one that waits least for communication, then the one with most free memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.plain_values import shown
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES

OBJECTIVES = ("time", "memory", "devices")
TIME_TO_LOSS = "time_to_loss"  # of `step_factors.choose_by_loss`, which knows of the steps


# Shares by which predicted times may be wrong: plans closer to one another than this count as
# equally fast. Errors of plans that run by the same mechanism are alike: only the storage and
# recomputation of blocks differ.
TIME_ERROR, ALIKE_TIME_ERROR = 0.15, 0.03


# Of steps of about 10 ms, ZeRO-1 was predicted to save 1 to 2 ms and saved none: what is done per
# step and per parameter in Python, by whatever runs it, is in no formula.
TIME_ERROR_SECONDS = 2e-3
# the same for memory, where it is the objective; errors of similar plans are alike, so it is small
MEMORY_ERROR = 0.01


def errors_of(difference: float | None) -> tuple[float, float]:
    """Return the share and the seconds within which times count as equal; see `choose`."""
    share = TIME_ERROR if difference is None else difference
    return share, 0.0 if share == 0 else TIME_ERROR_SECONDS


def equal_in_words(difference: float | None) -> str:
    """Return the share within which times count as equal, and that it is assumed where it is."""
    share, _ = errors_of(difference)
    return f"{100 * share:.3g} %" + (", which is assumed" if difference is None else "")


class NoPlanFitsError(ValueError):
    """No plan meets the limits; the message names the smallest plan and what it needs."""


def choose(points: Sequence[PlanPoint], **options: Any) -> PlanPoint:
    """Return the point of `choose_place`, whose `options` these are, with the reason in its plan.

    Raises what `choose_place` raises.
    """
    place, reason = choose_place(points, **options)
    chosen = points[place]
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, reason=reason))


def choose_place(
    points: Sequence[PlanPoint],
    *,
    objective: str = "time",
    memory_limit: float | None = None,
    devices: int | None = None,
    memory_margin: float = 0.05,
    difference: float | None = None,
) -> tuple[int, str]:
    """Return the place of the simplest point that is as good as the best by `objective`.

    And the reason: why it is that one, and what others cost.

    First the simplest mechanism is chosen: weights miss no update, or few; gradients are exchanged
    unsharded and uncompressed; parameters are not split; there are no stages; gradients are no
    views. Then the simplest plan that runs by it: a plain schedule, equal blocks, nothing
    recomputed, a low ZeRO level, few blocks that deviate, none compiled. Plans with equally many
    devices are compared.

    Args:
        points: `PlanFrontier.candidates`, or any others.
        objective: ``"time"``: least time; ``"memory"``: least memory (up to 1 %); ``"devices"``:
            fewest devices, then least time.
        memory_limit: bytes per device, or None.
        devices: consider plans for this number of devices only.
        memory_margin: a plan fits when ``peak_bytes * (1 + memory_margin) <= memory_limit``.
        difference: the share by which the ratio of two predicted times may be off: plans that are
            slower than the fastest by at most this count as equally fast. Plans that run by the
            same mechanism on one mesh are compared by `ALIKE_TIME_ERROR` all the same. 0: the
            fastest alone. None: not known, `TIME_ERROR` is assumed.

    Raises:
        ValueError: an unknown objective, or a number of devices without plans.
        NoPlanFitsError: nothing fits.
    """
    check_objective(objective)
    # plans that may be chosen at all: for so many devices, within the limit
    candidates = [point for point in points if devices is None or point.devices == devices]
    if not candidates:
        planned = sorted({point.devices for point in points})
        raise ValueError(f"there are no plans for {devices} devices; plans were made for {planned}")
    fitting = fitting_points(candidates, memory_limit=memory_limit, memory_margin=memory_margin)
    if not fitting:
        assert memory_limit is not None
        raise NoPlanFitsError(_why_none_fits(candidates, memory_limit, memory_margin))

    # the error between mechanisms, the one within a mechanism, and seconds on top of both
    error, least = errors_of(difference)
    alike_error = min(ALIKE_TIME_ERROR, error)
    if objective == "memory":
        error, alike_error, least, difference = MEMORY_ERROR, MEMORY_ERROR, 0.0, None

    def cost(point: PlanPoint) -> tuple[float, float]:
        # the objective first; the other cost decides between equals
        costs = point.step_seconds, point.peak_bytes
        return costs[::-1] if objective == "memory" else costs

    # the best by the objective, and all that are as good up to the error
    best = min(
        fitting, key=lambda p: (p.devices if objective == "devices" else 0, cost(p), p.devices)
    )
    equal = [
        p
        for p in fitting
        if p.devices == best.devices and cost(p)[0] <= cost(best)[0] * (1 + error) + least
    ]

    # of these, the simplest mechanism, and the simplest plan that runs by it
    simplest = min(_mechanism(point.plan) for point in equal)
    alike = [point for point in equal if _mechanism(point.plan) == simplest]

    def simplest_of(several: Sequence[PlanPoint]) -> PlanPoint:
        most = min(cost(point)[0] for point in several) * (1 + alike_error) + least
        close = (p for p in several if cost(p)[0] <= most)
        return min(close, key=lambda p: (_complexity(p.plan), cost(p)))

    if difference is None:
        chosen = simplest_of(alike)
    else:
        # a plan of each mesh: what is not in common is how these communicate
        of_meshes = [simplest_of(several) for several in _by_mesh(alike)]
        chosen = min(of_meshes, key=lambda p: (_waits(p), p.peak_bytes, cost(p)))

    first = _why(
        chosen,
        best,
        objective=objective,
        memory_limit=memory_limit,
        error=alike_error if best in alike and difference is None else error,
        error_seconds=least,
        by_difference=difference is not None,
    )
    # what other plans for as many devices cost, without a mechanism of the chosen one
    peers = [point for point in candidates if point.devices == chosen.devices]
    fit = [point for point in fitting if point.devices == chosen.devices]
    reason = "; ".join([first, *_mechanism_reasons(chosen, fit, peers)])
    place = next(place for place, point in enumerate(points) if point is chosen)
    return place, f"{reason}."


def check_objective(objective: str, *, allowed: Sequence[str] = OBJECTIVES) -> None:
    """Raise ValueError unless `objective` is one of `allowed`."""
    if objective not in allowed:
        raise ValueError(f"objective must be one of {', '.join(allowed)}; got {shown(objective)}")


def fitting_points(
    points: Iterable[PlanPoint], *, memory_limit: float | None, memory_margin: float = 0.05
) -> list[PlanPoint]:
    """Return the points that fit into `memory_limit` with their margin; all without a limit."""
    return [
        p
        for p in points
        if memory_limit is None or p.peak_bytes * (1 + memory_margin) <= memory_limit
    ]


# ---- what is simpler


def _mechanism(plan: ParallelPlan) -> tuple[int, ...]:
    # Rank what a plan runs by, besides storage and recomputation of blocks; smaller is simpler
    exchange = plan.gradient_exchange
    # 0: all-reduce of whole gradients, 1: sent otherwise but exactly, 2: compressed, 3: not at all
    exchanged = 0 if exchange is None else 2 - exchange.is_exact
    exchanged = exchanged if plan.local_steps is None else 3
    return (
        CONTINUOUS_SCHEDULES.get(plan.schedule or "", 0),
        exchanged,
        int(not plan.keeps_gradients_whole),
        int(plan.schedule is not None),
        int(plan.gradient_views),
    )


def _by_mesh(points: Iterable[PlanPoint]) -> list[list[PlanPoint]]:
    # The points by their meshes and schedules; only blocks differ within one of these
    found: dict[Hashable, list[PlanPoint]] = {}
    for point in points:
        plan = point.plan
        stages = plan.schedule, len(plan.stages), plan.num_microbatches, plan.accumulate
        found.setdefault((plan.mesh, *stages, plan.own_batches), []).append(point)
    return [*found.values()]


def _waits(point: PlanPoint) -> int:
    # The percent of a step that nothing but communication runs in
    predicted = point.plan.predicted
    if predicted is None or not predicted.step_seconds:
        return 0
    return round(100 * predicted.exposed_communication_seconds / predicted.step_seconds)


def _complexity(plan: ParallelPlan) -> tuple[int, ...]:
    """Rank plans of one mechanism; smaller is simpler.

    Whole numbers that depend on no prediction, so noise never decides between equals.
    """
    # blocks that have a name; the rest of the model is the block ""
    named = [block.config for block in plan.blocks if block.block]
    levels = [block.config.storage.level for block in plan.blocks]
    # how many ways of treating a block there are
    kinds = {(config.storage, config.recompute, config.compile) for config in named}
    if plan.keeps_gradients_whole:
        # the block "" cannot recompute, and is of level 2 in plans that shard: only here it can
        # deviate
        stored = {config.storage for config in named}
        kinds |= {
            (block.config.storage, False, False)
            for block in plan.blocks
            if block.config.storage not in stored
        }
    # compared from the left: the schedule first, then the axes of the mesh, then kinds of blocks
    recomputed = sum(config.recompute for config in named)
    return (
        *_schedule_complexity(plan),
        len(plan.mesh.axes),
        len(kinds),
        int(recomputed > 0),
        max(levels),
        recomputed,
        sum(levels),
        sum(config.compile for config in named),
    )


def _schedule_complexity(plan: ParallelPlan) -> tuple[int, ...]:
    # Rank schedules: none, one stage per rank, several, own passes for parameter gradients
    if plan.schedule is None:
        return 0, 0, 0
    rule = SCHEDULES.get(plan.schedule)
    return (
        1 + (rule is not None and rule.splits_backward),
        plan.stages_per_rank,
        int(plan.schedule != "1f1b"),
    )


# ---- why: sentences of the reason


def _why_none_fits(points: Sequence[PlanPoint], memory_limit: float, memory_margin: float) -> str:
    # what would help: the limit that the smallest plan needs, or more devices
    smallest = min(points, key=lambda point: point.peak_bytes)
    needed = smallest.peak_bytes * (1 + memory_margin)
    most_devices = max(points, key=lambda point: point.devices).devices
    return (
        f"no plan fits into {format_bytes(memory_limit)} per device. The smallest needs "
        f"{format_bytes(needed)} ({format_bytes(smallest.peak_bytes)} predicted and a margin of "
        f"{100 * memory_margin:.0f} %): {smallest.plan.summary()} on {smallest.devices} device(s). "
        "Set memory_limit to at least that, use a smaller batch per device, or more than "
        f"{most_devices} device(s)"
    )


def _why(
    chosen: PlanPoint,
    best: PlanPoint,
    *,
    objective: str,
    memory_limit: float | None,
    error: float,
    error_seconds: float,
    by_difference: bool,
) -> str:
    # The first sentence: what the plan is the best of, and what it costs
    limit = (
        "" if memory_limit is None else f" that fits into {format_bytes(memory_limit)} per device"
    )
    costs = (
        f": {format_seconds(chosen.step_seconds)} and {format_bytes(chosen.peak_bytes)} predicted "
        f"on {chosen.devices} device(s)"
    )
    # the best by the objective is the simplest as well: nothing more to explain
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
    # a simpler one was taken, so the reason says what the best would save
    within = f"{100 * error:.3g} %"
    # of steps of a few milliseconds the seconds of the error are what counts
    if objective != "memory" and chosen.step_seconds > best.step_seconds * (1 + error):
        within += f" and {format_seconds(error_seconds)}"
    simplest = f", within the prediction's error of {within}, and the simplest of these"
    if by_difference:
        simplest = (
            f", within {within}, which the ratio of two predicted times may be off by. Of these it "
            f"is the simplest kind that waits least for communication ({_waits(chosen)} % of the "
            "step), then has most free memory"
        )
    if objective == "memory":
        saved = (
            f"the smallest ({best.plan.summary()}) saves "
            f"{_percent(best.peak_bytes, chosen.peak_bytes)} of the memory"
        )
    else:
        saved = (
            f"the fastest ({best.plan.summary()}) saves "
            f"{format_seconds(chosen.step_seconds - best.step_seconds)}, "
            f"{_percent(best.step_seconds, chosen.step_seconds)} of the time"
        )
    return f"{words[objective]}{simplest}{costs}; {saved}"


def _mechanism_reasons(
    chosen: PlanPoint, fitting: Sequence[PlanPoint], peers: Sequence[PlanPoint]
) -> list[str]:
    """Return a sentence for each way in which the chosen plan is not a plain one.

    `fitting` are the plans for as many devices that meet the limits, `peers` all for as many
    devices.
    """
    found = []
    for words, has in _MECHANISMS:
        if not has(chosen.plan):
            continue
        said = words
        if (exchange := chosen.plan.gradient_exchange) is not None:
            said = words.format(exchange=exchange.words)
        without = [point.step_seconds for point in fitting if not has(point.plan)]
        if without:
            seconds = format_seconds(min(without))
            found.append(f"{said}: without that the fastest plan takes {seconds}")
        elif not all(has(point.plan) for point in peers):
            found.append(f"{said}, without which no plan fits")
        elif "allowed" in words:  # only such plans were searched: it is another training
            found.append(said)
    return found


def _is_compressed(plan: ParallelPlan) -> bool:
    return plan.gradient_exchange is not None and not plan.gradient_exchange.is_exact


_MECHANISMS: tuple[tuple[str, Callable[[ParallelPlan], bool]], ...] = (
    (
        "gradients are sent compressed ({exchange}), which was allowed and is predicted to be "
        "faster",
        _is_compressed,
    ),
    ("parameters are split over ranks inside a node", lambda plan: bool(plan.mesh.tensor_axes)),
    ("the model is cut into stages", lambda plan: plan.schedule is not None),
    (
        "shards are offloaded to the host",
        lambda plan: any(block.config.storage.offload for block in plan.blocks),
    ),
    (
        "stages compute with weights that miss some updates, which was allowed, and never wait for "
        "these",
        lambda plan: plan.schedule in CONTINUOUS_SCHEDULES,
    ),
    (
        "gradients are views of DDP's buckets, so that what an optimizer keeps of them is "
        "overwritten by the next step",
        lambda plan: plan.gradient_views,
    ),
)


def _percent(low: float, high: float) -> str:
    return f"{100 * (high - low) / high:.1f} %"
