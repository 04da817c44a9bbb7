"""Predict the plans of one family, and measure each of them in two fresh ranks; a part of
`strangers`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.strangers_models import FAMILIES
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile, measure_update_seconds, read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.plugins.planning import make_fake_optimizers
from lightning_topt.techniques.explain import Explanation, explain
from lightning_topt.techniques.plan_costs import PlanCosts

CPU, RANKS = torch.device("cpu"), 2
_ROUNDS, _AGREEMENT = 4, 0.1


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
    """What two ranks took: the slowest rank's median step, and the peak of each rank above its idle
    bytes.
    """

    step_seconds: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Predicted:
    """What the model says of one plan."""

    plan: ParallelPlan
    step_seconds: float
    peak_bytes: float
    peak_phase: str
    peak_parts: Mapping[str, float]


def predict(
    rank: int, family: str, cases: Sequence[Case], budget_seconds: float
) -> dict[Case, Predicted]:
    """Measure machine and kernels, and predict `cases`. Collective.

    Measured again, at most `_ROUNDS` times, until two measurements in a row predict the first case
    alike; their mean counts.
    """
    module, batch = FAMILIES[family].module(), FAMILIES[family].example(rank)
    graph = capture(module, batch)
    optimizers, named = make_fake_optimizers(module, device=CPU)
    profile = read_optimizer(optimizers, named_parameters=named)
    seconds = measure_update_seconds(optimizers, named_parameters=named, device=CPU)
    profile = replace(profile, seconds_per_element=seconds)
    rounds: list[dict[Case, Explanation]] = []
    while len(rounds) < _ROUNDS and not _agree([r[cases[0]].step_seconds for r in rounds[-2:]]):
        cluster = calibrate(budget_seconds=budget_seconds / 2)
        kernels = measure_kernels(graph, budget_seconds=budget_seconds)
        samples = FAMILIES[family].batch_size
        rounds.append(
            {case: _explain(case, graph, cluster, profile, kernels, samples) for case in cases}
        )
    last = rounds[-2:]
    return {
        case: Predicted(
            plan_of(case, graph),
            statistics.mean(r[case].step_seconds for r in last),
            last[-1][case].peak_bytes,
            last[-1][case].peak_phase,
            last[-1][case].peak_parts,
        )
        for case in cases
    }


def _agree(seconds: Sequence[float]) -> bool:
    return len(seconds) == 2 and max(seconds) <= (1 + _AGREEMENT) * min(seconds)


def _explain(
    case: Case,
    graph: OpGraph,
    cluster: Cluster,
    profile: OptimizerProfile,
    kernels: Mapping[KernelKey, float],
    samples: int,
) -> Explanation:
    plan = plan_of(case, graph)
    common = graph, cluster, profile, plan.mesh, samples, kernels
    step = TrainingStep(*common, returns_memory=case.limited or plan.saves_memory)
    return explain(PlanCosts(step), {block.block: block.config for block in plan.blocks})


def plan_of(case: Case, graph: OpGraph) -> ParallelPlan:
    """The plan that the strategy makes of the name."""
    given = read_plan_option(case.plan)
    assert isinstance(given, UniformPlan)
    return given.of(graph, data_mesh(RANKS))


def measure(
    rank: int, family: str, plan: ParallelPlan, limited: bool, steps: int, warmup: int
) -> Measured:
    """Train `warmup` + `steps` steps in Lightning's order: forward, zero_grad, backward, step.
    Collective.
    """
    if limited or plan.saves_memory:  # as the strategy does
        return_freed_memory(CPU)
    module = FAMILIES[family].module()
    batches = [FAMILIES[family].example(10 * rank + index) for index in range(2)]
    warm_up(CPU)
    meter = MemoryMeter(CPU)
    meter.mark_base(module)
    engine = Engine(plan, module, device=CPU)
    model = engine.apply()
    optimizer = module.configure_optimizers()
    engine.attach_optimizers([optimizer])
    release_free_memory()
    seconds, peak = [], 0
    for index in range(warmup + steps):
        meter.reset_peak()
        start = time.perf_counter()
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
