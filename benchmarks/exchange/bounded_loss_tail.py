"""Step times of sums of gradients where buffers are shallow or packets get lost.

    python -m benchmarks.exchange.bounded_loss_tail --rounds 5 --out tail.md

Compares our exchange, other methods of ours over TCP, gloo and a parameter server. Nodes of one
rank each on links of 1 Gb/s; methods alternate in every round. "Ideal" is 2 (n - 1) / n of the
bytes with their headers at the link's rate; "CPU" is what the process of rank 0 used in a step.
Needs root (`benchmarks.lab`); random losses need iptables and ethtool. ``--lock FILE`` holds that
file (flock) for each network, where others measure as well.

All methods of a network run in one job, so that they meet the same machine in the same state. Each
method over TCP has a process group of its own, made under its congestion control.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import machine
from benchmarks.exchange.bounded_loss_run import (
    Bounded,
    all_reduce,
    half_all_reduce,
    join_ranks,
    parameter_server,
)
from benchmarks.lab import (
    CONGESTION,
    Lab,
    allow_in_namespaces,
    check_root,
    end_on_signals,
    sent_bytes,
)
from lightning_topt.communication import feedback_top_k

RATE = {"1gbit": 125e6, "100mbit": 12.5e6, "unlimited": float("nan")}  # bytes per second
WIRE_SHARE = 1432 / 1514  # elements of a datagram of ours in a frame
COLUMNS = (
    "nodes | queue | loss | method | median s | p99 s | p99 / median | / ideal | / gloo | lost | "
    "resent | CPU s | steps"
)


def ideal_seconds(parameters: int, *, nodes: int, rate: str) -> float:
    """Seconds of a step if all links were full all the time."""
    return 2 * (nodes - 1) / nodes * 4 * parameters / (RATE[rate] * WIRE_SHARE)


@contextlib.contextmanager
def held(path: Path | None) -> Iterator[None]:
    """Hold a lock between processes, if there is one."""
    if path is None:
        yield
        return
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", choices=list(RATE))
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--queues", nargs="+", default=["deep", "128kb", "32kb", "16kb"])
    parser.add_argument("--losses", type=float, nargs="+", default=[0.0, 0.001, 0.01])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--burst", default="16kb")
    parser.add_argument("--parameters", type=int, default=2_500_000)
    parser.add_argument("--buckets", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of each method in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of a network: no new round after so many"
    )
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_on_signals()
    check_root()
    for congestion in ("cubic", "bbr"):
        allow_in_namespaces(congestion)  # each rank chooses for its connections
    shown = {key: value for key, value in vars(options).items() if key not in ("lock", "out")}
    lines = [__doc__ or "", machine(), "", f"`{shown}`", "", f"| {COLUMNS} |", "|" + "---|" * 13]
    for nodes in options.nodes:
        for queue in options.queues:
            for loss in options.losses:
                lines += _network(nodes, queue, loss, options)
                if options.out:
                    options.out.write_text("\n".join(lines) + "\n")


def _network(nodes: int, queue: str, loss: float, options: argparse.Namespace) -> list[str]:
    """Measure all methods on one network; the table's rows."""
    deep = queue == "deep"
    burst = "256kb" if deep else options.burst
    with (
        held(options.lock),
        Lab(
            nodes,
            rate=None if options.rate == "unlimited" else options.rate,
            burst=burst,
            queue=None if deep else queue,
            loss=loss,
        ) as lab,
    ):
        result = lab.run_module(
            "benchmarks.exchange.bounded_loss_tail",
            "--worker",
            ranks_per_node=1,
            methods=";".join(options.methods),
            **{
                key: getattr(options, key)
                for key in ("parameters", "buckets", "steps", "rounds", "seconds")
            },
        )
    print(json.dumps({"nodes": nodes, "queue": queue, "loss": loss, **result}), flush=True)
    rows = [
        f"| {nodes} | {queue} | {loss:.1%} | {_row(name, result['methods'], nodes, options)} |"
        for name in options.methods
    ]
    print("\n".join(rows), flush=True)
    return rows


def _row(name: str, methods: dict[str, Any], nodes: int, options: argparse.Namespace) -> str:
    found = methods[name]
    assert found["equal"], f"{name}: ranks differ"
    seconds = sorted(found["seconds"])
    middle, last = (
        statistics.median(seconds),
        seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
    )
    ideal = ideal_seconds(options.parameters, nodes=nodes, rate=options.rate)
    gloo = (
        statistics.median(methods["gloo, cubic"]["seconds"])
        if "gloo, cubic" in methods
        else float("nan")
    )
    counts = found.get("statistics")
    again = f"{counts['datagrams_resent'] / max(1, counts['datagrams_sent']):.2%}" if counts else ""
    left = f"{found['lost_share']:.2%}" if counts else ""
    numbers = (
        f"{middle:.3f} | {last:.3f} | {last / middle:.2f} | {middle / ideal:.2f} | "
        f"{middle / gloo:.2f}"
    )
    return (
        f"{name} | {numbers} | {left} | {again} | {found['cpu'] / len(seconds):.3f} | "
        f"{len(seconds)}"
    )


# ---- one rank of a network's job -----------------------------------------------------------------

TOLERANCES = {"ours, 1 %": 0.01, "ours, 0": 0.0, "ours, 1 %, 16 bits": 0.01}


class SelectedEntries:
    """The largest 1 % of each bucket with error feedback, gathered over TCP.

    This is `TopK` without the levels of a node.
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


def run_worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
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
    run_worker() if "--worker" in sys.argv else main()
