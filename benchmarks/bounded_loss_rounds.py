"""One rank of `bounded_loss_tail`: sums of the same buckets by several methods, which take turns in
every round.

One job for all methods of a network, so that they meet the same machine and the same state of it;
what TCP's congestion control is, a method's own connections say: each has a process group of its
own, made under that control.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bounded_loss_run import (
    Bounded,
    all_reduce,
    half_all_reduce,
    join_ranks,
    parameter_server,
)
from benchmarks.lab import sent_bytes
from benchmarks.lab_nodes import CONGESTION
from lightning_topt.communication import feedback_top_k

TOLERANCES = {"ours, 1 %": 0.01, "ours, 0": 0.0, "ours, 1 %, 16 bits": 0.01}


class SelectedEntries:
    """The largest 1 % of each bucket with error feedback, gathered over TCP: `TopK` without a
    node's levels.
    """

    def __init__(self) -> None:
        self.residuals: dict[int, Tensor] = {}

    def __call__(self, buckets: list[Tensor], group: Any = None) -> None:
        for bucket in buckets:
            residual = self.residuals.setdefault(len(bucket), torch.zeros_like(bucket))
            values, indices = feedback_top_k(bucket, residual, len(bucket) // 100)
            packed = torch.cat([values, indices.view(torch.float32)])
            parts = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, packed, group=group)
            bucket.zero_()
            for part in parts:
                chosen, places = part.chunk(2)
                bucket.index_add_(0, places.contiguous().view(torch.int32), chosen)


OVER_TCP = {
    "gloo, cubic": ("cubic", all_reduce),
    "gloo, BBR": ("bbr", all_reduce),
    "parameter server, cubic": ("cubic", parameter_server),
    "16 bits, cubic": ("cubic", half_all_reduce),
    "top-k 1 %, cubic": ("cubic", SelectedEntries()),
}
METHODS = [*TOLERANCES, *OVER_TCP]


def over_tcp(
    congestion: str, step: Callable[..., None], buckets: list[Tensor]
) -> Callable[[list[Tensor]], None]:
    """Return the method over connections of its own, which are made here."""
    Path(CONGESTION / "tcp_congestion_control").write_text(congestion)  # of this node's namespace
    group = dist.new_group()
    step([bucket.clone() for bucket in buckets], group)
    return lambda given: step(given, group)


def make_methods(
    names: list[str], buckets: list[Tensor], *, rank: int, world_size: int
) -> dict[str, Any]:
    """Return what sums buckets, by name."""
    zeros = [torch.zeros_like(bucket) for bucket in buckets]
    made: dict[str, Any] = {}
    for name in names:
        if name in TOLERANCES:
            made[name] = Bounded(
                rank,
                world_size,
                TOLERANCES[name],
                zeros,
                backward=0.0,
                priorities=False,
                name=f"bounded/{name}",
                bits=16 if "16" in name else 32,
            )
        else:
            made[name] = over_tcp(*OVER_TCP[name], buckets)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by ;")
    parser.add_argument("--parameters", type=int, default=2_500_000)
    parser.add_argument("--buckets", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new round after so many")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank, world_size, buckets = join_ranks(options.parameters, buckets=options.buckets)
    names = options.methods.split(";")
    methods = make_methods(names, buckets, rank=rank, world_size=world_size)
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "sent": 0, "cpu": 0.0, "equal": True} for name in names
    }
    begun, rounds = time.perf_counter(), 0
    for number in range(options.rounds + 1):  # the first is not counted
        late = torch.tensor([float(time.perf_counter() - begun > options.seconds)])
        dist.all_reduce(late)
        if late.item():
            break
        rounds += number > 0
        for name, step in methods.items():
            _round(step, buckets, found[name], steps=options.steps, counted=number > 0)
    for name, step in methods.items():
        if isinstance(step, Bounded):
            found[name].update(step.result())
    if rank == 0:
        options.out.write_text(json.dumps({"rounds": rounds, "methods": found}))
    dist.barrier()
    for step in methods.values():
        if isinstance(step, Bounded):
            step.close()
    dist.destroy_process_group()


def _round(
    step: Any, buckets: list[Tensor], found: dict[str, Any], *, steps: int, counted: bool
) -> None:
    given = [bucket.clone() for bucket in buckets]
    if counted is False and isinstance(step, Bounded):
        step.reset()
    sent, cpu = sent_bytes(), time.process_time()
    for _ in range(steps):
        for bucket, own in zip(given, buckets, strict=True):
            bucket.copy_(own)
        dist.barrier()
        start = time.perf_counter()
        step(given)
        if counted:
            found["seconds"].append(time.perf_counter() - start)
    if counted:
        found["sent"] += sent_bytes() - sent
        found["cpu"] += time.process_time() - cpu
    sums = torch.tensor([float(bucket.double().sum()) for bucket in given])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found["equal"] = found["equal"] and bool((least == most).all())


if __name__ == "__main__":
    main()
