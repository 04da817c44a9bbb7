"""Part 8: a share of the card's memory, the plan that is chosen for it, and whether it runs.

The batch is so large that plain DDP should take 45 % of the card. Each share is then enforced by
torch's allocator while the plan runs that the search chose for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.common import QUIET
from benchmarks.gpu_report.models import (
    PLANS,
    Model,
    Predicted,
    make_models,
    measure,
    predict,
    single_rank,
    update_profile,
)
from benchmarks.gpu_report.reporting import (
    MIB,
    Report,
    free_memory,
    memory_columns,
    reset_peaks,
    run_part,
)
from lightning_topt import AutoParallelStrategy
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.choose import choose
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.techniques.plan_costs import PlanCosts, explain

FRACTIONS = (0.3, 0.4, 0.5, 0.9)
_PLAIN_SHARE, _PRECISION, _STEPS = 0.45, "bf16-mixed", 4
_LIKE_CPU = 48 << 20  # bytes of a rehearsal's device, about what its small model needs
_STRATEGY_SECONDS = 8.0


def run(report: Report) -> None:
    model = make_models(report.quick)["gpt"]
    found: Predicted | None = None
    profile: OptimizerProfile | None = None
    with single_rank(report):
        with report.attempt("prediction"):
            cluster = calibrate(device=report.device, budget_seconds=0.8)
            found = predict(model, _PRECISION, report.device, cluster, PLANS, kernel_seconds=1.0)
            profile = update_profile(model.module(report.device), report.device)
        if found is None or profile is None:
            return
        total = torch.cuda.mem_get_info()[1] if report.device.type == "cuda" else _LIKE_CPU
        samples = samples_for(_PLAIN_SHARE * total, found, profile)
        model = replace(model, samples=samples)
        report.note("batch", samples=samples, total_bytes=total)
        for fraction in FRACTIONS:
            with report.attempt(f"{fraction} of the card", fraction=fraction) as row:
                point = chosen(fraction * total, samples, found, profile, row)
                with limited(fraction, report.device):
                    columns = measure(
                        model, _PRECISION, report.device, point.plan, steps=_STEPS
                    ).columns
                row |= columns
                if columns["reserved_bytes"] is not None:
                    row["headroom_bytes"] = fraction * total - columns["reserved_bytes"]
    for fraction in (0.3, 0.9):
        if report.left() > _STRATEGY_SECONDS:
            with report.attempt(f"strategy with {fraction} of the card", fraction=fraction) as row:
                row |= fit(model, fraction, int(fraction * total), report.device)


def samples_for(size: float, found: Predicted, profile: OptimizerProfile) -> int:
    """Return the largest batch with which plain DDP is predicted to take at most `size` bytes."""
    given = read_plan_option("ddp")
    assert isinstance(given, UniformPlan)
    configs = {b.block: b.config for b in given.of(found.graph, data_mesh(1)).blocks}

    def peak(samples: int) -> float:
        step = TrainingStep(found.graph, found.cluster, profile, data_mesh(1), samples)
        return explain(PlanCosts(step), configs).peak_bytes

    one, other = found.graph.batch_size, 2 * found.graph.batch_size
    each = max((peak(other) - peak(one)) / (other - one), 1.0)
    return max(1, int(one + (size - peak(one)) / each))


def chosen(
    limit: float, samples: int, found: Predicted, profile: OptimizerProfile, row: dict[str, Any]
) -> PlanPoint:
    """Return the plan that the search chooses for one rank under `limit` bytes."""
    request = SearchRequest(
        found.graph,
        found.cluster,
        profile,
        device_counts=(1,),
        global_batch_size=samples,
        kernel_seconds=found.kernels,
        returns_memory=True,
        gradient_views=(False, True),
    )
    frontier = search_plans(request)
    point = choose(frontier.candidates, memory_limit=limit, devices=1)
    blocks = point.plan.blocks
    row["limit_bytes"] = limit
    row["recomputed"] = f"{sum(b.config.recompute for b in blocks)} of {len(blocks)} blocks"
    row["gradient_views"] = point.plan.gradient_views
    row["predicted_reserved_bytes"] = point.peak_bytes
    row["predicted_step_seconds"] = point.step_seconds
    return point


@contextmanager
def limited(fraction: float, device: torch.device) -> Iterator[None]:
    """Let torch's allocator take this share of the card's memory at most."""
    if device.type != "cuda":
        yield
        return
    free_memory(device)
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fit(model: Model, fraction: float, limit: int, device: torch.device) -> Mapping[str, Any]:
    """Fit with the strategy under a `memory_limit` that the allocator enforces."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        module = model.make()
        tokens, targets = model.batch(model.samples * 10)
    loader = DataLoader(list(zip(tokens, targets, strict=True)), batch_size=model.samples)
    strategy = AutoParallelStrategy(memory_limit=f"{limit // MIB}MiB")
    trainer = L.Trainer(
        accelerator=device.type,
        devices=1,
        strategy=strategy,
        precision=_PRECISION,
        max_steps=10,
        **QUIET,
    )
    reset_peaks(device)
    columns: dict[str, Any] = {"limit_bytes": limit}
    with limited(fraction, device):
        trainer.fit(module, loader)
    plan = strategy.parallel_plan
    if plan is not None:
        again = sum(block.config.recompute for block in plan.blocks)
        columns["recomputed"] = f"{again} of {len(plan.blocks)} blocks, {strategy.planned_by}"
        if plan.predicted is not None:
            columns["predicted_reserved_bytes"] = plan.predicted.peak_bytes
            columns["predicted_step_seconds"] = plan.predicted.step_seconds
    memory = memory_columns(device)
    columns["whole_fit_allocated_bytes"] = memory.get("peak_allocated_bytes")
    columns["whole_fit_reserved_bytes"] = memory.get("peak_reserved_bytes")
    columns["planning_s"] = strategy.planning_seconds
    return columns


def main() -> None:
    run_part("memory_fractions", run, __doc__)


if __name__ == "__main__":
    main()
