"""Seconds and bytes of Megatron rows, by the model that the search prices pipelines with
(`plan.stage_simulation`).

A row is a chain of equal layers on stages of equally many (the first have one more where that is
not possible), under 1F1B, on a mesh pipeline x data x tensor whose tensor groups are neighbours.
Every shape of layer is captured once, with three layers (`RepeatedBlocks`), whatever the depth and
the batch. Layers recompute their activations only where a rank's memory is too small to keep them,
and large enough then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from lightning_topt.cli.megatron.megatron_gpt import GPTSizes, MegatronGPT, takes_fused_softmax
from lightning_topt.cli.megatron.megatron_rows import MegatronRow
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import OptimizerProfile, ParameterUpdate
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.meta_build import build_on_meta
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.plan.stage_blocks import RepeatedBlocks, StageBlocks, repeat_blocks
from lightning_topt.plan.stage_simulation import (
    StageSeconds,
    formula_step_seconds,
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
)
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape

# Adam in mixed precision (Micikevicius et al., arXiv 1710.03740; Rajbhandari et al., arXiv
# 1910.02054, section 3.1): a float32 copy, momentum and variance; read and written with the
# gradient, which is copied to float32 and whose norm is taken.
STATE_BYTES, MOVED_BYTES = 12, 2 + 4 + 4 + 4 + 2 * 12 + 2


@dataclass(frozen=True)
class RowCosts:
    """The costs of a row: `step_seconds` of an iteration, `peak_bytes` of the fullest rank, and
    `seconds` of the parts of an iteration on the slowest rank: "forward", "backward", "pipeline"
    (what it waits for others), "once" (exchange of gradients and update).
    """

    step_seconds: float
    peak_bytes: float
    seconds: Mapping[str, float]


class MegatronCosts:
    """The costs of rows on one cluster. What is known of a shape of layer is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._chains: dict[GPTSizes, StageBlocks] = {}
        self._repeated: dict[tuple[GPTSizes, int], RepeatedBlocks] = {}

    def price(self, row: MegatronRow) -> RowCosts:
        """Return the costs of a row. Raises ValueError for more ranks than the cluster has
        devices.
        """
        blocks, shape, point, peak = self._placed(row)
        seconds = stage_seconds(blocks, shape, [point])
        step = _step_seconds(seconds, shape)
        count = shape.num_microbatches
        slowest = int((count * (seconds.forward + seconds.backward) + seconds.once)[:, 0].argmax())
        parts = {
            "forward": count * (float(seconds.forward[slowest, 0]) + PASS_SECONDS),
            "backward": count * (float(seconds.backward[slowest, 0]) + PASS_SECONDS),
            "once": float(seconds.once[slowest, 0]),
        }
        return RowCosts(step, peak, {**parts, "pipeline": max(step - sum(parts.values()), 0.0)})

    def step_seconds(self, row: MegatronRow) -> float:
        """Return the seconds of an iteration of a row. Raises ValueError as `price`."""
        blocks, shape, point, _ = self._placed(row)
        return _step_seconds(stage_seconds(blocks, shape, [point]), shape)

    def _placed(self, row: MegatronRow) -> tuple[StageBlocks, PipelineShape, StagePoint, float]:
        """The chain, the pipeline, its cut, and the bytes at its peak."""
        if row.gpus > self.cluster.num_devices:
            raise ValueError(
                f"{row.gpus} GPUs are more than the {self.cluster.num_devices} of the cluster "
                f"{self.cluster.name!r}: say "
                f"cluster.num_nodes={math.ceil(row.gpus / self.cluster.devices_per_node)}"
            )
        chain = self._chain_of(row)
        shape = PipelineShape(
            row.pipeline,
            row.data,
            "1f1b",
            1,
            row.num_microbatches,
            float(row.samples),
            tensor=row.tensor,
        )
        each, more = divmod(row.layers, row.pipeline)
        ends = tuple(each * stage + min(stage, more) for stage in range(1, row.pipeline + 1))
        points = [
            StagePoint(0.0, 0.0, ends, (0,) * row.pipeline, (again,) * row.layers)
            for again in (0, 1)
        ]
        peaks = peak_bytes_of(chain, shape, stage_bytes(chain, shape, points)).tolist()
        again = peaks[0] > self.cluster.device.memory_bytes >= peaks[1]
        return chain, shape, points[again], peaks[again]

    def _chain_of(self, row: MegatronRow) -> RepeatedBlocks:
        key = sizes_of(row), row.layers
        if key not in self._repeated:
            self._repeated[key] = repeat_blocks(self._captured_chain(key[0]), _places(row.layers))
        return self._repeated[key]

    def _captured_chain(self, sizes: GPTSizes) -> StageBlocks:
        if sizes not in self._chains:
            known = captured_step(sizes)
            step = replace(known.base, cluster=self.cluster)
            for name in ("segments", "reduced_last", "tied", "phases", "_parameters"):
                step.__dict__[name] = getattr(known.base, name)
            blocks = StageBlocks(step)
            for name in (
                "names",
                "crossings",
                "_own_crossings",
                "uses",
                "owned",
                "_weight_shares",
                "_waiting",
            ):
                blocks.__dict__[name] = getattr(known.blocks, name)
            self._chains[sizes] = blocks
        return self._chains[sizes]


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The step of one rank on a microbatch, captured, and what does not depend on the cluster of
    its chain of blocks.
    """

    graph: OpGraph
    tensor: int

    @cached_property
    def base(self) -> TrainingStep:
        """The step, on a cluster that stands for any."""
        mesh = Mesh(
            (Axis("data", 1), Axis("tensor", self.tensor))
            if self.tensor > 1
            else (Axis("data", 1),)
        )
        update = _updates(self.graph)
        return TrainingStep(
            self.graph, _any_cluster(self.tensor), update, mesh, self.graph.batch_size
        )

    @cached_property
    def blocks(self) -> StageBlocks:
        """The chain of blocks."""
        return StageBlocks(self.base)


def sizes_of(row: MegatronRow) -> GPTSizes:
    """Return what is captured for a row."""
    fused = takes_fused_softmax(
        samples=row.samples, heads=row.heads // row.tensor, sequence=row.sequence
    )
    return GPTSizes(row.hidden, row.heads, row.sequence, min(row.layers, 3), row.tensor, fused)


@lru_cache(maxsize=256)
def captured_step(sizes: GPTSizes) -> CapturedStep:
    """Return the step of one rank of a GPT of these sizes."""
    module = build_on_meta(lambda: MegatronGPT(sizes))
    graph = capture(module, torch.zeros(2, sizes.sequence + 1, dtype=torch.int64))
    layers = [Block(f"layers.{index}", 1, recomputable=False) for index in range(sizes.layers)]
    return CapturedStep(
        graph.with_blocks([Block("", 0, recomputable=False), *layers]), sizes.tensor
    )


def cluster_for(rows: Sequence[MegatronRow], cluster: Cluster) -> Cluster:
    """Return the cluster, with as many more of its nodes as the largest of `rows` needs.

    Raises ValueError where it has several kinds of nodes, or one node and no network.
    """
    most = max(row.gpus for row in rows)
    if most <= cluster.num_devices:
        return cluster
    if cluster.nodes or cluster.inter is None:
        why = (
            "has several kinds of nodes"
            if cluster.nodes
            else "says nothing of a network between nodes (inter)"
        )
        raise ValueError(
            f"{most} GPUs are more than the {cluster.num_devices} of the cluster {cluster.name!r}, "
            f"which {why}: describe a larger one"
        )
    return replace(cluster, num_nodes=math.ceil(most / cluster.devices_per_node))


def _places(layers: int) -> tuple[int, ...]:
    return tuple(range(layers)) if layers <= 3 else (0, *[1] * (layers - 2), 2)


def _step_seconds(seconds: StageSeconds, shape: PipelineShape) -> float:
    simulated = step_seconds_of(seconds, shape)
    return float((formula_step_seconds(seconds, shape) if simulated is None else simulated)[0])


def _updates(graph: OpGraph) -> OptimizerProfile:
    updates = {
        p.name: ParameterUpdate(
            STATE_BYTES * p.numel, float(MOVED_BYTES * p.numel), 1.0, 0.0, False
        )
        for p in graph.parameters
    }
    return OptimizerProfile("Adam", elementwise=True, by_parameter=True, updates=updates)


def _any_cluster(ranks: int) -> Cluster:
    return Cluster("any", Device("any", 1, {"float32": 1.0}, 1.0), ranks, 1, Link(0.0, 1.0))
