"""Plans with stages: every number of ranks in a row, schedule, number of microbatches and level,
each cut exactly.

A pipeline that no bound leaves a chance against the plans known so far is not searched; the most
promising come first. Plans are found by the formulas of `costs.schedule_rates`, and those that are
kept are priced by the simulation of their schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.schedule_rates import fits
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_bounds import StageBounds, bounds_of
from lightning_topt.plan.stage_tables import PipelineShape, stage_table
from lightning_topt.schedules.schedules import SCHEDULES

PLAIN = "1f1b"  # the schedule that is preferred where others gain little
_MOST_CHUNKS = 4  # stages per rank
_MOST_PER_RANK = 16  # microbatches, in times the ranks of a pipeline


@dataclass(frozen=True)
class PipelineRequest:
    """The pipelines to look at: of so many `stages` in all, with this `schedule`, with so many
    `microbatches`, of so many `ranks` in a row, whose parameters are split over `tensor` ranks (1:
    not at all); None: any.

    `own_batches`: each rank of a pipeline brings a batch, which is one microbatch, as large as the
    captured one.
    """

    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    ranks: int | None = None
    own_batches: bool = False
    tensor: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is fixed: then a plan without stages is none that was asked for."""
        return self != PipelineRequest(own_batches=self.own_batches, tensor=self.tensor)

    def takes(self, tensor: int) -> bool:
        """Return whether parameters may be split over so many ranks: not where each rank brings a
        batch.
        """
        return tensor == 1 if self.own_batches else self.tensor in (None, tensor)


@dataclass
class FoundPipelines:
    """Plans by the shape of their pipeline, and `error_bound` as in `Frontier`; `searched` of
    `tables` tables were searched.

    `plain` are plans under 1F1B that only those of other schedules beat: a choice may prefer them.
    """

    plans: list[tuple[PipelineShape, StagePoint]] = field(default_factory=list)
    plain: list[tuple[PipelineShape, StagePoint]] = field(default_factory=list)
    error_bound: float = 0.0
    searched: int = 0
    tables: int = 0


def pipeline_shapes(
    blocks: StageBlocks,
    count: int,
    global_batch_size: int,
    wanted: PipelineRequest,
    *,
    tensor: int = 1,
) -> Iterator[PipelineShape]:
    """Yield the pipelines of `count` ranks, `tensor` of which hold slices of the same, for a batch:
    sizes divide the ranks, microbatches the batch of a row.

    A schedule that another one beats in every formula is left out unless it is wanted: with as many
    stages per rank, as short and with fewer microbatches in flight.
    """
    graph, most = blocks.step.graph, len(blocks.names)
    for ranks in range(2, min(count // tensor, most) + 1):
        data = count // tensor // ranks
        if (
            count % (ranks * tensor)
            or global_batch_size % data
            or wanted.ranks not in (None, ranks)
        ):
            continue
        for micro in _microbatches(global_batch_size // data, ranks, wanted):
            samples = global_batch_size / data / micro
            if not graph.batch_scaling and samples != graph.batch_size:
                continue
            for name, chunks in _schedules(ranks, micro, most, wanted):
                for level in (0, 1) if data > 1 and blocks.step.optimizer.by_parameter else (0,):
                    yield PipelineShape(ranks, data, name, chunks, micro, samples, level, tensor)


def search_pipelines(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    known: KnownPlans,
    *,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> FoundPipelines:
    """Return the plans of `shapes` that no other one beats, nor one of those that are `known`, by
    their formulas.

    With `epsilon`, pipelines whose plans known ones beat but for this share are not searched.
    """
    deadline, found, plain = (
        time.thread_time() + max_seconds,
        FoundPipelines(error_bound=epsilon, tables=len(shapes)),
        known,
    )
    bounds, shapes = _bounded(blocks, shapes, known, known.scaled(1 / (1 + epsilon)))
    # 1F1B first: what it finds is compared with plans without stages.
    for index in sorted(
        range(len(shapes)),
        key=lambda index: (shapes[index].schedule != PLAIN, bounds.least[index, 0]),
    ):
        shape = shapes[index]
        if not bounds.may_gain(index, known.scaled(1 / (1 + epsilon))):
            continue
        table = stage_table(blocks, shape)
        found.searched += 1
        left = deadline - time.thread_time()
        result = search_stages(table, known=known.costs, epsilon=epsilon, max_seconds=left)
        found.error_bound = max(found.error_bound, result.error_bound)
        found.plans += [(shape, point) for point in result.points]
        known = KnownPlans.best([known.costs, _costs(result.points)])
        if shape.schedule == PLAIN:
            plain = known
    found.plain = [each for each in _on(found.plans, plain) if each[0].schedule == PLAIN]
    found.plans = _on(found.plans, known)
    found.plain = [each for each in found.plain if each not in found.plans]
    return found


def hopeful_shapes(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], known: KnownPlans
) -> list[PipelineShape]:
    """Return those of `shapes` of which some plan may be one that no known plan beats; of others
    none is.
    """
    return _bounded(blocks, shapes, known, known)[1]


def _bounded(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], known: KnownPlans, beaten_by: KnownPlans
) -> tuple[StageBounds, list[PipelineShape]]:
    """Those of `shapes` of which some plan may be one that none of `beaten_by` beats, and their
    bounds.
    """
    left = list(shapes)
    for prices in (known.few_prices, known.prices):  # few prices rule out nearly all
        bounds = bounds_of(blocks, left, prices)
        rows = [index for index in range(len(left)) if bounds.may_gain(index, beaten_by)]
        left = [left[index] for index in rows]
    return StageBounds(bounds.prices, bounds.least[rows], bounds.fewest[rows]), left


def _on(
    plans: Sequence[tuple[PipelineShape, StagePoint]], best: KnownPlans
) -> list[tuple[PipelineShape, StagePoint]]:
    """Those that are among the best."""
    kept = {tuple(row) for row in best.costs.tolist()}
    return [(shape, p) for shape, p in plans if (p.step_seconds, p.peak_bytes) in kept]


def _costs(points: Sequence[StagePoint]) -> Array:
    return np.array([(point.step_seconds, point.peak_bytes) for point in points]).reshape(-1, 2)


def _microbatches(batch: int, ranks: int, wanted: PipelineRequest) -> Iterator[int]:
    if wanted.own_batches:
        yield ranks
        return
    if wanted.microbatches is not None:
        if wanted.microbatches <= batch:
            yield wanted.microbatches
        return
    yield from (
        count for count in range(2, min(batch, _MOST_PER_RANK * ranks) + 1) if batch % count == 0
    )


def _schedules(
    ranks: int, micro: int, most: int, wanted: PipelineRequest
) -> Iterator[tuple[str, int]]:
    """Schedules with their stages per rank."""
    for name, rule in SCHEDULES.items():
        if name != wanted.schedule and (
            wanted.schedule is not None
            or name == "looped_bfs"  # interleaved, with fewer in flight
            or not fits(name, num_ranks=ranks, num_microbatches=micro)
        ):
            continue
        for chunks in range(
            rule.least_stages, min(rule.most_stages or _MOST_CHUNKS, most // ranks) + 1
        ):
            if wanted.stages is None or wanted.stages == ranks * chunks:
                yield name, chunks


def why_no_pipeline(
    blocks: StageBlocks, count: int, wanted: PipelineRequest, *, global_batch_size: int
) -> str:
    """Return why no pipeline of `count` ranks is as wanted."""
    named = f"{wanted.stages} stages" if wanted.stages is not None else "stages"
    row = "" if wanted.ranks is None else f", {wanted.ranks} in a row,"
    return (
        f"no pipeline of {count} ranks{row} has {named}"
        + (f", schedule {wanted.schedule!r}" if wanted.schedule else "")
        + (f" and {wanted.microbatches} microbatches" if wanted.microbatches else "")
        + f": the model has {len(blocks.names)} blocks that can be stages, the ranks in a row "
        f"divide {count}, and the "
        f"{global_batch_size} sample(s) of a step are shared equally by the rows, a microbatch of "
        "which has at least one"
    )
