"""When the sums of the front layers arrive, with and without priorities.

    python -m benchmarks.exchange.bounded_loss_priorities --rounds 5 --out priorities.md

Buckets become ready during a backward pass, those of the last layers first. The next forward pass
first needs the bucket of the front layers, which is ready last. Without priorities the buckets
share the link. Needs root (see `benchmarks.lab`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.common import machine
from benchmarks.lab import Lab, end_on_signals


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
    found: dict[str, list[list[float]]] = {"off": [], "on": []}
    for _ in range(options.rounds):
        for name, arrivals in found.items():
            with Lab(options.nodes, rate=options.rate, burst="16kb", queue=options.queue) as lab:
                result = lab.run_module(
                    "benchmarks.exchange.bounded_loss_run",
                    ranks_per_node=1,
                    parameters=options.parameters,
                    backward=options.backward,
                    steps=options.steps,
                    priorities=name,
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
