"""What cuts of a pipeline really take: seconds by a simulation of the schedule, bytes by its order.

The search finds cuts by formulas that count a rank of several stages as if all of these were like
its dearest one (`costs.chain_table`). Cuts that it found get exact costs here:

    stage_seconds, stage_bytes      what each stage of n plans takes (stage, n)
    step_seconds_of                 the step, by a simulation of all passes
    peak_bytes_of                   the fullest rank, at the worst time of its order of passes
    with_moves                      better cuts, by moves of one boundary

[Note: uneven stages of one rank] A formula that takes all stages of a rank as its dearest is right
for equal stages; uneven ones may do better. This was tried on random chains of 8 to 10 blocks, 60
of each of 14 kinds. In the simulation the fastest cut by the formula took 1 to 8 % longer than the
fastest of all cuts (medians of the kinds; 51 % at most). Moves of one boundary at a time led from
it to 0 to 2 %, under looped_bfs to 6 % (26 % at most).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import Array
from lightning_topt.frontier.pareto import pareto_rows
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import (
    ContinuousShape,
    PipelineShape,
    fixed_costs,
    links_of,
    trained_bytes,
    transfer_seconds,
)
from lightning_topt.schedules.schedules import Schedule, make_schedule
from lightning_topt.schedules.timing import held_counts, many_rank_seconds

MOST_PASSES = 2**14  # of all stages; longer schedules are priced by their formulas
_ROUNDS = 16  # of moves
_MOST_MOVED_PASSES = 2**9  # of all stages: a simulation of many plans takes seconds beyond that
_MOST_POINTS = 64  # priced in one round


# ---- seconds


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """Seconds of the stages of n plans (stage, n).

    Args:
        forward, backward: of a microbatch.
        weights: the part of backward for gradients of parameters.
        once: per step.
        transfers: (2, stage, n), to send a microbatch into each stage, and its gradient back.
    """

    forward: Array
    backward: Array
    weights: Array
    once: Array
    transfers: Array


def stage_seconds(
    blocks: StageBlocks, shape: PipelineShape, points: Sequence[StagePoint]
) -> StageSeconds:
    """Return the seconds of the stages of plans of one shape."""
    cluster = blocks.step.cluster
    again = np.array([point.configs for point in points], bool)
    ends = np.array([point.ends for point in points]).T
    # (stage, n): the block that each stage begins with
    first = np.concatenate([np.zeros((1, len(points)), np.intp), ends[:-1]])
    # sums over the blocks of each stage: forward, backward, weights, once, split (5, stage, n)
    rows, sums = np.arange(len(points)), _block_seconds(blocks, shape, again)
    parts = sums[:, rows, ends] - sums[:, rows, first]
    of_step = shape.once(blocks)
    once = parts[3] if of_step.shared is None else parts[3] + of_step.shared[0][first, ends]
    if isinstance(shape, ContinuousShape):
        # a rule puts weights in place for both passes
        sums = np.cumsum([0.0, *(trained_bytes(blocks, n) for n in range(len(blocks.names)))])
        passes, update = shape.rule_seconds(blocks)[..., None] * (sums[ends] - sums[first])
        parts[:2] += passes / 2
        once = once + update
    if shape.splits_backward:
        # nothing before the first stage needs a gradient
        parts[2, 0], parts[4, 0] = parts[1, 0], 0.0
        parts[1:3] += parts[4] * np.array([1.0, 0.5])[:, None, None]
    # messages into each stage
    known = transfer_seconds(blocks, shape)
    # (2, stage, n)
    transfers = np.stack(
        [known[link][:, own] for link, own in zip(links_of(shape, cluster), first, strict=True)],
        axis=1,
    )
    return StageSeconds(parts[0], parts[1], parts[2], once, transfers)


def _block_seconds(blocks: StageBlocks, shape: PipelineShape, again: NDArray[np.bool_]) -> Array:
    """Return sums (5, n, block + 1) over the first blocks of n plans.

    They are forward, backward, gradients of parameters, once per step, and what backward in two
    parts takes besides.
    """
    passes, once = blocks.passes(shape.samples), shape.once(blocks)
    # recomputed blocks run forward again in backward
    costs = passes.forward, passes.backward + passes.forward * again, passes.weights, once.seconds
    split = passes.split * shape.splits_backward
    found = np.zeros((5, len(again), again.shape[1] + 1))
    # a stage is the difference of two of these sums
    found[:, :, 1:] = np.cumsum(
        [np.broadcast_to(each, again.shape) for each in (*costs, split)], axis=2
    )
    return found


def step_seconds_of(seconds: StageSeconds, shape: PipelineShape) -> Array | None:
    """Return the seconds of a step (n,) by a simulation; None where that would take long.

    A rank is done when its passes are over, its gradients exchanged and its parameters updated.
    """
    if isinstance(shape, ContinuousShape):
        passes = seconds.forward + seconds.backward
        return shape.pace(passes, seconds.once, seconds.transfers)
    schedule = simulated_schedule(shape)
    if schedule is None:
        return None
    there, back = (
        {(s - 1, s): row[s] for s in range(1, shape.num_stages)} for row in seconds.transfers
    )
    done = many_rank_seconds(schedule, (*pass_seconds(seconds, shape), None), (there, back))
    # (rank, n): stages of one rank add up
    once = np.zeros_like(done)
    np.add.at(once, list(shape.ranks), seconds.once)
    return np.asarray((done + once).max(axis=0))


def pass_seconds(seconds: StageSeconds, shape: PipelineShape) -> tuple[Array, Array, Array, Array]:
    """Return the seconds of each stage's passes (stage, n), with what each takes in Python.

    Forward and backward, and the two halves of a split backward: gradients of activations, then
    those of parameters.
    """
    python, inputs = shape.pass_seconds, np.maximum(seconds.backward - seconds.weights, 0.0)
    halves = inputs + python, seconds.weights + python
    return seconds.forward + python, seconds.backward + python, *halves


def simulated_schedule(shape: PipelineShape) -> Schedule | None:
    """Return the schedule of a pipeline; None where it has more passes than are simulated."""
    if shape.num_microbatches * shape.num_stages > MOST_PASSES:
        return None
    return make_schedule(
        shape.schedule,
        num_ranks=shape.pipeline,
        num_microbatches=shape.num_microbatches,
        stages_per_rank=shape.stages_per_rank,
    )


def formula_step_seconds(seconds: StageSeconds, shape: PipelineShape) -> Array:
    """Return the seconds of a step (n,) by the formula of its schedule.

    It is for schedules with more passes than are simulated.
    """
    rates = shape.rates
    round_trips = seconds.transfers.sum(axis=0)  # (stage, n)
    times = seconds.forward + seconds.backward + 2 * shape.pass_seconds
    load = np.maximum(
        rates.load * times + rates.sent_load * round_trips, rates.sent_floor * round_trips
    )
    once = np.zeros((shape.pipeline, times.shape[1]))
    np.add.at(once, list(shape.ranks), seconds.once)
    lead = rates.lead * (times + round_trips).sum(axis=0)
    return np.asarray(lead + load.max(axis=0) + once.max(axis=0))


# ---- bytes


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes of the stages of n plans (stage, n).

    Args:
        static: all the time.
        kept: of a microbatch, with what it received.
        waiting: besides these, between the two parts of its backward.
        hump: the most while a pass runs.
        update: while the optimizer steps.
    """

    static: Array
    kept: Array
    waiting: Array
    hump: Array
    update: Array


def stage_bytes(
    blocks: StageBlocks, shape: PipelineShape, points: Sequence[StagePoint]
) -> StageBytes:
    """Return the bytes of the stages of plans of one shape, but for what each rank has once."""
    passes, once = blocks.passes(shape.samples), shape.once(blocks)
    again = np.array([point.configs for point in points], bool)  # (n, block)
    ends = np.array([point.ends for point in points])  # (n, stage)
    first = np.concatenate([np.zeros((len(points), 1), np.intp), ends[:, :-1]], axis=1)
    # where each stage begins in the rows of all plans, one after the other
    places = (first + again.shape[1] * np.arange(len(points))[:, None]).ravel()

    def by_stage(combined: np.ufunc, values: Array) -> Array:
        every = np.broadcast_to(values, again.shape).ravel()
        return np.asarray(combined.reduceat(every, places).reshape(first.shape).T)

    static, update = by_stage(np.add, once.static), by_stage(np.add, once.update)
    if once.shared is not None:
        static = static + once.shared[1][first, ends].T
    if isinstance(shape, ContinuousShape):
        static = static + _copied_bytes(blocks, shape, points)
    arrives, leaves = blocks.crossing_bytes(shape.samples)
    # stages of one rank hand over without a message
    crosses = np.array(
        [s > 0 and shape.ranks[s - 1] != shape.ranks[s] for s in range(shape.num_stages)]
    )
    held = np.where(again, passes.recomputed_kept, passes.kept)
    if shape.cast_copies:  # all microbatches share them; they are gone when the optimizer steps
        casts = np.where(again, 0.0, passes.casts)
        held, of_stages = held - casts, by_stage(np.add, casts)
        static, update = static + of_stages, np.maximum(update - of_stages, 0.0)
    kept = by_stage(np.add, held) + (arrives[first] * crosses).T
    hump = by_stage(np.maximum, np.where(again, passes.recomputed_hump, passes.hump))
    waiting = by_stage(np.add, passes.waiting) * shape.splits_backward
    if shape.splits_backward and shape.num_stages > 1:
        # nothing before it needs a gradient, so all of its backward waits
        waiting[0] = leaves[first[:, 1]]
    return StageBytes(static, kept, waiting, hump, update)


def _copied_bytes(
    blocks: StageBlocks, shape: ContinuousShape, points: Sequence[StagePoint]
) -> Array:
    # The bytes of weight copies of each stage (stage, n)
    found = []
    for point in points:
        cuts = zip((0, *point.ends[:-1]), point.ends, strict=True)
        found.append(
            [shape.copied_bytes(blocks, stage=s, first=a, end=b) for s, (a, b) in enumerate(cuts)]
        )
    return np.array(found).T


def peak_bytes_of(blocks: StageBlocks, shape: PipelineShape, sizes: StageBytes) -> Array:
    """Return the peak bytes (n,) of the fullest rank of each plan."""
    peaks = []
    for rank, counts in enumerate(_counts(shape)):
        own = [stage for stage, of in enumerate(shape.ranks) if of == rank]
        # (2 * own stages, n), as `counts` has its columns
        held = np.concatenate([sizes.kept[own], sizes.kept[own] + sizes.waiting[own]])
        # the worst time for activations, or the update, whichever takes more
        running = (counts @ held).max(axis=0) + sizes.hump[own].max(axis=0)
        peaks.append(
            sizes.static[own].sum(axis=0) + np.maximum(running, sizes.update[own].sum(axis=0))
        )
    return np.asarray(np.max(peaks, axis=0) + fixed_costs(blocks, shape)[1])


def worst_activations(shape: PipelineShape, sizes: StageBytes) -> Array:
    """Return the bytes of activations (stage,) of the first plan when its rank holds the most."""
    found = np.zeros(shape.num_stages)
    for rank, counts in enumerate(_counts(shape)):
        own = [stage for stage, of in enumerate(shape.ranks) if of == rank]
        held = np.concatenate([sizes.kept[own, 0], sizes.kept[own, 0] + sizes.waiting[own, 0]])
        worst = counts[(counts @ held).argmax()] * held
        found[own] = worst[: len(own)] + worst[len(own) :]
    return found


def _counts(shape: PipelineShape) -> tuple[NDArray[np.int64], ...]:
    """Return for each rank the microbatches held at the times that matter (time, 2 * own stages).

    The second half counts those that wait for the second part of their backward.
    """
    if shape.stages_per_rank > 1:
        return _scheduled(
            shape.schedule, shape.pipeline, shape.num_microbatches, shape.stages_per_rank
        )
    # one stage on each rank: microbatches that are held, and those whose backward is half done
    pairs = zip(shape.rates.held, shape.rates.waits, strict=True)
    return tuple(
        np.array([(h - g, g) for h, g in ((held, 0), *waits)], np.int64) for held, waits in pairs
    )


@lru_cache(maxsize=64)
def _scheduled(
    name: str, ranks: int, microbatches: int, per_rank: int
) -> tuple[NDArray[np.int64], ...]:
    return held_counts(
        make_schedule(
            name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=per_rank
        )
    )


# ---- better cuts


def with_moves(
    blocks: StageBlocks, shape: PipelineShape, points: Sequence[StagePoint]
) -> list[StagePoint]:
    """Return the best plans of `shape` among `points` and what moves of boundaries lead to.

    Plans are compared as simulated, in seconds and bytes. Points stay as they are where ranks have
    one stage, and for long schedules.
    """
    if shape.stages_per_rank == 1 or shape.num_microbatches * shape.num_stages > _MOST_MOVED_PASSES:
        return [*points]
    best, fresh = _priced(blocks, shape, points), [*points]  # fresh: not moved yet
    known = {(point.ends, point.configs) for point in points}
    for _ in range(_ROUNDS):
        # only plans that are new on the frontier are moved further
        near = {(p.ends, p.configs): p for point in fresh for p in _neighbours(point)}
        new = [point for key, point in near.items() if key not in known][:_MOST_POINTS]
        if not new:
            break
        known.update((point.ends, point.configs) for point in new)
        priced = _priced(blocks, shape, new)
        every = [*best, *priced]
        costs = np.array([(point.step_seconds, point.peak_bytes) for point in every])
        rows = set(pareto_rows(costs).tolist())
        fresh = [point for n, point in enumerate(priced, len(best)) if n in rows]
        best = [point for n, point in enumerate(every) if n in rows]
        if not fresh:
            break
    return best


def _priced(
    blocks: StageBlocks, shape: PipelineShape, points: Sequence[StagePoint]
) -> list[StagePoint]:
    seconds = step_seconds_of(stage_seconds(blocks, shape, points), shape)
    assert seconds is not None
    peaks = peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, points))
    return [
        replace(point, step_seconds=step, peak_bytes=peak)
        for point, step, peak in zip(points, seconds.tolist(), peaks.tolist(), strict=True)
    ]


def _neighbours(point: StagePoint) -> Iterator[StagePoint]:
    # Yield the cuts with one boundary moved by one block
    bounds = (0, *point.ends)
    for n in range(1, len(bounds) - 1):
        for end in (bounds[n] - 1, bounds[n] + 1):
            if bounds[n - 1] < end < bounds[n + 1]:
                yield replace(point, ends=(*point.ends[: n - 1], end, *point.ends[n:]))


# ---- the cut of one plan


def cut_of_plan(blocks: StageBlocks, plan: ParallelPlan) -> StagePoint:
    """Return where the stages of `plan` end in the chain `blocks`, and which blocks recompute.

    Its costs are those expected of the plan, or 0 where it has none.
    """
    counts = [sum(block.block in blocks.names for block in stage.blocks) for stage in plan.stages]
    again = tuple(int(plan.configs[name].recompute) for name in blocks.names)
    ends, predicted = tuple(np.cumsum(counts).tolist()), plan.predicted
    costs = (0.0, 0.0) if predicted is None else (predicted.step_seconds, predicted.peak_bytes)
    return StagePoint(*costs, ends, again)
