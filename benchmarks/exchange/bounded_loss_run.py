r"""One rank of the benchmarks of the bounded-loss exchange: it sums buckets, step by step.

    sudo python -m benchmarks.lab --nodes 2 -- -m benchmarks.exchange.bounded_loss_run \
        --steps 5000 --parameters 200000 --out /tmp/growth.json

Started in a lab by `bounded_loss_shared` and `bounded_loss_priorities`, or by hand as above. Rank 0
writes seconds per step as JSON. `bounded_loss_tail` uses its methods.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from benchmarks.lab import sent_bytes
from lightning_topt.communication.bounded_loss.exchange import connect_over_store

Step = Callable[[list[Tensor]], None]


class Bounded:
    """Our exchange, with error feedback as its users have it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        tolerance: float,
        buckets: list[Tensor],
        *,
        backward: float,
        priorities: bool,
        name: str = "bounded",
        bits: int = 32,
    ) -> None:
        store = PrefixStore(name, _get_default_store())
        self.exchange = connect_over_store(store, rank=rank, world_size=world_size, bits=bits)
        self.tolerance, self.lost, self.steps = tolerance, 0.0, 0
        self.residuals = [bucket.clone() for bucket in buckets]
        self.world_size = world_size
        self.backward, self.priorities = backward, priorities
        self.arrivals: list[list[float]] = []

    def __call__(self, buckets: list[Tensor]) -> None:
        handles, begun = [], time.perf_counter()
        for index, bucket in enumerate(buckets):
            residual = self.residuals[index]
            residual.add_(bucket)
            handles.append(
                self.exchange.start(
                    index,
                    residual.numpy(),
                    out=bucket.numpy(),
                    tolerance=self.tolerance,
                    scale=1 / self.world_size,
                    # The backward pass fills the last layers' bucket first, the next forward pass
                    # needs it last.
                    priority=min(3, 4 * index // len(buckets)) if self.priorities else 0,
                )
            )
            if self.backward:
                time.sleep(self.backward / len(buckets))
        for index, handle in enumerate(handles):
            outcome = handle.wait(120)
            outcome.keep_only(self.residuals[index].numpy())
            self.lost += outcome.lost_share / len(handles)
        self.steps += 1
        self.arrivals.append([handle.finished - begun for handle in handles])

    def reset(self) -> None:
        """Count from here."""
        self.exchange.statistics()
        self.lost, self.steps, self.arrivals = 0.0, 0, []

    def result(self) -> dict[str, Any]:
        statistics = self.exchange.statistics()
        assert statistics is not None
        return {
            "lost_share": self.lost / max(self.steps, 1),
            "arrivals": [sum(times) / len(times) for times in zip(*self.arrivals, strict=True)],
            "statistics": vars(statistics),
        }

    def close(self) -> None:
        self.exchange.close()


def all_reduce(buckets: list[Tensor], group: Any = None) -> None:
    works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()


def half_all_reduce(buckets: list[Tensor], group: Any = None) -> None:
    halves = [bucket.bfloat16() for bucket in buckets]
    all_reduce(halves, group)
    for bucket, half in zip(buckets, halves, strict=True):
        bucket.copy_(half)


def parameter_server(buckets: list[Tensor], group: Any = None) -> None:
    """The papers' setting: rank 0 gathers all gradients and sends the sum to everybody."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for bucket in buckets:
        if rank:
            dist.send(bucket, 0, group=group)
            dist.recv(bucket, 0, group=group)
            continue
        parts = [torch.empty_like(bucket) for _ in range(world_size - 1)]
        for work in [dist.irecv(part, peer + 1, group=group) for peer, part in enumerate(parts)]:
            work.wait()
        for part in parts:
            bucket.add_(part)
        for work in [dist.isend(bucket, peer + 1, group=group) for peer in range(world_size - 1)]:
            work.wait()


def join_ranks(parameters: int, *, buckets: int) -> tuple[int, int, list[Tensor]]:
    """Return rank, world size and this rank's gradients in so many buckets.

    The ranks form a gloo group, as the launcher says.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    return rank, world_size, list(torch.randn(parameters).chunk(buckets))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--method", default="bounded", choices=["bounded", "gloo", "gloo16", "server"]
    )
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument(
        "--backward", type=float, default=0.0, help="seconds over which buckets become ready"
    )
    parser.add_argument("--priorities", default="on", choices=["on", "off"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank, world_size, buckets = join_ranks(options.parameters, buckets=options.buckets)
    step: Any = {"gloo": all_reduce, "gloo16": half_all_reduce, "server": parameter_server}.get(
        options.method
    )
    if step is None:
        step = Bounded(
            rank,
            world_size,
            options.tolerance,
            [torch.zeros_like(bucket) for bucket in buckets],
            backward=options.backward,
            priorities=options.priorities == "on",
        )
    seconds, before, used, begun = [], 0, [], 0.0
    for number in range(options.warm_up + options.steps):
        if number == options.warm_up:
            before, begun = sent_bytes(), time.time()
            if options.method == "bounded":
                step.reset()
        dist.barrier()
        start = time.perf_counter()
        step(buckets)
        seconds.append(time.perf_counter() - start)
        used.append((_memory(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    ended = time.time()
    sums = [None] * world_size
    dist.all_gather_object(sums, [float(bucket.double().sum()) for bucket in buckets])
    result = {
        "seconds": seconds[options.warm_up :],
        "sent": sent_bytes() - before,
        "period": [begun, ended],
        "equal": all(each == sums[0] for each in sums),
        "cpu": time.process_time(),
        "used": [used[options.warm_up], used[-1]],
        **(step.result() if options.method == "bounded" else {}),
    }
    if rank == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    if options.method == "bounded":
        step.close()
    dist.destroy_process_group()


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
