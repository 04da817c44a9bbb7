"""When the sums of the front layers arrive, with and without priorities.

    python -m benchmarks.exchange.bounded_loss_priorities --rounds 5 --out priorities.md

Buckets become ready during a backward pass, those of the last layers first. The next forward pass
first needs the bucket of the front layers, which is ready last. Without priorities the buckets
share the link. "HTB" adds queue disciplines (HTB, u32 filters on DSCP) at both ends of every link,
which let higher classes go first. Needs root (see `benchmarks.lab`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from benchmarks.common import machine
from benchmarks.lab import Lab, end_on_signals

CLASSES = {
    40: "1:14",
    32: "1:14",
    24: "1:13",
    16: "1:12",
    8: "1:11",
}  # first DSCP of an AF class (and EF) -> HTB's class


def add_queues(lab: Lab, rate: str, queue: str) -> None:
    """Put HTB in the place of each link's token bucket.

    Class 4x may use all of the link, lower ones what is left.
    """
    for node, link in zip(lab.nodes, lab._links, strict=True):
        for where, device in ((["ip", "netns", "exec", node], "eth0"), ([], link)):
            tc = [*where, "tc"]
            commands = [
                ["qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "11"],
                [
                    "class",
                    "add",
                    "dev",
                    device,
                    "parent",
                    "1:",
                    "classid",
                    "1:1",
                    "htb",
                    "rate",
                    rate,
                    "burst",
                    "16kb",
                ],
            ]
            for level, name in enumerate(("1:14", "1:13", "1:12", "1:11")):
                shape = [
                    "htb",
                    "rate",
                    "1mbit",
                    "ceil",
                    rate,
                    "prio",
                    str(level),
                    "burst",
                    "16kb",
                    "cburst",
                    "16kb",
                ]
                commands.append(
                    ["class", "add", "dev", device, "parent", "1:1", "classid", name, *shape]
                )
                commands.append(
                    ["qdisc", "add", "dev", device, "parent", name, "bfifo", "limit", queue]
                )
            for dscp, name in CLASSES.items():
                match = ["match", "ip", "dsfield", hex(dscp << 2), "0xe0"]
                flow = [
                    "protocol",
                    "ip",
                    "parent",
                    "1:",
                    "prio",
                    "1",
                    "u32",
                    *match,
                    "flowid",
                    name,
                ]
                commands.append(["filter", "add", "dev", device, *flow])
            for command in commands:
                subprocess.run([*tc, *command], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--queue", default="128kb")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--backward", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_on_signals()
    lines = [__doc__ or "", machine(), "", f"`{vars(options)}`", ""]
    lines += ["| priorities | front layers there after s | all there after s |", "|---|---|---|"]
    found: dict[str, list[list[float]]] = {"off": [], "on": [], "on, HTB": []}
    for _ in range(options.rounds):
        for name, arrivals in found.items():
            with Lab(options.nodes, rate=options.rate, burst="16kb", queue=options.queue) as lab:
                if name == "on, HTB":
                    add_queues(lab, options.rate, options.queue)
                result = lab.run_module(
                    "benchmarks.exchange.bounded_loss_run",
                    ranks_per_node=1,
                    parameters=options.parameters,
                    backward=options.backward,
                    steps=options.steps,
                    priorities=name[:3].rstrip(","),
                )
            arrivals.append(result["arrivals"])
            print(
                json.dumps({"name": name, "arrivals": arrivals[-1], "seconds": result["seconds"]}),
                flush=True,
            )
    for name, arrivals in found.items():
        front, last = [each[-1] for each in arrivals], [max(each) for each in arrivals]
        lines.append(f"| {name} | {statistics.median(front):.3f} | {statistics.median(last):.3f} |")
        print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
