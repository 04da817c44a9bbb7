"""A pipeline by its number of stages: cut where stages take equally long, with as many microbatches as suit the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_topt.costs.cluster import Device
from lightning_topt.costs.compute import KernelKey, estimate_pass_seconds
from lightning_topt.graph.blocks import choose_blocks
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Kernel, OpGraph
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.presets import PRESETS
from lightning_topt.plugins.batch_parts import count_samples
from lightning_topt.plugins.read_options import PipelinePlan
from lightning_topt.plugins.searched_plan import RunCosts

MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less


def choose_pipeline(
    trainer: pl.Trainer, batch: Any, given: PipelinePlan, graph: OpGraph, costs: RunCosts
) -> ParallelPlan:
    """Return the plan: the blocks of `graph` in stages, whose slowest takes as little time as can be.

    Raises PlanError where there are fewer blocks than stages.
    """
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    num_stages = mesh.pipeline_size * given.per_rank
    graph = _with_enough_blocks(graph, num_stages)
    seconds = block_seconds(graph, costs.cluster.device, measured=costs.kernel_seconds)
    names = list(seconds)
    if len(names) < num_stages:
        raise PlanError(
            f"{type(trainer.lightning_module).__name__} has {len(names)} blocks that can be stages of a pipeline "
            f"({', '.join(names) or 'none'}), and {num_stages} stages are wanted: choose fewer stages, or let the model "
            "consist of more submodules that are called one after the other"
        )
    storage = PRESETS["ddp"].storage(mesh)
    again = {block.name for block in graph.blocks if given.recompute and block.recomputable}
    stages, start = [], 0
    for stop in cut_evenly([seconds[name] for name in names], num_stages):
        blocks = [BlockPlan(name, OpConfig(storage, recompute=name in again)) for name in names[start:stop]]
        stages.append([*blocks, *([] if start else [BlockPlan("", OpConfig(storage))])])
        start = stop
    count = given.microbatches or choose_microbatches(count_samples(batch), mesh.pipeline_size)
    return ParallelPlan(
        mesh,
        tuple(StagePlan(tuple(blocks)) for blocks in stages),
        model=graph.model,
        fingerprint=graph.fingerprint,
        num_microbatches=count,
        schedule=given.schedule,
    )


def _with_enough_blocks(graph: OpGraph, count: int) -> OpGraph:
    """Take smaller modules for blocks where there are too few of the size that is worth a decision."""
    if len(graph.blocks) > count:
        return graph
    finer = choose_blocks(graph, min_parameter_share=0.0, min_kept_share=0.0, max_share=0.5 / count)
    return graph.with_blocks(finer) if len(finer) > len(graph.blocks) else graph


def block_seconds(graph: OpGraph, device: Device, *, measured: Mapping[KernelKey, float]) -> dict[str, float]:
    """Return the seconds of forward and backward of each block in the order of their first calls, on `device`.

    What is between two blocks counts for the former, what is before the first for that one.
    """
    passes: dict[str, tuple[list[Kernel], list[Kernel]]] = {}
    before: tuple[list[Kernel], list[Kernel]] = ([], [])
    current = ""
    for op in graph.ops:
        current = op.block or current
        forward, backward = passes.setdefault(current, ([], [])) if current else before
        forward += op.forward
        backward += op.backward
    for first in list(passes.values())[:1]:
        first[0].extend(before[0])
        first[1].extend(before[1])

    def seconds(kernels: list[Kernel]) -> float:
        size = graph.batch_size
        return estimate_pass_seconds(
            kernels, batch_size=size, device=device, measured=measured, measured_batch_size=size
        )

    return {block: seconds(forward) + seconds(backward) for block, (forward, backward) in passes.items()}


def cut_evenly(seconds: Sequence[float], parts: int) -> list[int]:
    """Return where each of `parts` parts of the row `seconds` ends, so that the longest takes as little as it can.

    Exact, by dynamic programming; no part is empty. Among equals the sum of squares is the least.
    """
    count = len(seconds)
    assert 1 <= parts <= count
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0), *[(inf, inf, 0)] * count]]
    for _ in range(parts):
        row: list[tuple[float, float, int]] = [(inf, inf, 0)] * (count + 1)
        for stop in range(1, count + 1):
            total = 0.0
            for start in reversed(range(stop)):
                total += seconds[start]
                longest, squares, _start = best[-1][start]
                row[stop] = min(row[stop], (max(longest, total), squares + total**2, start))
        best.append(row)
    ends, stop = [], count
    for row in reversed(best[1:]):
        ends.append(stop)
        stop = row[stop][2]
    return ends[::-1]


def choose_microbatches(samples: int, ranks: int) -> int:
    """Return into how many parts a batch of `samples` is split for `ranks` stages at once.

    A multiple of the ranks, up to four times as many, that divides the batch if there is one.
    """
    multiples = [ranks * times for times in range(MICROBATCHES_PER_RANK, 0, -1) if ranks * times <= samples]
    even = [count for count in multiples if samples % count == 0]
    return (even or multiples or [samples])[0]
