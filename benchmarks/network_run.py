"""One rank of `benchmarks.network`: step times and bytes of every method, or one method's time to a
loss.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import exchange_models
from benchmarks.exchange_methods import ALONE, Method, prepare
from benchmarks.lab import sent_bytes, sent_payload

BUSY = 0.1  # share of the CPUs that others may use
WARM_UP_STEPS = 3  # the first is dense, after it DDP lays its buckets anew


def step(method: Method, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss: Tensor = method.ddp(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_times(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the slowest rank by method and round; bytes that left node 0 per step, counted and
    by formula.

    Rounds in which the machine was busy with other things are measured again, three times as many
    in all; the quietest count.
    """
    rank = dist.get_rank()
    module, data = exchange_models.make(options.model), exchange_models.batches(options.model, rank)
    methods = {name: prepare(name, copy.deepcopy(module)) for name in options.methods}
    optimizers = {name: torch.optim.SGD(m.ddp.parameters(), lr=1e-3) for name, m in methods.items()}
    for name, method in methods.items():
        for i in range(WARM_UP_STEPS):
            step(method, optimizers[name], data[i])
    rounds: list[tuple[float, dict[str, Figures]]] = []
    while len(rounds) < (options.rounds if options.steady else 3 * options.rounds):
        clock = Clock()
        figures = {
            name: _measure(m, optimizers[name], data, options) for name, m in methods.items()
        }
        rounds.append((clock.share_of_others(), figures))
        if sum(others <= BUSY for others, _ in rounds) == options.rounds:
            break
    kept = sorted(rounds, key=lambda round: round[0])[: options.rounds]
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": {name: [figures[name].seconds for _, figures in kept] for name in methods},
        "node_bytes": {name: [figures[name].node_bytes for _, figures in kept] for name in methods},
        "node_payload": {
            name: [figures[name].node_payload for _, figures in kept] for name in methods
        },
        "formula_bytes": {name: kept[0][1][name].formula_bytes for name in methods},
        "others": [others for others, _ in kept],
        "rounds": len(rounds),
        "equal": {
            name: _equal_on_all_ranks(method) for name, method in methods.items() if name != ALONE
        },
        "checksum": {name: _checksum(method) for name, method in methods.items()},
    }


class Figures(NamedTuple):
    """One round of one method, per step: seconds; bytes that left node 0 with and without headers,
    and by formula.
    """

    seconds: float
    node_bytes: float
    node_payload: float
    formula_bytes: float


def _measure(
    method: Method,
    optimizer: torch.optim.Optimizer,
    data: list[Tensor],
    options: argparse.Namespace,
) -> Figures:
    delay = 0.2 if dist.get_rank() == options.straggler else 0.0
    if method.exchange is not None:
        method.exchange.statistics()
    times = []
    dist.barrier()
    before = sent_bytes(), sent_payload()
    for i in range(options.steps):
        start = time.perf_counter()
        time.sleep(delay)
        step(method, optimizer, data[i])
        times.append(time.perf_counter() - start)
    dist.barrier()
    counted = (
        (sent_bytes() - before[0]) / options.steps,
        (sent_payload() - before[1]) / options.steps,
    )
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    formula = method.bytes_per_step
    if method.exchange is not None:
        formula = method.exchange.statistics().bytes_sent / options.steps  # of the node
    return Figures(slowest.item(), *counted, formula)


class Clock:
    """How busy the machine is with other things than the ranks. Made and read by all ranks
    together.
    """

    def __init__(self) -> None:
        self.before = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, soft, steal = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()

    def share_of_others(self) -> float:
        """Of all CPUs' time since this was made; with the kernel's work for the ranks' network. The
        same on all ranks.
        """
        wall, busy, own = (
            after - before for after, before in zip(self._read(), self.before, strict=True)
        )
        ranks = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(ranks)
        share = torch.tensor(max(0.0, busy - ranks.item()) / (wall * (os.cpu_count() or 1)))
        dist.broadcast(share, 0)
        return share.item()


def _checksum(method: Method) -> list[int]:
    return [int(p.detach().view(torch.int32).long().sum()) for p in method.ddp.parameters()]


def _equal_on_all_ranks(method: Method) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _checksum(method))
    return all(other == everyone[0] for other in everyone)


def time_to_loss(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and steps until the mean loss of ten steps falls below `options.loss`; training
    only.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = exchange_models.text_batches(rank, world_size, sequences=8, steps=options.max_steps)
    method = prepare(options.methods[0], exchange_models.make("gpt"))
    optimizer = torch.optim.AdamW(method.ddp.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True)
    losses: list[float] = []
    spent, clock = 0.0, Clock()
    for batch in data:
        start = time.perf_counter()
        loss = step(method, optimizer, batch)
        spent += time.perf_counter() - start
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        if len(losses) >= 10 and statistics.mean(losses[-10:]) < options.loss:
            break
    reached = statistics.mean(losses[-10:])
    return {
        "seconds": spent,
        "steps": len(losses),
        "loss": reached,
        "reached": reached < options.loss,
        "others": [clock.share_of_others()],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt", "cnn"], default="gpt")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--steady", action="store_true", help="as many rounds whatever else the machine does"
    )
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
