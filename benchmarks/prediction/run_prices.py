"""What the training runs of a table cost: seconds of an iteration, bytes at the peak of a rank.

    clusters_of(runs, None)             # machines, by the GPU that each run names
    fit_runs(cluster, runs)             # constants, from runs with measured times
    RunPrices(cluster).price(run)

`training_runs` reads the file. A run is priced by the models that the search compares plans with.
Its rank's part of a Transformer (`transformer`) is captured once for each shape of layer, whatever
the cluster and the batch:

    run                        model                                      captured layers
    no ZeRO above level 1      stages of a pipeline (`plan.stage_simulation`): 1F1B, or   three,
                               interleaved; one stage without a pipeline                  repeated
    ZeRO-2, ZeRO-3             a chain of blocks (`techniques.plan_costs`)                all

ZeRO-3 in a pipeline is predicted as ZeRO-1. Stages have equally many layers; the first have one
more where that is not possible. Tensor groups
are neighbours, then data ranks, then stages. What has no model of its own is between two that do:

    every n-th layer recomputed          1 / n of the way from none to all
    every second product recomputed      `OPERATORS_AGAIN` of the seconds of that way, and
                                         `OPERATORS_KEPT` of its bytes
    activations offloaded to the host    the seconds of none, where passes do not wait for the
                                         host (vDNN, arXiv 1602.08124); the bytes of all, and
                                         of the layer that comes back while another one runs
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.prediction.error_figures import figure_of
from benchmarks.prediction.fitted_constants import (
    CONSTANTS,
    Constant,
    FittedConstants,
    fit_constants,
)
from benchmarks.prediction.overlapped_step import OverlappedStep
from benchmarks.prediction.repeated_blocks import RepeatedBlocks, repeat_blocks
from benchmarks.prediction.training_runs import ModelSizes, RunsAgain, TrainingRun, read_run_file
from benchmarks.prediction.transformer import RankTransformer, TransformerSizes, takes_fused_softmax
from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.costs.accuracy import ErrorFigure
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.costs.optimizer import OptimizerProfile, ParameterUpdate
from lightning_topt.costs.plain_values import names, shown
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.module_copy import build_on_meta
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plan.stage_blocks import _OF_THE_GRAPH, StageBlocks
from lightning_topt.plan.stage_simulation import (
    StageSeconds,
    formula_step_seconds,
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
)
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape
from lightning_topt.techniques.plan_costs import PlanCosts, explain

# clusters of the configurations, by what published tables call their GPUs
GPUS = {
    "a100_80gb": "a100_8x8",
    "a100_40gb": "a100_40gb_8x8",
    "h100_80gb": "h100_2x8",
    "h100_96gb_hbm2e_500w": "h100_96gb_2x8",
}

# Adam in mixed precision (Micikevicius et al., arXiv 1710.03740; Rajbhandari et al., arXiv
# 1910.02054, section 3.1): a float32 copy, momentum and variance; read and written with the
# gradient, which is copied to float32 and whose norm is taken.
STATE_BYTES, MOVED_BYTES = 12, 2 + 4 + 4 + 4 + 2 * 12 + 2
# torchtitan's selective checkpoint of Llama 3: of a layer's products those of keys, of attention's
# output and of one half of the MLP's input run again, 37 % of their FLOPs, and all that is cheap.
OPERATORS_AGAIN, OPERATORS_KEPT = 0.4, 0.55
# What products gain in float8, of twice the rate: scales and casts take the rest.
FLOAT8_GAIN = 1.5
NEAR = 0.25  # plans that a choice is between are predicted as close as this
_PLACES = 3  # layers that are captured of a repeated model

Seconds = Mapping[str, float]


def completed(
    runs: Sequence[TrainingRun], clusters: Mapping[str, Cluster]
) -> Sequence[TrainingRun]:
    """Return runs that all say what they recompute.

    A program that made a table has run all of it in one way. So those that do not say it recompute
    everything if one of them would not fit its device otherwise, else nothing.
    """
    unsaid = [run for run in runs if run.recompute is None]
    several = {gpu: RunPrices(cluster) for gpu, cluster in clusters.items()}

    def fits(run: TrainingRun) -> bool:
        costs = several.get(run.gpu) or several[""]
        return costs.price(run).peak_bytes <= costs.cluster.device.memory_bytes

    full = RunsAgain(1.0)
    # runs that fit in neither way tell nothing
    every = any(not fits(run) and fits(replace(run, recompute=full)) for run in unsaid)
    assumed = full if every else RunsAgain()
    return [replace(run, recompute=assumed) if run.recompute is None else run for run in runs]


def measured_runs(path: Path) -> list[TrainingRun]:
    """Return the runs of a file that have measured times.

    Raises:
        ValueError: there are fewer than two of them.
    """
    runs = [run for run in read_run_file(path, need_times=True).runs if run.seconds is not None]
    if len(runs) < 2:
        raise ValueError(
            f"{path} has {len(runs)} rows with a measured time: constants are fitted to at least "
            "two"
        )
    return runs


def fit_runs(
    cluster: Cluster, runs: Sequence[TrainingRun], *, constants: Sequence[Constant] = CONSTANTS
) -> FittedConstants:
    """Return the cluster with its `constants` fitted to measured runs."""

    def predict(changed: Cluster) -> list[float]:
        # once per change of the constants, of which there are hundreds
        costs = RunPrices(changed)
        return [costs.step_seconds(run) for run in runs]

    measured = [run.seconds for run in runs if run.seconds is not None]
    return fit_constants(cluster, predict, measured, constants=constants)


def difference_of(
    runs: Sequence[TrainingRun], seconds: Sequence[float], *, near: float = NEAR
) -> ErrorFigure | None:
    """Return the errors of ratios of two predicted times, of pairs of measured runs for one job.

    Jobs count alike, however many pairs they have. None where there is no pair.

    Args:
        runs: with measured times; pairs are of one source, GPU, model, batch and number of devices.
        seconds: predicted, with constants that fit, so that what runs have in common is left out.
        near: by how much, as a share, the two predicted times of a pair may differ.
    """
    by_job: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run, value in zip(runs, seconds, strict=True):
        if run.seconds is not None:
            pair = value, run.seconds
            by_job.setdefault((run.source, run.gpu, *run.job), []).append(pair)
    predicted, measured, jobs = [], [], []
    for job, several in by_job.items():
        for (a, was_a), (b, was_b) in itertools.combinations(several, 2):
            if abs(math.log(a / b)) <= math.log1p(near):
                predicted.append(a / b)
                measured.append(was_a / was_b)
                jobs.append(job)
    return figure_of(predicted, measured, groups=jobs) if jobs else None


def clusters_of(runs: Sequence[TrainingRun], cluster: Cluster | None) -> dict[str, Cluster]:
    """Return the clusters of runs, by their column `gpu`; the given one by "" if there is one.

    Raises:
        ValueError: none is given, and a run does not say its GPU, or one that is not known.
    """
    if cluster is not None:
        return {"": cluster_for(runs, cluster)}
    by_gpu: dict[str, list[TrainingRun]] = {}
    for run in runs:
        by_gpu.setdefault(run.gpu, []).append(run)
    if "" in by_gpu:
        raise ValueError(
            "say for which machines: --cluster NAME of conf/cluster, --cluster-file FILE, or a "
            "column gpu in each row"
        )
    return {gpu: cluster_for(several, cluster_named(gpu)) for gpu, several in by_gpu.items()}


def cluster_named(gpu: str) -> Cluster:
    """Return the cluster of the configurations with this GPU, or of this name.

    Raises:
        ValueError: there is none.
    """
    name = GPUS.get(gpu, gpu)
    path = conf_dir() / "cluster" / f"{name}.yaml"
    if not name.isidentifier() or not path.exists():
        raise ValueError(
            f"the GPU {shown(gpu)} is not known: write one of {names(GPUS)}, a name of "
            "conf/cluster, or give --cluster-file FILE for all rows"
        )
    return Cluster.load(path)


def cluster_for(runs: Sequence[TrainingRun], cluster: Cluster) -> Cluster:
    """Return the cluster, with as many more of its nodes as the largest of `runs` needs.

    Raises:
        ValueError: it has one node and no network.
    """
    # the largest run decides for all
    most = max(run.gpus for run in runs)
    if most <= cluster.num_devices:
        return cluster
    if cluster.inter is None:
        why = "says nothing of a network between nodes (inter)"
        raise ValueError(
            f"{most} GPUs are more than the {cluster.num_devices} of the cluster {cluster.name!r}, "
            f"which {why}: describe a larger one"
        )
    return replace(cluster, num_nodes=math.ceil(most / cluster.devices_per_node))


# ---- what a run costs


@dataclass(frozen=True)
class RunPrice:
    """The costs of a run.

    Args:
        step_seconds: of an iteration.
        peak_bytes: of the fullest rank.
        seconds: parts of an iteration on the slowest rank: "forward", "backward", "once" (exchange
            of gradients and update), "pipeline" (what it waits for others).
    """

    step_seconds: float
    peak_bytes: float
    seconds: Seconds


class RunPrices:
    """The costs of runs on one cluster; what is known of a shape of layer is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._chains: dict[tuple[TransformerSizes, str, bool], StageBlocks] = {}
        self._repeated: dict[tuple[TransformerSizes, str, bool, int], RepeatedBlocks] = {}

    def step_seconds(self, run: TrainingRun) -> float:
        """Return the seconds of an iteration; raises what `price` raises."""
        return self.price(run, with_bytes=False).step_seconds

    def price(self, run: TrainingRun, *, with_bytes: bool = True) -> RunPrice:
        """Return the costs of a run; without its bytes, which do not depend on rates, 0 of them.

        Raises:
            ValueError: it has more ranks than the cluster has devices, hybrid sharding on one
                node, or offloads to a host whose bandwidth is not known.
        """
        if run.gpus > self.cluster.num_devices:
            raise ValueError(
                f"{run.gpus} GPUs are more than the {self.cluster.num_devices} of the cluster "
                f"{self.cluster.name!r}: say "
                f"num_nodes: {math.ceil(run.gpus / self.cluster.devices_per_node)} in its file"
            )
        if run.offload:
            return self._offloaded(run, with_bytes=with_bytes)
        # between nothing and all that runs again
        recompute = run.recompute or RunsAgain()
        of_seconds = of_bytes = recompute.layers
        if recompute.operators:
            of_seconds, of_bytes = OPERATORS_AGAIN, OPERATORS_KEPT
        price = self._sharded if run.level > 1 and run.pipeline == 1 else self._staged
        if of_seconds in (0.0, 1.0):
            return price(run, again=of_seconds == 1, with_bytes=with_bytes)
        ends = [price(run, again=again, with_bytes=with_bytes) for again in (False, True)]

        def between(share: float, none: float, every: float) -> float:
            return (1 - share) * none + share * every

        seconds = {
            part: between(of_seconds, ends[0].seconds[part], ends[1].seconds[part])
            for part in ends[0].seconds
        }
        steps, peaks = [e.step_seconds for e in ends], [e.peak_bytes for e in ends]
        return RunPrice(between(of_seconds, *steps), between(of_bytes, *peaks), seconds)

    def _offloaded(self, run: TrainingRun, *, with_bytes: bool) -> RunPrice:
        """Return the costs of a run whose layers keep their inputs alone on the device."""
        device = self.cluster.device
        if not device.host_bandwidth:
            raise ValueError(
                f"how fast activations go to the host is not known of {device.name}: say "
                "device.host_bandwidth in the cluster's file, such as 25GB/s"
            )
        price = self._sharded if run.level > 1 and run.pipeline == 1 else self._staged
        plain = price(run, again=False, with_bytes=False)
        # what a layer keeps beside its input, of one microbatch
        graph = captured_step(sizes_of(run, layers=min(run.model.layers, _PLACES))).graph
        layer = next(part for part in graph.timeline if part.block == graph.blocks[-1].name)
        size = layer.kept_bytes.at(run.samples) - layer.output_bytes.at(run.samples)
        # one microbatch in all layers of a rank
        count, layers = run.num_microbatches, math.ceil(run.model.layers / run.pipeline)
        seconds, waits = {**plain.seconds}, 0.0
        for part in ("forward", "backward"):
            alone = seconds[part] / count
            there = max(alone, layers * size / device.host_bandwidth)
            seconds[part], waits = count * there, waits + there - alone
        step = plain.step_seconds + (count + run.pipeline - 1) * waits
        seconds["pipeline"] = max(step - sum(seconds[p] for p in seconds if p != "pipeline"), 0.0)
        peak = price(run, again=True, with_bytes=True).peak_bytes + size if with_bytes else 0.0
        return RunPrice(step, peak, seconds)

    # ---- stages of a pipeline, or one

    def _staged(self, run: TrainingRun, *, again: bool, with_bytes: bool) -> RunPrice:
        blocks = self._chain_of(run)
        data, count = run.data * run.context, run.num_microbatches
        schedule = "interleaved" if run.stages_per_rank > 1 else "1f1b"
        shape = PipelineShape(
            run.pipeline,
            data,
            schedule,
            run.stages_per_rank,
            count,
            float(run.samples),
            tensor=run.tensor,
        )
        # stages of equally many layers; `ends` has the layer after each stage
        each, more = divmod(run.model.layers, shape.num_stages)
        ends = tuple(each * s + min(s, more) for s in range(1, shape.num_stages + 1))
        layers = (int(again),) * run.model.layers
        point = StagePoint(0.0, 0.0, ends, layers)
        # Megatron and nanotron reduce-scatter gradients and gather parameters under ZeRO-1, which
        # takes as long as the all-reduce of level 0.
        seconds = stage_seconds(blocks, shape, [point])
        step = _step_seconds(seconds, shape)
        peak = 0.0
        if with_bytes:
            kept = replace(shape, level=min(run.level, 1))
            peak = float(peak_bytes_of(blocks, kept, stage_bytes(blocks, kept, [point]))[0])
        # the rank that works longest, all its stages together
        each_pass = np.stack([seconds.forward[:, 0], seconds.backward[:, 0]]) + PASS_SECONDS
        work = np.zeros((3, run.pipeline))  # forward, backward, once
        for stage, rank in enumerate(shape.ranks):
            work[:2, rank] += count * each_pass[:, stage]
            work[2, rank] += seconds.once[stage, 0]
        longest = work[:, work.sum(axis=0).argmax()].tolist()
        parts = dict(zip(("forward", "backward", "once"), longest, strict=True))
        exchanged = (count + run.pipeline - 1) * self._context_seconds(run)
        step += exchanged
        return RunPrice(step, peak, {**parts, "pipeline": max(step - sum(parts.values()), 0.0)})

    def _context_seconds(self, run: TrainingRun) -> float:
        """Return the seconds to exchange keys and values of a microbatch in a stage's layers.

        Gathered in forward and in backward, and their gradients scattered (Llama 3, arXiv
        2407.21783, section 3.3.2).
        """
        if run.context == 1:
            return 0.0
        model = run.model
        heads = max(model.key_heads // run.tensor, 1)
        width = model.hidden // model.heads
        size = 2 * 2 * run.samples * run.sequence * heads * width
        group = Group(run.context, run.tensor)
        gather, scatter = (
            estimate_collective_seconds(self.cluster, op=op, size=size, group=group)
            for op in ("all_gather", "reduce_scatter")
        )
        return model.layers / run.pipeline * (2 * gather + scatter)

    def _chain_of(self, run: TrainingRun) -> RepeatedBlocks:
        """Return the chain of all layers of a run, from that of the first, a middle and the last.

        Layers 0 1 2 of the captured chain become 0 1 1 ... 1 2.
        """
        count = run.model.layers
        sizes = sizes_of(run, layers=min(count, _PLACES))
        key = sizes, run.dtype, run.tensor_overlap, count
        if key not in self._repeated:
            places = tuple(range(count)) if count <= _PLACES else (0, *[1] * (count - 2), 2)
            self._repeated[key] = repeat_blocks(self._captured_chain(sizes, run), places)
        return self._repeated[key]

    def _captured_chain(self, sizes: TransformerSizes, run: TrainingRun) -> StageBlocks:
        """Return the captured chain on this cluster."""
        key = sizes, run.dtype, run.tensor_overlap
        if key not in self._chains:
            known = captured_step(sizes)
            step = replace(
                known.base, cluster=self._cluster_of(run.dtype), tensor_overlap=run.tensor_overlap
            )
            # What follows from the graph alone is not worked out again: a fit asks for the costs
            # of the same runs on hundreds of clusters.
            for name in ("segments", "reduced_last", "tied", "phases", "_parameters"):
                step.__dict__[name] = getattr(known.base, name)
            blocks = self._chains[key] = StageBlocks(step)
            blocks._take(known.blocks, *_OF_THE_GRAPH)
        return self._chains[key]

    def _cluster_of(self, dtype: str) -> Cluster:
        """Return the cluster with the rate of `dtype` for products, captured as float16."""
        device = self.cluster.device
        rate = device.flops_of("bfloat16" if dtype == "float8" else dtype)
        rate *= FLOAT8_GAIN if dtype == "float8" else 1.0
        return replace(
            self.cluster, device=replace(device, flops={**device.flops, "float16": rate})
        )

    # ---- ZeRO-2 and ZeRO-3

    def _sharded(self, run: TrainingRun, *, again: bool, with_bytes: bool) -> RunPrice:
        known = captured_step(sizes_of(run, layers=run.model.layers))
        mesh = self._data_mesh(run)
        step = replace(
            known.base,
            cluster=self._cluster_of(run.dtype),
            mesh=mesh,
            batch_size=float(run.samples),
            tensor_overlap=run.tensor_overlap,
        )
        costs = PlanCosts(step)
        preset = f"zero{run.level}" if not run.hybrid else "hybrid"
        storage = PRESETS[preset].storage(mesh)
        configs = {
            block.name: OpConfig(storage, recompute=again and bool(block.name))
            for block in known.graph.blocks
        }
        # parameters travel in each microbatch, the update comes once
        count, micro = run.num_microbatches, costs.seconds(configs)
        update = sum(costs.block_seconds(name, each).update for name, each in configs.items())
        exchanged = count * self._context_seconds(run)
        total = count * (micro - update) + update + exchanged
        forward, backward = (
            count * sum(float(times[n].sum()) for times in step.compute.values()) for n in (0, 1)
        )
        backward += count * sum(
            costs.block_seconds(name, each).recompute for name, each in configs.items()
        )
        parts = {"forward": forward, "backward": backward}
        parts["once"] = max(total - forward - backward, 0.0)
        peak = explain(costs, configs).peak_bytes if with_bytes else 0.0
        return RunPrice(total, peak, {**parts, "pipeline": 0.0})

    def _data_mesh(self, run: TrainingRun) -> Mesh:
        """Return the mesh data x tensor, of hybrid sharding nodes x ranks of a node x tensor."""
        data, per_node = run.data * run.context, self.cluster.devices_per_node
        inside = max(per_node // run.tensor, 1)
        whole = "intra" if run.gpus <= per_node else "inter"
        axes = [Axis("data", data, whole)]
        if run.hybrid and data > inside and data % inside == 0:
            axes = [Axis("data_replicate", data // inside, whole), Axis("data_shard", inside)]
        elif run.hybrid:
            raise ValueError(
                f"hybrid sharding needs several nodes of {per_node} ranks, not {run.gpus} GPUs"
            )
        return Mesh((*axes, Axis("tensor", run.tensor)) if run.tensor > 1 else tuple(axes))


def _step_seconds(seconds: StageSeconds, shape: PipelineShape) -> float:
    """Return the simulated seconds of a step; those of a formula where it has too many passes."""
    simulated = step_seconds_of(seconds, shape)
    return float((formula_step_seconds(seconds, shape) if simulated is None else simulated)[0])


# ---- the captured step


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The step of one rank on a microbatch, on a cluster that stands for any.

    Args:
        graph: the step, captured.
        base: the step with its optimizer and mesh.
        blocks: its chain of blocks.
    """

    graph: OpGraph
    base: OverlappedStep
    blocks: StageBlocks


@lru_cache(maxsize=256)
def captured_step(sizes: TransformerSizes) -> CapturedStep:
    """Return the step of one rank of a Transformer of these sizes."""
    # two samples of a rank's positions and one token; each layer is a block of its own
    module = build_on_meta(lambda: RankTransformer(sizes))
    tokens = torch.zeros(2, sizes.sequence // sizes.context + 1, dtype=torch.int64)
    graph = capture(module, tokens)
    layers = [Block(f"layers.{index}", 1, recomputable=True) for index in range(sizes.layers)]
    graph = graph.with_blocks([Block("", 0, recomputable=False), *layers])

    # mixed-precision Adam, on a cluster of one node with as many ranks as the tensor group
    updates = {
        p.name: ParameterUpdate(
            STATE_BYTES * p.numel, float(MOVED_BYTES * p.numel), 1.0, 0.0, False
        )
        for p in graph.parameters
    }
    optimizer = OptimizerProfile("Adam", elementwise=True, by_parameter=True, updates=updates)
    tensor = (Axis("tensor", sizes.tensor),) if sizes.tensor > 1 else ()
    machines = Cluster(
        "any", Device("any", 1, {"float32": 1.0}, 1.0), sizes.tensor, 1, Link(0.0, 1.0)
    )
    mesh = Mesh((Axis("data", 1), *tensor))
    base = OverlappedStep(graph, machines, optimizer, mesh, graph.batch_size)
    return CapturedStep(graph, base, StageBlocks(base))


def sizes_of(run: TrainingRun, *, layers: int) -> TransformerSizes:
    """Return what is captured for a run, of so many of its layers."""
    model: ModelSizes = run.model
    attention = run.attention
    if attention == "softmax" and model.kind == "gpt":
        fused = takes_fused_softmax(
            samples=run.samples, heads=model.heads // run.tensor, sequence=run.sequence
        )
        attention = "fused softmax" if fused else "softmax"
    return TransformerSizes(
        model.kind,
        model.hidden,
        model.heads,
        model.key_heads,
        model.inner,
        model.words,
        run.sequence,
        layers,
        run.tensor,
        run.context,
        attention,
        run.sequence_parallel and run.tensor > 1,
        run.recompute is not None and run.recompute.attention,
        run.fused,
    )
