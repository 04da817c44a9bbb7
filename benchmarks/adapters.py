"""Memory and traffic of fine-tuning by adapters (LoRA), predicted and measured, on two ranks.

    python -m benchmarks.adapters            # a minute on two cores

A GPT of 19 M parameters is trained whole, and frozen with adapters of rank 8 in all its layers but
the first three, under four plans. Bytes exchanged are those that a rank calls collectives on.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, machine
from lightning_topt.costs.optimizer import read_optimizer
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
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.searched_plan import make_fake_optimizers
from lightning_topt.techniques.plan_costs import PlanCosts, explain
from tests.costs.graphs import cluster_of
from tests.execution.observed_ranks import Calls, observe, priced
from tests.launch import run_ranks
from tests.models import GPT, TunedGPT, batch_for

CPU, MIB, RANKS, SAMPLES, STEPS = torch.device("cpu"), 2**20, 2, 4, 6
SIZES: dict[str, Any] = {"layers": 6, "width": 512, "heads": 8, "vocab": 512, "context": 64}
MODELS: dict[str, Any] = {
    "whole model": lambda: GPT(**SIZES),
    "adapters": lambda: TunedGPT(plain=3, rank=8, **SIZES),
}
NAMES = ("ddp", "zero1", "zero2", "zero3")


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    """Return its optimizer."""
    return [module.configure_optimizers()]


def predicted(model: str, plan: ParallelPlan) -> tuple[float, int]:
    """Return the peak and the bytes exchanged in a step."""
    module = MODELS[model]()
    batch = batch_for(module, SAMPLES)
    graph = capture(module, batch)
    optimizers, named = make_fake_optimizers(module, device=CPU)
    profile = read_optimizer(optimizers, named_parameters=named)
    cluster = cluster_of(RANKS, backend="gloo")
    blocks = [block for block in graph.blocks if block.name in {b.block for b in plan.blocks}]
    step = TrainingStep(graph.with_blocks(blocks), cluster, profile, plan.mesh, SAMPLES)
    peak = explain(PlanCosts(step), {b.block: b.config for b in plan.blocks}).peak_bytes
    return float(peak), exchanged(priced(plan, graph, profile))


def measured(rank: int, model: str, plan: ParallelPlan) -> tuple[float, int]:
    """Return the same of this rank."""
    return_freed_memory(CPU)
    torch.manual_seed(0)
    module = MODELS[model]()
    batch, meter = batch_for(module, SAMPLES), MemoryMeter(CPU)
    warm_up(CPU)
    meter.mark_base(module)
    engine = Engine(plan, module, device=CPU)
    root: Any = engine.apply()
    # the training step by the root's forward, as under a Trainer
    forward, step = module.forward, module.training_step

    def as_step(*args: Any) -> Any:
        module.forward = forward
        try:
            return step(batch, 0)
        finally:
            module.forward = as_step

    module.log = lambda *_, **__: None
    module.forward = as_step
    (optimizer,) = optimizers_of(module)
    engine.attach_optimizers([optimizer])
    release_free_memory()
    peaks = []
    for _ in range(STEPS):
        meter.reset_peak()
        loss = root()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peaks.append(meter.peak_bytes() or 0)
        del loss
    module.forward = forward
    engine.release()
    again = MODELS[model]()
    seen = observe(plan, again, batch, optimizers_of)
    return statistics.median(peaks[2:]), exchanged(seen.calls)


def exchanged(calls: Calls) -> int:
    """Return the bytes of all collectives of a step."""
    return sum(nbytes for _, nbytes in calls.values())


def main() -> None:
    """Write the page."""
    rows = []
    for model, make in MODELS.items():
        with torch.device("meta"):
            names = [block.name for block in capture(make(), batch_for(make(), SAMPLES)).blocks]
        for name in NAMES:
            plan = preset_plan(PRESETS[name], mesh=data_mesh(RANKS), blocks=names)
            said, found = (
                predicted(model, plan),
                run_ranks(measured, RANKS, model, plan, fresh=True, timeout_seconds=240),
            )
            peak = max(peak for peak, _ in found)
            cells = [said[0] / MIB, peak / MIB, said[1] / MIB, found[0][1] / MIB]
            rows.append(f"| {model} | {name} | " + " | ".join(f"{c:.1f}" for c in cells) + " |")
            print(rows[-1], flush=True)
    text = "\n".join(
        [
            "# Adapters on a frozen model",
            "",
            "A GPT of 6 layers and width 512 on 2 ranks over gloo, 4 sequences of 64 tokens per "
            "rank, AdamW. It is trained whole, or frozen with adapters (LoRA) of rank 8 in the "
            "last three layers. Peaks are above the idle rank; *exchanged* are the bytes that a "
            "rank's collectives are on in a step. `python -m benchmarks.adapters` makes this page.",
            "",
            machine(),
            "",
            "| trained | plan | peak MiB, predicted | measured | exchanged MiB, predicted | "
            "measured |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    Path(RESULTS / "adapters.md").write_text(text)


if __name__ == "__main__":
    main()
