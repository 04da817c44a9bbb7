"""Seconds of the stages of plans, and of their steps by a simulation of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.cost_table import Array
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.continuous_shape import ContinuousShape
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape, links_of, transfer_seconds
from lightning_topt.schedules.schedules import Schedule, make_schedule
from lightning_topt.schedules.timing import many_rank_seconds

# of all stages, of schedules that are simulated; longer ones are as their formulas say
MOST_PASSES = 2**14


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """Seconds of the stages of n plans (stage, n): of a microbatch, and `once` per step;
    ``transfers[s]`` are those into stage s, and of its gradients back (2, stage, n).
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
    cluster, stages = blocks.step.cluster, range(shape.num_stages)
    again = np.array([point.configs for point in points], bool)
    ends = np.array([point.ends for point in points]).T
    first = np.concatenate([np.zeros((1, len(points)), np.intp), ends[:-1]])
    on = [blocks.on(shape.kinds_of([s], cluster)) for s in stages]
    parts, rows = np.empty((5, *ends.shape)), np.arange(len(points))
    for device in {id(each): each for each in on}.values():
        own = [s for s in stages if on[s] is device]
        sums = _block_seconds(device, shape, again)
        parts[:, own] = sums[:, rows, ends[own]] - sums[:, rows, first[own]]
    shared = shape.once(blocks).shared
    once = parts[3] if shared is None else parts[3] + shared[0][first, ends]
    if shape.splits_backward:
        # nothing before the first stage needs a gradient
        parts[2, 0], parts[4, 0] = parts[1, 0], 0.0
        parts[1:3] += parts[4] * np.array([1.0, 0.5])[:, None, None]
    into, transfers = links_of(shape, cluster), np.empty((2, *ends.shape))
    for kinds, link in dict.fromkeys(into):
        own = [s for s in stages if into[s] == (kinds, link)]
        transfers[:, own] = transfer_seconds(blocks.on(kinds), shape)[link][:, first[own]]
    return StageSeconds(parts[0], parts[1], parts[2], once, transfers)


def _block_seconds(blocks: StageBlocks, shape: PipelineShape, again: NDArray[np.bool_]) -> Array:
    """Sums (5, n, block + 1) over the first blocks of n plans: forward, backward, gradients of
    parameters, once per step; and what a backward in two parts takes besides.
    """
    passes, once = blocks.passes(shape.samples), shape.once(blocks)
    costs = passes.forward, passes.backward + passes.forward * again, passes.weights, once.seconds
    split = passes.split * shape.splits_backward
    found = np.zeros((5, len(again), again.shape[1] + 1))
    found[:, :, 1:] = np.cumsum(
        [np.broadcast_to(each, again.shape) for each in (*costs, split)], axis=2
    )
    return found


def simulated_schedule(shape: PipelineShape) -> Schedule | None:
    """Return the schedule of a pipeline; None where it has more passes than are simulated."""
    if isinstance(shape, ContinuousShape):
        return shape.schedule_to_draw
    if shape.num_microbatches * shape.num_stages > MOST_PASSES:
        return None
    return make_schedule(
        shape.schedule,
        num_ranks=shape.pipeline,
        num_microbatches=shape.num_microbatches,
        stages_per_rank=shape.stages_per_rank,
    )


def formula_step_seconds(seconds: StageSeconds, shape: PipelineShape) -> Array:
    """Return the seconds of a step (n,) as the formula of its schedule says, for those with more
    passes than are simulated.
    """
    rates = shape.rates
    round_trips = seconds.transfers.sum(axis=0)  # (stage, n)
    times = seconds.forward + seconds.backward + 2 * PASS_SECONDS
    load = np.maximum(
        rates.load * times + rates.sent_load * round_trips, rates.sent_floor * round_trips
    )
    once = np.zeros((shape.pipeline, times.shape[1]))
    np.add.at(once, list(shape.ranks), seconds.once)
    return np.asarray(
        rates.lead * (times + round_trips).sum(axis=0) + load.max(axis=0) + once.max(axis=0)
    )


def step_seconds_of(seconds: StageSeconds, shape: PipelineShape) -> Array | None:
    """Return the seconds of a step (n,) by a simulation of the schedule; None where that would take
    long.

    A rank is done when its passes are over and its gradients are exchanged and its parameters
    updated.
    """
    if isinstance(shape, ContinuousShape):
        return shape.pace(seconds.forward + seconds.backward, seconds.once, seconds.transfers)
    schedule = simulated_schedule(shape)
    if schedule is None:
        return None
    inputs = np.maximum(seconds.backward - seconds.weights, 0.0)
    there, back = (
        {(s - 1, s): row[s] for s in range(1, shape.num_stages)} for row in seconds.transfers
    )
    each = [
        part + PASS_SECONDS for part in (seconds.forward, seconds.backward, inputs, seconds.weights)
    ]
    done = many_rank_seconds(schedule, (each[0], each[1], each[2], each[3], None), (there, back))
    once = np.zeros_like(done)
    np.add.at(once, list(shape.ranks), seconds.once)
    return np.asarray((done + once).max(axis=0))
