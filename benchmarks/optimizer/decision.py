"""Does the parallel optimizer step know when it pays? A sweep of sizes, links, optimizers.

    sudo python -m benchmarks.optimizer.decision  # 2 ranks; in a lab at 1 Gb/s, and on this machine
    python -m benchmarks.optimizer.decision --links unlimited          # without root
    python -m benchmarks.optimizer.decision --quick --links unlimited  # small, two rounds, not kept
    python -m benchmarks.optimizer.decision --report                   # tables of what was measured

In every case three copies of one optimizer alternate, round by round: plain, shared, and one that
decided for itself in its first steps. A decision is right if what it chose was faster, or if the
two differ by no more than 2 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.lab import Lab, LabError, end_on_signals
from benchmarks.optimizer.shared import (
    SETTLING_STEPS,
    Adaptive,
    Model,
    Shapes,
    count,
    gpt_shapes,
    parts,
)

FILE = RESULTS / "optimizer_decision.json"
# M parameters: width, depth
SIZES = {"0.1": (64, 2), "1": (128, 5), "4": (256, 5), "16": (512, 5), "64": (768, 9)}
OPTIMIZERS = ("SGD", "AdamW, fused", "AdamW", "Adafactor", "Muon")
LINKS = ("unlimited", "1gbit")
QUICK_SIZES = ("0.1", "1")
TIE = 0.02
RUN = "benchmarks.optimizer.decision"


def run(link: str, *, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Return everything measured on one link.

    Raises LabError when a rank fails, or where there can be no lab.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = ["-m", RUN, "--worker", "--out", str(out), *arguments]
        if link == "unlimited":
            _run_here(command, timeout=timeout)
        else:
            with Lab(2, rate=link) as lab:
                lab.run([*command, "--nodes", "2"], timeout=timeout)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _run_here(command: Sequence[str], *, timeout: float) -> None:
    """``python *command`` on two ranks of this machine."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            [*launcher, *command],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to be ended with its ranks
        )
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if status != 0:
            output.seek(0)
            why = (
                f"did not end within {timeout:.0f} s"
                if status is None
                else f"failed with status {status}"
            )
            raise LabError(f"the ranks' job {why}:\n{output.read()[-4000:]}")


def of_rounds(case: dict[str, Any], over: str, under: str) -> float:
    """Return seconds of `over` / seconds of `under`.

    It is the geometric mean of the medians of even and of odd rounds. Odd rounds have the opposite
    order. Whoever comes after shared steps, which leave sockets and caches busy, is slower: by up
    to two times for the smallest steps.
    """
    pairs = zip(case["seconds"][over], case["seconds"][under], strict=True)
    found = [one / other for one, other in pairs]
    return math.sqrt(statistics.median(found[::2]) * statistics.median(found[1::2]))


def ratio(case: dict[str, Any]) -> float:
    """How many times faster sharing is than the plain step."""
    return of_rounds(case, "plain", "shared")


def is_right(case: dict[str, Any]) -> bool:
    """Return whether the faster way was chosen, or both take the same time."""
    faster = ratio(case)
    return abs(faster - 1) <= TIE or (faster > 1) == case["pays"]


def loss(case: dict[str, Any]) -> float:
    """How much longer the optimizer that decided takes than the plain step."""
    return of_rounds(case, "decided", "plain") - 1


def cell(case: dict[str, Any]) -> str:
    """Times, ratio and decision of one case."""
    plain, shared = (1e3 * statistics.median(case["seconds"][kind]) for kind in ("plain", "shared"))
    chosen = "shared" if case["pays"] else "plain"
    wrong = "" if is_right(case) else ", **wrong**"
    return f"{plain:.1f} / {shared:.1f}: {ratio(case):.2f}, {chosen}{wrong}"


def cases(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, case) of all that was measured."""
    for link, of_link in results.items():
        for optimizer, of_optimizer in of_link.items():
            for size, case in of_optimizer.items():
                yield f"{optimizer}, {size} M, {link}", case


def table(link: str, of_link: dict[str, Any]) -> list[str]:
    """The section of one link."""
    sizes = list(dict.fromkeys(size for of_optimizer in of_link.values() for size in of_optimizer))
    lines = [
        f"## Link: {link}",
        "",
        "| | " + " | ".join(f"{size} M" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for optimizer, of_optimizer in of_link.items():
        cells = [cell(of_optimizer[size]) if size in of_optimizer else "" for size in sizes]
        lines.append(f"| {optimizer} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def summary(results: dict[str, Any]) -> list[str]:
    """The share of right decisions, and what the wrong ones cost."""
    everything = list(cases(results))
    if not everything:
        return []
    right = sum(is_right(case) for _, case in everything)
    ties = sum(abs(ratio(case) - 1) <= TIE for _, case in everything)
    declined = [loss(case) for _, case in everything if not case["pays"]]
    lines = [
        f"**{right} of {len(everything)} decisions right ({100 * right / len(everything):.1f} "
        f"%)**, {ties} of them ties. Where it declined, the step that decided takes "
        f"{1 + statistics.median(declined):.3f} times as long as the plain step (median of "
        f"{len(declined)} cases; the work is the same, so the range of {1 + min(declined):.2f} to "
        f"{1 + max(declined):.2f} is noise).",
        "",
    ]
    for name, case in everything:
        if not is_right(case):
            lines.append(
                f"- wrong: {name}: sharing is {ratio(case):.2f} times as fast; "
                f"{' '.join(case['said'])}"
            )
    return [*lines, ""]


def report(results: dict[str, Any], where: str) -> str:
    """The page."""
    rounds = next((len(case["seconds"]["plain"]) for _, case in cases(results)), 0)
    lines = [
        "# When the parallel optimizer step pays: decisions against measurements",
        "",
        where,
        "",
        "`python -m benchmarks.optimizer.decision`: 2 ranks on this machine, one thread each, "
        "gloo, float32, blocks of language models (Muon: their matrices). The link of 1gbit is a "
        "lab's (network namespaces with a token bucket), unlimited is loopback. Milliseconds of "
        f"`optimizer.step()` on the slowest rank, plain / shared; median of {rounds} interleaved "
        "rounds; then how many times faster sharing is (geometric mean over the two orders of the "
        "medians of the rounds' ratios) and what was decided in the first steps. A decision counts "
        f"as right if the faster way was chosen or they differ by at most {100 * TIE:.0f} %.",
        "",
        *summary(results),
    ]
    for link, of_link in results.items():
        lines += table(link, of_link)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    end_on_signals()
    sizes = options.sizes or (
        QUICK_SIZES if options.quick else [size for size in SIZES if float(size) >= 1]
    )
    rounds = 2 if options.quick else options.rounds
    results: dict[str, Any] = (
        {} if options.quick or not FILE.exists() else json.loads(FILE.read_text())
    )
    for link in () if options.report else options.links:
        print(link, flush=True)
        chosen = ["--sizes", *sizes, "--rounds", str(rounds), "--optimizers", *options.optimizers]
        try:
            measured = run(link, arguments=chosen, timeout=3000)
        except LabError as error:
            sys.exit(f"optimizer_decision: {error}")
        for optimizer, of_optimizer in measured.items():
            known = results.setdefault(link, {}).setdefault(optimizer, {})
            known.update(of_optimizer)
        if not options.quick:
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results, machine())
    if not options.quick:
        (RESULTS / "optimizer_decision.md").write_text(text)
    print(text)


# ---- one rank of a job, started as torchrun does -------------------------------------------------

ROUND_SECONDS = 0.2  # of a round, for each optimizer: as many steps as take about so long
MOST_STEPS = 20
KINDS = ("plain", "shared", "decided")


def blocks(size: str) -> Shapes:
    """Attention and perceptron blocks, without an embedding.

    It would be most of a small model.
    """
    width, depth = SIZES[size]
    return gpt_shapes(width, depth, 1)[1:-1]


def make(name: str, shapes: Shapes) -> Optimizer:
    """One optimizer over a model of its own; gradients are the same on all ranks."""
    model = Model(shapes, rank=0)
    if name == "Muon":  # for matrices only
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    optimizer = parts(name)[0].make(model)
    model(torch.zeros(1)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()  # memory of its own
    return optimizer


def slowest(value: float) -> float:
    """The maximum over ranks."""
    taken = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def step_seconds(optimizer: Optimizer, steps: int) -> float:
    """Seconds per step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    return slowest((time.perf_counter() - start) / steps)


def measure(name: str, size: str, rounds: int, num_nodes: int) -> dict[str, Any]:
    """Seconds per step by kind and round, the decision, and what was said about it."""
    shapes = blocks(size)
    optimizers = {kind: make(name, shapes) for kind in KINDS}
    decided = Adaptive(optimizers["decided"], always=False, num_nodes=num_nodes)
    Adaptive(optimizers["shared"], always=True, num_nodes=num_nodes)
    for optimizer in optimizers.values():
        for _ in range(SETTLING_STEPS):
            optimizer.step()
    expected = max(step_seconds(optimizer, 1) for optimizer in optimizers.values())
    steps = max(1, min(MOST_STEPS, round(ROUND_SECONDS / expected)))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            seconds[kind].append(step_seconds(optimizers[kind], steps))
    return {
        "seconds": seconds,
        "pays": decided.pays,
        "said": decided.said,
        "parameters": count(shapes),
        "per_turn": steps,
    }


def run_worker(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--optimizers", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    results: dict[str, dict[str, Any]] = {}
    for name in options.optimizers:
        for size in options.sizes:
            results.setdefault(name, {})[size] = measure(name, size, options.rounds, options.nodes)
            gc.collect()  # replaced steps and their optimizers refer to each other
            if dist.get_rank() == 0:
                Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker() if "--worker" in sys.argv else main()
