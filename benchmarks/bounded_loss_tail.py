"""Step times of sums of gradients where buffers are shallow or packets get lost: our exchange,
others of ours over TCP, gloo, a parameter server.

    python -m benchmarks.bounded_loss_tail --rounds 5 --out benchmarks/results/bounded_loss_tail.md

Nodes of one rank each on links of 1 Gb/s; methods take turns in every round
(`bounded_loss_rounds`). "Ideal" is 2 (n - 1) / n of the bytes with their headers at the link's
rate; "CPU" is what the process of rank 0 used in a step. Needs root (`lab`); losses at random need
iptables and ethtool. ``--lock FILE``: hold it (flock) for each network, where others measure as
well.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bounded_loss_rounds import METHODS
from benchmarks.common import machine
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import allow_in_namespaces, check_root

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
    lines = [
        __doc__ or "",
        machine(),
        "",
        f"`{shown}`",
        "",
        f"| {COLUMNS} |",
        "|" + "---|" * 13,
    ]
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
            "benchmarks.bounded_loss_rounds",
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


if __name__ == "__main__":
    main()
