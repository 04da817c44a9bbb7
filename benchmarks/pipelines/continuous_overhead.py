r"""Throughput of the continuous pipeline against the bubble-free bound and torch's schedules.

    python -m benchmarks.pipelines.continuous_overhead [--ranks 2 4] [--width 384] [--rounds 5]
    python -m benchmarks.pipelines.continuous_overhead --ranks 4 --ours continuous --theirs \
        --rule '{"rule": "two_versions", "error_feedback": true}' --accumulate 4 --out PAGE

All run the same Transformer layers as the same stages on the same ranks, minibatch by minibatch,
each with an update (SGD with momentum). Schedules of torch.distributed.pipelining cut the minibatch
into the number of microbatches with which they were fastest.

The bound is what all ranks together need for forward, backward and update of their own stages, side
by side, with nothing sent. That is the slowest stage's time, or all work divided by the cores where
ranks outnumber cores. Everything is timed in turn, round by round, in the steady state: per rank,
from the end of one iteration to that of another, without a barrier in between. The slowest rank
counts.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing as mp
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from benchmarks.pipelines.overhead import CPU, SPLIT, Stack, plan_of, their_step
from benchmarks.pipelines.overhead import SCHEDULES as OF_TORCH
from benchmarks.pipelines.shared import Iteration, iterations
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.schedules.schedules import make_schedule
from lightning_topt.schedules.timing import StageCosts, simulate
from lightning_topt.weight_prediction import Prediction, make_prediction, prediction_to_value

THEIRS = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Contestant(NamedTuple):
    """An `iteration` takes one minibatch; `end` comes after the last one of a round."""

    name: str
    microbatches: int
    iteration: Iteration
    end: Iteration = lambda: None


class Measured(NamedTuple):
    """Seconds of a minibatch by contestant and round, and the microbatches of each contestant."""

    ranks: int
    width: int
    seconds: dict[str, list[float]]
    microbatches: dict[str, int]


def ours(
    module: nn.Module, x: Tensor, y: Tensor, *, schedule: str, args: argparse.Namespace
) -> Contestant:
    """Return the engine's run, which takes over `module`."""
    ranks, rule = dist.get_world_size(), rule_of(args)
    flushing = plan_of("1f1b", ranks=ranks, layers=args.layers, microbatches=1)
    plan = replace(flushing, schedule=schedule, prediction=rule, accumulate=args.accumulate)
    engine = Engine(plan, module, device=CPU)
    batch = (x, y)
    engine.apply(example=Example(_loss, batch))
    iteration, end = iterations(
        engine, _optimizer(module), batch, _loss, accumulate=args.accumulate
    )
    return Contestant(f"{schedule}, {prediction_to_value(rule)}", 1, iteration, end)


def rule_of(args: argparse.Namespace) -> Prediction:
    """Return the rule of the weights, by its name or with options."""
    return make_prediction(json.loads(args.rule) if args.rule.startswith("{") else args.rule)


def theirs(
    layers: Sequence[nn.Module], x: Tensor, y: Tensor, *, name: str, microbatches: int
) -> Contestant:
    """Return torch's schedule with an update after each minibatch."""
    plan = plan_of(name, ranks=dist.get_world_size(), layers=len(layers), microbatches=microbatches)
    step, held = their_step(layers, plan, x, y)
    optimizer = _optimizer(held)

    def iteration() -> None:
        step()
        optimizer.step()

    return Contestant(name, microbatches, iteration)


def bound(layers: Sequence[nn.Module], x: Tensor, *, accumulate: int) -> Contestant:
    """Return forward, backward and update of this rank's stage alone."""
    count = itertools.count(1)
    rank, size = dist.get_rank(), len(layers) // dist.get_world_size()
    stage = nn.Sequential(*layers[size * rank : size * (rank + 1)])
    optimizer, given = _optimizer(stage), torch.ones_like(x) / x.numel()

    def iteration() -> None:
        stage(x.detach().requires_grad_(rank > 0)).backward(given)
        if next(count) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Contestant("bound", 1, iteration)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def seconds_of(contestant: Contestant, *, count: int, warm_up: int) -> float:
    """Return the seconds of an iteration in the steady state, those of the slowest rank."""
    dist.barrier()
    for _ in range(warm_up):
        contestant.iteration()
    start = time.perf_counter()
    for _ in range(count):
        contestant.iteration()
    taken = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
    contestant.end()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(rank: int, ranks: int, store: str, args: Any, results: Any) -> None:
    """Measure all widths on one rank; rank 0 puts what it found into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for width in args.width:
        torch.manual_seed(0)
        module = Stack(width, args.layers)
        x, y = torch.randn(2, args.batch, args.steps, width).unbind()
        running = [bound([*copy.deepcopy(module).layers], x, accumulate=args.accumulate)]
        for schedule in args.ours:
            running.append(ours(copy.deepcopy(module), x, y, schedule=schedule, args=args))
        for name in args.theirs:
            running.append(_fastest(module, x, y, name=name, args=args))
        warm_up = 2 * ranks + 2
        seconds: dict[str, list[float]] = {each.name: [] for each in running}
        for index in range(args.rounds):
            for each in running if index % 2 else running[::-1]:
                seconds[each.name].append(seconds_of(each, count=args.count, warm_up=warm_up))
        if rank == 0:
            results.put(
                Measured(ranks, width, seconds, {each.name: each.microbatches for each in running})
            )
    dist.destroy_process_group()


def _fastest(module: Stack, x: Tensor, y: Tensor, *, name: str, args: Any) -> Contestant:
    """Return torch's schedule with the number of microbatches that took the least time.

    Each has two trials.
    """
    splits, per_rank = name in SPLIT, OF_TORCH[name][1]
    counts = [
        count
        for count in args.microbatches
        if args.batch % count == 0 and count >= dist.get_world_size()
    ]
    if splits or per_rank > 1:  # torch runs these with whole rounds alone
        counts = [count for count in counts if count % dist.get_world_size() == 0]
    layers = [*copy.deepcopy(module).layers]
    tried = [theirs(layers, x, y, name=name, microbatches=count) for count in counts]
    trials = [[seconds_of(each, count=3, warm_up=1) for each in tried] for _ in range(2)]
    least = [min(times) for times in zip(*trials, strict=True)]
    return tried[least.index(min(least))]


def run_ranks(ranks: int, args: Any) -> Iterator[Measured]:
    """Run all widths on so many ranks."""
    context = mp.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, os.path.join(folder, "store"), args, results)
        processes = [context.Process(target=measure, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _ in args.width:
            yield _result(results, processes)
        for process in processes:
            process.join()


def _result(results: Any, processes: Sequence[Any]) -> Measured:
    """Raises RuntimeError where a rank ended before there was one."""
    while True:
        try:
            found: Measured = results.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise RuntimeError("a rank failed; its output says why") from None
        else:
            return found


def bubble(name: str, *, ranks: int, microbatches: int) -> float:
    """Return the share of time that ranks wait under a schedule of equal stages.

    Backward takes twice as long as forward.
    """
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    row = [1.0] * schedule.num_stages
    return simulate(
        schedule, StageCosts(row, [2.0] * schedule.num_stages, row, row)
    ).bubble_fraction


def lines(found: Measured, *, batch: int) -> Iterator[str]:
    """Yield the rows of a table."""
    first = next(name for name in found.seconds if name.startswith("continuous"))
    for name, seconds in found.seconds.items():
        of_bound = _ratio(found.seconds["bound"], seconds)
        gain = expected = ""
        if name in OF_TORCH:
            gain = _ratio(seconds, found.seconds[first])
            lost = bubble(name, ranks=found.ranks, microbatches=found.microbatches[name])
            expected = f"{1 / (1 - lost):.3f}"
        rate = batch / statistics.median(seconds)
        cells = (
            name,
            found.ranks,
            found.width,
            found.microbatches[name],
            f"{rate:.1f}",
            of_bound,
            gain,
            expected,
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The median of the ratios of neighbours, and the quartiles."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[384])
    parser.add_argument("--ours", nargs="+", default=["continuous", "continuous_overlapped"])
    parser.add_argument("--rule", default="spectrain", help="its name, or JSON with options")
    parser.add_argument("--accumulate", type=int, default=1, help="minibatches of an update")
    parser.add_argument("--theirs", nargs="*", default=list(THEIRS), choices=THEIRS)
    parser.add_argument(
        "--microbatches", type=int, nargs="+", default=[2, 4, 8, 16], help="that are tried"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--count", type=int, default=12, help="minibatches that are timed in a round"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a minibatch")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--out", type=Path, default=RESULTS / "continuous_overhead.md")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for found in run_ranks(ranks, args):
            for row in lines(found, batch=args.batch):
                rows.append(row)
                print(row, flush=True)
    args.out.write_text(
        f"""# The continuous pipeline against the bubble-free bound and torch.distributed.pipelining

`python -m benchmarks.pipelines.continuous_overhead --ranks {" ".join(map(str, args.ranks))} \
--width {" ".join(map(str, args.width))} --rounds {args.rounds} --rule '{args.rule}' \
--accumulate {args.accumulate}`

{machine()}
- gloo ranks of one thread each on one machine; {args.layers} Transformer layers; minibatches of
  {args.batch} x {args.steps} tokens, forward, backward and update (SGD with momentum);
  {args.rounds} rounds of {args.count} minibatches each, all in turn

Torch's schedules have the number of microbatches, of {", ".join(map(str, args.microbatches))}, with
which they were fastest. `of the bound`: throughput in parts of what all ranks reach side by side
with nothing sent. `gain`: throughput of the first continuous schedule over that of this one, and
beside it 1 / (1 - bubble) by a simulation of this one. Medians over rounds, with quartiles.

| schedule | ranks | width | microbatches | sequences per second | of the bound | gain \
| 1 / (1 - bubble) |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    )


if __name__ == "__main__":
    main()
