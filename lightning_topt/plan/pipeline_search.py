"""The search of pipelines: ranks in a row, schedule, microbatches, level; each cut exactly.

    shapes = [*pipeline_shapes(blocks, count, global_batch_size, PipelineRequest())]
    found = search_pipelines(blocks, shapes, KnownPlans.of(batches))

Thousands of shapes have no chance against the plans known so far. `bounds_of` rules them out, many
at once and without a table of costs; the most promising of the rest come first. Plans are found by
the formulas of `costs.chain_table`; `plan.staged_plans` prices those that are kept by
simulation.

Bounds are what no way to cut a pipeline takes less than. The largest load is at least the mean over
stages, S of them; the largest size at least any weighted mean. With weights that are equal, or are
as 1 / (microbatches in flight), sizes become sums over blocks, wherever these are. Stages receive
what crosses the boundary where that is least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.chain_table import Array, fits
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import legal_exchanges
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan.chains import KnownPlans, filled
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_tables import (
    ContinuousShape,
    PipelineShape,
    boundaries_of,
    fixed_costs,
    parts_of,
    stage_table,
    transfer_seconds,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.weight_prediction import Prediction

_PLAIN = "1f1b"  # see `is_plain`
_MOST_CHUNKS = 4  # stages per rank
_MOST_PER_RANK = 16  # microbatches, in times the ranks of a pipeline
_ROOM = 2**20  # numbers in an array, about


_CONFIGS, _WAYS = 2, 2  # at most, of a block; of weights


@dataclass(frozen=True)
class PipelineRequest:
    """The pipelines to search; None: any.

    Args:
        stages: of all ranks together.
        schedule: its name.
        microbatches: of a rank's batch.
        ranks: in a row.
        own_batches: each rank of a pipeline brings a batch, which is one microbatch, as large as
            the captured one.
        tensor: ranks that parameters are split over; 1: not split.
        by_exchange: rows use one of the exchanges that are searched; False: or they average
            gradients as they are.
    """

    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    ranks: int | None = None
    own_batches: bool = False
    tensor: int | None = None
    by_exchange: bool = False

    @property
    def is_given(self) -> bool:
        """True if anything is fixed: then no plan without stages was asked for."""
        free = PipelineRequest(
            own_batches=self.own_batches, tensor=self.tensor, by_exchange=self.by_exchange
        )
        return self != free

    def takes(self, tensor: int) -> bool:
        """Return whether parameters may be split over so many ranks.

        They may not where each rank brings a batch.
        """
        return tensor == 1 if self.own_batches else self.tensor in (None, tensor)


@dataclass(frozen=True)
class StaleWeights:
    """Asynchronous pipelines may be chosen.

    `rule_of` gives the rule of weights for so many minibatches in flight behind the first stage; an
    update takes `accumulate` minibatches.
    """

    rule_of: Callable[[int], Prediction]
    accumulate: int = 1

    def rule(self, ranks: int, schedule: str) -> Prediction:
        """Return the rule for a pipeline of `ranks` under `schedule`."""
        return self.rule_of((ranks - 1) * CONTINUOUS_SCHEDULES[schedule])


@dataclass
class FoundPipelines:
    """Plans that a search of pipelines found.

    Args:
        plans: each with the shape of its pipeline.
        plain: plans under 1F1B, of gradients as they are, that only other ones beat: a choice may
            prefer them.
        error_bound: as in `Frontier`.
    """

    plans: list[tuple[PipelineShape, StagePoint]] = field(default_factory=list)
    plain: list[tuple[PipelineShape, StagePoint]] = field(default_factory=list)
    error_bound: float = 0.0


def search_pipelines(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    known: KnownPlans,
    *,
    epsilon: float = 0.0,
    max_seconds: float = 10.0,
) -> FoundPipelines:
    """Return the plans of `shapes` that neither one another nor `known` plans beat, by formulas.

    With `epsilon`, pipelines whose plans known ones beat but for this share are not searched. Plans
    that fit into the memory of a device are searched first, the others in what is left of the time.
    """
    deadline = time.thread_time() + max_seconds
    found = FoundPipelines(error_bound=epsilon)
    plain = known  # and what 1F1B adds to it
    bounds, shapes = _bounded(blocks, shapes, known, known.scaled(1 / (1 + epsilon)))
    room = float(blocks.step.cluster.device.memory_bytes)
    for between in ((0.0, room), (room, np.inf)):
        # 1F1B first, of gradients as they are: what it finds is compared with plans without stages.
        seconds = bounds.seconds_within(between[1])
        order = sorted(range(len(shapes)), key=lambda n: (not is_plain(shapes[n]), seconds[n]))
        for index in order:
            shape = shapes[index]
            # by now more plans may be known than when the shapes were bounded
            if np.isinf(seconds[index]) or not bounds.may_gain(
                index, known.scaled(1 / (1 + epsilon))
            ):
                continue
            if time.thread_time() > deadline:
                found.error_bound = np.inf
                break
            result = search_stages(
                stage_table(blocks, shape),
                known=known.costs,
                epsilon=epsilon,
                max_seconds=deadline - time.thread_time(),
                between=between,
            )
            found.error_bound = max(found.error_bound, result.error_bound)
            found.plans += [(shape, point) for point in result.points]
            costs = np.array([(p.step_seconds, p.peak_bytes) for p in result.points]).reshape(-1, 2)
            known = KnownPlans.best([known.costs, costs])
            if is_plain(shape):
                plain = KnownPlans.best([plain.costs, costs])
    # plans that later ones beat are dropped; `plain` keeps 1F1B plans that only other stages beat
    found.plain = [each for each in _on(found.plans, plain) if is_plain(each[0])]
    found.plans = _on(found.plans, known)
    found.plain = [each for each in found.plain if each not in found.plans]
    return found


def is_plain(shape: PipelineShape) -> bool:
    """Return whether it is preferred where others gain little."""
    return shape.schedule == _PLAIN and shape.exchange is None


def hopeful_shapes(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], known: KnownPlans
) -> list[PipelineShape]:
    """Return those of `shapes` with a plan that may beat all known ones; others have none."""
    return _bounded(blocks, shapes, known, known)[1]


def least_seconds_of(blocks: StageBlocks, shapes: Sequence[PipelineShape]) -> float:
    """Return seconds that no plan of `shapes` takes less than; inf where none fits a device."""
    bounds = bounds_of(blocks, shapes, np.zeros(1))
    return float(bounds.seconds_within(float(blocks.step.cluster.device.memory_bytes)).min())


def _bounded(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], known: KnownPlans, beaten_by: KnownPlans
) -> tuple[StageBounds, list[PipelineShape]]:
    # Those of `shapes` with a plan that may not be `beaten_by` others, and their bounds
    left = list(shapes)
    for prices in (known.few_prices, known.prices):  # few prices rule out nearly all
        bounds = bounds_of(blocks, left, prices)
        rows = [index for index in range(len(left)) if bounds.may_gain(index, beaten_by)]
        left = [left[index] for index in rows]
    return StageBounds(bounds.prices, bounds.least[rows], bounds.fewest[rows]), left


def _on(
    plans: Sequence[tuple[PipelineShape, StagePoint]], best: KnownPlans
) -> list[tuple[PipelineShape, StagePoint]]:
    # Those that are among the best
    kept = {tuple(row) for row in best.costs.tolist()}
    return [(shape, p) for shape, p in plans if (p.step_seconds, p.peak_bytes) in kept]


# ---- the shapes of pipelines


def pipeline_shapes(
    blocks: StageBlocks,
    count: int,
    global_batch_size: int,
    wanted: PipelineRequest,
    *,
    tensor: int = 1,
    exchanges: Sequence[GradientMethod] = (),
) -> Iterator[PipelineShape]:
    """Yield the pipelines of `count` ranks for a batch; `tensor` ranks hold slices of the same.

    Sizes divide the ranks, microbatches the batch of a row. A schedule that another one beats in
    every formula is left out unless it is wanted: with as many stages per rank, as short and with
    fewer microbatches in flight. Rows may send gradients by one of `exchanges`, or train alone.
    """
    graph, most = blocks.step.graph, len(blocks.names)
    for ranks, data in _rows(count // tensor, global_batch_size, wanted, most=most):
        for micro in _microbatches(global_batch_size // data, ranks, wanted):
            # of a microbatch; a step of unknown scaling has the captured size alone
            samples = global_batch_size / data / micro
            if not graph.batch_scaling and samples != graph.batch_size:
                continue
            for name, chunks in _schedules(ranks, micro, most, wanted):
                # ZeRO-1 where there are replicas, and states that can be told apart by parameter
                levels = (0, 1) if data > 1 and blocks.step.optimizer.by_parameter else (0,)
                for level in () if wanted.by_exchange else levels:
                    yield PipelineShape(ranks, data, name, chunks, micro, samples, level, tensor)
                if tensor == 1:  # of slices gradients are sent as they are
                    for apart, method in ways_to_send(blocks.step.cluster, ranks, data, exchanges):
                        yield PipelineShape(
                            *(ranks, data, name, chunks, micro, samples),
                            rows_apart=apart,
                            exchange=method,
                        )


def _rows(
    count: int, batch: int, wanted: PipelineRequest, *, most: int
) -> Iterator[tuple[int, int]]:
    # Yield ranks in a row, which all have work, and rows, which share the batch equally
    for ranks in range(2, min(count, most) + 1):
        data = count // ranks
        if count % ranks == 0 and batch % data == 0 and wanted.ranks in (None, ranks):
            yield ranks, data


def ways_to_send(
    cluster: Cluster, ranks: int, data: int, exchanges: Sequence[GradientMethod]
) -> Iterator[tuple[bool, GradientMethod]]:
    """Yield whether the `ranks` of a row are neighbours, and how its `data` rows send gradients.

    The ranks of a stage are neighbours, as where gradients are sent as they are. What is smaller
    may travel between nodes in the place of activations.
    """
    for apart in (False, True) if ranks * data > cluster.devices_per_node else (False,):
        where: dict[str, Any] = {"world_size": data, "stride": ranks if apart else 1}
        legal = dict[GradientMethod, None]()
        for method in exchanges:
            legal.update(dict.fromkeys(legal_exchanges(method, cluster=cluster, **where)))
        for each in legal:
            yield apart, each


def _microbatches(batch: int, ranks: int, wanted: PipelineRequest) -> Iterator[int]:
    # each rank of a row brings one
    if wanted.own_batches:
        yield ranks
        return
    if wanted.microbatches is not None:
        if wanted.microbatches <= batch:
            yield wanted.microbatches
        return
    # equal microbatches
    yield from (
        count for count in range(2, min(batch, _MOST_PER_RANK * ranks) + 1) if batch % count == 0
    )


def _schedules(
    ranks: int, micro: int, most: int, wanted: PipelineRequest
) -> Iterator[tuple[str, int]]:
    # Yield schedules with their stages per rank
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
    """Explain why no pipeline of `count` ranks is as wanted."""
    named = f"{wanted.stages} stages" if wanted.stages is not None else "stages"
    row = "" if wanted.ranks is None else f", {wanted.ranks} in a row,"
    # those that never flush run one stage on each rank, and cut no batches
    continuous = wanted.schedule in CONTINUOUS_SCHEDULES
    rest = "with one stage on each rank" if continuous else "whose microbatches have at least one"
    return (
        f"no pipeline of {count} ranks{row} has {named}"
        + (f", schedule {wanted.schedule!r}" if wanted.schedule else "")
        + (f" and {wanted.microbatches} microbatches" if wanted.microbatches else "")
        + f": the model has {len(blocks.names)} blocks that can be stages, the ranks in a row "
        f"divide {count}, and the {global_batch_size} sample(s) of a step are shared equally by "
        f"the rows, {rest}"
        + ("; leave out microbatches" if continuous and wanted.microbatches else "")
    )


def continuous_shapes(
    blocks: StageBlocks,
    count: int,
    global_batch_size: int,
    wanted: PipelineRequest,
    stale: StaleWeights,
    *,
    exchanges: Sequence[GradientMethod] = (),
) -> Iterator[ContinuousShape]:
    """Yield the asynchronous pipelines of `count` ranks.

    Each row of ranks takes its part of the batch as one minibatch. Rows may send gradients by one
    of `exchanges`, or train alone.
    """
    graph = blocks.step.graph
    if wanted.schedule not in (None, *CONTINUOUS_SCHEDULES) or wanted.microbatches not in (None, 1):
        return
    # batches of each rank, and slices, are for pipelines that flush
    if wanted.own_batches or not wanted.takes(1):
        return
    for ranks, data in _rows(count, global_batch_size, wanted, most=len(blocks.names)):
        samples = global_batch_size / data
        if wanted.stages in (None, ranks) and (graph.batch_scaling or samples == graph.batch_size):
            for name in CONTINUOUS_SCHEDULES if wanted.schedule is None else (wanted.schedule,):
                shape = ContinuousShape.of(
                    *(ranks, data),
                    samples=samples,
                    schedule=name,
                    prediction=stale.rule(ranks, name),
                    accumulate=stale.accumulate,
                )
                if not wanted.by_exchange:
                    yield shape
                for apart, method in ways_to_send(blocks.step.cluster, ranks, data, exchanges):
                    yield replace(shape, rows_apart=apart, exchange=method)


# ---- lower bounds


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Lower bounds of n pipelines.

    Args:
        prices: seconds per byte.
        least: (n, price), of seconds + price * bytes.
        fewest: (n,), of bytes.
    """

    prices: Array
    least: Array
    fewest: Array

    def seconds_within(self, room: float) -> Array:
        """Return seconds (n,) that no plan of so many bytes takes less than; inf: there is none."""
        seconds = self.least if np.isinf(room) else self.least - self.prices * room
        found = seconds[:, 0] if np.isinf(room) else seconds.max(axis=1)
        return np.where(self.fewest > room, np.inf, found)

    def may_gain(self, index: int, known: KnownPlans) -> bool:
        """Return whether a plan of pipeline `index` may beat all known ones; False is certain."""
        return known.may_gain_above(float(self.fewest[index]), self.prices, self.least[index])


def bounds_of(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    prices: Array,
    *,
    recomputes: Sequence[bool] = (False, True),
) -> StageBounds:
    """Return the bounds of the plans of `shapes`; `recomputes` as in `stage_table`."""
    least, fewest = np.full((len(shapes), len(prices)), -np.inf), np.zeros(len(shapes))
    # so many shapes at a time that arrays of (shape, way, kind, config, price) stay small
    most = max(_ROOM // (_WAYS * (max(blocks.kinds) + 1) * _CONFIGS * len(prices)), 1)
    for first in range(0, len(shapes), most):
        some = slice(first, first + most)
        least[some], fewest[some] = _bounds_together(
            blocks, shapes[some], prices, tuple(recomputes)
        )
    return StageBounds(prices, least, fewest)


def _bounds_together(
    blocks: StageBlocks,
    shapes: Sequence[PipelineShape],
    prices: Array,
    recomputes: tuple[bool, ...],
) -> tuple[Array, Array]:
    counts = np.bincount(blocks.kinds)
    # weights of bytes that sum to those of no more than the largest stage
    held = np.array([_weights_of(shape.rates.held) for shape in shapes])  # (shape, 2, way)
    held = held.transpose(1, 0, 2)[..., None, None]  # (static or kept, shape, way, kind, config)
    # (lead, load, stages, stages per rank), shape, 1
    rates = np.array(
        [(s.rates.lead, s.rates.load, s.num_stages, s.stages_per_rank) for s in shapes]
    ).T[..., None]
    saved = np.array([shape.rates.weights for shape in shapes])[:, None]
    seconds, kept, weights, own = _parts(blocks, shapes, recomputes)
    weights = np.minimum(saved * weights, rates[0] * seconds.min(axis=2))  # (shape, kind)
    load = weights + rates[3] * own[:, 0]
    times = (rates[0] + rates[1] / rates[2])[..., None] * seconds
    times += (load / rates[2] - weights)[..., None]
    # (shape, way, kind, config)
    sizes = held[0] * (rates[3] * own[:, 1])[:, None, :, None] + held[1] * kept[:, None]
    # of the cheapest configuration (shape, way, kind, price), (shape, way, kind)
    least = (times[:, None, ..., None] + prices * sizes[..., None]).min(axis=3)
    fewest = np.where(np.isfinite(seconds)[:, None], sizes, np.inf).min(axis=3)
    # what comes once, and what stages receive
    fixed = np.array([fixed_costs(blocks, shape) for shape in shapes])
    seconds, received = np.array([_crossing(blocks, shape) for shape in shapes]).T
    received = held[1, ..., 0, 0] * received[:, None]  # (shape, way)
    # sums over blocks
    priced = np.einsum("k,nwkp->nwp", counts, least) + prices * received[..., None]
    total = (fixed[:, 0] + seconds)[:, None] + prices * fixed[:, 1:] + priced.max(axis=1)
    return total, fixed[:, 1] + (fewest @ counts + received).max(axis=1)


def _crossing(blocks: StageBlocks, shape: PipelineShape) -> tuple[float, float]:
    """Return the least seconds of messages in a step, and bytes that all stages receive at least.

    The bytes are of one microbatch.
    """
    rates, least, sent = shape.rates, 0.0, 0
    received = float(np.round(blocks.crossing_bytes(shape.samples)[0, 1:].min()))
    transfers = transfer_seconds(blocks, shape)
    for link, count in boundaries_of(shape, blocks.step.cluster).items():
        # (first block of the receiving stage,): activations there and gradients back
        round_trip = transfers[link].sum(axis=0)
        least += count * float(np.round(round_trip[1:].min(), 9))
        sent += count * (link != "none")
    return (rates.lead + rates.sent_load / shape.num_stages) * least, sent * received


def _parts(
    blocks: StageBlocks, shapes: Sequence[PipelineShape], recomputes: tuple[bool, ...]
) -> tuple[Array, Array, Array, Array]:
    """Return costs of blocks for each shape, as in `parts_of`.

    Returns:
        Seconds and bytes kept (shape, kind, config); seconds of gradients of parameters (shape,
        kind); and what comes once per step (shape, [seconds, static, update], kind).
    """
    known: dict[object, tuple[Array, ...]] = {}
    found = []
    for shape in shapes:
        # all that costs of blocks depend on: many shapes share them
        passes, rows = (shape.samples, shape.splits_backward), (shape.data, shape.tensor)
        stride = shape.pipeline if shape.rows_apart else 1  # from row to row
        key = *passes, *rows, stride, shape.level, shape.exchange
        if key not in known:
            chain, weights, own = parts_of(blocks, shape, recomputes)
            by_block = (
                np.array([filled(getattr(block, name), _CONFIGS) for block in chain.blocks])
                for name in ("seconds", "kept")
            )
            known[key] = *by_block, weights, own
        found.append(known[key])
    seconds, kept, weights, own = (np.array(each) for each in zip(*found, strict=True))
    return seconds, kept, weights, own


@lru_cache(maxsize=2**14)
def _weights_of(held: tuple[int, ...]) -> tuple[tuple[float, float], tuple[float, float]]:
    # Those ([static, kept], way) of a pipeline whose stages hold so many microbatches
    # (stage,): microbatches in flight
    counts = np.array(held, float)
    inverse = float((1 / counts).sum())
    static, kept = (
        (1 / len(held), 1 / counts.max() / inverse),
        (counts.min() / len(held), 1 / inverse),
    )
    return static, kept
