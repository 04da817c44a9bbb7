"""The optimizer step of Muon on FSDP2's shards: ours against torch's own, and a loop by hand.

    python -m benchmarks.optimizer.shards            # 2 and 4 ranks, five rounds: 10 minutes
    python -m benchmarks.optimizer.shards --quick    # small sizes, one round; printed, not kept
    python -m benchmarks.optimizer.shards --report   # the page from what was measured

The matrices of a language model's blocks, sharded by `fully_shard`, with given gradients: a step is
the optimizer's alone. Methods alternate, in an order that is reversed every second round.

    owners         each matrix is updated by one rank (`techniques.optimizer_sharding.share_step`)
    DTensors       torch.optim.Muon over the sharded parameters, as they are
    every rank     by hand: momentum in shards, each matrix gathered to all ranks (all gathers
                   under way at once), which all do its whole update and keep their rows
    whole          parameters that are not sharded, as under ddp: every rank does everything
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon

from benchmarks.common import RESULTS, machine, spread
from benchmarks.optimizer.shared import gpt_shapes
from lightning_topt.techniques.optimizer_sharding import share_step

FILE = RESULTS / "optimizer_shards.json"
WIDTH, DEPTH, ROUNDS, WARMUP = 384, 2, 5, 1
OWNERS, DTENSORS, EVERY, WHOLE = "owners", "DTensors", "every rank", "whole"
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
TIMEOUT = timedelta(seconds=300)


def matrices(width: int, depth: int) -> list[Tensor]:
    """The matrices of `depth` blocks, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [
        0.02 * torch.randn(shape, generator=generator)
        for block in gpt_shapes(width, depth, 1)[1:-1]
        for shape in block.values()
        if len(shape) == 2
    ]


class Method:
    """Parameters, their gradients, and a step of Muon."""

    def __init__(self, width: int, depth: int, *, sharded: bool) -> None:
        module = nn.Module()
        module.weights = nn.ParameterList(matrices(width, depth))
        gradients = [p.detach().flip(1) for p in module.parameters()]
        if sharded:
            fully_shard(module)
        self.parameters = list(module.parameters())
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else gradient
            )
        self.optimizer = Muon(self.parameters, **OPTIONS)
        self.step: Callable[[], Any] = self.optimizer.step


def owners(width: int, depth: int) -> Method:
    method = Method(width, depth, sharded=True)
    share_step(method.optimizer, ranks=dist.get_world_size(), group=None)
    method.step = method.optimizer.step
    return method


def every_rank(width: int, depth: int) -> Method:
    method = Method(width, depth, sharded=True)
    shards = [p for p in method.parameters if isinstance(p, DTensor)]
    averages = [torch.zeros_like(p.to_local()) for p in shards]
    momentum = float(method.optimizer.defaults["momentum"])

    @torch.no_grad()
    def step() -> None:
        # the elementwise part on shards; then Muon without momentum does the rest of a matrix
        gathered = []
        for parameter, average in zip(shards, averages, strict=True):
            assert isinstance(parameter.grad, DTensor)
            gradient = parameter.grad.to_local()
            average.lerp_(gradient, 1 - momentum)
            sent = DTensor.from_local(
                gradient.lerp(average, momentum), parameter.device_mesh, parameter.placements
            )
            gathered.append(sent.redistribute(placements=REPLICATED, async_op=True))
        for parameter, update in zip(shards, gathered, strict=True):
            whole = nn.Parameter(torch.zeros(parameter.shape))
            whole.grad = update.to_local()
            options = {**OPTIONS, "momentum": 0.0, "nesterov": False}
            Muon([whole], **options).step()
            rank, ranks = dist.get_rank(), dist.get_world_size()
            rows = whole.detach().chunk(ranks)[rank]
            local = parameter.to_local()
            local.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"]).add_(rows)

    method.step = step
    return method


REPLICATED = [torch.distributed.tensor.Replicate()]
MAKERS: dict[str, Callable[[int, int], Method]] = {
    OWNERS: owners,
    DTENSORS: lambda width, depth: Method(width, depth, sharded=True),
    EVERY: every_rank,
    WHOLE: lambda width, depth: Method(width, depth, sharded=False),
}


def slowest(value: float) -> float:
    """The maximum over ranks."""
    taken = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def timed(method: Method) -> float:
    dist.barrier()
    start = time.perf_counter()
    method.step()
    return slowest(time.perf_counter() - start)


def measure(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Seconds by method and round, errors, and differences from the whole parameters."""
    methods: dict[str, Method] = {}
    errors: dict[str, str] = {}
    for name, make in MAKERS.items():
        try:
            method = make(width, depth)
            for _ in range(WARMUP):
                method.step()
            methods[name] = method
        except (RuntimeError, NotImplementedError) as error:
            if name != DTENSORS:
                raise
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        dist.barrier()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds):
        for name in methods if number % 2 == 0 else reversed(methods):
            seconds[name].append(timed(methods[name]))
    start, whole = matrices(width, depth), methods[WHOLE].parameters
    differences = {}
    for name, method in methods.items():
        worst = 0.0
        for parameter, plain, before in zip(method.parameters, whole, start, strict=True):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            moved = (plain.detach() - before).abs().max()
            worst = max(worst, float((full - plain).detach().abs().max() / moved))
        differences[name] = slowest(worst)
    return {"seconds": seconds, "errors": errors, "differences": differences}


def _rank(rank: int, ranks: int, store: str, options: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        result = measure(**options)
        if rank == 0:
            Path(out).write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def launch(ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measure on so many new processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result")
        context = mp.get_context("spawn")
        jobs = [
            context.Process(target=_rank, args=(rank, ranks, f"{folder}/store", options, str(out)))
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(900)
            if job.is_alive() or job.exitcode:
                for other in jobs:
                    other.kill()
                raise RuntimeError("a rank failed or took more than 900 s")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def report(known: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# The step of Muon on shards",
        "",
        known["machine"],
        "",
        f"`python -m benchmarks.optimizer.shards`: the matrices of {known['depth']} blocks of "
        f"width {known['width']}, gloo, float32, one thread a rank. The slowest rank's seconds, "
        "median (range) of interleaved rounds; ratios are of the same round. The difference is "
        "from whole parameters after the same steps, relative to how far these have moved. Muon "
        "multiplies in bfloat16.",
        "",
    ]
    for ranks, result in known["ranks"].items():
        lines += [
            f"## {ranks} ranks",
            "",
            "| | step, ms | it / owners | largest difference |",
            "|---|---|---|---|",
        ]
        for name, seconds in result["seconds"].items():
            ratios = [a / b for a, b in zip(seconds, result["seconds"][OWNERS], strict=True)]
            lines.append(
                f"| {name} | {spread([1e3 * each for each in seconds], 0)} | {spread(ratios, 2)} | "
                f"{result['differences'][name]:.1e} |"
            )
        lines += [f"\n{name} cannot: {error}" for name, error in result["errors"].items()]
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args(arguments)
    if options.report:
        known = json.loads(FILE.read_text())
    else:
        width, depth, rounds = (64, 2, 1) if options.quick else (WIDTH, DEPTH, ROUNDS)
        sizes = {"width": width, "depth": depth}
        known = {"machine": machine(), **sizes, "ranks": {}}
        for ranks in options.ranks:
            known["ranks"][str(ranks)] = result = launch(ranks, {**sizes, "rounds": rounds})
            medians = {k: statistics.median(v) for k, v in result["seconds"].items()}
            print(ranks, {k: round(v, 4) for k, v in medians.items()}, flush=True)
        if not options.quick:
            FILE.write_text(json.dumps(known, indent=1) + "\n")
    text = report(known)
    if not options.quick:
        (RESULTS / "optimizer_shards.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
