"""Predict the plans of one family, and measure each of them in two fresh ranks; a part of `strangers`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.strangers_models import FAMILIES, Stranger
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.estimate import StepModel, explain
from lightning_topt.costs.memory import FAMILIES as FAMILIES_OF_PLANS
from lightning_topt.execution.allocator import return_freed_memory, warm_up
from lightning_topt.execution.engine import build_engine
from lightning_topt.execution.memory import MemoryMeter, release_free_memory
from lightning_topt.graph.capture import capture
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.planning import profile_optimizers
from lightning_topt.plugins.read_options import UniformPlan, read_plan_option

CPU, RANKS = torch.device("cpu"), 2


@dataclass(frozen=True)
class Case:
    """A uniform plan by name, run with a memory limit or without one."""

    plan: str
    limited: bool

    @property
    def name(self) -> str:
        """As in the report."""
        return self.plan if self.limited else f"{self.plan}, no limit"


@dataclass(frozen=True)
class Measured:
    """What two ranks took: the slowest rank's median step, and the peak of each rank above its idle bytes."""

    step_seconds: float
    peak_bytes: tuple[int, ...]


def predict(rank: int, family: str, cases: Sequence[Case], budget_seconds: float) -> dict[str, Any]:
    """Measure machine and kernels as the strategy does, and predict `cases`. Collective."""
    return_freed_memory(CPU)
    module, batch = FAMILIES[family].module(), FAMILIES[family].example(rank)
    start = time.perf_counter()
    graph = capture(module, batch)
    captured = time.perf_counter() - start
    cluster = calibrate(budget_seconds=budget_seconds / 2)
    profile = profile_optimizers(module, device=CPU)
    kernels = measure_kernels(graph, budget_seconds=budget_seconds)
    plans = {case: plan_of(case, graph) for case in cases}
    explained = {}
    for case, plan in plans.items():
        family_of_plan = FAMILIES_OF_PLANS[plan.is_sharded]
        model = StepModel(graph, cluster, profile, RANKS, FAMILIES[family].batch_size, family_of_plan, kernels)
        explained[case] = explain(model, {block.block: block.config for block in plan.blocks})
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "capture_seconds": captured,
        "cluster": cluster,
        "graph": graph,
        "profile": profile,
        "kernels": kernels,
        "plans": plans,
        "explained": explained,
    }


def plan_of(case: Case, graph: OpGraph) -> ParallelPlan:
    """The plan that the strategy makes of the name."""
    given = read_plan_option(case.plan)
    assert isinstance(given, UniformPlan)
    return given.of(graph, data_parallel_size=RANKS)


def measure(rank: int, family: str, plan: ParallelPlan, limited: bool, steps: int, warmup: int) -> Measured:
    """Train `warmup` + `steps` steps in Lightning's order: forward, zero_grad, backward, step. Collective."""
    if limited:
        return_freed_memory(CPU)
    module = FAMILIES[family].module()
    batches = [FAMILIES[family].example(10 * rank + index) for index in range(2)]
    warm_up(CPU)
    meter = MemoryMeter(CPU)
    meter.mark_base(module)
    engine = build_engine(plan, module, device=CPU)
    model = engine.parallelize()
    optimizer = module.configure_optimizers()
    engine.attach_optimizers([optimizer])
    release_free_memory()
    seconds, peak = [], 0
    for index in range(warmup + steps):
        meter.reset_peak()
        start = time.perf_counter()
        engine.before_forward()
        loss: Tensor = model(batches[index % 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        peak = max(peak, meter.peak_bytes() or 0)
        del loss
    mine = torch.tensor([statistics.median(seconds[warmup:]), float(peak)], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(ranks, mine)
    return Measured(max(float(r[0]) for r in ranks), tuple(int(r[1]) for r in ranks))


def parts(peak_parts: Mapping[str, float]) -> dict[str, int]:
    """MiB by kind."""
    return {kind: round(size / 2**20) for kind, size in peak_parts.items()}


__all__ = ["Case", "Measured", "Stranger", "measure", "parts", "plan_of", "predict"]
