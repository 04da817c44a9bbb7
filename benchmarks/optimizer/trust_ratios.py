"""Trust ratios of LARS: computed by every rank, and each by one rank and shared.

    python -m benchmarks.optimizer.trust_ratios        # about 1 minute on 2 cores

The parameters are those of a ResNet-50, the case of "parallel tensor operators" in arXiv
2010.10458. Only the optimizer runs, on random gradients that are equal on all ranks. Rounds are
interleaved: in each, every variant runs once, until the slowest rank is done.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import RESULTS, machine
from lightning_topt.optim.lars import LARS, TrustRatios, layer_norms, share_trust_ratios

RATIOS, STEP = "trust ratios", "whole step"
LOOP, WHOLE, SHARED = "one tensor after the other, plain torch", "not split", "split"
PLAIN = ("plain SGD with momentum, torch, fused", STEP)
OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5}
TRUST_COEFFICIENT = 0.001


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """Shapes of every parameter of a ResNet-50 for 1000 classes, in torchvision's order.

    Source: He et al., arXiv 1512.03385, Table 1.
    """
    yield from ((64, 3, 7, 7), (64,), (64,))
    channels = 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))  # the shortcut's
            for shape in convolutions:
                yield from (shape, shape[:1], shape[:1])  # and its batch norm
            channels = 4 * width
    yield from ((1000, channels), (1000,))


def make_parameters() -> list[torch.nn.Parameter]:
    """The same on every rank, with gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in resnet50_shapes():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.05)
        parameter.grad = torch.randn(shape, generator=generator) * 1e-3
        parameters.append(parameter)
    return parameters


def plain_ratios(parameters: Sequence[Tensor]) -> list[Tensor]:
    """As a loop over parameters computes them."""
    ratios = []
    for parameter in parameters:
        assert parameter.grad is not None
        weight, gradient = parameter.detach().norm(), parameter.grad.norm()
        ratio = TRUST_COEFFICIENT * weight / (gradient + OPTIONS["weight_decay"] * weight + 1e-8)
        ratios.append(torch.where((weight > 0) & (gradient > 0), ratio, 1.0))
    return ratios


@torch.no_grad()
def plain_step(parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """LARS as a loop over parameters."""
    for parameter, buffer, ratio in zip(parameters, buffers, plain_ratios(parameters), strict=True):
        assert parameter.grad is not None
        update = (parameter.grad + OPTIONS["weight_decay"] * parameter) * ratio
        buffer.mul_(OPTIONS["momentum"]).add_(update, alpha=OPTIONS["lr"])
        parameter.sub_(buffer)


def variants() -> tuple[dict[tuple[str, str], Callable[[], Any]], list[LARS]]:
    """What is timed, by name, and the two optimizers whose results must be equal."""
    sets = [make_parameters() for _ in range(4)]
    loop, whole, shared, sgd = sets
    buffers = [torch.zeros_like(parameter) for parameter in loop]
    optimizers = [
        LARS(parameters, trust_coefficient=TRUST_COEFFICIENT, **OPTIONS)
        for parameters in (whole, shared)
    ]
    ratios: TrustRatios = share_trust_ratios(optimizers[1])
    plain = torch.optim.SGD(sgd, fused=True, **OPTIONS)
    gradients = [[parameter.grad for parameter in parameters] for parameters in sets]
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        (LOOP, RATIOS): lambda: plain_ratios(loop),
        (WHOLE, RATIOS): lambda: layer_norms(whole, gradients[1]),
        (SHARED, RATIOS): lambda: ratios(shared, gradients[2]),
        (LOOP, STEP): lambda: plain_step(loop, buffers),
        (WHOLE, STEP): optimizers[0].step,
        (SHARED, STEP): optimizers[1].step,
        PLAIN: plain.step,
    }
    return calls, optimizers


@torch.no_grad()
def measure(rank: int, ranks: int, store: str, rounds: int, repeats: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    calls, optimizers = variants()
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items() if number % 2 else reversed(calls.items()):
            taken = timed(call, repeats=repeats)
            if number:  # the first is a warm-up
                seconds[name].append(taken)
    whole, shared = ([p for group in o.param_groups for p in group["params"]] for o in optimizers)
    assert all(torch.equal(a, b) for a, b in zip(whole, shared, strict=True))
    if rank == 0:
        queue.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def timed(call: Callable[[], Any], *, repeats: int) -> float:
    """Seconds per call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def run(*, ranks: int, rounds: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, str(Path(folder) / "store"), rounds, repeats, queue)
        processes = [
            context.Process(target=measure, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while not queue._reader.poll(1):  # type: ignore[attr-defined]
            if any(process.exitcode for process in processes):
                raise SystemExit(
                    f"a rank failed: exit codes {[process.exitcode for process in processes]}"
                )
        seconds: dict[tuple[str, str], list[float]] = queue.get()
        for process in processes:
            process.join()
    return seconds


def cell(seconds: Sequence[float]) -> str:
    return (
        f"{1e3 * statistics.median(seconds):.2f} ({1e3 * min(seconds):.2f} to "
        f"{1e3 * max(seconds):.2f})"
    )


def speed_up(before: Sequence[float], after: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(before, after, strict=True)]  # round by round
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def report(
    seconds: dict[tuple[str, str], list[float]],
    *,
    ranks: int,
    rounds: int,
    repeats: int,
    command: str,
) -> str:
    shapes = list(resnet50_shapes())
    number = sum(torch.Size(shape).numel() for shape in shapes)
    rows = [
        f"| {name} | {cell(seconds[name, RATIOS])} | {cell(seconds[name, STEP])} |"
        for name in (LOOP, WHOLE, SHARED)
    ]
    gains = [
        f"{part} {speed_up(seconds[WHOLE, part], seconds[SHARED, part])}" for part in (RATIOS, STEP)
    ]
    return "\n".join(
        [
            "# LARS on a ResNet-50's parameters: trust ratios split over ranks",
            "",
            f"`{command}`: {len(shapes)} tensors of {number / 1e6:.2f} M float32 parameters, "
            f"{ranks} ranks",
            f"with one thread each on one machine (gloo on loopback); {rounds} rounds of {repeats} "
            "calls, interleaved;",
            "milliseconds on the slowest rank, median (range). The parameters of the two `LARS` "
            "are equal bit for bit in the",
            "end.",
            "",
            machine(),
            "",
            "| | trust ratios, ms | whole step, ms |",
            "|---|---|---|",
            *rows,
            f"| {PLAIN[0]} | | {cell(seconds[PLAIN])} |",
            "",
            f"Not split / split, round by round: {', '.join(gains)}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="print the report, do not write it")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("ranks", "rounds", "repeats")}
    chosen = [
        f"--{name} {value}" for name, value in given.items() if value != parser.get_default(name)
    ]
    seconds = run(**given)
    command = " ".join(["python -m benchmarks.optimizer.trust_ratios", *chosen])
    text = report(seconds, **given, command=command)
    print(text)
    if not options.dry_run:
        (RESULTS / "trust_ratios.md").write_text(text)


if __name__ == "__main__":
    main()
