"""An explanation of a plan with stages: what each stage takes, as the search prices it.

Sums of its blocks, one after the other; a rank of several stages waits for what none of them runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_topt.plan.continuous_shape import ContinuousShape
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.search_request import SearchRequest, stage_blocks
from lightning_topt.plan.stage_peaks import stage_bytes, worst_activations
from lightning_topt.plan.stage_tables import PASS_SECONDS
from lightning_topt.plan.stage_times import stage_seconds, step_seconds_of
from lightning_topt.plan.staged_plans import shape_of_plan
from lightning_topt.plan.staged_step import cut_of_plan


@dataclass(frozen=True)
class StageExplanation:
    """One stage of a plan, on `rank` of the pipeline.

    Args:
        blocks: its blocks in the order of forward.
        seconds: of a step, all microbatches: "forward", "backward" (with recomputation), "receive"
            (activations from the stage before, and their gradients back), "once" (exchange of
            gradients and update).
        bubble: the share of the step in which its rank runs no pass and no exchange or update of
            any of its stages.
        peak_parts: bytes: "static" (parameters, gradients, states, copies of weights),
            "activations" (of all microbatches in flight when its rank holds the most, received
            tensors and gradients that wait for a later part of backward too), "running" (the most
            beside these while a block runs), "update" (while the optimizer steps). What is on every
            rank (buffers, batch) is in none of them.
        missing_updates: of the stage, before a minibatch's own one, that its forward pass is too
            early for.
    """

    rank: int
    blocks: tuple[str, ...]
    seconds: Mapping[str, float]
    bubble: float
    peak_parts: Mapping[str, float]
    missing_updates: int = 0


def explain_stages(request: SearchRequest, plan: ParallelPlan) -> tuple[StageExplanation, ...]:
    """Return what each stage of `plan` costs, one that `search_plans(request)` found.

    Raises PlanError for a plan without stages, and for one of other blocks than those of the step.
    """
    if plan.schedule is None:
        raise PlanError("a plan without stages is explained by its blocks: use explain_plan")
    blocks, shape = stage_blocks(request, plan), shape_of_plan(plan)
    names = [
        tuple(b.block for b in stage.blocks if b.block in blocks.names) for stage in plan.stages
    ]
    if [name for stage in names for name in stage] != [*blocks.names]:
        raise PlanError(
            "the stages of the plan do not have the blocks of this step in order: search it again"
        )
    point = cut_of_plan(blocks, plan)
    seconds, sizes = stage_seconds(blocks, shape, [point]), stage_bytes(blocks, shape, [point])
    simulated = step_seconds_of(seconds, shape)
    step = point.step_seconds if simulated is None else float(simulated[0])
    count, activations = shape.num_microbatches, worst_activations(shape, sizes)
    busy = np.zeros(shape.pipeline)
    passes_seconds = count * (seconds.forward + seconds.backward + 2 * PASS_SECONDS) + seconds.once
    np.add.at(busy, list(shape.ranks), passes_seconds[:, 0])
    missing = (
        shape.missing_updates if isinstance(shape, ContinuousShape) else (0,) * shape.num_stages
    )
    found = []
    for s, rank in enumerate(shape.ranks):
        times = {
            "forward": count * float(seconds.forward[s, 0]),
            "backward": count * float(seconds.backward[s, 0]),
            "receive": count * float(seconds.transfers[:, s, 0].sum()) if s else 0.0,
            "once": float(seconds.once[s, 0]),
        }
        held = {
            "static": float(sizes.static[s, 0]),
            "activations": float(activations[s]),
            "running": float(sizes.hump[s, 0]),
            "update": float(sizes.update[s, 0]),
        }
        bubble = max(1 - float(busy[rank]) / step, 0.0)
        found.append(StageExplanation(rank, names[s], times, bubble, held, missing[s]))
    return tuple(found)
