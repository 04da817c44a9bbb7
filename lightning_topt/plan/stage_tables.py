"""Pipelines of a training step: which ranks, schedule and microbatches, and what their stages cost.

A `PipelineShape` flushes after every step, a `ContinuousShape` never does. `stage_table` has the
costs of all ways to cut the chain of blocks into the stages of a shape, for
`frontier.stage_search`:

    shape = PipelineShape(4, 2, "1f1b", stages_per_rank=1, num_microbatches=8, samples=2.0)
    result = search_stages(stage_table(blocks, shape))

A stage costs the sum of its blocks, what it receives, and what its rank has once:

    part of a step              function            from
    passes of a microbatch      parts_of            `StageBlocks.passes`
    messages between stages     transfer_seconds    `StageBlocks.crossing_bytes`, the links
    exchange, update, states    PipelineShape.once  `StageBlocks.once`
    weights of a rule           rule_seconds        `Prediction.traffic`
    Python, buffers, batch      fixed_costs         measured
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from typing_extensions import override

from lightning_topt.basics import once_per_object
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.chain_table import (
    Array,
    ScheduleRates,
    StageChain,
    StageExtras,
    StageKind,
    StageLink,
    StageTable,
    rates_of,
)
from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.costs.reserved_memory import COMMUNICATOR_BYTES, CUBLAS_BYTES
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.stage_blocks import Once, StageBlocks
from lightning_topt.schedules.schedules import (
    CONTINUOUS_SCHEDULES,
    SCHEDULES,
    Schedule,
    continuous_schedule,
    lag_of,
)
from lightning_topt.schedules.staleness import staleness
from lightning_topt.schedules.timing import seconds_per_minibatch
from lightning_topt.weight_prediction import NoPrediction, Prediction
from lightning_topt.weight_prediction.rules import StagePlace, Traffic

# What a pass takes in Python beside its operators: stand-ins, messages. A rank of a pipeline of
# tiny stages took 1.1 ms of CPU per microbatch, forward and backward, more than the operators.
PASS_SECONDS = 5e-4
# The same of an asynchronous pipeline, whose minibatches are batches of Lightning's loop, with a
# log and the weights of a rule: ranks with two stages of tiny layers took 4.0 ms for each.
STALE_PASS_SECONDS = 2e-3
# Of a process on CPUs besides, with microbatches in stages: connections, threads, traces, what is
# free between small blocks. Ranks of a GPT of 8 layers under 1F1B and interleaved schedules held 8
# to 10 MiB more than their tensors and `process_bytes`.
STAGES_BYTES = 8 * 2**20
_FILLED = 6  # minibatches, in times those that fill the pipeline


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline of `pipeline` ranks in a row, and of `data` rows.

    Args:
        pipeline: ranks in a row. Each of these is a group of `tensor` ranks with slices.
        data: rows.
        schedule: its name.
        stages_per_rank: stages of each rank.
        num_microbatches: those of a row in a step.
        samples: of a microbatch.
        level: ZeRO level along the data axis, 0 or 1.
        tensor: ranks that hold slices of one copy of the parameters.
        rows_apart: the ranks of a row are neighbours; else those of a stage are.
        exchange: of gradients between rows; None: an all-reduce.
    """

    pipeline: int
    data: int
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    samples: float
    level: int = 0
    tensor: int = 1
    rows_apart: bool = False
    exchange: GradientMethod | None = None

    @property
    def cast_copies(self) -> int:
        """Of 16-bit casts of a stage's parameters, which microbatches share: one for each stage."""
        return self.stages_per_rank

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.pipeline * self.stages_per_rank

    @cached_property
    def rates(self) -> ScheduleRates:
        """The rates of its schedule."""
        return rates_of(
            self.schedule,
            num_ranks=self.pipeline,
            num_microbatches=self.num_microbatches,
            stages_per_rank=self.stages_per_rank,
        )

    @property
    def splits_backward(self) -> bool:
        """True if gradients of parameters come in passes of their own."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def pass_seconds(self) -> float:
        """What a pass takes in Python."""
        return PASS_SECONDS

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage along the pipeline."""
        return SCHEDULES[self.schedule].rank_of_stage(
            num_ranks=self.pipeline, stages_per_rank=self.stages_per_rank
        )

    def mesh(self, cluster: Cluster) -> Mesh:
        """Return the mesh: axes of stages, of parts of the batch and, if any, of slices."""
        per_node, size = cluster.devices_per_node, self.pipeline * self.width
        # neighbours are on one node where nodes consist of whole stages, or rows
        inner = size // self.data if self.rows_apart else self.width
        inside = inner <= per_node and per_node % inner == 0
        scopes = "intra" if size <= per_node else "inter", "intra" if inside else "inter"
        axes = [("pipeline", self.pipeline), ("data", self.data)]
        if self.rows_apart:
            axes.reverse()
        placed = tuple(Axis(*axis, scope) for axis, scope in zip(axes, scopes, strict=True))
        return Mesh((*placed, Axis("tensor", self.tensor)) if self.tensor > 1 else placed)

    @property
    def width(self) -> int:
        """The ranks of one stage."""
        return self.data * self.tensor

    @property
    def hop(self) -> int:
        """The distance of a rank from that of the next stage."""
        return self.tensor if self.rows_apart else self.width

    @property
    def rows(self) -> Mesh:
        """The mesh of the ranks of one stage, and of those between them."""
        axes = [Axis("data", self.data)]
        axes += [Axis("pipeline", self.pipeline)] if self.rows_apart else []
        return Mesh((*axes, Axis("tensor", self.tensor)) if self.tensor > 1 else tuple(axes))

    def once(self, blocks: StageBlocks) -> Once:
        """Return what a step of `blocks` takes besides its passes."""
        ranks, per_node = self.pipeline * self.hop, blocks.step.cluster.devices_per_node
        inside = ranks <= per_node and (not self.rows_apart or per_node % ranks == 0)
        return blocks.once(self.rows, self.level, crosses_nodes=not inside, exchange=self.exchange)

    def link_before(self, stage: int, cluster: Cluster) -> str:
        """Return what the slowest ranks of a stage receive through: "intra", "inter" or "none"."""
        # stages of one rank hand over without a message
        if self.ranks[stage - 1] == self.ranks[stage]:
            return "none"
        # links between neighbours in the row: their ranks lie beside one another
        both = [self._ranks_of(each) for each in (stage - 1, stage)]
        pairs = [*zip(*both, strict=True)]
        if not self.rows_apart:
            # Ranks follow the nodes: pairs are on one node where all of them are, or nowhere.
            pairs = [(min(ranks[0] for ranks in both), max(ranks[-1] for ranks in both))]
        same = all(cluster.node_of(a) == cluster.node_of(b) for a, b in pairs)
        return "intra" if same else "inter"

    def _ranks_of(self, stage: int) -> Sequence[int]:
        first = self.ranks[stage] * self.hop
        if not self.rows_apart:
            return range(first, first + self.width)
        starts = range(first, self.pipeline * self.width, self.pipeline * self.hop)
        return [start + n for start in starts for n in range(self.hop)]


@dataclass(frozen=True)
class ContinuousShape(PipelineShape):
    """A pipeline that never flushes: one stage on each rank, minibatches one after the other.

    Each minibatch has `samples` samples, and an update takes `accumulate` of them. Backward passes
    lag behind forward passes as the schedule says. Passes compute with the weights of `rule`.
    """

    rule: Prediction = field(default_factory=NoPrediction)
    accumulate: int = 1

    @property
    def cast_copies(self) -> int:
        """None are shared, as weights change between the passes of a minibatch."""
        return 0

    @classmethod
    def of(
        cls,
        ranks: int,
        data: int,
        *,
        samples: float,
        schedule: str,
        prediction: Prediction,
        accumulate: int = 1,
        rows_apart: bool = False,
        exchange: GradientMethod | None = None,
    ) -> ContinuousShape:
        """Return the shape of `data` rows of `ranks` ranks; `prediction` is the rule of weights."""
        return cls(
            *(ranks, data, schedule, 1, 1, samples),
            rows_apart=rows_apart,
            exchange=exchange,
            rule=prediction,
            accumulate=accumulate,
        )

    @property
    def lag_per_hop(self) -> int:
        """Minibatches per hop by which backward passes are behind forward passes."""
        return CONTINUOUS_SCHEDULES[self.schedule]

    @override
    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.pipeline))

    @property
    @override
    def splits_backward(self) -> bool:
        return False

    @property
    @override
    def pass_seconds(self) -> float:
        return STALE_PASS_SECONDS

    @property
    @override
    def rates(self) -> ScheduleRates:
        # the minibatch itself, and those by which its backward pass is behind
        held = tuple(self._lag(stage) + 1 for stage in range(self.pipeline))
        # With the fewest minibatches in flight stages wait for gradients: those of a round share
        # the transfers.
        waits = (self.pipeline - 1) / self.pipeline if self.lag_per_hop == 1 else 0.0
        return ScheduleRates(0.0, 1.0, 0.0, waits, 0.5, held, ((),) * self.pipeline, 1)

    @property
    def missing_updates(self) -> tuple[int, ...]:
        """Updates that a forward pass of each stage does not see, once the pipeline is filled.

        They are those before the minibatch's own one.
        """
        return tuple(each.forward[-1].missing for each in staleness(self.filling_schedule))

    @property
    def filling_schedule(self) -> Schedule:
        """The schedule of enough minibatches to see it filled."""
        count = _FILLED * max(self._lag(0), 1)
        return continuous_schedule(
            num_ranks=self.pipeline, num_minibatches=count, lag_per_hop=self.lag_per_hop
        )

    def pace(self, passes: Array, updates: Array, transfers: Array) -> Array:
        """Return the seconds of a minibatch (n,) of n plans, as `seconds_per_minibatch`."""
        work = passes + 2 * self.pass_seconds
        return seconds_per_minibatch(work, updates, transfers, lag_per_hop=self.lag_per_hop)

    @property
    def copies(self) -> tuple[int, ...]:
        """Copies of its weights that each stage keeps."""
        sizes = {"num_stages": self.pipeline, "lag_per_hop": self.lag_per_hop}
        sizes["accumulate"] = self.accumulate
        return tuple(self.rule.copies_at(StagePlace(s, **sizes)) for s in range(self.pipeline))

    def rule_seconds(self, blocks: StageBlocks) -> Array:
        """Return seconds per byte of a stage's weights that the rule takes, (2, stage).

        The first row is for both passes of a minibatch, the second for the update, as parts of a
        minibatch. Memory that is read and written takes them.
        """
        step = blocks.step
        moved = _rule_traffic(self, step.optimizer.name, in_cache=step.on_gloo)
        return np.array(moved).T / step.cluster.device.memory_bandwidth

    def copied_bytes(self, blocks: StageBlocks, *, stage: int, first: int, end: int) -> float:
        """Return the bytes of weight copies of a stage with blocks `first` to `end` - 1."""
        return self.copies[stage] * sum(trained_bytes(blocks, place) for place in range(first, end))

    def _lag(self, stage: int) -> int:
        return lag_of(stage, num_ranks=self.pipeline, lag_per_hop=self.lag_per_hop)


@lru_cache(maxsize=256)
def _rule_traffic(shape: ContinuousShape, optimizer: str, *, in_cache: bool) -> list[Traffic]:
    # The traffic of the rule by stage, of a minibatch once the pipeline is filled
    count = shape.accumulate
    first = -(-_FILLED * max(shape._lag(0), 1) // count) * count  # of an update
    schedule = continuous_schedule(
        num_ranks=shape.pipeline,
        # as many follow as precede them
        num_minibatches=2 * first + count,
        lag_per_hop=shape.lag_per_hop,
        accumulate=count,
    )
    found = []
    for stage in staleness(schedule):
        passes = [
            shape.rule.traffic(forward, backward, optimizer=optimizer, in_cache=in_cache)
            for forward, backward in zip(*stage, strict=True)
        ][first : first + count]
        most = max(each.update for each in passes)
        found.append(Traffic(sum(each.passes for each in passes) / count, most / count))
    return found


def trained_bytes(blocks: StageBlocks, place: int) -> float:
    """Return the bytes of the parameters of a block that are trained."""
    return float(
        sum(parameter_bytes(parameter) for parameter in blocks.owned[place] if parameter.trainable)
    )


def shape_of_plan(plan: ParallelPlan) -> PipelineShape:
    """Return the shape of the pipeline of a plan with stages."""
    assert plan.schedule is not None and plan.batch_size is not None
    mesh, tensor = plan.mesh, plan.mesh.ranks_along(plan.mesh.tensor_axes)
    sizes, exchange = (mesh.pipeline_size, mesh.data_parallel_size), plan.gradient_exchange
    if plan.schedule in CONTINUOUS_SCHEDULES:
        assert plan.weight_prediction is not None, "plans that are found have one"
        return ContinuousShape.of(
            *sizes,
            samples=float(plan.batch_size),
            schedule=plan.schedule,
            prediction=plan.weight_prediction,
            accumulate=plan.accumulate,
            rows_apart=_rows_apart(mesh),
            exchange=exchange,
        )
    level = max(config.storage.level for config in plan.configs.values())
    # with a batch for each rank, each of them is one microbatch
    samples = plan.batch_size if plan.own_batches else plan.batch_size / plan.num_microbatches
    return PipelineShape(
        *sizes,
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        num_microbatches=plan.num_microbatches,
        samples=samples,
        level=level,
        tensor=tensor,
        rows_apart=_rows_apart(mesh),
        exchange=exchange,
    )


def _rows_apart(mesh: Mesh) -> bool:
    # Whether the axis of rows is outside of that of stages
    return mesh.data_parallel_size > 1 and min(mesh.data_axes) < min(mesh.pipeline_axes)


# ---- the costs of all cuts


def stage_table(
    blocks: StageBlocks, shape: PipelineShape, *, recomputes: Sequence[bool] = (False, True)
) -> StageTable:
    """Return the costs of all ways to cut `blocks` into the stages of `shape`.

    Blocks that can recompute choose one of `recomputes`.

    Raises:
        ValueError: there are fewer blocks than stages, or the graph says nothing about microbatches
            of this size.
    """
    cluster, rates = blocks.step.cluster, shape.rates
    # the links that stages receive through
    into = links_of(shape, cluster)
    links = [*dict.fromkeys(into)]
    received = np.round(blocks.crossing_bytes(shape.samples)[0])
    # of each stage: microbatches that it holds, the link that it receives through
    stages = tuple(
        StageKind(0, float(held), links.index(link), waits)
        for held, link, waits in zip(rates.held, into, rates.waits, strict=True)
    )
    transfers = transfer_seconds(blocks, shape)
    chain, extras = _chain_and_extras(blocks, shape, tuple(recomputes))
    return StageTable(
        chain,
        (extras,),
        stages,
        tuple(
            _link(rates, transfers[link].sum(axis=0), received * (link != "none")) for link in links
        ),
        rates.lead,
        rates.load,
        float(shape.stages_per_rank),
        _shared_costs(blocks, shape),
        *fixed_costs(blocks, shape),
    )


def _shared_costs(blocks: StageBlocks, shape: PipelineShape) -> Array | None:
    # `StageTable.shared`: what blocks of a stage pay together
    once, count = shape.once(blocks), len(blocks.names)
    if once.shared is None:
        return None
    found = np.zeros((3, count, count + 1))
    found[:2] = once.shared
    return found * shape.stages_per_rank


def continuous_table(blocks: StageBlocks, shape: ContinuousShape) -> StageTable:
    """Return the costs of all ways to cut `blocks` into the stages of a pipeline without flushes.

    They are those of any pipeline, with copies of weights, and with minibatches in flight while a
    stage updates.
    """
    table = stage_table(blocks, shape)
    (usual,) = table.extras
    # bytes that one copy of the weights of each distinct block takes
    copied = np.array(
        [trained_bytes(blocks, blocks.kinds.index(kind)) for kind in range(max(blocks.kinds) + 1)]
    )
    seconds = shape.rule_seconds(blocks).sum(axis=0)
    # stages keep different numbers of copies
    extras = tuple(
        replace(usual, static=usual.static + copies * copied, load=usual.load + rate * copied)
        for copies, rate in zip(shape.copies, seconds.tolist(), strict=True)
    )
    stages = tuple(
        replace(stage, extras=n, in_update=stage.in_flight - 1)
        for n, stage in enumerate(table.stages)
    )
    return replace(table, extras=extras, stages=stages)


def _chain_and_extras(
    blocks: StageBlocks, shape: PipelineShape, recomputes: tuple[bool, ...]
) -> tuple[StageChain, StageExtras]:
    # gradients of parameters fill idle times, but no more of the lead than a block takes
    chain, weights, own = parts_of(blocks, shape, recomputes, parts=1 + shape.splits_backward)
    # the lead that a block has at least, whatever its configuration
    least = [shape.rates.lead * block.seconds.min() for block in chain.blocks]
    weights, own = np.minimum(shape.rates.weights * weights, least), own * shape.stages_per_rank
    waiting = np.round(
        blocks.passes(shape.samples).waiting[
            [blocks.kinds.index(k) for k in range(len(chain.blocks))]
        ]
    )
    return chain, StageExtras(
        -weights, weights + np.round(own[0], 9), np.round(own[1]), np.round(own[2]), waiting
    )


def parts_of(
    blocks: StageBlocks, shape: PipelineShape, recomputes: tuple[bool, ...], *, parts: int = 1
) -> tuple[StageChain, Array, Array]:
    """Return what stages of `shape` take, without schedule rates.

    Backward in two `parts` takes longer, but for that of the first stage, whatever its blocks are.
    With 1 the chain takes no longer than any stage.

    Returns:
        The chain; seconds of gradients of parameters (distinct block,) where these have passes of
        their own; and per step ([seconds, static bytes, bytes of the update], distinct block).
    """
    # the first place of each distinct block
    kinds = [blocks.kinds.index(kind) for kind in range(max(blocks.kinds) + 1)]
    once, splits = shape.once(blocks), shape.splits_backward
    # A recomputed block would recompute in either half of its backward.
    chain = blocks.chain(
        shape.samples,
        recomputes=(False,) if splits else recomputes,
        parts=parts,
        cast_copies=shape.cast_copies,
    )
    weights = blocks.passes(shape.samples).weights[kinds] if splits else np.zeros(len(kinds))
    return chain, weights, np.stack([once.seconds, once.static, once.update])[:, kinds]


def _link(rates: ScheduleRates, round_trip: Array, received: Array) -> StageLink:
    round_trip = np.round(round_trip, 9)
    return StageLink(
        rates.lead * round_trip,
        rates.sent_load * round_trip,
        rates.sent_floor * round_trip,
        received,
    )


def fixed_costs(blocks: StageBlocks, shape: PipelineShape) -> tuple[float, float]:
    """Return the seconds and bytes that all plans of `shape` pay: Python, what a rank has once."""
    rates = shape.rates
    # forward and backward, whole or in halves: each pass takes time in Python
    passes = (2 + shape.splits_backward) * (shape.num_stages * rates.lead + rates.load)
    seconds = passes * shape.pass_seconds
    # threads and connections of a pipeline on CPUs
    process = STAGES_BYTES if blocks.step.on_gloo and shape.num_microbatches > 1 else 0
    return seconds, bytes_of_rank(blocks, shape) + process


def bytes_of_rank(blocks: StageBlocks, shape: PipelineShape) -> float:
    """Return the bytes that a rank has in training and evaluation, whichever stages it runs."""
    graph, device = blocks.step.graph, blocks.step.cluster.device
    inputs = graph.input_bytes.at(shape.samples * shape.num_microbatches)
    held = graph.buffer_bytes + inputs + device.process_bytes
    # on CUDA a workspace, and communicators: two links of a rank at an end, four of others, the
    # pipeline's, and one for each other axis
    if device.caching_allocator:
        groups = (2 if shape.pipeline == 2 else 4) + 1 + (shape.data > 1) + (shape.tensor > 1)
        held += CUBLAS_BYTES + groups * COMMUNICATOR_BYTES
    return held


# ---- messages between stages


def transfer_seconds(blocks: StageBlocks, shape: PipelineShape) -> dict[str, Array]:
    """Return the seconds (2, block) to send a microbatch over each boundary, by link.

    The second row is for its gradient, back. Both include the gathering of slices.
    """
    # the same for every shape of as large microbatches and as wide stages
    if (known := blocks.transfers.get((shape.samples, shape.hop))) is not None:
        return known
    cluster, sizes = blocks.step.cluster, blocks.crossing_bytes(shape.samples)
    found = {"none": np.zeros(sizes.shape)}
    for link in ("intra", "inter"):
        # few different sizes cross the boundaries: each is priced once
        distinct = {
            float(size): _send_seconds(cluster, float(size), shape, link)
            for size in np.unique(sizes)
        }
        found[link] = np.array([[distinct[float(size)] for size in row] for row in sizes])
    # A stage on slices gathers, before it sends on, what it has in slices. Where blocks take slices
    # the stage after it cuts what it gets, and gathers its gradient.
    if blocks.tensor > 1:
        slices, axes = blocks.gathered_bytes(shape.samples), blocks.step.mesh.tensor_axes
        for n in np.flatnonzero(slices):
            gather = blocks.step.collective_seconds("all_gather", float(slices[n]), axes=axes)
            for seconds in found.values():
                seconds[: 1 + bool(blocks.step.computes), n] += gather
    blocks.transfers[shape.samples, shape.hop] = found
    return found


def _send_seconds(cluster: Cluster, size: float, shape: PipelineShape, link: str) -> float:
    """Return the seconds of a message.

    Where all ranks of a node send to another node at once they share its network.
    """
    if size <= 0 or (link == "inter" and cluster.inter is None):
        return 0.0
    group, per_node = Group(2, shape.hop), cluster.devices_per_node
    # by the collective's curve where it is measured, or where the group lies on that link
    measured = ("send_recv", group.size, group.stride) in cluster.collectives
    if group.span <= cluster.num_devices and (
        measured or group.is_inside(per_node) == (link == "intra")
    ):
        return estimate_collective_seconds(cluster, op="send_recv", size=size, group=group)
    if link == "intra":
        return cluster.intra.latency_seconds + size / cluster.intra.bandwidth
    assert cluster.inter is not None
    # a node sends as fast as its network, which all of its ranks in the stage share
    share = per_node / min(shape.hop, per_node)
    fast = Link(
        cluster.inter.latency_seconds, min(cluster.intra.bandwidth, cluster.inter.bandwidth * share)
    )
    return fast.latency_seconds + size / fast.bandwidth


def links_of(shape: PipelineShape, cluster: Cluster) -> list[str]:
    """Return through what each stage receives: "intra" (a node), "inter" or "none" (one rank).

    The first stage receives nothing, through whatever link.
    """
    return _known_links(cluster, shape)[0]


def boundaries_of(shape: PipelineShape, cluster: Cluster) -> Mapping[str, int]:
    """Return how many of the stages but the first receive through each of `links_of`."""
    return _known_links(cluster, shape)[1]


def _known_links(cluster: Cluster, shape: PipelineShape) -> _Links:
    known, key = _links_by_ranks(cluster), (shape.ranks, shape.width, shape.hop)
    if key not in known:
        # the first stage is given the link of the second
        links = ["none"]
        if shape.num_stages > 1:
            links = [shape.link_before(max(s, 1), cluster) for s in range(shape.num_stages)]
        known[key] = links, Counter(links[1:])
    return known[key]


_Links = tuple[list[str], Mapping[str, int]]


@once_per_object
def _links_by_ranks(cluster: Cluster) -> dict[tuple[tuple[int, ...], int, int], _Links]:
    # The links of this cluster that are known, an empty dictionary at first
    return {}
