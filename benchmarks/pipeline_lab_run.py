"""One measured job for `pipeline_lab` on ranks that a launcher started: a model under DDP or in a pipeline; JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab import sent_bytes
from benchmarks.pipeline_cuts import block_seconds, check_blocks, cut, plan_of, weights_of
from benchmarks.pipeline_lab_models import MODELS, LabModel
from lightning_topt.execution.allocator import return_freed_memory, warm_up
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory_meter import MemoryMeter, release_free_memory
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan

CPU = torch.device("cpu")


def loss_of(model: nn.Module, part: Any) -> Tensor:
    """Return the loss of a part of the batch."""
    loss: Tensor = model(part)
    return loss


def ddp(model: LabModel, module: nn.Module) -> tuple[Callable[[], None], nn.Module]:
    """Return the step of data parallelism; each rank has its part of the samples."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    batch = model.batch(model.samples // dist.get_world_size())

    def step() -> None:
        loss_of(wrapped, batch).backward()

    return step, wrapped


def pipeline(
    model: LabModel, module: nn.Module, options: argparse.Namespace
) -> tuple[Callable[[], None], ParallelPlan]:
    """Return the step of a pipeline, cut by seconds that rank 0 measured."""
    check_blocks(module, model.blocks)
    starts: list[Any] = [None]
    if dist.get_rank() == 0:
        part = model.batch(model.samples // options.microbatches)
        seconds = block_seconds(module, lambda each: loss_of(each, part), model.blocks)
        starts = [cut(seconds, weights_of(module, model.blocks), dist.get_world_size(), share=options.share)]
    dist.broadcast_object_list(starts)
    mesh = Mesh((Axis("pipeline", dist.get_world_size(), "inter"),))
    plan = plan_of(model.blocks, starts[0], mesh=mesh, schedule=options.schedule, microbatches=options.microbatches)
    engine = Engine(plan, module, device=CPU)
    count = options.microbatches
    microbatches = list(zip(*(tensor.chunk(count) for tensor in model.batch(model.samples)), strict=True))
    engine.apply(example=Example(loss_of, microbatches[0]))

    def step() -> None:
        engine.run_step(microbatches, loss_of)

    return step, plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--plan", choices=["ddp", "pipeline"], required=True)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.3, help="of all weights that a stage may have")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, meter = MODELS[options.model], MemoryMeter(CPU)
    return_freed_memory(CPU)  # what a rank holds is what it uses, under both plans
    warm_up(CPU)
    dist.barrier()
    meter.mark_base()
    module = model.make()
    parameters = sum(p.numel() for p in module.parameters())
    if options.plan == "ddp":
        step, held = ddp(model, module)
    else:
        step, held = pipeline(model, module, options)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    seconds, sent = [], 0
    for index in range(options.warmup + options.steps):
        if index == options.warmup:
            release_free_memory()
            meter.reset_peak()
            sent = sent_bytes()
        dist.barrier()
        start = time.perf_counter()
        step()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if index >= options.warmup:
            seconds.append(time.perf_counter() - start)
    mine = meter.peak_bytes(), (sent_bytes() - sent) / options.steps
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        peaks, sents = zip(*found, strict=True)
        stages = (
            [[b.block for b in s.blocks if b.block] for s in held.stages] if isinstance(held, ParallelPlan) else None
        )
        result = {
            "parameters": parameters,
            "step_seconds": statistics.median(seconds),
            "peak_bytes": list(peaks),
            "sent_bytes": list(sents),
            "stages": stages,
        }
        options.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
