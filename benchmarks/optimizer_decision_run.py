"""One rank of `optimizer_decision.py`, started as torchrun does: what sharing a step brings, and
what was decided before.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.optimizer_models import Model, Shapes, count, gpt_shapes, parts
from benchmarks.optimizer_ours import SETTLING_STEPS, Adaptive

# M parameters: width, depth
SIZES = {"0.1": (64, 2), "1": (128, 5), "4": (256, 5), "16": (512, 5), "64": (768, 9)}
TURN_SECONDS = 0.2  # a turn has as many steps as take about so long
MOST_STEPS = 20
KINDS = ("plain", "shared", "decided")


def blocks(size: str) -> Shapes:
    """Attention and perceptron blocks without an embedding, which would be most of a small
    model.
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


def turn(optimizer: Optimizer, steps: int) -> float:
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
    expected = max(turn(optimizer, 1) for optimizer in optimizers.values())
    steps = max(1, min(MOST_STEPS, round(TURN_SECONDS / expected)))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            seconds[kind].append(turn(optimizers[kind], steps))
    (pays,) = decided.pays
    return {
        "seconds": seconds,
        "pays": pays,
        "said": decided.said,
        "parameters": count(shapes),
        "per_turn": steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    main()
