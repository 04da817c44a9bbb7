"""One measured job for `pipeline_lab` on ranks that a launcher started; JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.continuous_iterations import Iteration, iterations
from benchmarks.lab import sent_bytes
from benchmarks.pipeline_cuts import block_seconds, check_blocks, cut, plan_of, weights_of
from benchmarks.pipeline_lab_models import MODELS, LabModel
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.prediction import make_prediction
from lightning_topt.schedules.staleness import Staleness

CPU = torch.device("cpu")


def loss_of(model: nn.Module, part: Any) -> Tensor:
    """Return the loss of a part of the batch."""
    loss: Tensor = model(part)
    return loss


class Training(NamedTuple):
    """`step` runs one step with its update; `plan` is that of a pipeline, and `end` comes after the
    last step.
    """

    step: Iteration
    plan: ParallelPlan | None = None
    end: Iteration = lambda: None


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of what this rank holds."""
    return torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-4, fused=True
    )


def ddp(model: LabModel, module: nn.Module) -> Training:
    """Return the training with data parallelism; each rank has its part of the samples."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer, batch = adamw(module), model.batch(model.samples // dist.get_world_size())

    def step() -> None:
        loss_of(wrapped, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step)


def weight_seconds(rule: str | None, count: int = 1 << 22) -> float:
    """Return the seconds of an update of one parameter, and of its prediction in both passes,
    measured on `count` of them.
    """
    module = nn.Linear(count, 1, bias=False)
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer = adamw(module)
    optimizer.step()
    stage = make_prediction(rule or "none").on(optimizer, stage=1, num_stages=4)
    staleness, rates = Staleness(version=0, missing=1, round_trip=1), [optimizer.param_groups]

    def turn() -> None:
        with stage.forward(0, staleness, rates):
            pass
        with stage.backward(0, staleness, rates):
            pass
        optimizer.step()

    turn()
    start = time.perf_counter()
    for _ in range(3):
        turn()
    return (time.perf_counter() - start) / (3 * count)


def cut_plan(
    model: LabModel, module: nn.Module, options: argparse.Namespace, *, rule: str | None = None
) -> ParallelPlan:
    """Return the plan of a pipeline, cut by seconds of passes and updates that rank 0 measured;
    `rule` predicts weights.
    """
    check_blocks(module, model.blocks)
    starts: list[Any] = [None]
    if dist.get_rank() == 0:
        part = model.batch(model.samples // options.microbatches)
        of_passes = block_seconds(module, lambda each: loss_of(each, part), model.blocks)
        weights, of_weight = weights_of(module, model.blocks), weight_seconds(rule)
        seconds = [
            options.microbatches * own + of_weight * count
            for own, count in zip(of_passes, weights, strict=True)
        ]
        starts = [cut(seconds, weights, dist.get_world_size(), share=options.share)]
    dist.broadcast_object_list(starts)
    mesh = Mesh((Axis("pipeline", dist.get_world_size(), "inter"),))
    return plan_of(
        model.blocks, starts[0], mesh=mesh, schedule="1f1b", microbatches=options.microbatches
    )


def pipeline(model: LabModel, module: nn.Module, options: argparse.Namespace) -> Training:
    """Return the training in a pipeline that flushes in each step."""
    plan = replace(cut_plan(model, module, options), schedule=options.schedule)
    engine, count = Engine(plan, module, device=CPU), options.microbatches
    microbatches = list(
        zip(*(tensor.chunk(count) for tensor in model.batch(model.samples)), strict=True)
    )
    engine.apply(example=Example(loss_of, microbatches[0]))
    optimizer = adamw(module)

    def step() -> None:
        engine.run_step(microbatches, loss_of)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, plan)


def continuous(model: LabModel, module: nn.Module, options: argparse.Namespace) -> Training:
    """Return the training in a pipeline that never flushes: a step takes in all samples as one
    minibatch.
    """
    plan = replace(
        cut_plan(model, module, options, rule=options.prediction),
        **{"schedule": options.schedule, "prediction": options.prediction, "num_microbatches": 1},
    )
    engine, batch = Engine(plan, module, device=CPU), model.batch(model.samples)
    engine.apply(example=Example(loss_of, batch))
    step, end = iterations(engine, adamw(module), batch, loss_of)
    return Training(step, plan, end)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--plan", choices=["ddp", "pipeline", "continuous"], required=True)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--share", type=float, default=0.3, help="of all weights that a stage may have"
    )
    parser.add_argument(
        "--measure",
        choices=["seconds", "memory"],
        default="seconds",
        help="memory: as under a limit, which takes time",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, meter = MODELS[options.model], MemoryMeter(CPU)
    if options.measure == "memory":  # what a rank holds is what it uses
        return_freed_memory(CPU)
    warm_up(CPU)
    dist.barrier()
    meter.mark_base()
    module = model.make()
    parameters = sum(p.numel() for p in module.parameters())
    make = {"ddp": lambda: ddp(model, module)}
    make["pipeline"] = lambda: pipeline(model, module, options)
    make["continuous"] = lambda: continuous(model, module, options)
    training = make[options.plan]()
    for _ in range(options.warmup):
        training.step()
    dist.barrier()
    release_free_memory()
    meter.reset_peak()
    sent, start = sent_bytes(), time.perf_counter()
    for _ in range(options.steps):
        training.step()
    dist.barrier()
    seconds = (time.perf_counter() - start) / options.steps
    mine = meter.peak_bytes(), (sent_bytes() - sent) / options.steps
    training.end()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        peaks, sents = zip(*found, strict=True)
        plan = training.plan
        stages = (
            None
            if plan is None
            else [[b.block for b in stage.blocks if b.block] for stage in plan.stages]
        )
        result = {
            "parameters": parameters,
            "step_seconds": seconds,
            "peak_bytes": list(peaks),
            "sent_bytes": list(sents),
            "stages": stages,
        }
        options.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
