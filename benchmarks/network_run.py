"""One rank of `benchmarks.network`: step times and bytes of every method, or one method's time to a loss."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import exchange_models
from benchmarks.exchange_methods import Method, names, prepare
from benchmarks.lab import sent_bytes

WARM_UP_STEPS = 3  # the first is dense, after it DDP lays its buckets anew


def step(method: Method, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss: Tensor = method.ddp(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_times(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the slowest rank by method and round; bytes that left node 0 per step, counted and by formula."""
    rank = dist.get_rank()
    module, data = exchange_models.make(options.model), exchange_models.batches(options.model, rank)
    ranks_per_node = dist.get_world_size() // options.nodes
    chosen = [n for n in names(ranks_per_node) if not options.methods or any(m in n for m in options.methods)]
    methods = {name: prepare(name, copy.deepcopy(module)) for name in chosen}
    optimizers = {name: torch.optim.SGD(m.ddp.parameters(), lr=1e-3) for name, m in methods.items()}
    for name, method in methods.items():
        for i in range(WARM_UP_STEPS):
            step(method, optimizers[name], data[i])
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    counted: dict[str, list[int]] = {name: [] for name in methods}
    formula: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, method in methods.items():
            times, delay = [], 0.2 if rank == options.straggler else 0.0
            if method.exchange is not None:
                method.exchange.statistics()
            dist.barrier()
            before = sent_bytes()
            for i in range(options.steps):
                start = time.perf_counter()
                time.sleep(delay)
                step(method, optimizers[name], data[i])
                times.append(time.perf_counter() - start)
            dist.barrier()
            counted[name].append((sent_bytes() - before) // options.steps)
            slowest = torch.tensor(statistics.median(times))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
            if method.exchange is not None:
                formula[name] = method.exchange.statistics().bytes_sent / options.steps  # of the node
    equal = {name: _equal_on_all_ranks(method) for name, method in methods.items()}
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": seconds,
        "node_bytes": counted,
        "formula_bytes": formula,
        "equal": equal,
        "checksum": {name: _checksum(method) for name, method in methods.items()},
    }


def _checksum(method: Method) -> list[int]:
    return [int(p.detach().view(torch.int32).long().sum()) for p in method.ddp.parameters()]


def _equal_on_all_ranks(method: Method) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _checksum(method))
    return all(other == everyone[0] for other in everyone)


def time_to_loss(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and steps until the mean loss of ten steps falls below `options.loss`; training only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = exchange_models.text_batches(rank, world_size, sequences=8, steps=options.max_steps)
    method = prepare(options.methods[0], exchange_models.make("gpt"))
    optimizer = torch.optim.AdamW(method.ddp.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True)
    losses: list[float] = []
    spent = 0.0
    for batch in data:
        start = time.perf_counter()
        loss = step(method, optimizer, batch)
        spent += time.perf_counter() - start
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        if len(losses) >= 10 and statistics.mean(losses[-10:]) < options.loss:
            break
    reached = statistics.mean(losses[-10:])
    return {"seconds": spent, "steps": len(losses), "loss": reached, "reached": reached < options.loss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt", "cnn"], default="gpt")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--straggler", type=int, default=-1)
    parser.add_argument("--loss", type=float)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result = step_times(options) if options.loss is None else time_to_loss(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
