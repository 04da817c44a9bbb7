"""The bounded-loss exchange beside one long TCP flow on the same link: who gets how much.

    python -m benchmarks.exchange.bounded_loss_shared --rounds 5 --out shared.md

Two nodes of one rank; the flow goes from node 0 to node 1, which counts what arrives. The exchange
sums buckets without a pause. Its share is what it sent in the flow's direction over what both did.
Needs root (see `benchmarks.lab`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.exchange.bounded_loss_tail import RATE
from benchmarks.lab import Lab, end_on_signals

RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5999))
connection, _ = server.accept()
got, memory, begun = 0, memoryview(bytearray(1 << 20)), None
while size := connection.recv_into(memory):
    begun = begun or time.time()
    got += size
    now = time.time()
    if now - begun > 0.1:
        print(f"{now:.3f} {got}", flush=True)
        begun, got = now, 0
"""
SENDER = """
import socket, sys, time
data = bytes(1 << 18)
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 5999))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
while True:
    connection.sendall(data)
"""
WIRE = 1514 / 1448  # of TCP's payload


def measure(queue: str | None, congestion: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the shares of one run, its seconds per step, and the bytes per second of both.

    Bytes are those that node 0 sends.
    """
    burst = options.burst if queue else "256kb"
    with (
        Lab(2, rate=options.rate, burst=burst, queue=queue, congestion=congestion) as lab,
        tempfile.TemporaryFile("w+") as log,
    ):
        flow = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    lab.nodes[node],
                    sys.executable,
                    "-c",
                    code,
                    lab.address(1),
                ],
                stdout=log,
            )
            for node, code in ((1, RECEIVER), (0, SENDER))
        ]
        try:
            time.sleep(options.head_start)
            result = lab.run_module(
                "benchmarks.exchange.bounded_loss_run",
                ranks_per_node=1,
                parameters=options.parameters,
                steps=options.steps,
                method=options.method,
            )
        finally:
            for process in flow:
                process.kill()
                process.wait()
        log.seek(0)
        samples = [line.split() for line in log.read().splitlines()]
    begun, ended = result["period"]
    during = [int(nbytes) for at, nbytes in samples if begun + 0.1 < float(at) < ended]
    tcp = sum(during) * WIRE / max(ended - begun, 1e-9)
    ours = result["sent"] / (ended - begun) - tcp
    return {"ours": ours, "tcp": tcp, "share": ours / (ours + tcp), "seconds": result["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", choices=list(RATE))
    parser.add_argument("--queues", nargs="+", default=["deep", "512kb", "128kb"])
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--method", default="bounded", choices=["bounded", "gloo"])
    parser.add_argument("--burst", default="16kb")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--head-start", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_on_signals()
    lines = [__doc__ or "", machine(), "", f"`{vars(options)}`", ""]
    lines += [
        "| queue | TCP's control | exchange's share | of the link together | s per step |",
        "|" + "---|" * 5,
    ]
    for queue in options.queues:
        for congestion in options.congestion:
            found = []
            for _ in range(options.rounds):
                found.append(measure(None if queue == "deep" else queue, congestion, options))
                print(
                    json.dumps({"queue": queue, "congestion": congestion, **found[-1]}), flush=True
                )
            shares = [each["share"] for each in found]
            together = statistics.median(
                (each["ours"] + each["tcp"]) / RATE[options.rate] for each in found
            )
            seconds = statistics.median(second for each in found for second in each["seconds"])
            lines.append(
                f"| {queue} | {congestion} | {statistics.median(shares):.0%} ({min(shares):.0%} to "
                f"{max(shares):.0%}) | {together:.0%} | {seconds:.3f} |"
            )
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
