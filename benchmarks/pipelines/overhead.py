"""Step time of pipelines: our engine against torch.distributed.pipelining.

    python -m benchmarks.pipelines.overhead [--ranks 2 4] [--width 128 384] [--rounds 9]

The engine has an unmodified module, torch has stages cut by hand. Both run the same Transformer
layers as the same stages under the same schedule, on the same ranks, in turn: forward and backward
of all microbatches. The median over rounds of the ratio of two neighbours is shown with its
quartiles.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import io
import multiprocessing as mp
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as of_torch

from benchmarks.common import RESULTS, machine
from benchmarks.tensor.overhead import Layer
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.schedules.schedules import make_schedule

CPU = torch.device("cpu")
# Our name: theirs, and stages per rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (of_torch.ScheduleGPipe, 1),
    "1f1b": (of_torch.Schedule1F1B, 1),
    "interleaved": (of_torch.ScheduleInterleaved1F1B, 2),
    "looped_bfs": (of_torch.ScheduleLoopedBFS, 2),
    "zero_bubble": (of_torch.ScheduleInterleavedZeroBubble, 1),
    "interleaved_zero_bubble": (of_torch.ScheduleInterleavedZeroBubble, 2),
    "zbv": (of_torch.ScheduleZBVZeroBubble, 2),
}
SPLIT = ("zero_bubble", "interleaved_zero_bubble", "zbv")
Step = Callable[[], None]
# by round, ours and theirs: seconds, and those of processors
Pairs = list[list[tuple[float, float]]]


class Stack(nn.Module):
    """As a user writes it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plan_of(schedule: str, *, ranks: int, layers: int, microbatches: int) -> ParallelPlan:
    """Return the plan that deals `layers` blocks out equally."""
    mesh = Mesh((Axis("pipeline", ranks),))
    config = OpConfig.zero(0, axes=1, over=())
    count = ranks * SCHEDULES[schedule][1]
    size = layers // count
    stages = tuple(
        StagePlan(
            (
                *(BlockPlan(f"layers.{i}", config) for i in range(size * s, size * (s + 1))),
                BlockPlan("", config),
            )
        )
        for s in range(count)
    )
    return ParallelPlan(mesh, stages, schedule=schedule, num_microbatches=microbatches)


def places_of(plan: ParallelPlan) -> Sequence[int]:
    """Return the rank of each stage."""
    assert plan.schedule is not None
    sizes = {"num_ranks": plan.mesh.pipeline_size, "num_microbatches": plan.num_microbatches}
    return make_schedule(plan.schedule, **sizes, stages_per_rank=plan.stages_per_rank).rank_of_stage


def our_step(module: nn.Module, plan: ParallelPlan, x: Tensor, y: Tensor) -> tuple[Step, Engine]:
    """Return the step of the engine, which has taken over `module`."""
    engine = Engine(plan, module, device=CPU)
    count = plan.num_microbatches
    microbatches = list(zip(x.chunk(count), y.chunk(count), strict=True))
    engine.apply(example=Example(_loss, microbatches[0]))

    def step() -> None:
        module.zero_grad()
        engine.run_step(microbatches, _loss)

    return step, engine


def _loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(part[0]), part[1])


def their_step(
    layers: Sequence[nn.Module], plan: ParallelPlan, x: Tensor, y: Tensor
) -> tuple[Step, nn.Module]:
    """Return the step of torch's schedule, and its stages on this rank."""
    assert plan.schedule is not None
    rank, count, kind, places = (
        dist.get_rank(),
        len(plan.stages),
        SCHEDULES[plan.schedule][0],
        places_of(plan),
    )
    own, size = [s for s in range(count) if places[s] == rank], len(layers) // count
    parts = {s: nn.Sequential(*layers[size * s : size * (s + 1)]) for s in own}
    stages = [PipelineStage(part, s, count, CPU) for s, part in parts.items()]
    of_many = issubclass(kind, of_torch.PipelineScheduleMulti)
    schedule = kind(stages if of_many else stages[0], plan.num_microbatches, loss_fn=F.mse_loss)
    first, last, held = places[0] == rank, places[-1] == rank, nn.ModuleList(parts.values())

    def step() -> None:
        held.zero_grad()
        schedule.step(*((x,) if first else ()), target=y if last else None, return_outputs=False)

    return step, held


def check_equal(module: Stack, held: nn.Module, places: Sequence[int]) -> None:
    """Raise RuntimeError where gradients differ after a step of each.

    Stage s is on rank ``places[s]``.
    """
    size = len(module.layers) // len(places)
    own = [stage for stage, rank in enumerate(places) if rank == dist.get_rank()]
    ours = [
        p
        for s in own
        for i in range(size * s, size * (s + 1))
        for p in module.layers[i].parameters()
    ]
    for one, other in zip(ours, held.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        if not torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"gradients differ by {(one.grad - other.grad).abs().max()}")


def measure(
    rank: int, ranks: int, store: str, cases: Sequence[tuple[str, int]], args: Any, results: Any
) -> None:
    """Measure all cases on one rank.

    Rank 0 puts schedule, width and pairs of seconds into `results`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name, width in cases:
        layers, count = args.layers, args.microbatches
        plan = plan_of(name, ranks=ranks, layers=layers, microbatches=count)
        torch.manual_seed(0)
        module = Stack(width, layers)
        other = copy.deepcopy(module)
        x, y = torch.randn(2, args.batch * count, args.steps, width).unbind()
        both, engine, held = [], None, None
        if args.alone != "theirs":
            step, engine = our_step(module, plan, x, y)
            both.append(step)
        if args.alone != "ours":
            step, held = their_step([*other.layers], plan, x, y)
            both.append(step)
        for step in both:
            timed(step, 3)
        if held is not None and engine is not None:
            check_equal(module, held, places_of(plan))
        pairs = []
        profile = cProfile.Profile()
        if args.profile and rank == ranks - 1:
            profile.enable()
        for index in range(args.rounds):
            order = both[::-1] if index % 2 else both
            found = {step: timed(step, args.count) for step in order}
            pairs.append([found[step] for step in both])
        if args.profile and rank == ranks - 1:
            profile.disable()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
            Path(args.profile).write_text(text.getvalue())
        if engine is not None:
            engine.release()
            engine.close()
        if rank == 0:
            results.put((name, width, pairs))
    dist.destroy_process_group()


def timed(step: Step, count: int) -> tuple[float, float]:
    """Return the seconds of one of `count` steps by the clock, and those of all processors.

    All ranks have finished then.
    """
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    of_all = torch.tensor([time.process_time() - used], dtype=torch.float64)
    dist.all_reduce(of_all)
    return (time.perf_counter() - start) / count, float(of_all) / count


def run_cases(
    ranks: int, cases: Sequence[tuple[str, int]], args: Any
) -> Iterator[tuple[str, int, Pairs]]:
    """Run the cases on so many ranks; yields schedule, width and pairs of seconds."""
    context = mp.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, os.path.join(folder, "store"), cases, args, results)
        processes = [context.Process(target=measure, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _ in cases:
            yield results.get(timeout=600)
        for process in processes:
            process.join()


def line(ranks: int, name: str, width: int, pairs: Pairs) -> str:
    """Return a row of the table."""
    ratios = []
    for kind in range(2):
        low, middle, high = statistics.quantiles(
            [ours[kind] / theirs[kind] for ours, theirs in pairs], n=4
        )
        ratios.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    our_ms, their_ms = (
        1e3 * statistics.median(wall for wall, _ in each) for each in zip(*pairs, strict=True)
    )
    return f"| {name} | {ranks} | {width} | {our_ms:.1f} | {their_ms:.1f} | {' | '.join(ratios)} |"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=2, help="steps in a round")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a microbatch")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a sequence")
    parser.add_argument(
        "--alone", choices=["ours", "theirs"], help="run one of them, for a profile"
    )
    parser.add_argument("--profile", help="file for the profile of the last rank")
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_overhead.md")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for name, width, pairs in run_cases(
            ranks, [(n, w) for n in args.schedules for w in args.width], args
        ):
            if args.alone:
                print(
                    f"{args.alone} {name} {ranks} {width}: "
                    f"{1e3 * statistics.median(p[0][0] for p in pairs):.1f} ms"
                )
                continue
            rows.append(line(ranks, name, width, pairs))
            print(rows[-1], flush=True)
    if rows:
        args.out.write_text(
            f"""# Pipelines of an unmodified module against torch.distributed.pipelining

`python -m benchmarks.pipelines.overhead --rounds {args.rounds}`

{machine()}
- gloo ranks of one thread each on one machine; {args.layers} Transformer layers,
  {args.microbatches} microbatches of {args.batch} x {args.steps} tokens, forward and backward;
  {args.rounds} rounds of {args.count} steps, both in turn

Stages, schedule and microbatches are the same; gradients were compared. Milliseconds per step:
median. Ratio: median of the ratios of neighbouring rounds, with its quartiles; of processor time,
that of all ranks together, which other programs on the machine hardly change. The engine's step
also gives every rank the losses.

| schedule | ranks | width | engine ms | torch ms | engine / torch | processor time |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
        )


if __name__ == "__main__":
    main()
