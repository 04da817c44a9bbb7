"""Predicted and measured step time and memory of twelve model families used nowhere else.

    python -m benchmarks.foreign.model_families           # 12 families, 7 plans each; 15 minutes
    python -m benchmarks.foreign.model_families --only vit --only llama
    python -m benchmarks.foreign.model_families --quick   # three steps of each plan: for memory
    python -m benchmarks.foreign.model_families --fresh   # forget what an interrupted run measured
    python -m benchmarks.foreign.model_families --compiled     # 3 plans whose blocks are compiled

Two constants of the cost model were read from these families: the reserve of sharded plans and the
LSTM's workspace. Two gloo ranks with one thread each run each plan in fresh processes. "limit
kept": the smallest `memory_limit` under which the plan would have been chosen is its prediction
with the default margin; measured bytes must not exceed it. With ``--compiled`` all blocks are
compiled that can be, also those that are slower so; their costs are those of a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import RESULTS, machine, measure_update_seconds, mib
from benchmarks.foreign.family_models import FAMILIES
from lightning_topt.basics.forked_call import ForkedCall, writable_files
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measuring import on_rank_0
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.training_step import CompiledCost, TrainingStep
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
from lightning_topt.plan.parallel_plan import ParallelPlan, StagePlan
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.plugins.searched_plan import make_fake_optimizers
from lightning_topt.techniques import compilation
from lightning_topt.techniques.known_trials import compiled_costs
from lightning_topt.techniques.plan_costs import Explanation, PlanCosts, explain
from tests.launch import run_ranks


@dataclass(frozen=True)
class Case:
    """A uniform plan by name, run with a memory limit or without one."""

    plan: str
    limited: bool

    @property
    def name(self) -> str:
        """As in the report."""
        return self.plan if self.limited else f"{self.plan}, no limit"


LIMITED = [Case(plan, True) for plan in ("ddp", "zero1", "zero2", "zero3", "zero3+recompute")]
FREE = [Case("ddp", False), Case("ddp+recompute", False)]
COMPILED = [Case(f"{plan}+compile", True) for plan in ("ddp", "zero3", "zero3+recompute")]
MARGIN = 0.05
STORE = RESULTS / "strangers.json"


def run_family(
    family: str, cases: Sequence[Case], *, steps: int, warmup: int
) -> list[dict[str, Any]]:
    """One row per case."""
    predictions = run_ranks(predict, RANKS, family, cases, 4.0, timeout_seconds=900)[0]
    rows = []
    for case, predicted in predictions.items():
        args = (family, predicted.plan, case.limited, steps, warmup)
        measured = run_ranks(measure, RANKS, *args, timeout_seconds=600)[0]
        row = {
            "family": family,
            "plan": case.name,
            "limited": case.limited,
            "predicted_seconds": predicted.step_seconds,
            "seconds": measured.step_seconds,
            "predicted_bytes": predicted.peak_bytes,
            "bytes": max(measured.peak_bytes),
            "peak_phase": predicted.peak_phase,
        }
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    time_error = row["predicted_seconds"] / row["seconds"] - 1
    memory_error = row["predicted_bytes"] / row["bytes"] - 1
    kept = "" if not row["limited"] else ("yes" if is_kept(row) else "NO")
    memory = f"{mib(row['predicted_bytes'])} | {mib(row['bytes'])} | {100 * memory_error:+.1f} %"
    return (
        f"| {row['family']} | {row['plan']} | {row['predicted_seconds']:.3f} | "
        f"{row['seconds']:.3f} | {100 * time_error:+.0f} % | {memory} | {kept} |"
    )


def is_kept(row: dict[str, Any]) -> bool:
    """Return whether the measured bytes keep the smallest limit under which the plan is chosen."""
    return bool(row["bytes"] <= row["predicted_bytes"] * (1 + MARGIN))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Errors, limits and rank correlation, of plans with a limit and without one."""
    lines = []
    for limited, title in ((True, "with a limit"), (False, "without a limit")):
        chosen = [row for row in rows if row["limited"] == limited]
        if not chosen:
            continue
        for what, unit in (("seconds", "time"), ("bytes", "memory")):
            errors = np.array([row[f"predicted_{what}"] / row[what] - 1 for row in chosen])
            rank_correlation = spearman(
                [row[f"predicted_{what}"] for row in chosen], [row[what] for row in chosen]
            )
            lines.append(
                f"- {title}, {unit}: median |error| {100 * np.median(abs(errors)):.1f} %, 90th "
                f"percentile {100 * np.quantile(abs(errors), 0.9):.1f} %, median error "
                f"{100 * np.median(errors):+.1f} %, Spearman {rank_correlation:.3f}"
            )
        if limited:
            kept = sum(is_kept(row) for row in chosen)
            lines.append(f"- limits kept: {kept} of {len(chosen)}")
            within = [
                spearman([r["predicted_seconds"] for r in same], [r["seconds"] for r in same])
                for family in dict.fromkeys(row["family"] for row in chosen)
                if len(same := [row for row in chosen if row["family"] == family]) > 2
            ]
            lines.append(
                "- Spearman of the times of a family's plans: median "
                f"{np.median(within or [1.0]):.2f}"
            )
    return lines


def spearman(one: list[float], other: list[float]) -> float:
    """Correlation of ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def write(rows: list[dict[str, Any]], path: Path, *, steps: int) -> None:
    """The report."""
    is_compiled = rows[0]["plan"].endswith("compile")
    of = "of plans whose blocks are compiled" if is_compiled else "on twelve other model families"
    text = [f"# Predictions {of}", "", machine(), ""]
    text += [f"- 2 gloo ranks, one thread each; median of {steps} steps", "", *summary(rows), ""]
    text += [
        "| family | plan | predicted s | measured s | error | predicted MiB | measured MiB | error "
        "| limit kept |"
    ]
    text += ["|---|---|---|---|---|---|---|---|---|", *map(line, rows)]
    path.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(FAMILIES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    steps, warmup = (2, 2) if options.quick else (7, 3)
    done: dict[str, Any] = (
        json.loads(STORE.read_text()) if STORE.exists() and not options.fresh else {}
    )
    kind = " compiled" if options.compiled else ""
    cases = COMPILED if options.compiled else [*LIMITED, *FREE]
    for family in options.only or FAMILIES:
        key = f"{family} {steps}{kind}"
        if key not in done or options.only:
            done[key] = run_family(family, cases, steps=steps, warmup=warmup)
            STORE.write_text(json.dumps(done, indent=1))
    rows = [row for family in FAMILIES for row in done.get(f"{family} {steps}{kind}", [])]
    print("\n".join(summary(rows)))
    name = "compiled_predictions.md" if options.compiled else "strangers.md"
    write(rows, RESULTS / name, steps=steps)


# ---- one rank: predictions and measurements of a family's plans ----------------------------------

CPU, RANKS = torch.device("cpu"), 2
_ROUNDS, _AGREEMENT = 4, 0.1


@dataclass(frozen=True)
class Measured:
    """What two ranks took: the slowest rank's median step, and peaks above the idle bytes."""

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
    compiled: Mapping[str, CompiledCost] = {}
    if any(read_uniform(case).compile for case in cases):
        compiled = on_rank_0(partial(compiled_costs_of, module, batch))
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
            {
                case: _explain(case, graph, cluster, profile, kernels, samples, compiled)
                for case in cases
            }
        )
    last = rounds[-2:]
    return {
        case: Predicted(
            plan_of(case, graph, compiled),
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
    compiled: Mapping[str, CompiledCost],
) -> Explanation:
    plan = plan_of(case, graph, compiled)
    common = graph, cluster, profile, plan.mesh, samples, kernels
    returns = case.limited or plan.saves_memory
    step = TrainingStep(*common, returns_memory=returns, compiled=compiled)
    return explain(PlanCosts(step), {block.block: block.config for block in plan.blocks})


def read_uniform(case: Case) -> UniformPlan:
    """The option of that name."""
    given = read_plan_option(case.plan)
    assert isinstance(given, UniformPlan)
    return given


def plan_of(case: Case, graph: OpGraph, compiled: Mapping[str, CompiledCost]) -> ParallelPlan:
    """The plan that the strategy makes of the name; blocks that cannot be compiled are not."""
    plan = read_uniform(case).of(graph, data_mesh(RANKS))
    blocks = [
        replace(each, config=replace(each.config, compile=False))
        if each.block not in compiled
        else each
        for each in plan.blocks
    ]
    return replace(plan, stages=(StagePlan(tuple(blocks)),))


def compiled_costs_of(module: Any, batch: Any) -> dict[str, CompiledCost]:
    """What a trial of all blocks says, as in a fit."""
    compilation.LEAST_GAIN = 0.0
    groups = compilation.candidates(module)
    recording = compilation.CallRecording(module, groups)
    module(batch).backward()
    calls = recording.take()
    module.zero_grad()

    def run() -> dict[str, compilation.Trial]:
        with writable_files():
            return compilation.compare(module, groups, calls)

    trials = ForkedCall(run, isolated=True).result(timeout_seconds=600)
    for name, trial in trials.items():
        print(f"{name}: {trial}", flush=True)
    return compiled_costs(module, trials, steps=float("inf"))


def measure(
    rank: int, family: str, plan: ParallelPlan, limited: bool, steps: int, warmup: int
) -> Measured:
    """Train `warmup` + `steps` steps. A collective call.

    Lightning's order: forward, zero_grad, backward, step.
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


if __name__ == "__main__":
    main()
