"""One rank of `benchmarks.adam_lab`: trains a GPT with AdamW under one method, to a loss or for
some steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import exchange_models
from benchmarks.lab import sent_bytes
from lightning_topt.communication import CompressedExchange
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.local_sgd import LocalMethod, OuterSteps
from lightning_topt.communication.method_registry import read_method
from lightning_topt.communication.topology import Topology

SEQUENCES = 4
WARM_UP = 20  # steps in which the learning rate rises
TIMEOUT = 1800  # seconds of any wait; trainings may be stopped for a while
NOT_TIMED = 3  # steps: kernels are compiled, buckets laid anew


class Training:
    """A module, its optimizer, and what exchanges; made alike on all ranks."""

    def __init__(self, method: dict[str, Any] | None, rate: float, decay: float = 0.1) -> None:
        self.module: nn.Module = exchange_models.make("gpt")
        self.forward: Callable[[Tensor], Tensor] = self.module
        self.exchange: CompressedExchange | None = None
        self.outer: OuterSteps | None = None
        parameters = list(self.module.parameters())
        self.rate, chosen = rate, read_method(method) if method else None
        topology = Topology.from_environment(rank=dist.get_rank(), world_size=dist.get_world_size())
        if isinstance(chosen, LocalMethod):
            self.outer = OuterSteps(
                self.module.named_parameters(), chosen, topology=topology, timeout_seconds=TIMEOUT
            )
        else:
            ddp = DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, init_sync=False
            )
            self.forward = ddp
            if chosen is not None:
                assert isinstance(chosen, GradientMethod)
                self.exchange = CompressedExchange(
                    chosen, topology=topology, timeout_seconds=TIMEOUT
                )
                self.exchange.register(ddp)
        # of signs: its decay is AdamW's
        if isinstance(chosen, GradientMethod) and chosen.has_momentum:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, lr=rate, weight_decay=decay
            )
        else:
            self.optimizer = torch.optim.AdamW(
                parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True
            )

    def step(self, batch: Tensor, number: int) -> None:
        """One step of this rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (number + 1) / WARM_UP)
        self.optimizer.zero_grad(set_to_none=False)
        self.forward(batch).backward()
        if self.outer is not None:
            self.outer.average_gradients()
        self.optimizer.step()
        if self.outer is not None:
            self.outer.after_step()

    @property
    def is_together(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return self.outer is None or self.outer.pending_steps == 0


@torch.no_grad()
def validation_loss(module: nn.Module, batches: list[Tensor]) -> float:
    """Mean loss, the same on all ranks: each has its part of the batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = batches[rank::ranks]
    total = torch.tensor([sum(float(module(batch)) for batch in own), float(len(own))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, steps, bytes of node 0, and the validation losses on the way; evaluation is not
    timed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = exchange_models.text_batches(rank, ranks, sequences=SEQUENCES, steps=options.steps)
    held_out = exchange_models.held_out_batches(sequences=SEQUENCES, batches=options.held_out)
    training = Training(json.loads(options.method), options.rate)
    seconds: list[float] = []
    losses: list[tuple[int, float]] = []
    before, due = sent_bytes(), options.every
    for number, batch in enumerate(batches):
        dist.barrier()
        start = time.perf_counter()
        training.step(batch, number)
        seconds.append(time.perf_counter() - start)
        if number + 1 == NOT_TIMED:
            before = sent_bytes()
        last = number + 1 == len(batches)
        if last and training.outer is not None and options.every:
            start = time.perf_counter()
            training.outer.synchronize()
            seconds[-1] += time.perf_counter() - start
        if training.is_together and (number + 1 >= due or last) and options.every:
            due = number + 1 + options.every
            losses.append((number + 1, validation_loss(training.module, held_out)))
            if statistics.mean(loss for _, loss in losses[-2:]) <= options.loss:
                break
    steps = len(seconds)
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    counted = max(1, steps - NOT_TIMED)
    return {
        "steps": steps,
        "step_seconds": float(slowest[NOT_TIMED:].mean())
        if steps > NOT_TIMED
        else float(slowest.mean()),
        "losses": losses,
        "node_bytes": (sent_bytes() - before) / counted,
        "parameters": sum(p.numel() for p in training.module.parameters()),
        "equal": _equal(training.module) if training.is_together else None,
    }


def _equal(module: nn.Module) -> bool:
    sums = [int(p.detach().view(torch.int32).long().sum()) for p in module.parameters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return all(other == everyone[0] for other in copy.copy(everyone))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True, help="as JSON; null: DDP")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loss", type=float, default=float("-inf"), help="where to stop")
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="steps between validations; 0: none, steps are timed only",
    )
    parser.add_argument("--held_out", type=int, default=32, help="batches")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    result = train(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
