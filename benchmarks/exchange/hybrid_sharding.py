"""Hybrid sharding against flat ZeRO-3 on two nodes of two ranks joined by 1 Gb/s.

    sudo python -m benchmarks.exchange.hybrid_sharding   # 10 minutes on 4 cores; --rounds, --rate

Also shows what the search chooses there, under a memory limit that plain data parallelism and
ZeRO-1 do not keep ("topt"). A GPT of 15 M parameters on CPU ranks with one thread each. Rounds are
interleaved; each is a job of its own.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.lab import Lab, LabError, end_on_signals

SIZES = {
    "layers": 8,
    "hidden": 384,
    "heads": 6,
    "seq-len": 128,
    "batch-size": 4,
    "steps": 8,
    "warmup": 3,
    "num-nodes": 2,
}
PLANS = ("ddp", "zero3", "hybrid")


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    with Lab(2, rate=options.rate) as lab:
        first = {plan: lab.run_gpt(ranks_per_node=2, **SIZES, plan=plan) for plan in PLANS}
        # Above what hybrid sharding takes, with the default margin; below what data parallelism
        # does.
        limit = int(1.08 * first["hybrid"]["peak_bytes"])
        for _ in range(options.rounds):
            for plan in ("zero3", "hybrid"):
                results.setdefault(plan, []).append(
                    lab.run_gpt(ranks_per_node=2, **SIZES, plan=plan)
                )
            results.setdefault("topt", []).append(
                lab.run_gpt(ranks_per_node=2, **SIZES, **{"memory-limit": limit})
            )
            print(
                {name: round(found[-1]["step_seconds"], 3) for name, found in results.items()},
                flush=True,
            )
    times = {name: [result["step_seconds"] for result in found] for name, found in results.items()}
    ratios = [flat / hybrid for flat, hybrid in zip(times["zero3"], times["topt"], strict=True)]
    lines = [
        "# Hybrid sharding on two nodes of two ranks",
        "",
        f"`sudo python -m benchmarks.exchange.hybrid_sharding --rounds {options.rounds} --rate "
        f"{options.rate}`",
        "",
        machine(),
        "",
        f"Memory limit {mib(limit)} MiB per rank; `ddp` takes {mib(first['ddp']['peak_bytes'])} "
        "MiB. Seconds: median (range).",
        "",
        "| plan | what runs | seconds per step | MiB per rank |",
        "|---|---|---|---|",
        *(
            f"| {name} | {found[-1]['summary']} | {spread(times[name], 2)} | "
            f"{mib(max(r['peak_bytes'] for r in found))} |"
            for name, found in results.items()
        ),
        "",
        f"Flat ZeRO-3 takes {spread(ratios, 2)} times as long as what was searched and chosen "
        "under the limit.",
    ]
    (RESULTS / "hybrid_sharding.md").write_text("\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
