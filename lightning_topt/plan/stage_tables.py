"""Pipelines of a training step: `PipelineShape` says which ranks, schedule and microbatches,
`stage_table` what they cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_topt.basics.once import once_per_object
from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.communication import estimate_collective_seconds
from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.groups import Group
from lightning_topt.costs.schedule_rates import ScheduleRates, rates_of
from lightning_topt.costs.stage_table import (
    StageChain,
    StageKind,
    StageLink,
    StageTable,
    StageVariant,
)
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.step_once import Once
from lightning_topt.schedules.schedules import SCHEDULES

# What a pass takes in Python beside its operators: stand-ins, messages. A rank of a pipeline of
# tiny stages took 1.1 ms of CPU per microbatch, forward and backward, more than the operators.
PASS_SECONDS = 5e-4
# Of a process on CPUs besides, with microbatches in stages: connections, threads, traces, what is
# free between small blocks. Ranks of a GPT of 8 layers under 1F1B and interleaved schedules held 8
# to 10 MiB more than their tensors and `process_bytes`.
STAGES_BYTES = 8 * 2**20
LINKS = ("intra", "inter", "none")  # inside a node, between nodes, on one rank


@dataclass(frozen=True)
class PipelineShape:
    """`pipeline` ranks in a row, `data` rows; `stages_per_rank` stages each, run as `schedule` says
    on `num_microbatches` of `samples` samples; ZeRO `level` 0 or 1 along the data axis. Each of
    these is a group of `tensor` ranks with slices.
    """

    pipeline: int
    data: int
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    samples: float
    level: int = 0
    tensor: int = 1

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
        """Whether gradients of parameters come in passes of their own."""
        return SCHEDULES[self.schedule].splits_backward

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage along the pipeline."""
        return SCHEDULES[self.schedule].rank_of_stage(
            num_ranks=self.pipeline, stages_per_rank=self.stages_per_rank
        )

    def mesh(self, cluster: Cluster) -> Mesh:
        """Return the mesh: stages along its first axis, parts of the batch along the second, slices
        along the last, if any.
        """
        per_node, width = cluster.devices_per_node, self.width
        inside = width <= per_node and per_node % width == 0
        scopes = (
            "intra" if self.pipeline * width <= per_node else "inter",
            "intra" if inside else "inter",
        )
        axes = Axis("pipeline", self.pipeline, scopes[0]), Axis("data", self.data, scopes[1])
        return Mesh((*axes, Axis("tensor", self.tensor)) if self.tensor > 1 else axes)

    @property
    def width(self) -> int:
        """The ranks of one stage."""
        return self.data * self.tensor

    @property
    def rows(self) -> Mesh:
        """The mesh of the ranks of one stage."""
        data = Axis("data", self.data)
        return Mesh((data, Axis("tensor", self.tensor)) if self.tensor > 1 else (data,))

    def once(self, blocks: StageBlocks) -> Once:
        """Return what a step of `blocks` takes besides its passes."""
        inside = self.pipeline * self.width <= blocks.step.cluster.devices_per_node
        return blocks.once(self.rows, self.level, crosses_nodes=not inside)

    def link_before(self, stage: int, cluster: Cluster) -> str:
        """Return which of `LINKS` the slowest ranks of a stage receive through, from the stage
        before.
        """
        if self.ranks[stage - 1] == self.ranks[stage]:
            return "none"
        both = [self._ranks_of(each) for each in (stage - 1, stage)]
        first, last = min(ranks[0] for ranks in both), max(ranks[-1] for ranks in both)
        # Ranks follow the nodes, so each pair is on one node where all of them are, and nowhere
        # else.
        return "intra" if cluster.node_of(first)[1] == cluster.node_of(last)[1] else "inter"

    def kinds_of(self, stages: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
        """Return the kinds of nodes (`Cluster.nodes`) that run `stages`; none where all are
        equal.
        """
        if not cluster.nodes:
            return ()
        ends = [(ranks[0], ranks[-1]) for ranks in map(self._ranks_of, stages)]
        kinds = [(cluster.node_of(first)[0], cluster.node_of(last)[0]) for first, last in ends]
        return tuple(sorted({kind for first, last in kinds for kind in range(first, last + 1)}))

    def _ranks_of(self, stage: int) -> range:
        first = self.ranks[stage] * self.width
        return range(first, first + self.width)


def stage_table(
    blocks: StageBlocks, shape: PipelineShape, *, recomputes: Sequence[bool] = (False, True)
) -> StageTable:
    """Return the costs of all ways to cut `blocks` into the stages of `shape`; blocks that can
    recompute choose one of `recomputes`.

    Raises ValueError for fewer blocks than stages, and for microbatches that the graph says nothing
    about.
    """
    cluster, rates, count = blocks.step.cluster, shape.rates, shape.num_stages
    on = [shape.kinds_of([s], cluster) for s in range(count)]
    several = [*dict.fromkeys(on)]
    into = links_of(shape, cluster)
    links = [*dict.fromkeys(into)]
    received = np.round(blocks.crossing_bytes(shape.samples)[0])
    stages = tuple(
        StageKind((several.index(kinds),), float(held), links.index(link), waits)
        for kinds, held, link, waits in zip(on, rates.held, into, rates.waits, strict=True)
    )
    shared = shape.once(blocks).shared
    return StageTable(
        tuple(_variant(blocks.on(kinds), shape, tuple(recomputes)) for kinds in several),
        stages,
        tuple(
            _link(
                rates,
                transfer_seconds(blocks.on(kinds), shape)[link].sum(axis=0),
                received * (link != "none"),
            )
            for kinds, link in links
        ),
        rates.lead,
        rates.load,
        float(shape.stages_per_rank),
        None if shared is None else shared * shape.stages_per_rank,
        *fixed_costs(blocks, shape),
    )


def fixed_costs(blocks: StageBlocks, shape: PipelineShape) -> tuple[float, float]:
    """Return the seconds and bytes that all plans of `shape` pay: Python, what each rank has
    once.
    """
    rates, graph, rank_samples = (
        shape.rates,
        blocks.step.graph,
        shape.samples * shape.num_microbatches,
    )
    seconds = (
        (2 + shape.splits_backward) * PASS_SECONDS * (shape.num_stages * rates.lead + rates.load)
    )
    process = blocks.step.cluster.device.process_bytes
    if blocks.step.on_gloo and shape.num_microbatches > 1:
        process += STAGES_BYTES
    return seconds, graph.buffer_bytes + graph.input_bytes.at(rank_samples) + process


def links_of(shape: PipelineShape, cluster: Cluster) -> list[tuple[tuple[int, ...], str]]:
    """Return through what each stage receives: the kinds of nodes at both ends, and one of `LINKS`.

    The first stage receives nothing, through whatever link.
    """
    return _known_links(cluster, shape)[0]


def boundaries_of(
    shape: PipelineShape, cluster: Cluster
) -> Mapping[tuple[tuple[int, ...], str], int]:
    """Return how many of the stages but the first receive through each of `links_of`."""
    return _known_links(cluster, shape)[1]


def _known_links(cluster: Cluster, shape: PipelineShape) -> _Links:
    known, key = _links_by_ranks(cluster), (shape.ranks, shape.width)
    if key not in known:
        before = [max(s, 1) for s in range(shape.num_stages)]
        if shape.num_stages == 1:
            links = [(shape.kinds_of([0], cluster), "none")]
        else:
            links = [
                (shape.kinds_of([s - 1, s], cluster), shape.link_before(s, cluster)) for s in before
            ]
        known[key] = links, Counter(links[1:])
    return known[key]


_Links = tuple[list[tuple[tuple[int, ...], str]], Mapping[tuple[tuple[int, ...], str], int]]


@once_per_object
def _links_by_ranks(cluster: Cluster) -> dict[tuple[tuple[int, ...], int], _Links]:
    """The links that were worked out for this cluster."""
    return {}


def _variant(
    blocks: StageBlocks, shape: PipelineShape, recomputes: tuple[bool, ...]
) -> StageVariant:
    """Stages on the devices of `blocks`."""
    chain, weights, own = parts_of(blocks, shape, recomputes, parts=1 + shape.splits_backward)
    least = [shape.rates.lead * block.seconds.min() for block in chain.blocks]
    weights, own = np.minimum(shape.rates.weights * weights, least), own * shape.stages_per_rank
    waiting = np.round(
        blocks.passes(shape.samples).waiting[
            [blocks.kinds.index(k) for k in range(len(chain.blocks))]
        ]
    )
    return StageVariant(
        chain, -weights, weights + np.round(own[0], 9), np.round(own[1]), np.round(own[2]), waiting
    )


def parts_of(
    blocks: StageBlocks, shape: PipelineShape, recomputes: tuple[bool, ...], *, parts: int = 1
) -> tuple[StageChain, Array, Array]:
    """Return what stages of `shape` take on the devices of `blocks`, whatever its schedule's rates
    are: the chain; seconds of gradients of parameters (distinct block,) where these have passes of
    their own; and seconds, static bytes and those of the update once per step ([seconds, static,
    update], distinct block). Backwards in two `parts` take longer, but for those of the first
    stage, whatever its blocks are; with 1 the chain takes no longer than any stage.
    """
    kinds = [blocks.kinds.index(kind) for kind in range(max(blocks.kinds) + 1)]
    once, splits = shape.once(blocks), shape.splits_backward
    # A recomputed block would recompute in either half of its backward.
    chain = blocks.chain(shape.samples, recomputes=(False,) if splits else recomputes, parts=parts)
    weights = blocks.passes(shape.samples).weights[kinds] if splits else np.zeros(len(kinds))
    return chain, weights, np.stack([once.seconds, once.static, once.update])[:, kinds]


def transfer_seconds(blocks: StageBlocks, shape: PipelineShape) -> dict[str, Array]:
    """Return the seconds (2, block) to send a microbatch over the boundary before each block, and
    to send its gradient back, by link; with those to make whole tensors of slices.
    """
    if (known := blocks.transfers.get((shape.samples, shape.width))) is not None:
        return known
    cluster, sizes = blocks.step.cluster, blocks.crossing_bytes(shape.samples)
    found = {"none": np.zeros(sizes.shape)}
    for link in ("intra", "inter"):
        distinct = {
            float(size): _send_seconds(cluster, float(size), shape, link)
            for size in np.unique(sizes)
        }
        found[link] = np.array([[distinct[float(size)] for size in row] for row in sizes])
    if blocks.tensor > 1:
        slices, axes = blocks.gathered_bytes(shape.samples), blocks.step.mesh.tensor_axes
        for n in np.flatnonzero(slices):
            gather = blocks.step.collective_seconds("all_gather", float(slices[n]), axes=axes)
            for seconds in found.values():
                seconds[0, n] += gather
    blocks.transfers[shape.samples, shape.width] = found
    return found


def _send_seconds(cluster: Cluster, size: float, shape: PipelineShape, link: str) -> float:
    """Seconds of a message; where all ranks of a node send to another node at once they share its
    network.
    """
    if size <= 0 or (link == "inter" and cluster.inter is None):
        return 0.0
    group, per_node = Group(2, shape.width), cluster.devices_per_node
    measured = ("send_recv", group.size, group.stride) in cluster.collectives
    if group.span <= cluster.num_devices and (
        measured or group.is_inside(per_node) == (link == "intra")
    ):
        return estimate_collective_seconds(cluster, op="send_recv", size=size, group=group)
    if link == "intra":
        return cluster.intra.latency_seconds + size / cluster.intra.bandwidth
    assert cluster.inter is not None
    share = per_node / min(shape.width, per_node)
    fast = Link(
        cluster.inter.latency_seconds, min(cluster.intra.bandwidth, cluster.inter.bandwidth * share)
    )
    return fast.latency_seconds + size / fast.bandwidth


def _link(rates: ScheduleRates, round_trip: Array, received: Array) -> StageLink:
    round_trip = np.round(round_trip, 9)
    return StageLink(
        rates.lead * round_trip,
        rates.sent_load * round_trip,
        rates.sent_floor * round_trip,
        received,
    )
